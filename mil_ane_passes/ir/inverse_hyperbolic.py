"""Build asinh and acosh, which MIL has no ops for, from ops that stay in the range of fp16."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

__all__ = ["build_acosh", "build_asinh"]

_SERIES = (1.0, -1 / 6, 3 / 40, -15 / 336, 105 / 3456)
"The factors of x, x^3, x^5, x^7 and x^9 in the Taylor series of asinh."


def build_asinh(x: Var, **options: Any) -> Var:
    """Build asinh of the float `x`; `options` are those of the last op, such as `name`.

    It is sign(x) * (log(m) + log(n + sqrt((n/m)^2 + 1))) with m = max(|x|, 1) and n = min(|x|, 1), as log(|x| +
    sqrt(x^2 + 1)) would be infinite in fp16 from 256 on. Below 1/4, where a logarithm near that of 1 loses the digits
    of x, it is the series of asinh up to x^9, which is exact to 2e-8 of x there.
    """
    one = _make_one(x)
    quarter = one / 4
    size = mb.abs(x=x)
    above, below = mb.maximum(x=size, y=one), mb.minimum(x=size, y=one)
    ratio = mb.real_div(x=below, y=above)
    root = mb.sqrt(x=mb.add(x=mb.mul(x=ratio, y=ratio), y=one))
    logarithm = mb.add(x=mb.log(x=above), y=mb.log(x=mb.add(x=below, y=root)))
    small = mb.minimum(x=size, y=quarter)  # as powers of large numbers are infinite
    square = mb.mul(x=small, y=small)
    series: Any = type(one)(_SERIES[-1])
    for factor in reversed(_SERIES[:-1]):
        series = mb.add(x=mb.mul(x=square, y=series), y=type(one)(factor))
    near_zero = mb.mul(x=small, y=series)
    chosen = mb.select(cond=mb.less(x=size, y=quarter), a=near_zero, b=logarithm)
    return mb.mul(x=mb.sign(x=x), y=chosen, **options)


def build_acosh(x: Var, **options: Any) -> Var:
    """Build 2 * log(sqrt((x + 1) / 2) + sqrt((x - 1) / 2)) of the float `x`; NaN below 1.

    log(x + sqrt(x^2 - 1)) would be infinite in fp16 from 256 on, and cancels near 1. `options` are those of the last
    op, such as `name`.
    """
    one = _make_one(x)
    half, two = one / 2, one + one
    plus = mb.sqrt(x=mb.mul(x=mb.add(x=x, y=one), y=half))
    minus = mb.sqrt(x=mb.mul(x=mb.sub(x=x, y=one), y=half))
    return mb.mul(x=mb.log(x=mb.add(x=plus, y=minus)), y=two, **options)


def _make_one(x: Var) -> np.floating[Any]:
    return np.float16(1) if x.dtype == types.fp16 else np.float32(1)
