"""`fmax`, `fmin`, `copysign`, `signbit` and `erfc`.

fmax and fmin take the other number where one is NaN; where both are, 0/0 makes it NaN again. The
sign of -0 is that of 1 / -0 = -inf. erfc(x) = 1 - erf(x) is as near to torch's as fp32 holds 1: 6e-8, absolutely.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..contract import Patch
from ..lowering import add, bind, cast, promoted, tensor

PATCH = Patch(code="TORCH111",
              title="`fmax`, `fmin`, `copysign`, `signbit`, `erfc` are not implemented", upstream=("none known",))


@PATCH.op("fmax", "fmin")
def without_nan(context: Any, node: Any) -> None:
    """fmax(self, other)."""
    given = bind(context, node, "self other")
    x, y = promoted(given.self, given.other)
    extreme, least = (mb.maximum, -np.inf) if node.kind == "fmax" else (mb.minimum, np.inf)
    if not types.is_float(x.dtype):
        add(context, node, extreme(x=x, y=y, name=node.name))
        return
    numbers = [cast(mb.equal(x=each, y=each), x.dtype) for each in (x, y)]
    x, y = (mb.select(cond=mb.not_equal(x=each, y=each), a=_number(least, each), b=each) for each in (x, y))
    any_number = mb.maximum(x=numbers[0], y=numbers[1])
    nan_or_one = mb.real_div(x=any_number, y=any_number)
    add(context, node, mb.mul(x=extreme(x=x, y=y), y=nan_or_one, name=node.name))


def _number(value: float, like: Var) -> Any:
    return types.nptype_from_builtin(like.dtype)(value)


@PATCH.op("copysign")
def copysign(context: Any, node: Any) -> None:
    """copysign(self, other): a float."""
    given = bind(context, node, "self other")
    x, y = (each if types.is_float(each.dtype) else cast(each, types.fp32)
            for each in promoted(given.self, given.other))
    sign = mb.sub(x=_number(1, y), y=mb.mul(x=cast(_negative(y), y.dtype), y=_number(2, y)))
    add(context, node, mb.mul(x=mb.abs(x=x), y=sign, name=node.name))


@PATCH.op("signbit")
def signbit(context: Any, node: Any) -> None:
    """signbit(self)."""
    x = tensor(bind(context, node, "self").self)
    add(context, node, mb.identity(x=_negative(cast(x, types.int32) if x.dtype == types.bool else x), name=node.name))


def _negative(x: Var) -> Var:
    below = mb.less(x=x, y=_number(0, x))
    if not types.is_float(x.dtype):
        return below
    return mb.logical_or(x=below, y=mb.less(x=mb.real_div(x=_number(1, x), y=x), y=_number(0, x)))


@PATCH.op("erfc")
def erfc(context: Any, node: Any) -> None:
    """erfc(self)."""
    x = tensor(bind(context, node, "self").self)
    x = x if types.is_float(x.dtype) else cast(x, types.fp32)
    add(context, node, mb.sub(x=_number(1, x), y=mb.erf(x=x), name=node.name))
