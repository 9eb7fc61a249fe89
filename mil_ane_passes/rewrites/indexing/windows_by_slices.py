"""Build sliding windows from slices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ane.limits import find_limit
from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_symbolic
from ...passes.contract import FP32_UNSUPPORTED_REASON, Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_m4_study
from ...passes.examples import make_example
from ...rules.unsupported_ops import SlidingWindows


class WindowsBySlices(Rewrite):
    """Replace sliding_windows by slices and a concat or stack.

    why     Core ML on an M4 rejects sliding_windows, on the GPU, too, and the ANE's compiler has no equivalent. Slices,
            concat, stack, reshape and pads of zero are supported.
    when    fp16, an axis of static length; other axes may be symbolic. The form with the fewest slices is used: windows
            at multiples of the stride are rows of a reshape, ceil(size / stride) of which are concatenated; one slice
            per window; or, for stride 1, one slice per element of the window. At most `max_parts` slices, and a result
            of rank 5 or less.
    exact   bitwise: data movement only. Padding zeros in the last row are not used.
    cost    each element of the result is moved twice, and each slice counts as reading its entire input.

    before
        %y: fp16[2, 7, 4] = sliding_windows(x=%x, axis=1, size=4, stride=2)
    after
        %0: fp16[2, 8, 2] = reshape(x=%x, shape=[2, 8, 2])
        %1: fp16[2, 7, 2] = slice_by_index(x=%0, begin=[0, 0, 0], end=[0, 7, 0], end_mask=[True, False, True])
        %2: fp16[2, 7, 2] = slice_by_index(x=%0, begin=[0, 1, 0], end=[0, 8, 0], end_mask=[True, False, True])
        %y: fp16[2, 7, 4] = concat(values=(%1, %2), axis=2)
    """

    fixes = (SlidingWindows,)
    stage = "decompose"
    exactness = Exactness.BITWISE
    preset = "full"
    roots = ("sliding_windows",)
    evidence = (
        cite_m4_study(
            "sliding_windows is unsupported, on the GPU, too; slices with and without steps, stack and "
            "reshape are accepted"
        ),
    )

    max_parts: int = 64
    "Maximum number of slices."

    def match(self, op: Operation) -> Hit | Miss:
        axis, size, step = _read_window_settings(op)
        extent = op.x.shape[axis]
        if not types.is_float(op.x.dtype):
            return Miss(op, "does not move floating-point numbers", near=False)
        if op.x.dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        if is_symbolic(extent):
            return Miss(op, "the length of the axis is dynamic")
        most = find_limit("rank", self.generations)
        if most is not None and op.x.rank + 1 > most.most:
            return Miss(op, f"the windows have {op.x.rank + 1} dimensions, {most.most} are supported on the ANE")
        count = (int(extent) - size) // step + 1
        if count < 1:
            return Miss(op, f"a window of {size} does not fit into {extent} elements")
        use_rows = step > 1 and _can_reshape_to_windows(op)
        rows = -(-size // step) if use_rows else size
        parts = min(rows, count)
        if parts > self.max_parts:
            return Miss(op, f"{count} windows of {size} elements: {parts} slices, above max_parts={self.max_parts}")
        if count < rows:
            form = "windows"
        else:
            form = "rows" if use_rows else "columns"
        return Hit(op, note=f"{count} windows of {size} elements: {parts} slices", count=count, form=form)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        op, count = hit.op, hit.count
        axis, size, step = _read_window_settings(op)
        if hit.form == "rows":
            return _build_windows_from_rows(mb, op, count)
        if hit.form == "windows":
            windows = [_slice_axis(mb, op.x, axis, start, start + size, 1) for start in range(0, count * step, step)]
            joined: Var = mb.stack(values=windows, axis=axis)
            return joined
        last = (count - 1) * step + 1
        columns = [_slice_axis(mb, op.x, axis, at, at + last, step) for at in range(size)]
        stacked: Var = mb.stack(values=columns, axis=axis + 1)
        return stacked

    def examples(self) -> Iterable[Example]:
        example = _make_windows_example
        yield example("overlapping", (2, 16), axis=1, size=4, stride=2)
        yield example("a part of a row", (1, 2, 16), axis=2, size=5, stride=2)
        yield example("few windows", (2, 12), axis=1, size=7, stride=3)
        yield example("many", (2, 11, 3), axis=1, size=3, stride=2)
        yield example("every one, for iOS15", (9,), opset=ct.target.iOS15, axis=0, size=3)
        yield example("apart", (2, 3, 2, 10), axis=-1, size=2, stride=5)
        yield example("edge to edge", (1, 3, 12), axis=-1, size=4, stride=4)
        yield example("edge to edge, a tail nobody reads", (2, 14, 3), axis=1, size=4, stride=4)
        yield example("one window", (3, 5), axis=1, size=5)
        yield example("too many", (200,), axis=0, size=65,
                      reason="136 windows of 65 elements: 65 slices, above max_parts=64")
        yield example("flexible", (2, None), axis=1, size=4,
                      reason="the length of the axis is dynamic")
        yield example("rank 5", (1, 2, 2, 2, 8), axis=4, size=4,
                      reason="the windows have 6 dimensions, 5 are supported on the ANE")
        yield example("fp32", (2, 8), dtype=types.fp32, axis=1, size=4, reason=FP32_UNSUPPORTED_REASON)
        yield example("integers", (2, 8), dtype=types.int32, axis=1, size=4,
                      reason="does not move floating-point numbers")


def _read_window_settings(op: Operation) -> tuple[int, int, int]:
    """Return the axis counted from the front, the elements of a window, and the distance between window starts."""
    return int(op.axis.val) % op.x.rank, int(op.size.val), get_const_value(op.stride, 1)


def _can_reshape_to_windows(op: Operation) -> bool:
    """Return whether a reshape can express the shape of the windows."""
    return bool(sum(map(is_symbolic, op.x.shape)) <= 1)


def _build_windows_from_rows(mb: RewriteBuilder, op: Operation, count: int) -> Var:
    """Build the windows from rows of a reshape, each joined with those after it."""
    axis, size, step = _read_window_settings(op)
    x, extent, needed = op.x, int(op.x.shape[axis]), (count - 1 + -(-size // step)) * step
    if needed > extent:
        behind = [0] * (2 * x.rank)
        behind[2 * axis + 1] = needed - extent
        x = mb.pad(x=x, pad=behind, mode="constant", constant_val=np.float16(0))
    elif needed < extent:
        x = _slice_axis(mb, x, axis, 0, needed, 1)
    shape = [-1 if is_symbolic(length) else int(length) for length in op.x.shape]
    shape[axis:axis + 1] = [needed // step, step]
    table = mb.reshape(x=x, shape=shape)
    parts = []
    for first in range(0, size, step):
        row = first // step
        part = table if count * step == needed else _slice_axis(mb, table, axis, row, row + count, 1)
        left = min(step, size - first)
        parts.append(part if left == step else _slice_axis(mb, part, axis + 1, 0, left, 1))
    joined: Var = parts[0] if len(parts) == 1 else mb.concat(values=parts, axis=axis + 1)
    return joined


def _slice_axis(mb: RewriteBuilder, x: Var, axis: int, begin: int, end: int, step: int) -> Var:
    """Slice elements `begin` to `end` of one axis, every `step`-th; all of the other axes."""
    stride: dict[str, Any] = {} if step == 1 else {"stride": _make_axis_values(x, axis, step, 1)}
    part: Var = mb.slice_by_index(
        x=x,
        begin=_make_axis_values(x, axis, begin, 0),
        end=_make_axis_values(x, axis, end, 0),
        end_mask=_make_axis_values(x, axis, False, True),
        **stride,
    )
    return part


def _make_axis_values(x: Var, axis: int, here: Any, elsewhere: Any) -> list[Any]:
    return [here if number == axis else elsewhere for number in range(x.rank)]


def _make_windows_example(
    name: str,
    x: tuple[int | None, ...],
    *,
    opset: Any = ct.target.iOS17,
    dtype: Any = types.fp16,
    reason: str | None = None,
    **parameters: int,
) -> Example:
    return make_example(name, lambda x: Builder.sliding_windows(x=x, name="y", **parameters), reason=reason,
                        opset=opset, dtype=dtype, x=x)
