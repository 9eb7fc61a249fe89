"""Construction of both parts of a cut function: ops, inputs and outputs, and their descriptions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from coremltools import proto

from ..utils.text_format import format_count
from .description import Feature, Section
from .document import Document
from .program_parts import Function
from .split_at_crossing import CrossingValue
from .split_at_graph import Cut, FunctionGraph
from .split_at_shapes import FlexibleSizes

__all__ = ["SplitParts"]


@dataclass(frozen=True)
class SplitParts:
    """The two parts of `function` of `document`, to be written into the documents that hold the parts."""

    document: Document
    function: Function
    graph: FunctionGraph
    cut: Cut
    crossing: Sequence[CrossingValue]
    sizes: Mapping[str, FlexibleSizes]

    @property
    def _made_first(self) -> list[str]:
        """The model's own outputs that the first part computes."""
        return [name for name in self.graph.outputs
                if self.graph.maker.get(name) in self.cut.first and not self._constant(name)]

    def _constant(self, name: str) -> bool:
        return self.graph.constant[self.graph.maker[name]]

    def _given(self, names: set[str]) -> list[str]:
        """Return the function's inputs and states among `names`, in their order."""
        return [each.name for each in self.function.inputs if each.name in names]

    def _read_in(self, part: Iterable[int]) -> set[str]:
        return {name for place in part for name in self.graph.reads[place]}

    @property
    def _second_inputs(self) -> list[str]:
        return self._given(self._read_in(self.cut.second) | set(self._second_outputs))

    @property
    def _second_outputs(self) -> list[str]:
        return [name for name in self.graph.outputs if name not in self._made_first]

    @property
    def _first_inputs(self) -> list[str]:
        """The inputs that the first part reads, and those that no op reads: they stay inputs of the first part."""
        elsewhere = set(self._second_inputs) - self._read_in(self.cut.first)
        return [each.name for each in self.function.inputs if each.name not in elsewhere]

    @property
    def _first_outputs(self) -> list[str]:
        made = self._made_first
        return [*made, *(each.feature for each in self.crossing if each.feature not in made)]

    def write_first(self, part: Document) -> None:
        """Reduce the function in `part` to the first part."""
        function, ops = part.functions[self.function.name], self.function.block.ops
        kept = set(self._first_inputs)
        function.inputs = [each for each in self.function.inputs if each.name in kept]
        function.block.ops = [*(ops[place] for place in sorted(self.cut.first)),
                              *(op for each in self.crossing for op in each.leaving)]
        function.block.outputs = self._first_outputs
        new = [self._feature(each) for each in self.crossing if each.feature not in self._made_first]
        for section in part.description.of(function.name):
            _keep_features(section, kept, set(self._made_first))
            section.put("output", [*section.features("output"), *new])

    def write_second(self, part: Document) -> None:
        """Reduce the function in `part` to the second part."""
        function, ops = part.functions[self.function.name], self.function.block.ops
        kept = set(self._second_inputs)
        function.inputs = [*(each for each in self.function.inputs if each.name in kept),
                           *(each.declared for each in self.crossing)]
        function.block.ops = [*(op for each in self.crossing for op in each.arriving),
                              *(ops[place] for place in sorted(self.cut.second))]
        function.block.outputs = self._second_outputs
        new = [self._feature(each, sized=True) for each in self.crossing]
        for section in part.description.of(function.name):
            _keep_features(section, kept, set(self._second_outputs))
            section.put("input", [*section.features("input"), *new])

    def _feature(self, each: CrossingValue, sized: bool = False) -> Feature:
        message = proto.Model_pb2.FeatureDescription(name=each.feature)
        message.type.multiArrayType.CopyFrom(each.array())
        if sized and each.nbytes is None:
            self.sizes[each.value].put(message.type.multiArrayType)
        return Feature.of(message)

    def summary(self) -> str:
        """Describe both parts in one sentence: number of ops, and the names of inputs and outputs."""
        words = []
        for number, part, takes, gives in (
            ("first", self.cut.first, self._first_inputs, self._first_outputs),
            ("second", self.cut.second, [*self._second_inputs, *(each.feature for each in self.crossing)],
             self._second_outputs),
        ):
            count = sum(self.graph.ops[place].type != "const" for place in part)
            words.append(f"the {number} part has {format_count(count, 'op')}, takes {', '.join(takes)} and "
                         f"gives {', '.join(gives)}")
        return "; ".join(words)


def _keep_features(section: Section, given: set[str], made: set[str]) -> None:
    """Keep in `section` the inputs and states `given`, the outputs `made`, and those predicted features in `made`."""
    for kind, names in (("input", given), ("state", given), ("output", made)):
        section.put(kind, [feature for feature in section.features(kind) if feature.name in names])
    section.keep_predicted(made)
