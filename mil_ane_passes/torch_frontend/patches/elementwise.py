"""`fmax`, `fmin`, `copysign`, `signbit` and `erfc`.

fmax and fmin return the other number where one is NaN; where both are, 0/0 makes the result NaN again. The sign of -0
is that of 1 / -0 = -inf. erfc(x) = 1 - erf(x) has the absolute error of fp32 near 1, 6e-8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..contract import Patch
from ..lowering import add_result, bind_arguments, cast_to, promote_operands, to_tensor

PATCH = Patch(code="TORCH111",
              title="`fmax`, `fmin`, `copysign`, `signbit`, `erfc` are not implemented", upstream=("none known",))


@PATCH.op("fmax", "fmin")
def lower_fmax_fmin(context: Any, node: Any) -> None:
    """Lower fmax(self, other)."""
    inputs = bind_arguments(context, node, "self other")
    x, y = promote_operands(inputs.self, inputs.other)
    extreme, least = (mb.maximum, -np.inf) if node.kind == "fmax" else (mb.minimum, np.inf)
    if not types.is_float(x.dtype):
        add_result(context, node, extreme(x=x, y=y, name=node.name))
        return
    numbers = [cast_to(mb.equal(x=each, y=each), x.dtype) for each in (x, y)]
    x, y = (mb.select(cond=mb.not_equal(x=each, y=each), a=_make_number_like(least, each), b=each) for each in (x, y))
    any_number = mb.maximum(x=numbers[0], y=numbers[1])
    nan_or_one = mb.real_div(x=any_number, y=any_number)
    add_result(context, node, mb.mul(x=extreme(x=x, y=y), y=nan_or_one, name=node.name))


def _make_number_like(value: float, like: Var) -> Any:
    return types.nptype_from_builtin(like.dtype)(value)


@PATCH.op("copysign")
def copysign(context: Any, node: Any) -> None:
    """Lower copysign(self, other): a float."""
    inputs = bind_arguments(context, node, "self other")
    x, y = (each if types.is_float(each.dtype) else cast_to(each, types.fp32)
            for each in promote_operands(inputs.self, inputs.other))
    sign = mb.sub(x=_make_number_like(1, y), y=mb.mul(x=cast_to(_is_negative(y), y.dtype), y=_make_number_like(2, y)))
    add_result(context, node, mb.mul(x=mb.abs(x=x), y=sign, name=node.name))


@PATCH.op("signbit")
def signbit(context: Any, node: Any) -> None:
    """Lower signbit(self)."""
    x = to_tensor(bind_arguments(context, node, "self").self)
    add_result(
        context,
        node,
        mb.identity(x=_is_negative(cast_to(x, types.int32) if x.dtype == types.bool else x), name=node.name),
    )


def _is_negative(x: Var) -> Var:
    below = mb.less(x=x, y=_make_number_like(0, x))
    if not types.is_float(x.dtype):
        return below
    return mb.logical_or(x=below, y=mb.less(x=mb.real_div(x=_make_number_like(1, x), y=x), y=_make_number_like(0, x)))


@PATCH.op("erfc")
def erfc(context: Any, node: Any) -> None:
    """Lower erfc(self)."""
    x = to_tensor(bind_arguments(context, node, "self").self)
    x = x if types.is_float(x.dtype) else cast_to(x, types.fp32)
    add_result(context, node, mb.sub(x=_make_number_like(1, x), y=mb.erf(x=x), name=node.name))
