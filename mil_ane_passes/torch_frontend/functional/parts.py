"""Views that come as a list: chunk, split, unbind, tensor_split."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from ..errors import NotConverted
from .aliases import Step
from .emit import Emitter, constant
from .views import Sliced
from .writes import written_arguments

__all__ = ["CONSTANT_CHUNK", "PARTS", "part"]

CONSTANT_CHUNK = "prim::ConstantChunk"


class _Picked:
    """One element of unbind."""

    def __init__(self, emit: Emitter, dim: Any, index: int) -> None:
        self.emit, self.dim, self.index = emit, dim, index

    def replay(self, parent: Any) -> Any:
        return self.emit.op("aten::select", parent, self.dim, self.index)

    def scatter(self, parent: Any, new: Any) -> Any:
        return self.emit.op("aten::select_scatter", parent, new, self.dim, self.index, like=parent)


def part(emit: Emitter, node: Any, index: int) -> Step:
    """The step to part `index` of the list that `node` makes."""
    return PARTS[node.kind()](emit, node, index)


def _unbind(emit: Emitter, node: Any, index: int) -> Step:
    return _Picked(emit, list(node.inputs())[1], index)


class _Part(Sliced):
    """One part of a list of slices; sizes that the graph computes are read where the part is written or made again."""

    def __init__(self, emit: Emitter, node: Any, index: int, bounds: Callable[[Any], tuple[Any, Any, Any] | None]
                 ) -> None:
        super().__init__(emit, node, self._bounds_or_refusal)
        self.index, self._bounds_of = index, bounds

    def replay(self, parent: Any) -> Any:
        if self._bounds_of(parent) is None:
            return self.emit.op("aten::__getitem__", self.emit.copy_of(self.node, parent), self.index)
        return super().replay(parent)

    def _bounds_or_refusal(self, parent: Any) -> tuple[Any, Any, Any]:
        bounds = self._bounds_of(parent)
        if bounds is None:
            raise NotConverted.at(self.node, f"part {self.index} is written, and the list of sizes is computed",
                                  "give the sizes as a list literal, such as [n, x.shape[1] - n], or use narrow()")
        return bounds


def _chunk(emit: Emitter, node: Any, index: int) -> Step:
    """chunk(self, chunks, dim): parts of ceil(size / chunks), the last one shorter.

    coremltools' own preparation of the graph makes prim::ConstantChunk of it, with attributes and several outputs.
    """
    if node.kind() == CONSTANT_CHUNK:
        chunks, dim = node.i("chunks"), node.i("dim")
    else:
        chunks, dim = map(_element, list(node.inputs())[1:])

    def bounds(parent: Any) -> tuple[Any, Any, Any]:
        size = emit.size(parent, dim)
        rounded_up = emit.arithmetic("aten::sub", emit.arithmetic("aten::add", size, chunks), 1)
        part_size = emit.arithmetic("aten::floordiv", rounded_up, chunks)
        begin = emit.arithmetic("aten::mul", part_size, index) if index else 0
        return dim, begin, emit.arithmetic("aten::mul", part_size, index + 1)

    return _Part(emit, node, index, bounds)


def _split(emit: Emitter, node: Any, index: int) -> Step:
    """split(self, size or sizes, dim)"""
    given, dim = list(node.inputs())[1:]
    sizes = [_element(given)] * (index + 1) if given.type().kind() == "IntType" else _elements(given)

    def bounds(parent: Any) -> tuple[Any, Any, Any] | None:
        if sizes is None:
            return None
        edges = list(itertools.accumulate(sizes[:index + 1], functools.partial(emit.arithmetic, "aten::add"),
                                          initial=0))
        return _element(dim), edges[index], edges[index + 1]

    return _Part(emit, node, index, bounds)


def _tensor_split(emit: Emitter, node: Any, index: int) -> Step:
    """tensor_split(self, indices or sections, dim): the first `size % sections` parts are one longer."""
    given, dim = list(node.inputs())[1:]

    def bounds(parent: Any) -> tuple[Any, Any, Any] | None:
        where = _equal_sections(node, constant(given), _element(dim)) if given.type().kind() == "IntType" \
            else _elements(given)
        if where is None:
            return None
        edges: list[Any] = [0, *where, None]
        return _element(dim), edges[index], edges[index + 1]

    return _Part(emit, node, index, bounds)


def _equal_sections(node: Any, sections: int | None, dim: Any) -> list[int] | None:
    """Where tensor_split(sections) cuts; None where that is not a compile-time constant."""
    sizes = next(node.inputs()).type().sizes()
    if sizes is None or sections is None or not isinstance(dim, int):
        return None
    each, more = divmod(sizes[dim], sections)
    return [place * each + min(place, more) for place in range(1, sections)]


def _element(value: Any) -> Any:
    """A constant as a Python number, anything else as the graph's value."""
    known = constant(value)
    return value if known is None else known


def _elements(value: Any) -> list[Any] | None:
    """The elements of a list that the graph makes and never changes, each as `_element` gives it; else None."""
    if value.node().kind() == "prim::ListConstruct":
        if any(written_arguments(use.user) for use in value.uses()):
            return None
        return [_element(item) for item in value.node().inputs()]
    known = constant(value)
    return known if isinstance(known, list) else None


PARTS: dict[str, Callable[[Emitter, Any, int], Step]] = {
    "aten::unbind": _unbind, "aten::chunk": _chunk, "aten::split": _split, "aten::split_with_sizes": _split,
    "aten::tensor_split": _tensor_split, CONSTANT_CHUNK: _chunk,
    "aten::unsafe_chunk": _chunk, "aten::unsafe_split": _split, "aten::unsafe_split_with_sizes": _split,
}
