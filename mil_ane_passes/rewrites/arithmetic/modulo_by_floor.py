"""Compute remainders of a constant divisor with floor."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...passes.contract import FP32_UNSUPPORTED_REASON, Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_m4_study
from ...passes.examples import make_example, make_op_example
from ...rules.unsupported_ops import Modulo

_INTEGER_DIVISORS = tuple(2.0**exponent for exponent in range(6))
"Integer divisors whose quotient is exact in one step: x / d and its floor keep all relevant bits."
_FRACTION_DIVISORS = tuple(2.0**-exponent for exponent in range(1, 15))
"Fractions by which the quotient of a number of at most 1/2 is exact in one step."
_MIN_DIVISOR, _MAX_DIVISOR = 2.0**-14, 2.0**14
"Supported range of divisors: their inverses are normal numbers."
_FP16_MAX = 65504.0
"The largest finite number of fp16."
_SIGNIFICAND_BITS = 11
"Significand bits of an fp16 number."
_MAX_QUOTIENT_BITS = 8
"Bits of a quotient in one step: with more, it may be off by two."


class ModuloByFloor(Rewrite):
    """Compute the remainder of a constant divisor with mul, floor and sub, without intermediate rounding.

    why     Core ML on an M4 rejects mod, and so does the ANE's compiler on M1 to M5 when queried without Core ML.
            floor, mul, sub and select are supported. x - y floor(x / y) alone is inaccurate in fp16: it has the
            rounding error of the product, and is off by y if x / y rounds to an integer.
    when    mod of fp16 values by one constant number between 2^-14 and 2^14. PyTorch's remainder is converted to
            floor_div, mul and sub, which do not match.
    exact   bitwise, for every fp16 number: division by a power of two up to 32 is exact; other divisors are split into
            parts of few bits, whose products with the quotient are fp16 numbers, and larger quotients are computed in
            steps. The result is rounded once, as before. It has the sign of the divisor; infinities give NaN. The
            algebra holds if every op rounds to fp16 or is more precise.
    cost    two ops for the divisor 1, five for the powers of two from 2 to 32, six for 1/2, 1/4, ...; otherwise 11 to
            55, most for small divisors: 18 for 3 or 10, 26 for 2 pi, 37 for 0.1. With `periods=30` the latter take 11,
            13 and 13. A negative divisor takes two more, which `max_steps` does not count.

    before
        %y: fp16[2, 8] = mod(x=%x, y=1.0)
    after
        %0: fp16[2, 8] = floor(x=%x)
        %y: fp16[2, 8] = sub(x=%x, y=%0)
    """

    fixes = (Modulo,)
    stage = "decompose"
    exactness = Exactness.BITWISE
    reach = 65504.0  # the largest number of fp16: larger ones are infinite there, and their remainder NaN
    preset = "full"
    roots = ("mod",)
    evidence = (
        cite_m4_study("mod is unsupported; floor, round, mul, sub, select and comparisons are accepted"),
    )

    periods: int = 0
    "Known bound of |x| as a multiple of the divisor: beyond it, results are wrong. 0: any x."
    max_steps: int = 40
    "Maximum number of ops for one remainder."

    def match(self, op: Operation) -> Hit | Miss:
        if not types.is_float(op.outputs[0].dtype):
            return Miss(op, "computes on integers", near=False)
        if op.x.dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        if op.y.val is None:
            return Miss(op, "the divisor is dynamic: a quotient of two fp16 numbers is not exact in general")
        divisors = np.asarray(op.y.val)
        if divisors.size == 0 or np.ptp(divisors) != 0 or op.outputs[0].shape != op.x.shape:
            return Miss(op, "the divisor is not a single number")
        divisor = float(divisors.flat[0])
        magnitude = abs(divisor)
        if not _MIN_DIVISOR <= magnitude <= _MAX_DIVISOR:
            return Miss(op, f"a remainder by {divisor:g}: divisors from 2^-14 to 2^14 are supported")
        exact = magnitude in (*_INTEGER_DIVISORS, *_FRACTION_DIVISORS)
        steps = [] if exact else _plan_division_steps(magnitude, self.periods)
        op_count = _count_exact_ops(magnitude) if exact else sum(step.op_count for step in steps) + 4
        if op_count > self.max_steps:
            return Miss(op, f"a remainder by {divisor:g} needs {op_count} ops, max_steps={self.max_steps}")
        largest = self.periods * magnitude if self.periods else math.inf
        return Hit(op, note=f"a remainder by {divisor:g}", steps=steps, divisor=divisor, within=(0.0, largest))

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        x, magnitude = hit.op.x, abs(hit.divisor)
        if hit.divisor < 0:  # x mod -d is -(-x mod d)
            x = mb.mul(x=x, y=np.float16(-1))
        if hit.steps:
            rest = _build_remainder_in_steps(mb, x, hit.steps)
        elif magnitude >= 1:
            rest = _build_remainder_by_integer(mb, x, magnitude)
        else:
            rest = _build_remainder_by_fraction(mb, x, magnitude)
        return rest if hit.divisor > 0 else mb.mul(x=rest, y=np.float16(-1))

    def examples(self) -> Iterable[Example]:
        yield _make_mod_example("by 1", 1)
        yield _make_mod_example("by 4, for iOS15", 4, opset=ct.target.iOS15, scale=10.0)
        yield _make_mod_example("by a quarter", 0.25)
        yield _make_mod_example("by a turn", 2 * math.pi, scale=10.0)
        yield _make_mod_example("by 360", 360, scale=1000.0)
        yield _make_mod_example("by a negative number", -3, scale=10.0)
        yield _make_mod_example("by a negative power of two", -2, scale=10.0)
        yield _make_mod_example("three periods", 2 * math.pi, options={"periods": 3}, scale=5.0, within=18.8)
        yield _make_mod_example("a constant of many equal numbers", np.full((1, 8), 10), scale=30.0)
        yield _make_mod_example("by 0", 0, reason="a remainder by 0: divisors from 2^-14 to 2^14 are supported")
        yield _make_mod_example("by several", np.arange(1, 9), reason="the divisor is not a single number")
        yield make_example(
            "at run time",
            lambda x, z: Builder.mod(x=x, y=z, name="y"),
            reason="the divisor is dynamic: a quotient of two fp16 numbers is not exact in general",
            x=(2, 3),
            z=(1, 3),
        )
        yield _make_mod_example("many steps", 0.1, options={"max_steps": 24},
                                reason="a remainder by 0.0999756 needs 37 ops, max_steps=24")
        yield _make_mod_example("a power of two in more ops than allowed", 4, options={"max_steps": 4},
                                reason="a remainder by 4 needs 5 ops, max_steps=4")
        yield _make_mod_example("a power of two in as many", 4, options={"max_steps": 5}, scale=10.0)
        yield make_op_example("integers", "mod", (2, 3), {"y": np.int32(3)}, dtype=types.int32,
                              reason="computes on integers")


def _count_exact_ops(magnitude: float) -> int:
    """Count the ops of a remainder by a power of two that is exact in one step."""
    if magnitude == 1:
        return 2
    return 5 if magnitude > 1 else 6


@dataclass(frozen=True)
class _DivisionStep:
    """A division with remainder: the divisor, its inverse, and the pieces to subtract times the quotient."""

    divisor: float
    inverse: float
    pieces: tuple[float, ...]

    @property
    def op_count(self) -> int:
        return 5 + 2 * len(self.pieces)


def _plan_division_steps(divisor: float, periods: int) -> list[_DivisionStep]:
    """Plan the steps for a positive `divisor`, of numbers of up to `periods` times it (0: all), with the fewest ops."""
    largest = min(_FP16_MAX, periods * divisor) if periods else _FP16_MAX
    bits = max(1, math.ceil(math.log2(largest / divisor * (1 + 2.0**-9))))  # of the quotient, rounded up
    fewest = math.ceil(bits / _MAX_QUOTIENT_BITS)
    plans = [_split_quotient_bits(divisor, bits, count) for count in range(fewest, bits + 1)]
    return min(plans, key=lambda plan: sum(step.op_count for step in plan))


def _split_quotient_bits(divisor: float, bits: int, count: int) -> list[_DivisionStep]:
    """Plan `count` steps, the largest divisor first, each for about as many bits of the quotient."""
    ends = [bits * number // count for number in range(count, -1, -1)]
    return [_make_division_step(divisor * 2.0**low, high - low) for high, low in pairwise(ends)]


def _make_division_step(divisor: float, bits: int) -> _DivisionStep:
    """Make the step for a quotient of `bits` bits: its product with each piece of the divisor is an fp16 number."""
    inverse = np.float16(1 / divisor)
    if float(inverse) * divisor < 1:  # rounded up, so that the quotient of a multiple is not one too small
        inverse = np.nextafter(inverse, np.float16(np.inf))
    width = _SIGNIFICAND_BITS - ((1 << bits) + 1).bit_length()
    rest, pieces = divisor, []
    while rest:
        mantissa, exponent = math.frexp(rest)
        pieces.append(math.ldexp(math.floor(math.ldexp(mantissa, width)), exponent - width))
        rest -= pieces[-1]
    return _DivisionStep(divisor, float(inverse), tuple(pieces))


def _build_remainder_in_steps(mb: RewriteBuilder, x: Var, steps: list[_DivisionStep]) -> Var:
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


def _build_remainder_by_integer(mb: RewriteBuilder, x: Var, divisor: float) -> Var:
    """Build `x` mod 1, 2, 4, ... 32 as x - d floor(floor(x) / d); the inner floor avoids underflow of small
    quotients."""
    quotient = mb.floor(x=x)
    if divisor != 1:
        quotient = mb.floor(x=mb.mul(x=quotient, y=np.float16(1 / divisor)))
        quotient = mb.mul(x=quotient, y=np.float16(divisor))
    rest: Var = mb.sub(x=x, y=quotient)
    return rest


def _build_remainder_by_fraction(mb: RewriteBuilder, x: Var, divisor: float) -> Var:
    """Build `x` mod 1/2, 1/4, ...: integers are subtracted first, as the quotient of all of x may be infinite."""
    near = mb.sub(x=x, y=mb.round(x=x))
    quotient = mb.floor(x=mb.mul(x=near, y=np.float16(1 / divisor)))
    rest: Var = mb.sub(x=near, y=mb.mul(x=quotient, y=np.float16(divisor)))
    return rest


def _make_mod_example(name: str, divisor: Any, **settings: Any) -> Example:
    return make_op_example(name, "mod", (2, 8), {"y": np.float16(divisor)}, **settings)
