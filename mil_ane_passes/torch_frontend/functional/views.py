"""The views torch knows: how each is made again of a changed base, and how a write to it goes back.

`VIEWS` maps an op to the function that gives its Step; an op is asked only when its first argument is a tensor.
The inverses are those of torch's own functionalisation: slice_scatter for slice, select_scatter for select, the
reshape back for view, and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import NotConverted
from .aliases import Step
from .emit import Emitter, constant

__all__ = ["VIEWS", "Same", "Scattered", "Sliced"]


class _View:
    """A view that one node makes; `scatter` is what differs."""

    def __init__(self, emit: Emitter, node: Any) -> None:
        self.emit, self.node = emit, node
        self.arguments = list(node.inputs())[1:]

    def replay(self, parent: Any) -> Any:
        return self.emit.copy_of(self.node, parent)


class Same(_View):
    """The tensor itself: detach, dropout that does nothing, contiguous of a contiguous tensor, ..."""

    def replay(self, parent: Any) -> Any:
        return parent

    def scatter(self, parent: Any, new: Any) -> Any:
        return new


class Scattered(_View):
    """`op` → `op_scatter` with the same arguments: select, slice, diagonal."""

    def scatter(self, parent: Any, new: Any) -> Any:
        return self.emit.op(f"{self.node.kind()}_scatter", parent, new, *self.arguments, like=parent)


class Sliced(_View):
    """A part from `start` up to `end` along `dim`: narrow, and each part of chunk and split."""

    def __init__(self, emit: Emitter, node: Any, bounds: Callable[[Any], tuple[Any, Any, Any]]) -> None:
        super().__init__(emit, node)
        self.bounds = bounds

    def replay(self, parent: Any) -> Any:
        dim, start, end = self.bounds(parent)
        return self.emit.op("aten::slice", parent, dim, start, end, 1)

    def scatter(self, parent: Any, new: Any) -> Any:
        dim, start, end = self.bounds(parent)
        return self.emit.op("aten::slice_scatter", parent, new, dim, start, end, 1, like=parent)


class Reshaped(_View):
    """The same elements in the same order: view, reshape, flatten, squeeze."""

    def scatter(self, parent: Any, new: Any) -> Any:
        return self.emit.op("aten::reshape", new, self.emit.sizes(parent), like=parent)


class Swapped(_View):
    """Two axes exchanged; its own inverse."""

    def scatter(self, parent: Any, new: Any) -> Any:
        axes = self.arguments[:2] if len(self.arguments) >= 2 else (0, 1)
        return self.emit.op("aten::transpose", new, *axes, like=parent)


class Mirrored(_View):
    """All axes, or the last two, turned round; its own inverse."""

    def scatter(self, parent: Any, new: Any) -> Any:
        return self.emit.op(self.node.kind(), new, like=parent)


class Permuted(_View):
    def scatter(self, parent: Any, new: Any) -> Any:
        order = constant(self.arguments[0])
        if order is None or None in order:
            raise NotConverted.at(self.node, "writes through a permute whose order is computed")
        order = [axis % len(order) for axis in order]
        return self.emit.op("aten::permute", new, [order.index(axis) for axis in range(len(order))], like=parent)


class Moved(_View):
    def scatter(self, parent: Any, new: Any) -> Any:
        return self.emit.op("aten::movedim", new, self.arguments[1], self.arguments[0], like=parent)


class Unsqueezed(_View):
    def scatter(self, parent: Any, new: Any) -> Any:
        return self.emit.op("aten::squeeze", new, self.arguments[0], like=parent)


class Expanded(_View):
    """A write to an expanded tensor is an error in torch, unless nothing was repeated: then a reshape leads back."""

    def scatter(self, parent: Any, new: Any) -> Any:
        mine, theirs = (_sizes(value) for value in (self.node.output(), next(self.node.inputs())))
        if mine is None or theirs is None or _elements(mine) != _elements(theirs):
            raise NotConverted.at(self.node, "writes to an expanded tensor, whose elements share memory",
                                  "use .clone() or .repeat() before the write")
        return self.emit.op("aten::reshape", new, self.emit.sizes(parent), like=parent)


def slice_(emit: Emitter, node: Any) -> Step:
    """slice(self, dim, start, end, step); `x[:]` is x."""
    start, end, step = (constant(value) for value in list(node.inputs())[2:5])
    known = all(value.node().kind() == "prim::Constant" for value in list(node.inputs())[2:5])
    whole = known and start in (None, 0) and (end is None or end >= _OPEN) and step == 1
    return (Same if whole else Scattered)(emit, node)


_OPEN = 2**31 - 1
"""torch's "to the end": anything from here on."""


def narrow(emit: Emitter, node: Any) -> Step:
    """narrow(self, dim, start, length)"""
    dim, start, length = list(node.inputs())[1:]
    if start.type().kind() == "TensorType":
        raise NotConverted.at(node, "narrow starts at a tensor", "use an int start")

    def bounds(parent: Any) -> tuple[Any, Any, Any]:
        known = constant(start), constant(length)
        if None in known:
            return dim, start, emit.arithmetic("aten::add", start, length)
        end = known[0] + known[1]
        return dim, start, None if known[0] < 0 and end == 0 else end

    return Sliced(emit, node, bounds)


def _sizes(value: Any) -> list[int] | None:
    kind = value.type()
    return kind.sizes() if kind.kind() == "TensorType" else None


def _elements(sizes: list[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def _named(step: Callable[[Emitter, Any], Step], *names: str) -> dict[str, Callable[[Emitter, Any], Step]]:
    return dict.fromkeys((f"aten::{name}" for name in names), step)


VIEWS: dict[str, Callable[[Emitter, Any], Step]] = {
    **_named(Same, "detach", "alias", "lift_fresh", "positive", "requires_grad_", "detach_"),
    **_named(Scattered, "select", "diagonal"),
    **_named(Reshaped, "view", "view_as", "squeeze", "unflatten", "_unsafe_view", "_reshape_alias"),
    **_named(Swapped, "transpose", "swapaxes", "swapdims", "t"),
    **_named(Mirrored, "numpy_T", "mT"),
    **_named(Permuted, "permute"),
    **_named(Moved, "movedim", "moveaxis"),
    **_named(Unsqueezed, "unsqueeze"),
    **_named(Expanded, "expand", "expand_as", "broadcast_to"),
    "aten::narrow": narrow,
    "aten::slice": slice_,
}
