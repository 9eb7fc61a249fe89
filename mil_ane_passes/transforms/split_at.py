"""Splitting of a package into two that run one after the other, cut after user-supplied values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..utils.errors import InputError
from ..utils.option_spelling import format_option, format_option_values
from .contract import PART_SUFFIXES, EditRecord
from .document import Document
from .expose import can_have_fp16_interface
from .fix_shape_inputs import get_declared_shape
from .names import make_unknown_name_error
from .program_parts import Function
from .split_at_crossing import CrossingValue, describe_crossing, plan_crossing
from .split_at_graph import Cut, CutError, FunctionGraph
from .split_at_parts import SplitParts
from .split_at_shapes import FlexibleSizes, infer_crossing_sizes

__all__ = ["SplitAt"]

_OPTION = "--split-at"
_MAX_CUTS_TRIED = 400
"The most values tried on either side of the requested cut, to suggest one in an error."
_MAX_INFERENCES = 8
"The most of these tries that may be at values of flexible shape, each of which takes a few inferences."
_REPORTED_BYTES_RATIO = 1.5
"Ratio of all crossing bytes to those of the named values above which a report states the difference."


@dataclass(frozen=True)
class SplitAt:
    """Cuts every function after `values`, or `function` alone, in which case the parts lack the others.

    The first part has the ops that the values need; the second has the rest, and the outputs made there. Ops that
    depend on consts only are where they are used, or in both.
    """

    values: Sequence[str]
    function: str | None = None

    def apply(self, document: Document) -> list[Document]:
        """Return the two parts.

        Raises InputError with the reason, and with possible cuts near by, if there is no such cut.
        """
        functions = document.chosen(self.function)
        for value in self.values:
            if value in document.gone and not any(value in function.names() for function in functions):
                raise make_unknown_name_error(value, format_option_values("split_at", value), (), gone=document.gone)
        parts = [_copy_document(document, number, functions) for number in PART_SUFFIXES]
        for function in functions:
            self._split(document, function, parts)
        for part in parts:
            part.repack, part.dead_limit = True, 0.0
        return parts

    def _split(self, document: Document, function: Function, parts: list[Document]) -> None:
        place = _CutSearch(document, function)
        try:
            cut, crossing = place.cut(self.values)
            both = SplitParts(document, function, place.graph, cut, crossing, place.sizes(cut, crossing))
        except CutError as no:
            raise InputError(self._explain_refusal(place, no)) from no
        both.write_first(parts[0])
        both.write_second(parts[1])
        notes = self._notes(cut, crossing, both)
        for part in parts:
            part.done += [EditRecord(_OPTION, function.name, ", ".join(self.values), note) for note in notes]

    def _explain_refusal(self, place: _CutSearch, no: CutError) -> str:
        several = "" if len(place.document.functions) == 1 else f"function '{place.function.name}': "
        hint = (
            "" if not several or self.function else f"; {format_option('function')} cuts one and leaves the others out"
        )
        near = place.near(self.values) if no.elsewhere else []
        instead = f"; near by it can be cut at {' or '.join(repr(name) for name in near)}" if near else ""
        return f"{format_option_values('split_at', *self.values)}: {several}{no}{instead}{hint}"

    def _notes(self, cut: Cut, crossing: Sequence[CrossingValue], both: SplitParts) -> Iterable[str]:
        yield both.summary()
        for each in crossing:
            yield f"crosses: {describe_crossing(each)}"
        if not crossing:
            yield "nothing crosses: the two parts can run side by side"
        for name in cut.inside:
            yield f"'{name}' is used in the first part only and stays inside it"
        if cut.unneeded:
            yield f"ops that no output needs, left out of both parts: {cut.unneeded}"
        named, others = [[each for each in crossing if (each.value in self.values) is asked] for asked in (True, False)]
        asked_for, more = [sum(each.nbytes or 0 for each in group) for group in (named, others)]
        if others and more > (_REPORTED_BYTES_RATIO - 1) * asked_for:
            yield (f"besides what was named, {more:,} bytes cross that the second part uses too (values: "
                   f"{len(others)}); another place may need less")


class _CutSearch:
    """The search for cuts of one function."""

    def __init__(self, document: Document, function: Function) -> None:
        self.document, self.function = document, function
        self.graph = FunctionGraph(function)
        self._names = function.names()
        self._inferences = _MAX_INFERENCES
        self._halves = can_have_fp16_interface(document, function)
        self._types = {output.name: output.type for op in function.block.ops for output in op.message.outputs}
        self._images = {feature.name for section in document.description.of(function.name)
                        for feature in section.features("output") if feature.message.type.HasField("imageType")}

    def cut(self, named: Sequence[str]) -> tuple[Cut, list[CrossingValue]]:
        """Return the cut at `named` and how each value crosses. Raises CutError when it is not possible."""
        cut = self.graph.cut(named)
        taken = set(self._names)
        found = []
        for name in cut.crossing:
            how = plan_crossing(name, self._types[name], self.function.opset, self._halves, taken, name in self._images)
            if isinstance(how, str):
                raise CutError(f"'{name}' would cross, but {how}", elsewhere=True)
            found.append(how)
        return cut, found

    def sizes(self, cut: Cut, crossing: Sequence[CrossingValue]) -> dict[str, FlexibleSizes]:
        """Return the shapes of crossing values of flexible shape. Raises CutError where they are unknown."""
        names = [each.value for each in crossing if each.nbytes is None]
        if not names:
            return {}
        first = self.function.copy(self.function.name)
        first.block.ops = [self.function.block.ops[place] for place in sorted(cut.first)]
        first.block.outputs = names
        read = {name for place in cut.second for name in self.graph.reads[place]}
        others = [each.name for each in self.function.inputs
                  if each.name in read and None in (get_declared_shape(each.message.type) or ())]
        found = infer_crossing_sizes(self.document, first, names, alone=len(names) == 1 and not others)
        if isinstance(found, str):
            raise CutError(found, elsewhere=True)
        return found

    def near(self, named: Sequence[str]) -> list[str]:
        """Return the nearest values before and after `named` that the function can be cut at."""
        at = max(self.graph.maker[name] for name in named)
        values = [(self.graph.maker[name], name) for name in self.graph.values() if name not in named]
        before = [name for place, name in reversed(values) if place < at]
        behind = [name for place, name in values if place >= at]
        found = (
            next((name for name in side[:_MAX_CUTS_TRIED] if self._can_cut_at(name)), None) for side in (before, behind)
        )
        return [name for name in found if name is not None]

    def _can_cut_at(self, name: str) -> bool:
        try:
            cut, crossing = self.cut([name])
            if any(each.nbytes is None for each in crossing):
                if self._inferences == 0:
                    return False
                self._inferences -= 1
                self.sizes(cut, crossing)
        except CutError:
            return False
        return True


def _copy_document(document: Document, part: str, functions: Sequence[Function]) -> Document:
    """Return a copy of the current document that has only `functions`."""
    kept = [function.name for function in functions]
    made = document.again(document.emit(), part)
    made.functions = {name: made.functions[name] for name in kept}
    if made.description.functions and len(kept) < len(document.functions):
        made.description.functions = [each for each in made.description.functions if each.name in kept]
        if made.description.default not in kept:
            made.description.default = kept[0]
    return made
