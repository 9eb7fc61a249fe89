"""Views that are returned as a list: chunk, split, unbind, tensor_split."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from ..errors import NotConverted
from .aliases import ViewStep
from .emitter import Emitter, read_constant
from .in_place_ops import find_written_arguments
from .views import SliceView

__all__ = ["CONSTANT_CHUNK", "SPLIT_VIEWS", "make_part_step"]

CONSTANT_CHUNK = "prim::ConstantChunk"


class _UnbindElement:
    """One element of unbind."""

    def __init__(self, emit: Emitter, dim: Any, index: int) -> None:
        self.emit, self.dim, self.index = emit, dim, index

    def replay(self, parent: Any) -> Any:
        return self.emit.op("aten::select", parent, self.dim, self.index)

    def scatter(self, parent: Any, new: Any) -> Any:
        return self.emit.op("aten::select_scatter", parent, new, self.dim, self.index, like=parent)


def make_part_step(emit: Emitter, node: Any, index: int) -> ViewStep:
    """Make the step to part `index` of the list that `node` makes."""
    return SPLIT_VIEWS[node.kind()](emit, node, index)


def _make_unbind_step(emit: Emitter, node: Any, index: int) -> ViewStep:
    return _UnbindElement(emit, list(node.inputs())[1], index)


class _SlicePart(SliceView):
    """One part of a list of slices.

    Sizes that the graph computes are read where the part is written or recomputed.
    """

    def __init__(self, emit: Emitter, node: Any, index: int, bounds: Callable[[Any], tuple[Any, Any, Any] | None]
                 ) -> None:
        super().__init__(emit, node, self._get_bounds)
        self.index, self._compute_bounds = index, bounds

    def replay(self, parent: Any) -> Any:
        if self._compute_bounds(parent) is None:
            return self.emit.op("aten::__getitem__", self.emit.copy_node(self.node, parent), self.index)
        return super().replay(parent)

    def _get_bounds(self, parent: Any) -> tuple[Any, Any, Any]:
        bounds = self._compute_bounds(parent)
        if bounds is None:
            raise NotConverted.at(self.node, f"part {self.index} is written, and the list of sizes is computed",
                                  "give the sizes as a list literal, such as [n, x.shape[1] - n], or use narrow()")
        return bounds


def _make_chunk_step(emit: Emitter, node: Any, index: int) -> ViewStep:
    """Make the step of chunk(self, chunks, dim): parts of ceil(size / chunks), the last one shorter.

    coremltools' own preparation of the graph turns it into prim::ConstantChunk, with attributes and several outputs.
    """
    if node.kind() == CONSTANT_CHUNK:
        chunks, dim = node.i("chunks"), node.i("dim")
    else:
        chunks, dim = map(_read_element, list(node.inputs())[1:])

    def get_bounds(parent: Any) -> tuple[Any, Any, Any]:
        size = emit.size(parent, dim)
        rounded_up = emit.arithmetic("aten::sub", emit.arithmetic("aten::add", size, chunks), 1)
        part_size = emit.arithmetic("aten::floordiv", rounded_up, chunks)
        begin = emit.arithmetic("aten::mul", part_size, index) if index else 0
        return dim, begin, emit.arithmetic("aten::mul", part_size, index + 1)

    return _SlicePart(emit, node, index, get_bounds)


def _make_split_step(emit: Emitter, node: Any, index: int) -> ViewStep:
    """Make the step of split(self, size or sizes, dim)."""
    inputs, dim = list(node.inputs())[1:]
    sizes = [_read_element(inputs)] * (index + 1) if inputs.type().kind() == "IntType" else _read_elements(inputs)

    def get_bounds(parent: Any) -> tuple[Any, Any, Any] | None:
        if sizes is None:
            return None
        edges = list(itertools.accumulate(sizes[:index + 1], functools.partial(emit.arithmetic, "aten::add"),
                                          initial=0))
        return _read_element(dim), edges[index], edges[index + 1]

    return _SlicePart(emit, node, index, get_bounds)


def _make_tensor_split_step(emit: Emitter, node: Any, index: int) -> ViewStep:
    """Make the step of tensor_split(self, indices or sections, dim).

    The first `size % sections` parts are one element longer.
    """
    inputs, dim = list(node.inputs())[1:]

    def get_bounds(parent: Any) -> tuple[Any, Any, Any] | None:
        where = (
            _compute_section_bounds(node, read_constant(inputs), _read_element(dim))
            if inputs.type().kind() == "IntType"
            else _read_elements(inputs)
        )
        if where is None:
            return None
        edges: list[Any] = [0, *where, None]
        return _read_element(dim), edges[index], edges[index + 1]

    return _SlicePart(emit, node, index, get_bounds)


def _compute_section_bounds(node: Any, sections: int | None, dim: Any) -> list[int] | None:
    """Compute the bounds of tensor_split(sections); None where they are not compile-time constants."""
    sizes = next(node.inputs()).type().sizes()
    if sizes is None or sections is None or not isinstance(dim, int):
        return None
    each, more = divmod(sizes[dim], sections)
    return [place * each + min(place, more) for place in range(1, sections)]


def _read_element(value: Any) -> Any:
    """Return a constant as a Python number, any other value as it is."""
    known = read_constant(value)
    return value if known is None else known


def _read_elements(value: Any) -> list[Any] | None:
    """Read the elements of a constant list, or of a list literal that is never changed; None for other lists."""
    if value.node().kind() == "prim::ListConstruct":
        if any(find_written_arguments(use.user) for use in value.uses()):
            return None
        return [_read_element(item) for item in value.node().inputs()]
    known = read_constant(value)
    return known if isinstance(known, list) else None


SPLIT_VIEWS: dict[str, Callable[[Emitter, Any, int], ViewStep]] = {
    "aten::unbind": _make_unbind_step,
    "aten::chunk": _make_chunk_step,
    "aten::split": _make_split_step,
    "aten::split_with_sizes": _make_split_step,
    "aten::tensor_split": _make_tensor_split_step,
    CONSTANT_CHUNK: _make_chunk_step,
    "aten::unsafe_chunk": _make_chunk_step,
    "aten::unsafe_split": _make_split_step,
    "aten::unsafe_split_with_sizes": _make_split_step,
}
