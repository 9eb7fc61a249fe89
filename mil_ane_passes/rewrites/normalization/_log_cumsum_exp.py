"""Logarithm of a running sum of exponentials by doubling, and the ops that it can replace."""

from __future__ import annotations

from coremltools.converters.mil.mil import Operation, Var
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value
from ._log_exp_patterns import FP16_MAX

__all__ = ["build_log_cumsum_exp", "count_doubling_steps", "find_cumsum_obstacle"]


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
