"""Splitting of a package, after values that the user names, into two packages that run one after the other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, NamedTuple

from coremltools import proto
from coremltools.converters.mil.mil import Builder, Function, Operation, Placeholder, Var, get_new_symbol, types

from ..ir.block_editor import BlockEditor
from ..ir.clone import clone_function
from ..ir.coremltools_internals import add_function_input
from ..ir.query import is_symbolic
from ..ir.shape_inference import ShapeInference, Sizes, get_sizes, set_input_shape
from ..package.interface import describe_feature, get_feature, get_specification_version
from ..package.names import make_free_name, rename_var
from ..passes.interface_change import InterfaceChange
from ..utils.errors import InputError, suggest_nearest
from ..utils.option_spelling import format_option, format_option_values
from ..utils.text_format import format_count, join_names
from .contract import PART_SUFFIXES, Draft, EditRecord, Transform
from .dead_ops import get_read_vars, is_pure
from .expose import choose_interface_dtype, get_dtype, get_type_kind
from .names import collect_names, find_value, iterate_values, make_unknown_name_error

__all__ = ["FunctionGraph", "SplitAt", "split_each"]


_OPTION = "--split-at"
_MAX_CUTS_TRIED = 400
"Most values tried on either side of the requested cut to suggest one in an error, which must not take long."
_MAX_INFERENCES = 8
"Most of these tries that may be at values of flexible shape: each needs several inferences of the whole function."
_REPORTED_BYTES_RATIO = 1.5
"Ratio of all crossing bytes to the bytes of the named values above which the report states the difference."
Shape = tuple[int, ...]
_MAX_CORNER_DIMENSIONS = 3
"Most ranged dimensions for which all corners are tried: n dimensions have 2**n corners."
_MIN_VERSION_MANY_ENUMERATED = 9
"The specification version (iOS 18) from which several inputs may list their shapes."
_UNBOUNDED_STEP = 97
"Distance above the smallest size at which an unbounded dimension is tried; a prime, which few other sizes divide."


@dataclass(frozen=True)
class SplitAt(Transform):
    """Cuts every function after `values`, or only `function`; in that case the parts have no other functions.

    The first part has the ops that the values need. The second part has the remaining ops and the outputs computed by
    them. Ops that depend only on consts are in the part that uses them, or in both.
    """

    values: Sequence[str]
    function: str | None = None
    asked: str = ""
    "The option with its values that asked for the cut, for errors, if it is another one."

    def apply(self, draft: Draft) -> list[Draft]:
        """Return the two parts.

        Raises InputError with the reason, and with possible cuts nearby, if the function cannot be cut there.
        """
        functions = draft.select_functions(self.function)
        for value in self.values:
            if value in draft.gone and not any(value in collect_names(each) for each in functions.values()):
                raise make_unknown_name_error(value, format_option_values("split_at", value), (), gone=draft.gone)
        return split_each(draft, dict.fromkeys(functions, self.values), self.function, self.asked)

    def check(self, draft: Draft) -> None:
        """Raise InputError with the reason if the cut is not possible; the draft is not changed."""
        for name, function in draft.select_functions(self.function).items():
            self._search(draft, name, function)

    def split(self, draft: Draft, name: str, parts: Sequence[Draft]) -> None:
        """Cut the function `name` of a draft into those of two parts, which are copies of the draft."""
        function = draft.program.functions[name]
        both = self._search(draft, name, function)
        both.write_first(parts[0])
        both.write_second(parts[1])
        notes = list(self._notes(both.cut, both.crossing, both))
        for part in parts:
            part.done += [EditRecord(_OPTION, name, ", ".join(self.values), note) for note in notes]

    def _search(self, draft: Draft, name: str, function: Function) -> SplitParts:
        search = _CutSearch(draft, name, function)
        try:
            cut, crossing = search.cut(self.values)
            return SplitParts(name, function, search.graph, cut, crossing, search.sizes(cut, crossing))
        except CutError as no:
            raise InputError(self._explain_refusal(search, no)) from no

    def _explain_refusal(self, search: _CutSearch, no: CutError) -> str:
        several = "" if len(search.draft.program.functions) == 1 else f"function '{search.name}': "
        hint = (
            "" if not several or self.function else f"; {format_option('function')} cuts one and leaves the others out"
        )
        near = search.near(self.values) if no.elsewhere else []
        instead = f"; nearby it can be cut at {' or '.join(repr(name) for name in near)}" if near else ""
        asked = self.asked or format_option_values("split_at", *self.values)
        return f"{asked}: {several}{no}{instead}{hint}"

    def _notes(self, cut: Cut, crossing: Sequence[CrossingValue], both: SplitParts) -> Iterable[str]:
        yield both.summary()
        for each in crossing:
            yield f"crosses: {describe_crossing(each)}"
        if not crossing:
            yield "nothing crosses: the two parts can run side by side"
        for var in cut.inside:
            yield f"'{var.name}' is used in the first part only and stays inside it"
        if cut.unneeded:
            yield f"ops that no output needs, left out of both parts: {cut.unneeded}"
        named, others = [[each for each in crossing if (each.value in self.values) is asked] for asked in (True, False)]
        asked_for, more = [sum(each.nbytes or 0 for each in group) for group in (named, others)]
        if others and more > (_REPORTED_BYTES_RATIO - 1) * asked_for:
            yield (f"besides what was named, {more:,} bytes cross that the second part uses too (values: "
                   f"{len(others)}); another place may need less")


def split_each(
    draft: Draft, values: Mapping[str, Sequence[str]], function: str | None = None, asked: str = ""
) -> list[Draft]:
    """Cut functions of a draft, each after the values listed for it, and return the two parts.

    `function` is the one that was requested, by the option `asked`. Raises InputError as `SplitAt` does.
    """
    parts = [_copy_draft(draft, number, list(values)) for number in PART_SUFFIXES]
    for name, named in values.items():
        SplitAt(named, function, asked).split(draft, name, parts)
    left_out = [name for name in draft.program.functions if name not in values]
    for part in parts:
        part.dead_limit = 0.0
        if left_out:
            note = f"functions of IN that are left out of both parts: {join_names(left_out)}"
            part.done.append(EditRecord(_OPTION, next(iter(values)), ", ".join(next(iter(values.values()))), note))
    return parts


class _CutSearch:
    """The search for cuts of one function."""

    def __init__(self, draft: Draft, name: str, function: Function) -> None:
        self.draft, self.name, self.function = draft, name, function
        self.graph = FunctionGraph(function)
        self._names = collect_names(function)
        self._inferences = _MAX_INFERENCES

    def cut(self, named: Sequence[str]) -> tuple[Cut, list[CrossingValue]]:
        """Return the cut at `named` and the crossing values. Raises CutError if the cut is not possible."""
        cut = self.graph.cut(named)
        taken = set(self._names)
        found = []
        for var in cut.crossing:
            feature = get_feature(self.function, var.name) if var in self.graph.outputs else None
            image = feature is not None and feature.type.HasField("imageType")
            how = plan_crossing(self.function, var, taken, image)
            if isinstance(how, str):
                raise CutError(f"'{var.name}' would cross, but {how}", elsewhere=True)
            found.append(how)
        return cut, found

    def sizes(self, cut: Cut, crossing: Sequence[CrossingValue]) -> dict[str, FlexibleSizes]:
        """Return the shapes of crossing values of flexible shape. Raises CutError if they are unknown."""
        names = [each.value for each in crossing if each.nbytes is None]
        if not names:
            return {}
        read = {var for place in cut.second for var in self.graph.reads[place]}
        others = [name for name, var in self.function.inputs.items()
                  if var in read and None in (get_sizes(var.sym_type) or ())]
        found = infer_crossing_sizes(self.function, names, alone=len(names) == 1 and not others)
        if isinstance(found, str):
            raise CutError(found, elsewhere=True)
        return found

    def near(self, named: Sequence[str]) -> list[str]:
        """Return the nearest values before and after `named` at which the function can be cut."""
        places = {var.name: place for var, place in self.graph.maker.items()}
        at = max(places[name] for name in named)
        values = [(places[name], name) for name in self.graph.values() if name not in named]
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


def _copy_draft(draft: Draft, part: str, functions: Sequence[str]) -> Draft:
    """Return a copy of the draft that has only `functions`."""
    made = draft.copy(part)
    made.program.functions = {name: made.program.functions[name] for name in functions}
    made.interfaces = {name: made.interfaces[name] for name in functions}
    if made.program.default_function_name not in functions:
        made.program.default_function_name = functions[0]
    return made


class CutError(Exception):
    """The reason why a function cannot be cut at a value.

    `elsewhere` is true if another cut of the function may be possible.
    """

    def __init__(self, reason: str, elsewhere: bool = False) -> None:
        super().__init__(reason)
        self.elsewhere = elsewhere


@dataclass(frozen=True)
class Cut:
    """Two parts of a function, as indices into its list of ops; ops that depend only on consts may be in both.

    `crossing` are the values that the second part reads from the first: the requested values in the requested order,
    then the others in program order. `inside` are requested values that do not cross. `unneeded` is the number of ops
    in neither part, without consts.
    """

    first: frozenset[int]
    second: frozenset[int]
    crossing: tuple[Var, ...]
    inside: tuple[Var, ...]
    unneeded: int


class FunctionGraph:
    """The ops of a function's top level, with their dependencies.

    Building it takes one walk; each cut takes one more.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        self.ops: list[Operation] = list(function.operations)
        self.outputs = list(function.outputs)
        self.states = {var for var in function.inputs.values() if types.is_state(var.sym_type)}
        self.inputs = set(function.inputs.values()) - self.states
        place_of = {op: place for place, op in enumerate(self.ops)}
        self.maker = {var: place for op, place in place_of.items() for var in op.outputs}
        visible = {*self.maker, *self.inputs, *self.states}
        self.reads = [get_read_vars(op) & visible for op in self.ops]
        named = [var.name for var in iterate_values(function) if var in visible]
        self.refusal = "two of its values have one name" if len(named) != len(set(named)) else ""
        self.constant = self._constant()
        self.state_users = {state: [place for place, read in enumerate(self.reads) if state in read]
                            for state in sorted(self.states, key=lambda var: var.name)}
        self.flows, self.needs = self._build_edges()

    def _constant(self) -> list[bool]:
        """Return for each op whether it depends only on consts and is deterministic."""
        found: list[bool] = []
        for op, read in zip(self.ops, self.reads, strict=True):
            compressed = op.op_type.startswith("constexpr_")
            makers = [self.maker.get(var, len(found)) for var in read]
            found.append((compressed or is_pure(op)) and all(m < len(found) and found[m] for m in makers))
        return found

    def _build_edges(self) -> tuple[list[set[int]], list[set[int]]]:
        """Return for each op the ops whose results reach it by value or state, and the ops that must run before it."""
        flows = [{self.maker[var] for var in read if var in self.maker} for read in self.reads]
        needs = [set(makers) for makers in flows]
        for places in self.state_users.values():
            written: set[int] = set()
            for before, place in pairwise(places):
                needs[place].add(before)
                written |= {before} if self.ops[before].op_type != "read_state" else set()
                flows[place] |= written
        return flows, needs

    def find(self, name: str) -> Var:
        """Return the value `name`. Raises CutError if the function cannot be cut at it."""
        var = find_value(self._function, name)
        if var in self.states:
            raise CutError(f"'{name}' is a state, which cannot be passed between packages; name a value that is read "
                           "from it")
        if var in self.inputs:
            raise CutError(
                f"'{name}' is an input: the first part would be empty; name a value that an op computes"
            )
        if var is None:
            outer = next((op for op in self.ops for inner in op.blocks
                          if name in {each.name for each in iterate_values(inner)}), None)
            if outer is not None:
                raise CutError(f"'{name}' is inside a block of a {outer.op_type} op, which cannot be cut; the op "
                               f"itself computes {_format_names(outer.outputs)}")
            raise CutError(f"no value '{name}'{suggest_nearest(name, self.values())}")
        if self.constant[self.maker[var]]:
            raise CutError(
                f"'{name}' depends on consts only: the first part would be empty; name a value that "
                "depends on an input"
            )
        if var not in self.outputs and not var.child_ops:
            raise CutError(f"nothing uses '{name}'", elsewhere=True)
        return var

    def values(self) -> list[str]:
        """Return the values at which a cut can be requested: outputs of ops that depend on inputs, in order."""
        named = set(iterate_values(self._function))
        return [var.name for place, op in enumerate(self.ops) if not self.constant[place]
                for var in op.outputs if var in named]

    def cut(self, names: Sequence[str]) -> Cut:
        """Return the cut after the values `names`. Raises CutError with the reason if it is not possible."""
        if self.refusal:
            raise CutError(self.refusal)
        named = [self.find(name) for name in names]
        first = self.collect_required(self.maker[var] for var in named)
        first = self._include_state_users(first, [self.maker[var] for var in named])
        made = {var for place in first for var in self.ops[place].outputs}
        left = [var for var in self.outputs if var not in made]
        if not left:
            raise CutError(
                f"all outputs of the model ({', '.join(var.name for var in self.outputs)}) are computed up to "
                f"{_format_names(named)}: the second part would be empty",
                elsewhere=True,
            )
        effects = [place for place, op in enumerate(self.ops)
                   if place not in first and not self.constant[place] and not is_pure(op)]
        second = self.collect_required([*(self.maker[var] for var in left if var in self.maker), *effects]) - first
        if all(self.constant[place] for place in second):
            raise CutError(f"no op after {_format_names(named)} depends on these or on an input: the second part would "
                           "be empty",
                           elsewhere=True)
        found = self._cut(named, first, second)
        if not found.crossing and made.isdisjoint(self.outputs):
            raise CutError(f"neither an output of the model nor an op after {_format_names(named)} needs what is "
                           "computed up to there: the first part would be empty, without outputs", elsewhere=True)
        return found

    def _cut(self, named: Sequence[Var], first: set[int], second: set[int]) -> Cut:
        wanted = {var for place in second for var in self.reads[place]}
        crosses = [var for place in sorted(first) if not self.constant[place]
                   for var in self.ops[place].outputs if var in wanted]
        requested = [var for var in dict.fromkeys(named) if var in crosses]
        consts = {place for place in first if self.constant[place]}
        second |= self.collect_required(need for place in second for need in self.needs[place] if need in consts)
        inside = tuple(var for var in dict.fromkeys(named) if var not in crosses and var not in self.outputs)
        either = first | second
        unneeded = sum(op.op_type != "const" for place, op in enumerate(self.ops) if place not in either)
        others = (var for var in crosses if var not in requested)
        return Cut(frozenset(first), frozenset(second), (*requested, *others), inside, unneeded)

    def collect_required(self, start: Iterable[int]) -> set[int]:
        """Return `start` and all ops that must run before it."""
        found: set[int] = set()
        stack = list(start)
        while stack:
            place = stack.pop()
            if place not in found:
                found.add(place)
                stack.extend(self.needs[place] - found)
        return found

    def _include_state_users(self, first: set[int], named: list[int]) -> set[int]:
        """Return `first` with all users of the states that it uses. Raises CutError if one of them needs the cut's
        values."""
        while True:
            torn = {state: places for state, places in self.state_users.items()
                    if not first.isdisjoint(places) and not first.issuperset(places)}
            if not torn:
                return first
            behind = self._collect_reached(named)
            for state, places in torn.items():
                late = [place for place in places if place in behind and place not in first]
                if late:
                    op = self.ops[late[0]]
                    name = next((var.name for var in op.outputs), "")
                    raise CutError(f"the state '{state.name}' is used before and after the cut ({op.op_type}"
                                   f"{f' {name!r}' if name else ''}); a state must be in one part", elsewhere=True)
            first = first | self.collect_required(place for places in torn.values() for place in places)

    def _collect_reached(self, start: Iterable[int]) -> set[int]:
        """Return all ops that depend on results of `start`."""
        found: set[int] = set()
        begun = set(start)
        for place, sources in enumerate(self.flows):
            if not sources.isdisjoint(begun) or not sources.isdisjoint(found):
                found.add(place)
        return found


def _format_names(values: Iterable[Var]) -> str:
    return ", ".join(f"'{var.name}'" for var in values)


class _Step(NamedTuple):
    """An op of the conversion from a value to its feature: its type, and the name and dtype of its result."""

    op: str
    name: str
    dtype: str


@dataclass(frozen=True)
class CrossingValue:
    """A value that crosses: its name and dtype in the program, and the feature (output and input) that represents it.

    `steps` convert the value to the feature in the first part, and back in the second. Without steps, the value is the
    feature. `shape` is the shape of the feature, with None for flexible sizes.
    """

    value: str
    inner: str
    shape: Sizes
    steps: tuple[_Step, ...]
    conversion: str = ""

    @property
    def feature(self) -> str:
        """The name of the value in both parts' dictionaries of features."""
        return self.steps[-1].name if self.steps else self.value

    @property
    def dtype(self) -> str:
        """The dtype of the feature."""
        return self.steps[-1].dtype if self.steps else self.inner

    @property
    def nbytes(self) -> int | None:
        """Bytes per prediction; None if the shape is flexible."""
        if None in self.shape:
            return None
        return math.prod(size for size in self.shape if size is not None) * (2 if self.dtype == "fp16" else 4)

    def build_output(self, function: Function, var: Var) -> Var:
        """Build the ops that convert the value to the feature at the end of the first part; return the feature."""
        with function:
            for step in self.steps:
                var = _build_op(step.op, var, step.name, step.dtype)
        return var

    def build_input(self, function: Function, var: Var) -> Var:
        """Add the feature as an input of the second part, with the ops that convert it to the value.

        Returns the replacement of the value `var`, which this part does not compute.
        """
        sizes: Sequence[Any] = var.shape if len(var.shape) == len(self.shape) else self.shape
        # coremltools accepts symbols as sizes of inputs, but not expressions of symbols, such as a product
        sizes = [get_new_symbol() if is_symbolic(size) and not size.is_Symbol else size for size in sizes]
        placeholder = Placeholder(tuple(sizes), types.string_to_builtin(self.dtype), name=self.feature)
        made = placeholder.outputs[0]
        made.name = self.feature
        add_function_input(function, self.feature, placeholder)
        first = next(iter(function.operations), None)
        dtypes = [self.inner, *(step.dtype for step in self.steps)]
        names = [self.value, *(step.name for step in self.steps)]
        with function:
            for place, step in reversed(list(enumerate(self.steps))):
                undo = "squeeze" if step.op == "expand_dims" else step.op
                made = _build_op(undo, made, f"{names[place]}_back", dtypes[place], first)
                rename_var(made.op, made, names[place] if place == 0 else f"{names[place]}_back")
        return made


def plan_crossing(
    function: Function, var: Var, taken: set[str], image: bool = False
) -> CrossingValue | str:
    """Plan the conversion of the crossing value `var`, or return the reason why it cannot cross.

    `taken` are the names in use; new names are added. `image` is true if the value is already an output as an image,
    which cannot represent all values.
    """
    dtype, shape = get_dtype(var), get_sizes(var.sym_type)
    if dtype is None:
        return f"it is a {get_type_kind(var)}, which no input or output can hold"
    if shape is None:
        return "its rank is not known"
    cast, inner = choose_interface_dtype(function, dtype), types.builtin_to_string(dtype)
    if cast is None:
        return f"an input cannot hold its type ({inner}), nor another that holds it exactly"
    planned: list[tuple[str, str, str]] = []
    notes = []
    if cast:
        planned.append(("cast", cast, cast))
        notes.append(f"{inner} as {cast}, which holds it exactly")
    if not shape:
        planned.append(("expand_dims", "array", cast or inner))
        notes.append("a scalar as an array of one")
    if image and not planned:
        planned.append(("identity", "values", inner))
        notes.append("its values beside the image")
    steps = tuple(_Step(op, make_free_name(f"{var.name}_{suffix}", taken), kind) for op, suffix, kind in planned)
    return CrossingValue(var.name, inner, shape or (1,), steps, "; ".join(notes))


def _build_op(kind: str, var: Var, name: str, dtype: str, before: Operation | None = None) -> Var:
    inputs: dict[str, Any] = {"cast": {"dtype": dtype}, "identity": {}}.get(kind, {"axes": [0]})
    made: Var = getattr(Builder, kind)(x=var, **inputs, name=name, before_op=before)
    return made


def describe_crossing(each: CrossingValue) -> str:
    """Describe one value that crosses."""
    shape = " x ".join("?" if size is None else str(size) for size in each.shape)
    size = "flexible" if each.nbytes is None else f"{each.nbytes:,} bytes"
    note = f" ('{each.value}': {each.conversion})" if each.conversion else ""
    return f"'{each.feature}'{note}: {each.dtype} {shape}, {size} per prediction"


@dataclass(frozen=True)
class FlexibleSizes:
    """The shapes that a value can have: the shapes in `listed` or, if empty, from `low` to `high` (-1: unbounded)."""

    default: Shape
    low: Shape
    high: Shape
    listed: tuple[Shape, ...] = ()

    def put(self, array: Any) -> None:
        """Write the shapes to `array`, an ArrayFeatureType."""
        array.shape[:] = self.default
        if self.listed:
            for shape in self.listed:
                array.enumeratedShapes.shapes.add().shape[:] = shape
            return
        for low, high in zip(self.low, self.high, strict=True):
            array.shapeRange.sizeRanges.add(lowerBound=low, upperBound=high)


@dataclass(frozen=True)
class _FlexibleInput:
    """The shapes that the description allows for one input of flexible shape."""

    name: str
    default: Shape
    listed: tuple[Shape, ...]
    ranges: tuple[tuple[int, int], ...]

    @property
    def open(self) -> list[int]:
        """The dimensions with a range of sizes."""
        return [axis for axis, (low, high) in enumerate(self.ranges) if low != high]

    @property
    def unbounded_axes(self) -> dict[int, bool]:
        """The dimensions without an upper bound."""
        return {axis: True for axis, (_, high) in enumerate(self.ranges) if high < 0}

    def at(self, ends: Mapping[int, bool] | None) -> Shape:
        """Return the shape with each ranged dimension at its upper (True) or lower (False) end.

        If `ends` is None, each ranged dimension is at the middle of its range.
        """
        shape = []
        for axis, (low, high) in enumerate(self.ranges):
            top = high if high >= 0 else low + _UNBOUNDED_STEP
            shape.append((low + top) // 2 if ends is None else (top if ends.get(axis, False) else low))
        return tuple(shape)


def infer_crossing_sizes(
    function: Function, values: Sequence[str], alone: bool
) -> dict[str, FlexibleSizes] | str:
    """Infer the shapes of each of `values`, or return the reason why they are unknown.

    `alone` is true if no other input of the second part has a flexible shape.
    """
    inputs = _find_flexible_inputs(function)
    if isinstance(inputs, str):
        return inputs
    unknown = f"the sizes of '{values[0]}' do not follow from the shapes of the inputs: no input can take them all"
    if not inputs:
        return unknown
    aligned, mixed = _sample_input_shapes(inputs)
    found = [_infer_sizes(function, sample, values) for sample in aligned]
    for name in values:
        if any(each[name] is None for each in found):
            return unknown.replace(values[0], name)
    found += [each for each in (_infer_sizes(function, sample, values) for sample in mixed)
              if None not in each.values()]
    may_list = all(each.listed for each in inputs) and (
        alone or get_specification_version(function) >= _MIN_VERSION_MANY_ENUMERATED)
    ends: list[dict[str, Shape | None]] = []
    if any(each.unbounded_axes for each in inputs):
        low = {each.name: each.at({}) for each in inputs}
        further = {each.name: each.at(each.unbounded_axes) for each in inputs}
        ends = [_infer_sizes(function, sample, values) for sample in (low, further)]
    may_list = may_list and len(inputs) == 1
    return {name: _join_shapes([each[name] or () for each in found], may_list, [end[name] for end in ends])
            for name in values}


def _join_shapes(shapes: Sequence[Shape], may_list: bool, ends: Sequence[Shape | None]) -> FlexibleSizes:
    """Combine `shapes`, the first of which is the default.

    A dimension that differs between the two `ends` grows with an unbounded input, so it is unbounded.
    """
    low = tuple(map(min, zip(*shapes, strict=True)))
    high = tuple(map(max, zip(*shapes, strict=True)))
    listed = tuple(dict.fromkeys(shapes)) if may_list else ()
    if ends:
        first, second = ends[0] or low, ends[1] or high
        high = tuple(top if a == b else -1 for top, a, b in zip(high, first, second, strict=True))
    return FlexibleSizes(shapes[0], low, high, listed if len(listed) > 1 else ())


def _sample_input_shapes(inputs: Sequence[_FlexibleInput]) -> tuple[list[dict[str, Shape]], list[dict[str, Shape]]]:
    """Return shapes to try: shapes with all inputs at the same end, which are consistent, and others, which may not be.
    """
    aligned = [{each.name: each.default for each in inputs}]
    most = max(len(each.listed) for each in inputs)
    for number in range(most):
        aligned.append({each.name: each.listed[number % len(each.listed)] if each.listed else each.default
                        for each in inputs})
    for end in (False, True, None):
        aligned.append({each.name: each.default if each.listed else
                        each.at(None if end is None else dict.fromkeys(each.open, end)) for each in inputs})
    places = [(each.name, axis) for each in inputs if not each.listed for axis in each.open]
    mixed = []
    if 1 < len(places) <= _MAX_CORNER_DIMENSIONS:
        for ends in product((False, True), repeat=len(places)):
            chosen = dict(zip(places, ends, strict=True))
            mixed.append({each.name: each.default if each.listed else
                          each.at({axis: chosen[each.name, axis] for axis in each.open}) for each in inputs})
    unique = list({tuple(sorted(sample.items())): sample for sample in aligned}.values())
    return unique, [sample for sample in mixed if sample not in unique]


def _infer_sizes(
    function: Function, sample: Mapping[str, Shape], values: Sequence[str]
) -> dict[str, Shape | None]:
    clone = clone_function(function)
    ShapeInference(clone, [set_input_shape(clone, name, shape) for name, shape in sample.items()])
    found: dict[str, Shape | None] = dict.fromkeys(values)
    for var in (var for op in clone.operations for var in op.outputs if var.name in found):
        known = get_sizes(var.sym_type)
        fixed = () if known is None else tuple(size for size in known if size is not None)
        can_be_described = len(fixed) == len(known or ()) and all(0 <= size < 2**63 for size in fixed)
        found[var.name] = fixed if known is not None and can_be_described else None
    return found


def _find_flexible_inputs(function: Function) -> list[_FlexibleInput] | str:
    found = []
    for name, var in function.inputs.items():
        shape = get_sizes(var.sym_type)
        if shape is not None and None not in shape:
            continue
        feature = get_feature(function, name)
        one = _read_allowed_shapes(name, None if feature is None else feature.type, shape)
        if one is None:
            return f"the description does not say which shapes the input '{name}' can have"
        found.append(one)
    return found


def _read_allowed_shapes(name: str, feature: Any, shape: Sequence[int | None] | None) -> _FlexibleInput | None:
    kind = feature.WhichOneof("Type") if feature is not None else None
    if kind == "multiArrayType":
        array = feature.multiArrayType
        listed = tuple(tuple(map(int, one.shape)) for one in array.enumeratedShapes.shapes)
        ranges = tuple(map(_read_bounds, array.shapeRange.sizeRanges))
        default = tuple(map(int, array.shape))
    elif kind == "imageType" and shape is not None and None not in shape[:-2]:
        image = feature.imageType
        front = tuple(size or 1 for size in shape[:-2])
        listed = tuple((*front, int(one.height), int(one.width)) for one in image.enumeratedSizes.sizes)
        sides = [_read_bounds(image.imageSizeRange.heightRange), _read_bounds(image.imageSizeRange.widthRange)]
        ranges = (*((size, size) for size in front), *sides) if image.HasField("imageSizeRange") else ()
        default = (*front, int(image.height), int(image.width))
    else:
        return None
    ranges = ranges or tuple((size, size) for size in default)
    fits = shape is not None and {len(default), len(ranges), *map(len, listed)} == {len(shape)}
    return _FlexibleInput(name, default, listed, ranges) if fits else None


def _read_bounds(one: Any) -> tuple[int, int]:
    return int(one.lowerBound), int(one.upperBound)


@dataclass(frozen=True)
class SplitParts:
    """The two parts of the function `name`, which are written into the drafts of the parts.

    A part's function is a clone of the whole function, so its ops have the same indices.
    """

    name: str
    function: Function
    graph: FunctionGraph
    cut: Cut
    crossing: Sequence[CrossingValue]
    sizes: Mapping[str, FlexibleSizes]

    @property
    def _made_first(self) -> list[str]:
        """The outputs of the model that the first part computes."""
        return [var.name for var in self.graph.outputs
                if self.graph.maker.get(var) in self.cut.first and not self.graph.constant[self.graph.maker[var]]]

    def _select_inputs(self, values: set[Var]) -> list[str]:
        """Return the function's inputs and states among `values`, in their order."""
        return [name for name, var in self.function.inputs.items() if var in values]

    def _read_in(self, part: Iterable[int]) -> set[Var]:
        return {var for place in part for var in self.graph.reads[place]}

    @property
    def _second_inputs(self) -> list[str]:
        made = self._made_first
        return self._select_inputs(self._read_in(self.cut.second)
                                   | {var for var in self.graph.outputs if var.name not in made})

    @property
    def _second_outputs(self) -> list[str]:
        made = self._made_first
        return [var.name for var in self.graph.outputs if var.name not in made]

    @property
    def _first_inputs(self) -> list[str]:
        """The inputs that the first part reads, and the inputs that no op reads, which stay in the first part."""
        read = set(self._select_inputs(self._read_in(self.cut.first)))
        elsewhere = set(self._second_inputs) - read
        return [name for name in self.function.inputs if name not in elsewhere]

    @property
    def _first_outputs(self) -> list[str]:
        made = self._made_first
        return [*made, *(each.feature for each in self.crossing if each.feature not in made)]

    def write_first(self, part: Draft) -> None:
        """Reduce the function in `part` to the first part."""
        function = part.program.functions[self.name]
        ops, outputs = list(function.operations), {var.name: var for var in function.outputs}
        values = {each.value: self._get_clone(ops, var) for each, var in zip(self.crossing, self.cut.crossing)}
        made = {each.feature: each.build_output(function, values[each.value]) for each in self.crossing}
        function.set_outputs([outputs.get(name) or made[name] if name in self._made_first else made[name]
                              for name in self._first_outputs])
        self._reduce(part, function, [op for place, op in enumerate(ops) if place not in self.cut.first],
                     self._first_inputs, self._made_first)
        part.change_interface(self.name, *(InterfaceChange("output", None, name, "added")
                                           for name in self._first_outputs if name not in self._made_first))

    def write_second(self, part: Draft) -> None:
        """Reduce the function in `part` to the second part."""
        function = part.program.functions[self.name]
        ops, outputs = list(function.operations), {var.name: var for var in function.outputs}
        function.set_outputs([outputs[name] for name in self._second_outputs])
        with BlockEditor() as editor:
            for each, var in zip(self.crossing, self.cut.crossing):
                old = self._get_clone(ops, var)
                editor.replace(old, each.build_input(function, old))
        inputs = [*self._second_inputs, *(each.feature for each in self.crossing)]
        self._reduce(part, function, [op for place, op in enumerate(ops) if place not in self.cut.second],
                     inputs, self._second_outputs)
        part.change_interface(self.name, *(InterfaceChange("input", None, each.feature, "added")
                                           for each in self.crossing))
        for each in self.crossing:
            if each.nbytes is None:
                feature = proto.Model_pb2.FeatureDescription(name=each.feature)
                kind = proto.FeatureTypes_pb2.ArrayFeatureType
                names = {"fp16": kind.FLOAT16, "fp32": kind.FLOAT32, "int32": kind.INT32}
                feature.type.multiArrayType.dataType = names[each.dtype]
                self.sizes[each.value].put(feature.type.multiArrayType)
                describe_feature(function, feature)

    def _get_clone(self, ops: Sequence[Operation], var: Var) -> Var:
        """Return the clone of `var` in a part."""
        place = self.graph.maker[var]
        clone: Var = ops[place].outputs[self.graph.ops[place].outputs.index(var)]
        return clone

    def _reduce(self, part: Draft, function: Function, ops: Sequence[Operation], inputs: Sequence[str],
                outputs: Sequence[str]) -> None:
        """Remove `ops`, and all inputs and states except `inputs`; `outputs` are the original outputs that stay."""
        with BlockEditor() as editor:
            editor.remove(reversed(ops))
        removed = [name for name in function.inputs if name not in inputs]
        for held in ("_input_dict", "placeholder_inputs"):
            kept = getattr(function, held)
            setattr(function, held, type(kept)((name, kept[name]) for name in inputs))
        states = {var.name for var in self.graph.states}
        part.change_interface(
            self.name,
            *(InterfaceChange("state" if name in states else "input", name, None, "removed") for name in removed),
            *(InterfaceChange("output", var.name, None, "removed") for var in self.graph.outputs
              if var.name not in outputs),
        )

    def summary(self) -> str:
        """Describe both parts in one sentence: number of ops, and the names of inputs and outputs."""
        words = []
        for number, part, inputs, outputs in (
            ("first", self.cut.first, self._first_inputs, self._first_outputs),
            ("second", self.cut.second, [*self._second_inputs, *(each.feature for each in self.crossing)],
             self._second_outputs),
        ):
            count = sum(self.graph.ops[place].op_type != "const" for place in part)
            words.append(f"the {number} part has {format_count(count, 'op')}, takes {', '.join(inputs)} and "
                         f"gives {', '.join(outputs)}")
        return "; ".join(words)
