"""Compute long sums in the accumulator of matrix products."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_symbolic
from ...passes.contract import Community, Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_m4_study
from ...passes.examples import make_op_example
from ..constants._generated_constants import build_shared_const

_ACCUMULATOR_LIMIT = 2.0**15
"Limit that the partial sums of a matrix product must stay below."
_SAFETY_FACTOR = 1.01
"Factor of the measured partial sums, for the rounding of what was measured."
_MAX_SHIFT = 6
"Most bits by which the operand is scaled down: more would lose small elements."


class WideReduceSum(Rewrite):
    """Compute sums over long axes as a matmul with ones, which accumulates with more bits than a reduction.

    why     According to one source reduce_sum accumulates in fp16: a sum of ones would stop at 2048, and cancellation
            loses accuracy. A matmul accumulates in 32 bits, 16 of them fractional, and rounds once.
    when    reduce_sum and reduce_mean of fp16 values over `least` to `most` elements, with a static number of elements;
            a mean only if fp16 represents that number. The accumulator overflows at 32768. With feeds, the operand is
            scaled by a power of two that keeps every partial sum below this limit (the op is skipped if more than 2^-6
            is needed); without feeds, the finding states the condition.
    exact   rounding: of the sum as before; a mean is then divided by the number of elements, which rounds once more. If
            sums reach 32768, or 65504 with fp16 outputs, a mean that was finite becomes infinite: give feeds.
    cost    a transpose if the summed axes are not the last, a reshape if there are several; a column of ones; a
            division for a mean or a scaled operand.

    before
        %y: fp16[2, 3] = reduce_sum(x=%x, axes=[-1])
    after
        %0: fp16[2, 3, 1] = matmul(x=%x, y=<fp16[2048, 1]>)
        %y: fp16[2, 3] = squeeze(x=%0, axes=[-1])
    """

    code, slug = "ANE313", "long-fp16-sum"
    stage = "numerics"
    exactness = Exactness.ROUNDING
    bound = "half a unit in the last place of the sum, and for a mean half of the result, while sums stay below 32768"
    preset = "named"
    roots = ("reduce_sum", "reduce_mean")
    measures = True
    evidence = (
        Community("reduce_sum accumulates narrow, matmul wide; x @ ones is never less exact (not through Core ML)",
                  source="sbryngelson/ANEForge docs/developer/numerics.md", date="2026"),
        Community("contradicts it, on the same page: all reductions accumulate wide, a sum of 16384 ones is exact",
                  source="sbryngelson/ANEForge docs/developer/numerics.md", date="2026"),
        Community("integer sums are exact up to 2048; a sum of 2048 read as 2050, and 2049 as 2050, which is no more "
                  "than the rounding of the result (not through Core ML)", chip="M5", os="macOS 26.5",
                  source="https://github.com/sbryngelson/ANEForge/issues/115", date="2026-07-23"),
        Community("unexplained: two matrix products of transposed operands were infinite although no order of summing "
                  "could pass 17321 (not through Core ML)", chip="M5", os="macOS 26.5",
                  source="https://github.com/sbryngelson/ANEForge/issues/115", date="2026-07-23"),
        cite_m4_study("a matrix product whose inner dimension is above 32768 is unsupported"),
        Community("products are summed in 32 bits, 16 after the point; a partial sum of 32768 is infinite for good",
                  source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/numerics.md", chip="M4, M6",
                  date="2026-10-02"),
    )

    least: int = 2048
    "Minimum number of elements of a sum to rewrite."
    most: int = 16384
    "Maximum elements of a sum that a matmul supports: 16384 on M1 to M3, 32768 from M4 on."

    def match(self, op: Operation) -> Hit | Miss:
        rank = op.x.rank
        axes = sorted({axis % rank for axis in get_const_value(op.axes) or range(rank)}) if rank else []
        extents = [op.x.shape[axis] for axis in axes]
        if not axes or not types.is_float(op.x.dtype):
            return Miss(op, "does not sum floating-point numbers", near=False)
        if any(is_symbolic(extent) for extent in extents):
            return Miss(op, "the number of elements is symbolic")
        count = math.prod(int(extent) for extent in extents)
        if count < self.least:
            return Miss(op, f"sums {count} elements, fewer than {self.least}", near=False)
        if count > self.most:
            return Miss(op, f"sums {count} elements; matmuls over more than {self.most} elements leave the ANE")
        if op.x.dtype != types.fp16:
            return Miss(op, "computed in fp32, off the ANE; the fault is in fp16 only")
        if len(axes) > 1 and sum(map(is_symbolic, op.x.shape)) > 1:
            return Miss(op, "several axes are summed next to several symbolic ones: a reshape cannot distinguish them")
        if op.op_type == "reduce_mean" and float(np.float16(count)) != count:
            return Miss(op, f"a mean of {count} elements, a number that fp16 cannot represent")
        return self._match_scale(op, axes, count)

    def _match_scale(self, op: Operation, axes: list[int], count: int) -> Hit | Miss:
        """Match with the scale that the operand needs, as far as the measured runs show it."""
        measured_x, measured_sum = (None, None) if self.measured is None else map(
            self.measured.get, (op.x, op.outputs[0]))
        if measured_x is None or measured_sum is None:
            return Hit(op, note=f"{count} elements; partial sums must stay below 32768, which was not measured",
                       shift=0, axes=axes, count=count)
        if measured_x.low >= 0 or measured_x.high <= 0:  # of one sign: no partial sum exceeds the sum
            partial = measured_sum.largest * (count if op.op_type == "reduce_mean" else 1)
        else:
            partial = measured_x.largest * count
        shift = max(0, math.ceil(math.log2(partial * _SAFETY_FACTOR / _ACCUMULATOR_LIMIT))) if partial else 0
        if not measured_x.finite or shift > _MAX_SHIFT:
            return Miss(op, f"partial sums may reach {partial:.4g} in the measured runs: scaling below 32768 would "
                            f"lose small elements")
        scaled = f", the operand scaled by 2^-{shift}" if shift else ""
        return Hit(op, note=f"{count} elements; partial sums within {partial:.4g} in the measured runs{scaled}",
                   shift=shift, axes=axes, count=count)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        op = hit.op
        total = _sum_by_matmul(mb, op.x, hit.axes, 2.0**-hit.shift)
        divisor = (hit.count if op.op_type == "reduce_mean" else 1) / 2.0**hit.shift
        if divisor != 1:
            total = mb.real_div(x=total, y=np.float16(divisor))
        return _restore_reduced_shape(mb, total, op, hit.axes)

    def examples(self) -> Iterable[Example]:
        yield make_op_example("last axis", "reduce_sum", (2, 3, 2048), {"axes": [-1]}, measured=False)
        yield make_op_example("kept", "reduce_sum", (2, 3, 2048), {"axes": [-1], "keep_dims": True})
        yield make_op_example("first axis", "reduce_sum", (2048, 3, 2), {"axes": [0]})
        yield make_op_example("first axis kept", "reduce_sum", (2048, 3, 2), {"axes": [0], "keep_dims": True})
        yield make_op_example("whole image", "reduce_sum", (1, 3, 32, 64), {"axes": [2, 3]})
        yield make_op_example("apart", "reduce_sum", (64, 3, 32), {"axes": [0, 2], "keep_dims": True})
        yield make_op_example("everything", "reduce_sum", (4, 8, 64))
        yield make_op_example("mean", "reduce_mean", (1, 3, 32, 64), {"axes": [-2, -1], "keep_dims": True}, within=15.0)
        yield make_op_example("mean of large ones", "reduce_mean", (2, 2048), {"axes": [1]}, scale=30.0, within=99.0)
        yield make_op_example("short", "reduce_sum", (2, 2047), {"axes": [1]},
                              reason="sums 2047 elements, fewer than 2048")
        yield make_op_example("too long", "reduce_sum", (1, 16385), {"axes": [1]},
                              reason="sums 16385 elements; matmuls over more than 16384 elements leave the ANE")
        yield make_op_example("short, but requested", "reduce_sum", (2, 64), {"axes": [1]}, options={"least": 64})
        yield make_op_example("symbolic", "reduce_sum", (2, None), {"axes": [1]},
                              reason="the number of elements is symbolic")
        yield make_op_example("odd mean", "reduce_mean", (2, 2049), {"axes": [1]},
                              reason="a mean of 2049 elements, a number that fp16 cannot represent")
        yield make_op_example("too large", "reduce_mean", (2, 2048), {"axes": [1]}, scale=9000.0,
                              reason="partial sums may reach 7.189e+07 in the measured runs: scaling below 32768 "
                                     "would lose small elements")
        yield make_op_example("fp32", "reduce_sum", (2, 2048), {"axes": [1]}, dtype=types.fp32,
                              reason="computed in fp32, off the ANE; the fault is in fp16 only")


def _sum_by_matmul(mb: RewriteBuilder, x: Var, axes: list[int], factor: float) -> Var:
    """Build `factor` times the sums of fp16 `x` over `axes` (sorted): the other axes, then one of extent 1."""
    kept = [axis for axis in range(x.rank) if axis not in axes]
    order = [*kept, *axes]
    rows = x if order == sorted(order) else mb.transpose(x=x, perm=order)
    count = math.prod(int(x.shape[axis]) for axis in axes)
    if len(axes) > 1 or not kept:
        outer = [-1 if is_symbolic(x.shape[axis]) else int(x.shape[axis]) for axis in kept]
        rows = mb.reshape(x=rows, shape=[*(outer or [1]), count])
    ones = build_shared_const(mb, ("ones", count, factor), lambda: np.full((count, 1), factor, np.float16))
    total: Var = mb.matmul(x=rows, y=ones)
    return total


def _restore_reduced_shape(mb: RewriteBuilder, total: Var, op: Operation, axes: list[int]) -> Any:
    """Reshape the result of `_sum_by_matmul` to the shape of reduction `op`'s output."""
    keep_dims = bool(get_const_value(op.keep_dims, False))
    if keep_dims and axes == [op.x.rank - 1] and op.x.rank > 1:
        return total
    result: Any
    if len(axes) == op.x.rank:
        result = mb.reshape(x=total, shape=[1] * op.x.rank) if keep_dims else mb.squeeze(x=total, axes=[0, 1])
    else:
        result = mb.squeeze(x=total, axes=[-1])
        result = mb.expand_dims(x=result, axes=axes) if keep_dims else result
    return result
