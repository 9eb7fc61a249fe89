"""Compute cumulative sums on the ANE by a triangle of ones, or by convs with ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_itemsize, get_reshape_extents, get_static_shape, is_symbolic
from ...passes.contract import FP32_UNSUPPORTED_REASON, Community, Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_m4_study
from ...passes.examples import make_example, make_op_example
from ...rules.unsupported_ops import Cumsum
from ..constants._generated_constants import build_shared_const
from ._cumulative_sums import (
    build_running_sums,
    find_conv_limits,
    plan_windows,
    read_cumsum_settings,
    split_shape_at_axis,
)

_MAX_LAYOUT_OPS = 5
"Maximum number of layout ops between a mask and its cast."
_LAYOUT_OPS = ("expand_dims", "squeeze", "reshape", "transpose", "slice_by_index")
_MAX_INPUT = 150.0
"Largest input of the examples: every partial sum of the elements is then within the range of fp16."


class TriangleCumsum(Rewrite):
    """Replace cumsum, which is unsupported on the ANE, by convs with ones or by a matmul with a triangle of ones.

    why     cumsum runs on the CPU, and cheap neighbouring ops fall back with it. Convs, matmuls and adds are supported.
    when    fp16. form=windows: a conv with k ones and k - 1 zeros in front computes the sum of the last k elements at
            each position; a second one over every k-th of those (a reshape moves them to an axis) computes the sum of
            the last k * k; and so on until the window covers the axis: one conv up to 13 elements, two up to 169, three
            up to 2197 (15, 225 and 3375 for targets from M4 on). reverse pads the other side; exclusive moves the
            window by one. form=triangle: x @ U for the last axis, L @ x for another, U being 1 on and above the
            diagonal (above it for exclusive) and L the same below; reverse swaps the two. form=auto uses the triangle
            for masks (x cast from bool) with at least as many elements as the triangle, and windows otherwise. An axis
            of symbolic length needs `longest`: one conv, and adds of the value shifted by 13, 26, 52, ...
    exact   rounding: the same sums in a different order. Windows read only elements of their sum: an infinite or NaN
            element affects only the sums that contain it. With several convs the sum of a window is stored in fp16, so
            all sums must stay below 32752. A triangle multiplies the other elements by 0: with form=triangle an
            infinite or NaN element makes all sums of its row NaN. Masks have no such elements.
    cost    windows: a conv and a reshape for each factor of up to 13, each a pass over the data; k ones per channel.
            triangle: 2 * n * n bytes. On the CPU these ops are slower than a cumsum, so a model too small for the ANE
            becomes slower.

    before
        %y: fp16[1, 8, 100] = cumsum(x=%x, axis=-1)
    after
        %0: fp16[1, 8, 1, 100] = expand_dims(x=%x, axes=[2])
        %1: fp16[1, 8, 1, 100] = conv(x=%0, weight=<fp16[8, 1, 1, 10]>, pad_type=custom, pad=[0, 0, 9, 0], groups=8)
        %2: fp16[1, 8, 10, 10] = reshape(x=%1, shape=[1, 8, 10, 10])
        %3: fp16[1, 8, 10, 10] = conv(x=%2, weight=<fp16[8, 1, 10, 1]>, pad_type=custom, pad=[9, 0, 0, 0], groups=8)
        %y: fp16[1, 8, 100] = reshape(x=%3, shape=[1, 8, 100])
    """

    fixes = (Cumsum,)
    stage = "decompose"
    exactness = Exactness.ROUNDING
    bound = "for each conv 2^-11 of the sum of magnitudes up to that position; for a triangle half a unit in the " \
            "last place. Measured on normal draws, relative to the largest sum: 5.9e-4 for 16 elements, 4.6e-4 for " \
            "128, 6.7e-4 for 1024, 8.7e-4 for 8192; with a single rounding 3.7e-4, 2.7e-4, 3.7e-4, 4.4e-4"
    preset = "full"
    roots = ("cumsum",)
    evidence = (
        cite_m4_study("cumsum is unsupported; conv, matmul, add, pad and reshape are accepted"),
        Community("limits all sums: in convs and products a partial sum of 32768 is infinite for good",
                  source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/numerics.md", chip="M4, M6",
                  date="2026-10-02"),
    )

    form: Literal["auto", "windows", "triangle"] = "auto"
    "windows keeps infinities and NaN out of other sums; triangle does not, but rounds once; auto uses it for masks."
    longest: int = 0
    "Maximum extent of a symbolic axis; 0 skips such axes."
    max_bytes: int = 2 << 20
    "Maximum bytes of ones for one cumsum."

    def match(self, op: Operation) -> Hit | Miss:
        if not types.is_float(op.x.dtype):
            return Miss(op, "computes on integers", near=False)
        if op.x.rank == 0 or op.axis.val is None:
            return Miss(op, "has no axis to sum along")
        if op.x.dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        extent = op.x.shape[read_cumsum_settings(op).axis]
        if not is_symbolic(extent) and self._prefers_triangle(op):
            return self._match_triangle(op, int(extent))
        return self._match_windows(op, extent)

    def _prefers_triangle(self, op: Operation) -> bool:
        """Return whether to use a triangle: by `form`, or for a mask x with at least as many elements, so that reading
        the triangle costs no more than reading x."""
        if self.form != "auto" or not _is_bool_mask(op.x):
            return self.form == "triangle"
        shape = get_static_shape(op.x)
        if shape is None:
            return False
        return shape[read_cumsum_settings(op).axis]**2 <= min(math.prod(shape), self.max_bytes // 2)

    def _match_triangle(self, op: Operation, count: int) -> Hit | Miss:
        axis, rank = read_cumsum_settings(op).axis, op.x.rank
        needed = count * count * get_itemsize(op.x)
        if needed > self.max_bytes:
            return Miss(op, f"a triangle of {count} x {count} is {needed} bytes, above max_bytes={self.max_bytes}; "
                            "form=windows needs none")
        if axis < rank - 2 and sum(map(is_symbolic, op.x.shape)) > 1:
            return Miss(op, "several axes are symbolic: a reshape cannot distinguish them")
        return Hit(op, note=f"{count} elements by a triangle of ones", plan=None, keeps_nonfinite=_is_bool_mask(op.x))

    def _match_windows(self, op: Operation, count: Any) -> Hit | Miss:
        symbolic = is_symbolic(count)
        if symbolic and (self.longest < 1 or self.form == "triangle"):
            return Miss(op, "sums along an axis of symbolic length; form=windows with longest=N supports up to N "
                            "elements")
        settings, limits = read_cumsum_settings(op), find_conv_limits(self.generations)
        plan = plan_windows(op.x.shape, get_itemsize(op.x), settings, limits, self.max_bytes, self.longest)
        if plan is None:
            inner = max(split_shape_at_axis(op.x, settings.axis)[2], 1)
            return Miss(op, f"{count} elements, {inner} apart, do not fit on two axes of up to {limits.extent}")
        if isinstance(plan, str):
            return Miss(op, plan)
        if symbolic:
            return Hit(op, note=f"up to {self.longest} elements by doubling windows", plan=plan,
                       largest_size=self.longest)
        return Hit(op, note=f"{count} elements by windows of {' x '.join(map(str, plan.sizes))}", plan=plan)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        return _build_triangle_matmul(mb, hit.op) if hit.plan is None else build_running_sums(mb, hit.op.x, hit.plan)

    def examples(self) -> Iterable[Example]:
        yield _make_cumsum_example("two convs", (1, 8, 100), axis=-1)
        yield make_op_example("one conv", "cumsum", (2, 4, 8), {"axis": 2})
        yield _make_cumsum_example("exclusive", (2, 30, 4), axis=1, exclusive=True)
        yield make_op_example("exclusive, last axis", "cumsum", (2, 3, 12), {"axis": -1, "exclusive": True})
        yield _make_mask_example("a mask, exclusive", axis=-1, exclusive=True)
        yield _make_cumsum_example("backwards", (40, 3), axis=0, reverse=True)
        yield _make_cumsum_example("both", (2, 2, 3, 17), axis=3, reverse=True, exclusive=True)
        yield _make_cumsum_example("three convs", (2, 200), axis=1)
        yield make_op_example("a vector", "cumsum", (5,), {"axis": 0})
        yield _make_cumsum_example("rank 5", (2, 3, 14, 2, 3), axis=2)
        yield _make_mask_example("a mask", axis=1)
        yield _make_cumsum_example("any length up to", (2, None), longest=100, axis=1)
        yield _make_cumsum_example("any length backwards", (None, 3), longest=40, axis=0, reverse=True, exclusive=True)
        yield make_op_example("any length", "cumsum", (2, None), {"axis": 1}, reason=(
            "sums along an axis of symbolic length; form=windows with longest=N supports up to N elements"))
        yield make_op_example("large triangle", "cumsum", (2, 2000), {"axis": 1}, options={"form": "triangle"}, reason=(
            "a triangle of 2000 x 2000 is 8000000 bytes, above max_bytes=2097152; form=windows needs none"))
        yield make_op_example("fp32", "cumsum", (2, 5), {"axis": 1}, dtype=types.fp32, reason=FP32_UNSUPPORTED_REASON)
        yield make_op_example("integers", "cumsum", (2, 5), {"axis": 1}, dtype=types.int32,
                              reason="computes on integers")


def _is_bool_mask(x: Var) -> bool:
    """Return whether `x` is cast from bools, apart from layout ops: it then contains no infinity and no NaN."""
    for _ in range(_MAX_LAYOUT_OPS):
        if x.op is None or x.op.op_type not in _LAYOUT_OPS:
            break
        x = x.op.x
    return x.op is not None and x.op.op_type == "cast" and bool(x.op.x.dtype == types.bool)


def _build_triangle_matmul(mb: RewriteBuilder, op: Operation) -> Any:
    """Compute the running sums of `op`'s x as one product with a triangle of ones."""
    x, (axis, exclusive, reverse) = op.x, read_cumsum_settings(op)
    count = int(x.shape[axis])
    last = axis == x.rank - 1
    upper = last != reverse
    diagonal = int(exclusive)

    def make_triangle() -> Any:
        square = np.ones((count, count), np.float16)
        return np.triu(square, diagonal) if upper else np.tril(square, -diagonal)

    triangle = build_shared_const(mb, ("triangle", count, upper, diagonal), make_triangle)
    if x.rank == 1:
        return mb.squeeze(x=mb.matmul(x=mb.expand_dims(x=x, axes=[0]), y=triangle), axes=[0])
    if last:
        return mb.matmul(x=x, y=triangle)
    if axis == x.rank - 2:
        return mb.matmul(x=triangle, y=x)
    sums = mb.matmul(x=triangle, y=mb.reshape(x=x, shape=list(split_shape_at_axis(x, axis))))
    return mb.reshape(x=sums, shape=get_reshape_extents(x.shape))


def _make_cumsum_example(name: str, shape: tuple[int | None, ...], longest: int = 0, **parameters: Any) -> Example:
    """Make an example of so many elements that their sums leave fp16 for large inputs."""
    options = {"longest": longest} if longest else {}
    return make_op_example(name, "cumsum", shape, parameters, options=options, within=_MAX_INPUT)


def _make_mask_example(name: str, **parameters: Any) -> Example:
    def build_body(x: Var) -> Any:
        mask = Builder.cast(x=Builder.greater(x=x, y=np.float16(0)), dtype="fp16")
        return Builder.cumsum(x=mask, name="y", **parameters)

    return make_example(name, build_body, x=(3, 5, 4))
