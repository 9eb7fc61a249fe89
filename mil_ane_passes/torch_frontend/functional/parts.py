"""Views that come as a list: chunk, split, unbind, tensor_split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import NotConverted
from .aliases import Step
from .emit import Emitter, constant
from .views import Sliced

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


def _chunk(emit: Emitter, node: Any, index: int) -> Step:
    """chunk(self, chunks, dim): parts of ceil(size / chunks), the last one shorter.

    The host's own preparation of the graph makes prim::ConstantChunk of it, with attributes and several outputs.
    """
    if node.kind() == CONSTANT_CHUNK:
        chunks, dim = node.i("chunks"), node.i("dim")
    else:
        chunks, dim = (_known(value, node) for value in list(node.inputs())[1:])

    def bounds(parent: Any) -> tuple[Any, Any, Any]:
        size = emit.size(parent, dim)
        part_size = emit.arithmetic("aten::floordiv", emit.arithmetic("aten::add", size, chunks - 1), chunks)
        begin = emit.arithmetic("aten::mul", part_size, index) if index else 0
        return dim, begin, emit.arithmetic("aten::mul", part_size, index + 1)

    return Sliced(emit, node, bounds)


def _split(emit: Emitter, node: Any, index: int) -> Step:
    """split(self, size or sizes, dim)"""
    sizes, dim = (_known(value, node) for value in list(node.inputs())[1:])
    sizes = [sizes] * (index + 1) if isinstance(sizes, int) else sizes
    begin = sum(sizes[:index])
    return Sliced(emit, node, lambda parent: (dim, begin, begin + sizes[index]))


def _tensor_split(emit: Emitter, node: Any, index: int) -> Step:
    """tensor_split(self, indices or sections, dim): the first `size % sections` parts are one longer."""
    where, dim = (_known(value, node) for value in list(node.inputs())[1:])
    if isinstance(where, int):
        sizes = next(node.inputs()).type().sizes()
        if sizes is None:
            raise NotConverted.at(node, "writes to a part of tensor_split(sections) of an unknown size", "use split")
        each, more = divmod(sizes[dim], where)
        where = [place * each + min(place, more) for place in range(1, where)]
    edges: list[Any] = [0, *where, None]
    return Sliced(emit, node, lambda parent: (dim, edges[index], edges[index + 1]))


def _known(value: Any, node: Any) -> Any:
    known = constant(value)
    if known is None or (isinstance(known, list) and None in known):
        raise NotConverted.at(node, "writes to a part of a split whose sizes are computed")
    return known


PARTS: dict[str, Callable[[Emitter, Any, int], Step]] = {
    "aten::unbind": _unbind, "aten::chunk": _chunk, "aten::split": _split, "aten::split_with_sizes": _split,
    "aten::tensor_split": _tensor_split, CONSTANT_CHUNK: _chunk,
    "aten::unsafe_chunk": _chunk, "aten::unsafe_split": _split, "aten::unsafe_split_with_sizes": _split,
}
