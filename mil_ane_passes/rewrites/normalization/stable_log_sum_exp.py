"""Subtract the maximum before a log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value
from ...passes.contract import Community, Exactness, Example, Hit, Measured, Miss, Rewrite
from ...passes.examples import build_program, make_example
from ._log_exp_patterns import (
    FP16_MAX,
    find_precision_obstacle,
    has_negligible_epsilon,
    is_made_by,
    is_maximum_subtracted,
    match_log_sum_exp,
    read_reduced_axes,
)

__all__ = ["build_log_cumsum_exp", "count_doubling_steps", "find_cumsum_obstacle"]


class StableLogSumExp(Rewrite):
    """Compute a log-sum-exp as the maximum plus the log-sum-exp of x minus the maximum.

    why     On the ANE reduce_log_sum_exp in fp16 falls to 0 where the sum of exponentials passes 65504: for 32 equal
            channels at 7.63. log(sum(exp(x))) is infinite there, and log(cumsum(exp(x))) above 11.09.
    when    reduce_log_sum_exp, reduce_log_sum of exp, log of reduce_sum of exp, log of cumsum of exp, in fp16; any
            axes, keep_dims or not; the epsilon of log no larger than 1e-38. Left alone: fp32, and x that has its
            maximum over the same axes taken off already; a cumsum that is reversed or exclusive, or of unknown length.
    exact   rounding: the same function. The maximum is held to finite numbers, so that a row of minus infinities gives
            minus infinity and not NaN. log's epsilon goes with its floor of -103.3. Infinite results become finite.
            The sum contains exp(0), so nothing underflows; it overflows only for more than 65504 nearly equal values.
            A running sum takes no fixed maximum: what suits its end makes its beginning underflow (minus infinity
            where it was right before). It is joined pairwise in steps that double, each max + softplus(min - max).
    cost    four ops more than the one (five where axes are dropped), two over all of x. A running sum of n takes
            ceil(log2 n) steps of ten ops, up to `longest`; the cumsum goes, which by measurements on an M4 is computed
            on the CPU, while the report of its overflow says on the ANE.

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
    stage, after = "numerics", ("stable_log_softmax",)
    exactness = Exactness.ROUNDING
    bound = "half a unit in the last place of x - max(x), of the log-sum-exp, and of the result; for a running sum " \
            "one unit a step"
    preset = "safe"
    fixes_nonfinite = True
    roots = ("reduce_log_sum_exp", "reduce_log_sum", "log")
    evidence = (
        Community("reduce_log_sum_exp over 32 equal channels drops from 11.10 to 0 on the ANE at x = 7.63",
                  source="https://github.com/apple/coremltools/issues/2690"),
        Community("max + log(sum(exp(x - max))) cannot overflow",
                  source="https://github.com/apple/coremltools/pull/2726", date="2026-05-29"),
        Community("with the maximum taken off, compute units ALL agree with double precision at 100 and at -100",
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
    "The most elements of a running sum that is unrolled."

    def match(self, op: Operation) -> Hit | Miss:
        parts = match_log_sum_exp(op)
        if parts is None:
            return Miss(op, "not the logarithm of a sum of exponentials", near=False)
        x, reduction = parts
        running = reduction.op_type == "cumsum"
        axes = None if running else read_reduced_axes(reduction)
        if is_made_by(x, "sub") and axes is not None and is_maximum_subtracted(x.op, axes):
            return Miss(op, "the maximum is taken off already", near=False)
        reason = find_precision_obstacle(op) or (find_cumsum_obstacle(reduction, self.longest) if running else None)
        if reason:
            return Miss(op, reason)
        if not running and axes is None:
            return Miss(op, "the axes are not known")
        if op.op_type == "log" and not has_negligible_epsilon(op):
            return Miss(op, f"log adds {get_const_value(op.epsilon):g} to the sum, which is meant to bound it below")
        if running:
            axis = int(get_const_value(reduction.axis))
            return Hit(op, x=x, axis=axis, note=f"the running sum of exponentials overflows fp16: joined pairwise in "
                                                f"{count_doubling_steps(int(x.shape[axis]))} steps")
        return Hit(op, x=x, axis=None, axes=axes, keep=bool(get_const_value(reduction.keep_dims, False)),
                   note="the sum of exponentials overflows fp16: the maximum is taken off first")

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        if hit.axis is not None:
            return build_log_cumsum_exp(mb, hit.x, hit.axis)
        axes = list(hit.axes)
        top = mb.clip(x=mb.reduce_max(x=hit.x, axes=axes, keep_dims=True), alpha=-FP16_MAX, beta=FP16_MAX)
        rest = mb.reduce_log_sum_exp(x=mb.sub(x=hit.x, y=top), axes=axes, keep_dims=True)
        total: Var = mb.add(x=top, y=rest)
        return total if hit.keep else mb.squeeze(x=total, axes=axes)

    def examples(self) -> Iterable[Example]:
        yield Example("op", lambda: _build_reduction(axes=[1], keep_dims=True))
        yield Example("dropped axis, large", lambda: _build_reduction(axes=[-1], keep_dims=False), scale=30.0)
        yield Example(
            "two axes, for iOS15", lambda: _build_reduction(axes=[1, 2], keep_dims=False, opset=ct.target.iOS15)
        )
        yield Example("all axes", lambda: _build_reduction())
        # log(sum + 1e-45) bottoms out at -103.3, or at fp16 at minus infinity, so x stays within 40
        yield Example("by hand", lambda: _build_of_exp(lambda e: Builder.log(
            x=Builder.reduce_sum(x=e, axes=[1]), name="y")), within=40.0)
        yield Example("reduce_log_sum", lambda: _build_of_exp(lambda e: Builder.reduce_log_sum(
            x=e, axes=[-1], keep_dims=True, name="y")), within=40.0)
        yield Example("running", lambda: _build_log_cumsum(axis=2), within=40.0)
        yield Example("too long", lambda: _build_log_cumsum(axis=2), options={"longest": 4},
                      reason="the running sum is over 8 elements, above 4: it would take 3 steps of ten ops; longest=8 "
                             "allows that")
        yield Example("reversed", lambda: _build_log_cumsum(axis=2, reverse=True),
                      reason="the running sum is exclusive or reversed")
        yield make_example(
            "maximum off already",
            lambda x: Builder.reduce_log_sum_exp(
                x=Builder.sub(x=x, y=Builder.reduce_max(x=x, axes=[1], keep_dims=True)), axes=[-2], name="y"
            ),
            reason="the maximum is taken off already",
            x=(2, 4, 8),
        )
        yield Example("fp32", lambda: _build_reduction(axes=[1], dtype=types.fp32),
                      reason="computed in fp32, and the fault is fp16's")
        yield make_example(
            "no exponential",
            lambda x: Builder.log(x=Builder.reduce_sum(x=x, axes=[1]), name="y"),
            reason="not the logarithm of a sum of exponentials",
            x=(2, 4, 8),
        )
        yield Example("epsilon that counts", lambda: _build_of_exp(lambda e: Builder.log(
            x=Builder.reduce_sum(x=e, axes=[1]), epsilon=np.float16(0.5), name="y")),
            reason="log adds 0.5 to the sum, which is meant to bound it below")


def _build_reduction(opset: Any = ct.target.iOS17, dtype: Any = types.fp16, **given: Any) -> Program:
    return build_program(
        lambda x: Builder.reduce_log_sum_exp(x=x, name="y", **given), opset=opset, dtype=dtype, x=(2, 4, 8)
    )


def _build_of_exp(outer: Callable[[Var], Any]) -> Program:
    return build_program(lambda x: outer(Builder.exp(x=x)), x=(2, 4, 8))


def _build_log_cumsum(**given: Any) -> Program:
    return _build_of_exp(lambda e: Builder.log(x=Builder.cumsum(x=e, **given), name="y"))


def count_doubling_steps(length: int) -> int:
    """Count how often a window of one element is doubled until it covers `length`."""
    return max(0, length - 1).bit_length()


def find_cumsum_obstacle(cumsum: Operation, longest: int) -> str | None:
    """Return why the running sum cannot be written out in steps, or None when it can."""
    axis = get_const_value(cumsum.axis)
    if axis is None:
        return "the axis of the running sum is not known"
    if get_const_value(cumsum.exclusive, False) or get_const_value(cumsum.reverse, False):
        return "the running sum is exclusive or reversed"
    length = cumsum.x.shape[int(axis)]
    if is_symbolic(length):
        return "the running sum is over a flexible axis, and the number of steps depends on its length"
    if length > longest:
        return (
            f"the running sum is over {length} elements, above {longest}: it would take "
            f"{count_doubling_steps(int(length))} "
            f"steps of ten ops; longest={length} allows that"
        )
    return None


def build_log_cumsum_exp(mb: RewriteBuilder, x: Var, axis: int) -> Var:
    """Compute log(cumsum(exp(x))): after step k each element is the log-sum-exp of the 2**k elements up to it.

    Two windows are joined as max(a, b) + softplus(min(a, b) - max(a, b)), where no exponential exceeds 1.
    """
    axis, done, total = axis % x.rank, 1, x
    length = int(x.shape[axis])
    while done < length:
        first, late, early = (_slice_axis(mb, total, axis, begin, end) for begin, end in (
            (0, done), (done, length), (0, length - done)))
        top = mb.maximum(x=late, y=early)
        held = mb.clip(x=top, alpha=-FP16_MAX, beta=FP16_MAX)  # minus infinity minus itself is NaN
        gap = mb.sub(x=mb.minimum(x=late, y=early), y=held)
        total = mb.concat(values=[first, mb.add(x=top, y=mb.softplus(x=gap))], axis=axis)
        done *= 2
    return total


def _slice_axis(mb: RewriteBuilder, x: Var, axis: int, begin: int, end: int) -> Var:
    mask = [position != axis for position in range(x.rank)]
    part: Var = mb.slice_by_index(
        x=x, begin=[begin if position == axis else 0 for position in range(x.rank)],
        end=[end if position == axis else 0 for position in range(x.rank)], begin_mask=mask, end_mask=mask)
    return part
