"""Remainders of fp16 numbers by a constant, without a rounding besides the last.

With a = |x| and a divisor d, let c be 1 / d rounded up in fp16, at most 2^-10 too large, and q = floor(a c). Where a <
2^s d and s <= 8, q is the integer quotient or one more. d is cut into pieces of few enough bits that q times each is an
fp16 number; subtracted one after the other from a they leave a - q d, exactly, as every difference on the way has few
enough bits, too. Where that is negative, d is added. For larger a, multiples 2^k d are divided by first: a mod d = (a
mod 2^k d) mod d. This was checked for every fp16 number and hundreds of divisors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from coremltools.converters.mil.mil import Var

from ...ir.builder import RewriteBuilder

__all__ = [
    "MAX_DIVISOR",
    "MIN_DIVISOR",
    "DivisionStep",
    "build_remainder",
    "build_remainder_by_fraction",
    "build_remainder_by_integer",
    "plan_division_steps",
]

MIN_DIVISOR, MAX_DIVISOR = 2.0**-14, 2.0**14
"Supported range of divisors: their inverses are normal numbers."
_FP16_MAX = 65504.0
"The largest finite number of fp16."
_SIGNIFICAND_BITS = 11
"Significand bits of an fp16 number."
_MAX_QUOTIENT_BITS = 8
"Bits of a quotient in one step: with more, it may be off by two."


@dataclass(frozen=True)
class DivisionStep:
    """A division with remainder: the divisor, its inverse, and the pieces to subtract times the quotient."""

    divisor: float
    inverse: float
    pieces: tuple[float, ...]

    @property
    def ops(self) -> int:
        return 5 + 2 * len(self.pieces)


def plan_division_steps(divisor: float, periods: int) -> list[DivisionStep]:
    """Plan the steps for a positive `divisor`, of numbers of up to `periods` times it (0: all), with the fewest ops."""
    reach = min(_FP16_MAX, periods * divisor) if periods else _FP16_MAX
    bits = max(1, math.ceil(math.log2(reach / divisor * (1 + 2.0**-9))))
    plans = [_split_quotient_bits(divisor, bits, count) for count in range(-(-bits // _MAX_QUOTIENT_BITS), bits + 1)]
    return min(plans, key=lambda plan: sum(step.ops for step in plan))


def _split_quotient_bits(divisor: float, bits: int, count: int) -> list[DivisionStep]:
    """Plan `count` steps, the largest divisor first, each for about as many bits of the quotient."""
    ends = [bits * number // count for number in range(count, -1, -1)]
    return [_make_division_step(divisor * 2.0**low, high - low) for high, low in pairwise(ends)]


def _make_division_step(divisor: float, bits: int) -> DivisionStep:
    inverse = np.float16(1 / divisor)
    if float(inverse) * divisor < 1:
        inverse = np.nextafter(inverse, np.float16(np.inf))
    width, rest, pieces = _SIGNIFICAND_BITS - ((1 << bits) + 1).bit_length(), divisor, []
    while rest:
        mantissa, exponent = math.frexp(rest)
        pieces.append(math.ldexp(math.floor(math.ldexp(mantissa, width)), exponent - width))
        rest -= pieces[-1]
    return DivisionStep(divisor, float(inverse), tuple(pieces))


def build_remainder(mb: RewriteBuilder, x: Var, steps: list[DivisionStep]) -> Var:
    """Build `x` mod the last step's divisor.

    The exact remainder is at least 0 and less than the divisor; rounded, it may be the divisor.
    """
    zero, last = np.float16(0), np.float16(steps[-1].divisor)
    left = mb.abs(x=x)
    for step in steps:
        quotient = mb.floor(x=mb.mul(x=left, y=np.float16(step.inverse)))
        for piece in step.pieces:
            left = mb.sub(x=left, y=mb.mul(x=quotient, y=np.float16(piece)))
        if step is not steps[-1]:  # a negative rest of the last step is corrected with the sign of x
            left = _add_if_negative(mb, left, np.float16(step.divisor))
    signed = mb.select(cond=mb.less(x=x, y=zero), a=mb.sub(x=zero, y=left), b=left)
    return _add_if_negative(mb, signed, last)


def _add_if_negative(mb: RewriteBuilder, x: Var, by: np.float16) -> Var:
    """Add `by` to `x` where it is negative."""
    raised: Var = mb.select(cond=mb.less(x=x, y=np.float16(0)), a=mb.add(x=x, y=by), b=x)
    return raised


def build_remainder_by_integer(mb: RewriteBuilder, x: Var, divisor: float) -> Var:
    """Build `x` mod 1, 2, 4, ... 32 as x - d floor(floor(x) / d); the inner floor avoids underflow of small
    quotients."""
    quotient = mb.floor(x=x)
    if divisor != 1:
        quotient = mb.floor(x=mb.mul(x=quotient, y=np.float16(1 / divisor)))
        quotient = mb.mul(x=quotient, y=np.float16(divisor))
    rest: Var = mb.sub(x=x, y=quotient)
    return rest


def build_remainder_by_fraction(mb: RewriteBuilder, x: Var, divisor: float) -> Var:
    """Build `x` mod 1/2, 1/4, ...: integers are subtracted first, as the quotient of all of x may be infinite."""
    near = mb.sub(x=x, y=mb.round(x=x))
    quotient = mb.floor(x=mb.mul(x=near, y=np.float16(1 / divisor)))
    rest: Var = mb.sub(x=near, y=mb.mul(x=quotient, y=np.float16(divisor)))
    return rest
