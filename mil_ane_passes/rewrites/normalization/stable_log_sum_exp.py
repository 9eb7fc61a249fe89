"""Subtract the maximum before a log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value
from ...passes.contract import Community, Exactness, Example, Hit, Measured, Miss, Rewrite, Severity
from ...passes.examples import make_example, make_op_example
from ._log_exp_patterns import (
    find_exp_operand,
    find_precision_obstacle,
    has_negligible_epsilon,
    is_made_by,
    is_maximum_subtracted,
    read_reduced_axes,
)

_FP16_MAX = np.float16(65504)
"The largest finite number of fp16."
_SHAPE = (2, 4, 8)
"Shape of the input of the examples."


class StableLogSumExp(Rewrite):
    """Compute a log-sum-exp as the maximum plus the log-sum-exp of x minus the maximum.

    why     On the ANE reduce_log_sum_exp in fp16 returns 0 if the sum of exponentials exceeds 65504: for 32 equal
            channels at 7.63. log(sum(exp(x))) is infinite there, and log(cumsum(exp(x))) above 11.09.
    when    reduce_log_sum_exp, reduce_log_sum of exp, log of reduce_sum of exp, log of cumsum of exp, in fp16; any
            axes, keep_dims or not; the epsilon of log no larger than 1e-38. Skipped: fp32, and x from which its maximum
            over the same axes is already subtracted; a reversed or exclusive cumsum, or one of dynamic length.
    exact   rounding: the same function. The maximum is clipped to finite numbers, so that a row of minus infinities
            gives minus infinity and not NaN. The epsilon of log is removed, with its floor of -103.3. Infinite results
            become finite. The sum contains exp(0), so nothing underflows; it overflows only for more than 65504 nearly
            equal values. A cumulative sum has no fixed maximum: the maximum of its end makes its beginning underflow
            (minus infinity where it was correct before). It is combined pairwise in doubling steps, each max +
            softplus(min - max).
    cost    four more ops (five if axes are dropped), two over all of x. A cumulative sum of n elements takes ceil(log2
            n) steps of ten ops, up to `longest`; the cumsum is removed, which runs on the CPU according to measurements
            on an M4, but on the ANE according to the report of its overflow.

    before
        %y: fp16[2, 1, 8] = reduce_log_sum_exp(x=%x, axes=[1], keep_dims=True)
    after
        %0: fp16[2, 1, 8] = reduce_max(x=%x, axes=[1], keep_dims=True)
        %1: fp16[2, 1, 8] = clip(x=%0, alpha=-65504.0, beta=65504.0)
        %2: fp16[2, 4, 8] = sub(x=%x, y=%1)
        %3: fp16[2, 1, 8] = reduce_log_sum_exp(x=%2, axes=[1], keep_dims=True)
        %y: fp16[2, 1, 8] = add(x=%1, y=%3)
    """

    code, slug = "ANE308", "log-sum-exp-cliff"
    severity = Severity.WRONG
    stage, after = "numerics", ("stable_log_softmax",)
    exactness = Exactness.ROUNDING
    bound = "half a unit in the last place of x - max(x), of the log-sum-exp, and of the result; for a cumulative " \
            "sum one unit in the last place per step"
    preset = "safe"
    fixes_nonfinite = True
    roots = ("reduce_log_sum_exp", "reduce_log_sum", "log")
    evidence = (
        Community("reduce_log_sum_exp over 32 equal channels drops from 11.10 to 0 on the ANE at x = 7.63",
                  source="https://github.com/apple/coremltools/issues/2690"),
        Community("max + log(sum(exp(x - max))) cannot overflow",
                  source="https://github.com/apple/coremltools/pull/2726", date="2026-05-29"),
        Community("with the maximum subtracted, compute units ALL agree with double precision at 100 and at -100",
                  source="https://github.com/rustnn/rustnn/pull/213", chip="M4", date="2026-08-28"),
        Measured("cumsum is computed on the CPU", chip="M4", os="macOS 27.0.1",
                 source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 "
                        "notes/coreml_dispatch.md"),
        Community("logcumsumexp, exp then cumsum then log, is infinite and then NaN above 11.09 on the ANE",
                  source="https://github.com/apple/coremltools/issues/2729", date="2026-05-29"),
        Community("the maximum of the whole axis stops the overflow, and early elements may underflow",
                  source="https://github.com/apple/coremltools/pull/2763", date="2026-07-25"),
    )

    longest: int = 256
    "Maximum number of elements of a cumulative sum to unroll."

    def match(self, op: Operation) -> Hit | Miss:
        parts = _match_log_sum_exp(op)
        if parts is None:
            return Miss(op, "not the logarithm of a sum of exponentials", near=False)
        x, reduction = parts
        is_cumsum = reduction.op_type == "cumsum"
        axes = None if is_cumsum else read_reduced_axes(reduction)
        if is_made_by(x, "sub") and axes is not None and is_maximum_subtracted(x.op, axes):
            return Miss(op, "the maximum is already subtracted", near=False)
        reason = find_precision_obstacle(op) or (
            _find_cumsum_obstacle(reduction, self.longest) if is_cumsum else None)
        if reason:
            return Miss(op, reason)
        if not is_cumsum and axes is None:
            return Miss(op, "the axes are not known")
        if op.op_type == "log" and not has_negligible_epsilon(op):
            return Miss(op, f"log adds {get_const_value(op.epsilon):g} to the sum, a deliberate lower bound")
        if is_cumsum:
            axis = int(get_const_value(reduction.axis))
            return Hit(op, x=x, axis=axis, note=f"the cumulative sum of exponentials overflows fp16: combined "
                                                f"pairwise in "
                                                f"{count_doubling_steps(int(x.shape[axis]))} steps")
        return Hit(op, x=x, axis=None, axes=axes, keep_dims=bool(get_const_value(reduction.keep_dims, False)),
                   note="the sum of exponentials overflows fp16: the maximum is subtracted first")

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        if hit.axis is not None:
            return _build_log_cumsum_exp(mb, hit.x, hit.axis)
        axes = list(hit.axes)
        maximum = mb.clip(x=mb.reduce_max(x=hit.x, axes=axes, keep_dims=True), alpha=-_FP16_MAX, beta=_FP16_MAX)
        rest = mb.reduce_log_sum_exp(x=mb.sub(x=hit.x, y=maximum), axes=axes, keep_dims=True)
        result: Var = mb.add(x=maximum, y=rest)
        return result if hit.keep_dims else mb.squeeze(x=result, axes=axes)

    def examples(self) -> Iterable[Example]:
        op = "reduce_log_sum_exp"
        yield make_op_example("op", op, _SHAPE, {"axes": [1], "keep_dims": True})
        yield make_op_example("dropped axis, large", op, _SHAPE, {"axes": [-1], "keep_dims": False}, scale=30.0)
        yield make_op_example("two axes, for iOS15", op, _SHAPE, {"axes": [1, 2], "keep_dims": False},
                              opset=ct.target.iOS15)
        yield make_op_example("all axes", op, _SHAPE)
        # log(sum + 1e-45) bottoms out at -103.3, or at fp16 at minus infinity, so x stays within 40
        yield _make_exp_example(
            "by hand", lambda e: Builder.log(x=Builder.reduce_sum(x=e, axes=[1]), name="y"), within=40.0)
        yield _make_exp_example(
            "reduce_log_sum", lambda e: Builder.reduce_log_sum(x=e, axes=[-1], keep_dims=True, name="y"), within=40.0)
        yield _make_exp_example(
            "running", lambda e: Builder.log(x=Builder.cumsum(x=e, axis=2), name="y"), within=40.0)
        yield _make_exp_example(
            "too long", lambda e: Builder.log(x=Builder.cumsum(x=e, axis=2), name="y"), options={"longest": 4},
            reason="the cumulative sum has 8 elements, above 4: it would take 3 steps of ten ops (longest=8 allows it)")
        yield _make_exp_example(
            "reversed", lambda e: Builder.log(x=Builder.cumsum(x=e, axis=2, reverse=True), name="y"),
            reason="the cumulative sum is exclusive or reversed")
        yield make_example(
            "maximum already subtracted",
            lambda x: Builder.reduce_log_sum_exp(
                x=Builder.sub(x=x, y=Builder.reduce_max(x=x, axes=[1], keep_dims=True)), axes=[-2], name="y"
            ),
            reason="the maximum is already subtracted",
            x=_SHAPE,
        )
        yield make_op_example("fp32", op, _SHAPE, {"axes": [1]}, dtype=types.fp32,
                              reason="computed in fp32; the fault is in fp16 only")
        yield make_example("no exponential", lambda x: Builder.log(x=Builder.reduce_sum(x=x, axes=[1]), name="y"),
                           reason="not the logarithm of a sum of exponentials", x=_SHAPE)
        yield _make_exp_example(
            "epsilon that counts",
            lambda e: Builder.log(x=Builder.reduce_sum(x=e, axes=[1]), epsilon=np.float16(0.5), name="y"),
            reason="log adds 0.5 to the sum, a deliberate lower bound")


def _match_log_sum_exp(op: Operation) -> tuple[Var, Operation] | None:
    """Return (x, the op that sums its exponentials) where `op` computes the logarithm of their sum, else None."""
    if op.op_type == "reduce_log_sum_exp":
        return (op.x, op) if op.x.rank else None
    total = op
    if op.op_type == "log":
        if not is_made_by(op.x, "reduce_sum", "cumsum"):
            return None
        total = op.x.op
    x = find_exp_operand(total.x)
    return (x, total) if x is not None and x.rank else None


def _find_cumsum_obstacle(cumsum: Operation, longest: int) -> str | None:
    """Return why the running sum cannot be written out in steps, or None when it can."""
    axis = get_const_value(cumsum.axis)
    if axis is None:
        return "the axis of the cumulative sum is unknown"
    if get_const_value(cumsum.exclusive, False) or get_const_value(cumsum.reverse, False):
        return "the cumulative sum is exclusive or reversed"
    length = cumsum.x.shape[int(axis)]
    if is_symbolic(length):
        return "the cumulative sum is over a flexible axis, and the number of steps depends on its length"
    if length > longest:
        return (f"the cumulative sum has {length} elements, above {longest}: it would take "
                f"{count_doubling_steps(int(length))} steps of ten ops (longest={length} allows it)")
    return None


def count_doubling_steps(length: int) -> int:
    """Count how often a window of one element is doubled until it covers `length`."""
    return max(0, length - 1).bit_length()


def _build_log_cumsum_exp(mb: RewriteBuilder, x: Var, axis: int) -> Var:
    """Compute log(cumsum(exp(x))): after step k each element is the log-sum-exp of the 2**k elements up to it.

    Two windows are joined as max(a, b) + softplus(min(a, b) - max(a, b)), where no exponential exceeds 1.
    """
    axis, size, total = axis % x.rank, 1, x
    length = int(x.shape[axis])
    while size < length:
        complete = _slice_axis(mb, total, axis, 0, size)
        late, early = _slice_axis(mb, total, axis, size, length), _slice_axis(mb, total, axis, 0, length - size)
        larger = mb.maximum(x=late, y=early)
        finite = mb.clip(x=larger, alpha=-_FP16_MAX, beta=_FP16_MAX)  # minus infinity minus itself is NaN
        gap = mb.sub(x=mb.minimum(x=late, y=early), y=finite)
        total = mb.concat(values=[complete, mb.add(x=larger, y=mb.softplus(x=gap))], axis=axis)
        size *= 2
    return total


def _slice_axis(mb: RewriteBuilder, x: Var, axis: int, begin: int, end: int) -> Var:
    begins, ends = [0] * x.rank, [0] * x.rank
    begins[axis], ends[axis] = begin, end
    mask = [each != axis for each in range(x.rank)]
    result: Var = mb.slice_by_index(x=x, begin=begins, end=ends, begin_mask=mask, end_mask=mask)
    return result


def _make_exp_example(name: str, outer: Callable[[Var], Any], **settings: Any) -> Example:
    return make_example(name, lambda x: outer(Builder.exp(x=x)), x=_SHAPE, **settings)
