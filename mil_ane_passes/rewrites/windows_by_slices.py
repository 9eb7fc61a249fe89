"""Cut sliding windows out by slices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import coremltools as ct
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ..core.build import RewriteBuilder
from ..core.contract import Exactness, Example, Hit, Miss, Rewrite
from ..core.examples import program
from ..core.limits import limit
from ..core.query import is_symbolic, value
from ._said import on_m4, private


class WindowsBySlices(Rewrite):
    """Replace sliding_windows by slices and a stack, or by a reshape where windows do not overlap.

    why     Core ML on an M4 refuses sliding_windows, which runs on no GPU either, and the ANE's compiler has no form
            of it. Slices, stack and reshape are taken.
    when    fp16, an axis of known length; other axes may be symbolic. Windows that lie edge to edge are a reshape.
            Others are cut out one by one, or (where they are more than the elements of one) each element of all
            windows by a slice with the stride as its step; then they are stacked. Refused where both are more than
            `max_parts`, and where the result has more than 5 dimensions.
    exact   bitwise: elements are moved, none is computed with.
    cost    each element of the result is moved twice; edge to edge at most once.

    before
        %y: fp16[1, 2, 3, 4] = sliding_windows(x=%x, axis=2, size=4, stride=2)
    after
        %0: fp16[1, 2, 4] = slice_by_index(x=%x, begin=[0, 0, 0], end=[0, 0, 4], end_mask=[True, True, False])
        %1: fp16[1, 2, 4] = slice_by_index(x=%x, begin=[0, 0, 2], end=[0, 0, 6], end_mask=[True, True, False])
        %2: fp16[1, 2, 4] = slice_by_index(x=%x, begin=[0, 0, 4], end=[0, 0, 8], end_mask=[True, True, False])
        %y: fp16[1, 2, 3, 4] = stack(values=(%0, %1, %2), axis=2)
    """

    code, slug = "ANE284", "windows-off-the-ane"
    stage = "decompose"
    exactness = Exactness.BITWISE
    preset = "full"
    roots = ("sliding_windows",)
    evidence = (
        on_m4("sliding_windows is refused, and runs on no GPU either; slices with and without steps, stack and "
              "reshape are accepted"),
        private("sliding_windows has no form on any generation"),
    )

    max_parts: int = 64
    "Slices up to which the windows are cut out."

    def match(self, op: Operation) -> Hit | Miss:
        axis, size, step = _window(op)
        extent = op.x.shape[axis]
        if not types.is_float(op.x.dtype):
            return Miss(op, "moves no floating-point numbers", near=False)
        if op.x.dtype != types.fp16:
            return Miss(op, "computed in fp32, which the ANE does not take")
        if is_symbolic(extent):
            return Miss(op, "the length of the axis is known only at run time")
        most = limit("rank", self.generations)
        if most is not None and op.x.rank + 1 > most.most:
            return Miss(op, f"the windows have {op.x.rank + 1} dimensions, the ANE takes {most.most}")
        count = (int(extent) - size) // step + 1
        if count < 1:
            return Miss(op, f"no window of {size} fits into {extent} elements")
        edge = step == size and _reshapes(op)
        parts = min(count, size)
        if not edge and parts > self.max_parts:
            return Miss(op, f"{count} windows of {size} elements: {parts} slices at least, max_parts={self.max_parts}")
        how = "edge to edge" if edge else f"{parts} slices"
        return Hit(op, note=f"{count} windows of {size} elements: {how}", count=count, edge=edge)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        op, count = hit.op, hit.count
        axis, size, step = _window(op)
        if hit.edge:
            whole = op.x if count * size == op.x.shape[axis] else _cut(mb, op.x, axis, 0, count * size, 1)
            shape = [-1 if is_symbolic(extent) else int(extent) for extent in op.x.shape]
            shape[axis:axis + 1] = [count, size]
            edged: Var = mb.reshape(x=whole, shape=shape)
            return edged
        if count <= size:
            starts = range(0, count * step, step)
            windows: Var = mb.stack(values=[_cut(mb, op.x, axis, start, start + size, 1) for start in starts],
                                    axis=axis)
            return windows
        last = (count - 1) * step + 1
        columns: Var = mb.stack(values=[_cut(mb, op.x, axis, at, at + last, step) for at in range(size)], axis=axis + 1)
        return columns

    def examples(self) -> Iterable[Example]:
        yield Example("overlapping", lambda: _windows((1, 2, 8), axis=2, size=4, stride=2))
        yield Example("many", lambda: _windows((2, 11, 3), axis=1, size=3, stride=2))
        yield Example("every one, for iOS15", lambda: _windows((9,), ct.target.iOS15, axis=0, size=3))
        yield Example("apart", lambda: _windows((2, 3, 2, 10), axis=-1, size=2, stride=5))
        yield Example("edge to edge", lambda: _windows((1, 3, 12), axis=-1, size=4, stride=4))
        yield Example("edge to edge, a tail nobody reads", lambda: _windows((2, 14, 3), axis=1, size=4, stride=4))
        yield Example("one window", lambda: _windows((3, 5), axis=1, size=5))
        yield Example("too many", lambda: _windows((200,), axis=0, size=65),
                      reason="136 windows of 65 elements: 65 slices at least, max_parts=64")
        yield Example("flexible", lambda: _windows((2, None), axis=1, size=4),
                      reason="the length of the axis is known only at run time")
        yield Example("rank 5", lambda: _windows((1, 2, 2, 2, 8), axis=4, size=4),
                      reason="the windows have 6 dimensions, the ANE takes 5")
        yield Example("fp32", lambda: _windows((2, 8), dtype=types.fp32, axis=1, size=4),
                      reason="computed in fp32, which the ANE does not take")
        yield Example("integers", lambda: _windows((2, 8), dtype=types.int32, axis=1, size=4),
                      reason="moves no floating-point numbers")


def _window(op: Operation) -> tuple[int, int, int]:
    """The axis counted from the front, the elements of a window, and how far apart windows begin."""
    return int(op.axis.val) % op.x.rank, int(op.size.val), value(op.stride, 1)


def _reshapes(op: Operation) -> bool:
    """Whether a reshape can say the shape of the windows."""
    return bool(sum(map(is_symbolic, op.x.shape)) <= 1)


def _cut(mb: RewriteBuilder, x: Var, axis: int, begin: int, end: int, step: int) -> Var:
    """Elements `begin` to `end` of one axis, every `step`-th; all of the others."""
    given: dict[str, Any] = {} if step == 1 else {"stride": _at(x, axis, step, 1)}
    part: Var = mb.slice_by_index(x=x, begin=_at(x, axis, begin, 0), end=_at(x, axis, end, 0),
                                  end_mask=_at(x, axis, False, True), **given)
    return part


def _at(x: Var, axis: int, here: Any, elsewhere: Any) -> list[Any]:
    return [here if number == axis else elsewhere for number in range(x.rank)]


def _windows(shape: tuple[int | None, ...], opset: Any = ct.target.iOS17, dtype: Any = types.fp16,
             **parameters: int) -> Program:
    return program(lambda x: Builder.sliding_windows(x=x, name="y", **parameters), opset=opset, dtype=dtype, x=shape)
