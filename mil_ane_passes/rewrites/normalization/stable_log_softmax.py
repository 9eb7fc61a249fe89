"""Compute the logarithm of a softmax without probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value
from ...passes.contract import Community, Exactness, Example, Hit, Miss, Rewrite, Severity
from ...passes.examples import make_example
from ._log_exp_patterns import (
    find_precision_obstacle,
    has_negligible_epsilon,
    is_made_by,
    is_maximum_subtracted,
    read_reduced_axes,
)

_MAX_INPUT = 40.0
"Largest input of the examples: beyond, the original is minus infinity at full precision where it should be x - max."


class StableLogSoftmax(Rewrite):
    """Compute log(softmax(x)) as x minus its maximum minus their log-sum-exp.

    why     In fp16 small probabilities are 0, and their logarithm is minus infinity: for all classes except one that
            dominates by more than about 10 (or 17: sources differ on the smallest number). x - reduce_log_sum_exp(x)
            has the fault of `ane::stable_log_sum_exp`.
    when    log of softmax, or x minus its log-sum-exp with kept axes, in fp16, for any axis and rank; the epsilon of
            log is at most 1e-38, so that it has no effect. A softmax or log-sum-exp with other users stays. Skipped:
            fp32, and larger epsilons.
    exact   rounding: the same function. With log's epsilon of 1e-45, log(softmax(x) + 1e-45) is never below -103.3. An
            fp16 epsilon is rounded to 0 and is removed. For an fp32 epsilon (from iOS17) this lower bound is kept as
            maximum(result, log(0 + epsilon)), so that finite results stay finite; within 20 of the bound results differ
            by up to 0.7. On a machine that flushes the epsilon to 0, which is the fault, log(0 + epsilon) is minus
            infinity and bounds nothing, as in PyTorch. Infinite results become finite. The sum of exponentials contains
            exp(0), so nothing underflows; it overflows fp16 only for more than 65504 nearly equal values, as it would
            within softmax. That the log-sum-exp of numbers up to 0 is right on an ANE is predicted from
            `ane::stable_log_sum_exp`'s sources.
    cost    four ops for two; for the lower bound two more on the reduced shape and one over all of x.

    before
        %0: fp16[2, 4, 8] = softmax(x=%x, axis=1)
        %y: fp16[2, 4, 8] = log(x=%0)
    after
        %0: fp16[2, 1, 8] = reduce_max(x=%x, axes=[1], keep_dims=True)
        %1: fp16[2, 4, 8] = sub(x=%x, y=%0)
        %2: fp16[2, 1, 8] = reduce_log_sum_exp(x=%1, axes=[1], keep_dims=True)
        %y: fp16[2, 4, 8] = sub(x=%1, y=%2)
    """

    code, slug = "ANE307", "log-of-softmax"
    severity = Severity.WRONG
    stage = "numerics"
    exactness = Exactness.ROUNDING
    bound = "half a unit in the last place of x - max(x), of the log-sum-exp, and of the result, while the result " \
            "is above -83, which is 20 above the smallest logarithm"
    preset = "safe"
    fixes_nonfinite = True
    within = (0.0, _MAX_INPUT)  # the logarithm of a softmax at full precision is correct above its floor
    roots = ("log", "sub")
    evidence = (
        Community("log_softmax on the ANE in fp16 is minus infinity for every class but a dominant one",
                  source="https://github.com/apple/coremltools/issues/2728", date="2026-05-29"),
        Community("x - max(x) - log(sum(exp(x - max(x)))) does not lose small probabilities",
                  source="https://github.com/apple/coremltools/pull/2727", date="2026-05-29"),
        Community("reduce_log_sum_exp over 32 equal channels drops from 11.10 to 0 on the ANE at x = 7.63",
                  source="https://github.com/apple/coremltools/issues/2690"),
        Community("log(softmax(x)) underflows in fp16; x - reduce_log_sum_exp(x) instead",
                  source="https://github.com/sbryngelson/ANEForge/issues/75", date="2026-07-22"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        has_softmax = op.op_type == "log" and is_made_by(op.x, "softmax")
        if not has_softmax and not (op.op_type == "sub" and _is_log_softmax_subtraction(op)):
            return Miss(op, "not the logarithm of a softmax", near=False)
        reason = find_precision_obstacle(op)
        if reason:
            return Miss(op, reason)
        if has_softmax and not has_negligible_epsilon(op):
            return Miss(
                op, f"log adds {get_const_value(op.epsilon):g} to the probabilities, a deliberate lower bound"
            )
        axes: tuple[int, ...] | None
        if has_softmax:
            x, axis = op.x.op.x, get_const_value(op.x.op.axis)
            axes = None if axis is None else (axis,)
            epsilon = op.epsilon if get_const_value(op.epsilon) > 0 else None
            fault = "small probabilities are 0"
        else:
            x, axes, epsilon = op.x, read_reduced_axes(op.y.op), None
            fault = "the sum of exponentials overflows"
        if axes is None or x.rank == 0:
            return Miss(op, "the axis of the softmax is not known")
        return Hit(op, x=x, axes=list(axes), epsilon=epsilon, keeps_nonfinite=has_softmax,
                   note=f"{fault} in fp16: x - max - log-sum-exp")

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        maximum = mb.reduce_max(x=hit.x, axes=hit.axes, keep_dims=True)
        shifted = mb.sub(x=hit.x, y=maximum)
        result: Var = mb.sub(x=shifted, y=mb.reduce_log_sum_exp(x=shifted, axes=hit.axes, keep_dims=True))
        if hit.epsilon is not None:  # its logarithm is computed at run time: fp16 has neither number
            result = mb.maximum(x=result, y=mb.log(x=mb.mul(x=maximum, y=np.float16(0)), epsilon=hit.epsilon))
        return result

    def examples(self) -> Iterable[Example]:
        # log(softmax(x)) is minus infinity at full precision where it should be x - max, so x stays within 40
        no_log_softmax = "not the logarithm of a softmax"
        yield _make_log_example("as converted", lambda x: Builder.softmax(x=x, axis=1), within=_MAX_INPUT)
        yield _make_log_example("last axis", lambda x: Builder.softmax(x=x), within=_MAX_INPUT, scale=10.0)
        yield _make_log_example("for iOS15", lambda x: Builder.softmax(x=x, axis=-2), opset=ct.target.iOS15,
                                within=_MAX_INPUT)
        yield _make_log_example("epsilon in fp32", lambda x: Builder.softmax(x=x, axis=1), np.float32(1e-45))
        yield make_example("probabilities are returned too", _build_shared_softmax, within=_MAX_INPUT, x=(2, 4, 8))
        yield make_example("less its log-sum-exp", lambda x: _subtract_log_sum_exp(x, axes=[1, 2], keep_dims=True),
                           within=3e4, scale=10.0, x=(2, 4, 8))
        yield make_example(
            "maximum off already",
            lambda x: _subtract_log_sum_exp(
                Builder.sub(x=x, y=Builder.reduce_max(x=x, axes=[1], keep_dims=True)), axes=[1], keep_dims=True
            ),
            reason=no_log_softmax,
            x=(2, 4, 8),
        )
        yield make_example("axis dropped", lambda x: _subtract_log_sum_exp(x, axes=[0], keep_dims=False),
                           reason=no_log_softmax, x=(4, 4))
        yield _make_log_example("sigmoid", lambda x: Builder.sigmoid(x=x), reason=no_log_softmax)
        yield _make_log_example(
            "epsilon that counts", lambda x: Builder.softmax(x=x), np.float16(1e-4),
            reason="log adds 0.000100017 to the probabilities, a deliberate lower bound")
        yield _make_log_example("fp32", lambda x: Builder.softmax(x=x), dtype=types.fp32,
                                reason="computed in fp32; the fault is in fp16 only")


def _is_log_softmax_subtraction(sub: Operation) -> bool:
    """Return whether `sub` is x minus the log-sum-exp of x, and no maximum was subtracted from x before."""
    if not is_made_by(sub.y, "reduce_log_sum_exp") or sub.y.op.x is not sub.x:
        return False
    if not get_const_value(sub.y.op.keep_dims, False):
        return False
    return not (is_made_by(sub.x, "sub") and is_maximum_subtracted(sub.x.op, read_reduced_axes(sub.y.op)))


def _make_log_example(name: str, inner: Callable[[Var], Any], epsilon: Any = None, **settings: Any) -> Example:
    parameters = {} if epsilon is None else {"epsilon": epsilon}
    return make_example(name, lambda x: Builder.log(x=inner(x), name="y", **parameters), x=(2, 4, 8), **settings)


def _subtract_log_sum_exp(x: Var, **parameters: Any) -> Any:
    return Builder.sub(x=x, y=Builder.reduce_log_sum_exp(x=x, **parameters), name="y")


def _build_shared_softmax(x: Var) -> list[Var]:
    probabilities = Builder.softmax(x=x, axis=1, name="p")
    return [probabilities, Builder.log(x=probabilities, name="y")]
