"""The views of torch: recomputing a view of a changed base, and propagating a write to a view to its base.

`VIEWS` maps an op to the function that makes its step; it applies only where the op's first argument is a tensor. The
inverses are those of torch's own functionalization: slice_scatter for slice, select_scatter for select, the inverse
reshape for view, and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import NotConverted
from .aliases import ViewStep
from .emitter import Emitter, read_constant

__all__ = ["VIEWS", "IdentityView", "ScatterView", "SliceView"]


class _View:
    """A view that one node makes; subclasses define `scatter`."""

    def __init__(self, emit: Emitter, node: Any) -> None:
        self.emit, self.node = emit, node
        self.arguments = list(node.inputs())[1:]

    def replay(self, parent: Any) -> Any:
        return self.emit.copy_node(self.node, parent)


class IdentityView(_View):
    """The tensor itself: detach, inactive dropout, contiguous of a contiguous tensor, ..."""

    def replay(self, parent: Any) -> Any:
        return parent

    def scatter(self, parent: Any, new: Any) -> Any:
        return new


class ScatterView(_View):
    """A view whose inverse is `op_scatter` with the same arguments: select, slice, diagonal."""

    def scatter(self, parent: Any, new: Any) -> Any:
        return self.emit.op(f"{self.node.kind()}_scatter", parent, new, *self.arguments, like=parent)


class SliceView(_View):
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


class ReshapeView(_View):
    """The same elements in the same order: view, reshape, flatten, squeeze."""

    def scatter(self, parent: Any, new: Any) -> Any:
        return self.emit.op("aten::reshape", new, self.emit.sizes(parent), like=parent)


class TransposeView(_View):
    """Two axes exchanged; a transpose is its own inverse."""

    def scatter(self, parent: Any, new: Any) -> Any:
        axes = self.arguments[:2] if len(self.arguments) >= 2 else (0, 1)
        return self.emit.op("aten::transpose", new, *axes, like=parent)


class ReversedAxesView(_View):
    """All axes, or the last two, in reverse order; its own inverse."""

    def scatter(self, parent: Any, new: Any) -> Any:
        return self.emit.op(self.node.kind(), new, like=parent)


class PermuteView(_View):
    def scatter(self, parent: Any, new: Any) -> Any:
        order = read_constant(self.arguments[0])
        if order is None or None in order:
            raise NotConverted.at(self.node, "writes through a permute whose order is computed")
        order = [axis % len(order) for axis in order]
        return self.emit.op("aten::permute", new, [order.index(axis) for axis in range(len(order))], like=parent)


class MovedimView(_View):
    def scatter(self, parent: Any, new: Any) -> Any:
        return self.emit.op("aten::movedim", new, self.arguments[1], self.arguments[0], like=parent)


class UnsqueezeView(_View):
    def scatter(self, parent: Any, new: Any) -> Any:
        return self.emit.op("aten::squeeze", new, self.arguments[0], like=parent)


class ExpandView(_View):
    """An expanded tensor. A write to one is an error in torch, unless no element is repeated.

    In that case a reshape is the inverse.
    """

    def scatter(self, parent: Any, new: Any) -> Any:
        mine, other = (_get_sizes(value) for value in (self.node.output(), next(self.node.inputs())))
        if mine is None or other is None or _count_elements(mine) != _count_elements(other):
            raise NotConverted.at(self.node, "writes to an expanded tensor, whose elements share memory",
                                  "use .clone() or .repeat() before the write")
        return self.emit.op("aten::reshape", new, self.emit.sizes(parent), like=parent)


def make_slice_step(emit: Emitter, node: Any) -> ViewStep:
    """Make the step of slice(self, dim, start, end, step); `x[:]` is x."""
    start, end, step = (read_constant(value) for value in list(node.inputs())[2:5])
    known = all(value.node().kind() == "prim::Constant" for value in list(node.inputs())[2:5])
    entire = known and start in (None, 0) and (end is None or end >= _OPEN_END) and step == 1
    return (IdentityView if entire else ScatterView)(emit, node)


_OPEN_END = 2**31 - 1
"""The end of an open slice in torch: this number or more."""


def make_narrow_step(emit: Emitter, node: Any) -> ViewStep:
    """Make the step of narrow(self, dim, start, length)."""
    dim, start, length = list(node.inputs())[1:]
    if start.type().kind() == "TensorType":
        raise NotConverted.at(node, "narrow starts at a tensor", "use an int start")

    def get_bounds(parent: Any) -> tuple[Any, Any, Any]:
        known = read_constant(start), read_constant(length)
        if None in known:
            return dim, start, emit.arithmetic("aten::add", start, length)
        end = known[0] + known[1]
        return dim, start, None if known[0] < 0 and end == 0 else end

    return SliceView(emit, node, get_bounds)


def _get_sizes(value: Any) -> list[int] | None:
    kind = value.type()
    return kind.sizes() if kind.kind() == "TensorType" else None


def _count_elements(sizes: list[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def _map_aten_names(
    step: Callable[[Emitter, Any], ViewStep], *names: str
) -> dict[str, Callable[[Emitter, Any], ViewStep]]:
    return dict.fromkeys((f"aten::{name}" for name in names), step)


VIEWS: dict[str, Callable[[Emitter, Any], ViewStep]] = {
    **_map_aten_names(IdentityView, "detach", "alias", "lift_fresh", "positive", "requires_grad_", "detach_"),
    **_map_aten_names(ScatterView, "select", "diagonal"),
    **_map_aten_names(ReshapeView, "view", "view_as", "squeeze", "unflatten", "_unsafe_view", "_reshape_alias"),
    **_map_aten_names(TransposeView, "transpose", "swapaxes", "swapdims", "t"),
    **_map_aten_names(ReversedAxesView, "numpy_T", "mT"),
    **_map_aten_names(PermuteView, "permute"),
    **_map_aten_names(MovedimView, "movedim", "moveaxis"),
    **_map_aten_names(UnsqueezeView, "unsqueeze"),
    **_map_aten_names(ExpandView, "expand", "expand_as", "broadcast_to"),
    "aten::narrow": make_narrow_step,
    "aten::slice": make_slice_step,
}
