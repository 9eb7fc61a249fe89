"""Compute running sums of phases modulo one turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ...ane.limits import find_limit
from ...ir.builder import RewriteBuilder
from ...ir.query import is_symbolic
from ...passes.contract import FP32_UNSUPPORTED_REASON, Community, Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_m4_study
from ...passes.examples import build_program, make_example
from ._cumulative_sums import (
    ConvLayout,
    CumsumSettings,
    VirtualCumsum,
    build_doubling_windows,
    build_window_convs,
    choose_window_sizes,
    plan_conv_layout,
    read_cumsum_settings,
    slice_axis,
    split_shape_at_axis,
)

_LAYOUT_OPS = (
    "expand_dims",
    "squeeze",
    "reshape",
    "transpose",
    "identity",
    "concat",
    "slice_by_index",
    "split",
    "tile",
    "upsample_nearest_neighbor",
    "resize_nearest_neighbor",
)
"Ops that only move elements, so that a sum may differ by integer turns before them."
_INTERPOLATING_OPS = ("upsample_bilinear", "resize_bilinear", "resize", "crop_resize")
"Ops that interpolate between sums, which is wrong where these differ by different integer turns."
_PERIODIC_OPS = ("sin", "cos")
_MAX_TURNS = 512
"""Largest number of turns of a factor.

Beyond it fp16 does not determine the integer, as a factor is rounded to 2^-12 of itself.
"""

_ROW_ELEMENTS = 2197
"Elements of a row where a long axis is cut into rows: three convs of up to 13 ones sum up so many."
_FP16_BYTES = 2
"Bytes of an fp16 number."
_MAX_WEIGHT_BYTES = 2 << 20
"Most bytes of ones for one sum."


_CONSTANT_ERROR = 2.0**-11
"Largest relative error of 2 pi k in fp16, as a share of the angle: the rewrite no longer accumulates it."

_COARSE_STEP = 2.0**-8
"Step of coarse parts, in turns: 13 of half a turn add up to less than 8, exactly in fp16."


@dataclass(frozen=True)
class _SumPlan:
    """The layout of a sum: the convs and the padded extent (0 where it is symbolic), or the number of rows."""

    asked: CumsumSettings
    laid: ConvLayout | None = None
    taps: tuple[int, ...] = ()
    extent: int = 0
    rows: int = 0


class WrapPhase(Rewrite):
    """Sum up a phase modulo one turn, so that its sine is right in fp16 however long the sum is.

    why     An oscillator is sin(2 pi cumsum(f / rate)). After 100 turns fp16 knows the angle to 0.25 rad, after 330 to
            1 rad: the sine is noise. Also, fp16 has 6.28125 for 2 pi, and each turn adds 0.0019 rad to the error. No op
            behind the sum brings the phase back. A sine needs the fraction of a turn only, which stays small.
    when    cumsum in fp16 whose every reader leads to sin and cos, by way of constant factors that make up k turns
            (fp16's 2 pi k, k a whole number up to 512), sums with other phases, and ops that move elements. The least
            common fraction of a turn is what is wrapped. An axis of symbolic length needs `longest`. Not where the
            sum is read by anything else, which needs it whole, or interpolated: from 0.9 to 1.1 turns the middle is
            1.0, from 0.9 to 0.1 it is 0.5. Summed up at a lower rate and lengthened linearly (iSTFTNet, Kokoro), the
            sum less its turns would have to be held and increment times place in between added, a sum of up to tens
            of turns for each, which fp16 does not hold to a small part of a turn.
    exact   rounding: x less its nearest whole number is exact, and is cut into a multiple of 2^-8 turn and a rest. Both
            are summed by convs with ones, of up to 13 elements; after each, whole steps of the rests go to the
            multiples and whole turns away, exactly: sin(2 pi (s - n)) = sin(2 pi s). A conv rounds rests by up to
            2^-17 turn, the end the sum of both by 2^-13. What the program's constant is off from 2 pi k is
            summed up no longer, which moves results, to the right. x itself is as exact as fp16
            has it: a frequency is off by 2^-12 of itself.
    cost    for each factor of up to 13 of the length a conv, a reshape and nine ops of the same size, and ten more, in
            place of a cumsum on the CPU.

    before
        %0: fp16[1, 12] = cumsum(x=%x, axis=1)
        %1: fp16[1, 12] = mul(x=%0, y=6.28125)
        %y: fp16[1, 12] = cos(x=%1)
    after
        %0: fp16[1, 12] = round(x=%x)
        %1: fp16[1, 12] = sub(x=%x, y=%0)
        %2: fp16[1, 12] = mul(x=%1, y=256.0)
        %3: fp16[1, 12] = round(x=%2)
        %4: fp16[1, 12] = mul(x=%3, y=0.00390625)
        %5: fp16[1, 12] = sub(x=%1, y=%4)
        %6: fp16[2, 12] = concat(values=(%4, %5), axis=0)
        %7: fp16[1, 2, 1, 12] = expand_dims(x=%6, axes=[0, 2])
        %8: fp16[1, 2, 1, 12] = conv(x=%7, weight=<fp16[2, 1, 1, 12]>, pad_type=custom, pad=[0, 0, 11, 0], groups=2)
        %9: fp16[1, 1, 1, 12], %10: fp16[1, 1, 1, 12] = split(x=%8, num_splits=2, axis=1)
        %11: fp16[1, 1, 1, 12] = mul(x=%10, y=256.0)
        %12: fp16[1, 1, 1, 12] = round(x=%11)
        %13: fp16[1, 1, 1, 12] = mul(x=%12, y=0.00390625)
        %14: fp16[1, 1, 1, 12] = add(x=%9, y=%13)
        %15: fp16[1, 1, 1, 12] = round(x=%14)
        %16: fp16[1, 1, 1, 12] = sub(x=%14, y=%15)
        %17: fp16[1, 1, 1, 12] = sub(x=%10, y=%13)
        %18: fp16[1, 2, 1, 12] = concat(values=(%16, %17), axis=1)
        %19: fp16[2, 12] = squeeze(x=%18, axes=[0, 2])
        %20: fp16[1, 12], %21: fp16[1, 12] = split(x=%19, num_splits=2, axis=0)
        %22: fp16[1, 12] = add(x=%20, y=%21)
        %23: fp16[1, 12] = mul(x=%22, y=6.28125)
        %y: fp16[1, 12] = cos(x=%23)
    """

    code, slug = "ANE322", "phase-summed-up"
    stage = "numerics"
    after = ("fp16_compute",)
    exactness = Exactness.ROUNDING
    bound = "2^-13 turn and 2^-17 turn for each conv and element that it sums; then angle and sine are rounded. " \
            "Largest error of the sine, 200 Hz at 24 kHz in fp16: 2.1e-3 for 100 samples, 2.4e-3 for 1000, 2.6e-3 " \
            "for 24000; of the program as it was 2.6e-3, 0.041, 1.1"
    preset = "safe"
    moves = 2.0**-5
    moves_of = "result"
    measures = True
    roots = ("cumsum",)
    evidence = (
        Community("a vocoder's sine of a phase summed up to thousands is noise once the phase is rounded (bfloat16, "
                  "another machine, the same arithmetic)", source="https://github.com/tenstorrent/tt-xla/issues/5332",
                  chip="n150 (no Apple chip)", date="2026-06-22"),
        cite_m4_study("sin, cos, conv, round, mul and sub are accepted; cumsum is unsupported"),
    )

    longest: int = 0
    "The largest extent of an axis of symbolic length; 0 skips such axes."
    least: int = 10
    "Fewest elements of a sum that is wrapped; a shorter one has few turns."

    def match(self, op: Operation) -> Hit | Miss:
        if not types.is_float(op.x.dtype):
            return Miss(op, "computes on integers", near=False)
        if op.axis.val is None or op.x.rank == 0:
            return Miss(op, "has no axis to sum along")
        factors = _find_angle_factors(op.outputs[0])
        if isinstance(factors, str):
            return Miss(op, factors, near="phase" in factors)
        if op.x.dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        counts = [_count_whole_turns(factor) for factor in factors]
        if None in counts:
            return Miss(op, f"the phase is {factors[counts.index(None)]:g} times the sum, which is no whole number of "
                            "turns: 2 pi k is expected")
        turns = max(1, math.gcd(*(count for count in counts if count is not None)))
        return self._match_layout(op, turns, max(map(_compute_angle_error, factors)))

    def _match_layout(self, op: Operation, turns: int, off: float) -> Hit | Miss:
        """Match a layout of the sum for convs.

        A unit of the sum is `turns` turns, and its angle differs from that by `off`.
        """
        extent = op.x.shape[read_cumsum_settings(op).axis]
        if is_symbolic(extent) and self.longest < 1:
            return Miss(op, "sums a phase along an axis of symbolic length; longest=N takes up to N elements")
        if sum(map(is_symbolic, op.x.shape)) > is_symbolic(extent):
            return Miss(op, "the phase has an axis of symbolic size that it is not summed along")
        count = self.longest if is_symbolic(extent) else int(extent)
        if count < self.least:
            return Miss(op, f"sums up a phase of {count} elements only, least={self.least}")
        batch, _, inner = split_shape_at_axis(op, read_cumsum_settings(op).axis)
        shape = (2 * batch, extent) if inner == 1 else (2 * batch, extent, inner)
        plan = self._plan(shape, replace(read_cumsum_settings(op), axis=1))
        if isinstance(plan, str):
            return Miss(op, f"the phase of {count} elements cannot be summed by convs: {plan}")
        seen = None if self.measured is None else self.measured.get(op.outputs[0])
        return Hit(op, note=f"a phase is summed over {'up to ' if is_symbolic(extent) else ''}{count} elements",
                   plan=plan, turns=turns, moves_at_op=_CONSTANT_ERROR,
                   largest_size=self.longest if is_symbolic(extent) else math.inf,
                   moves=self.moves if seen is None else max(self.moves, min(2.0, off * seen.largest)))

    def _plan(self, shape: tuple[Any, ...], asked: CumsumSettings) -> _SumPlan | str:
        """Plan the layout of a sum for convs, in rows where its axis is too long, or return why it fails."""
        bounds = [find_limit(name, self.generations) for name in ("conv-kernel-width", "channels", "spatial")]
        widest, *most = [bound.most for bound in bounds if bound is not None]
        extent, inner = shape[asked.axis], math.prod(shape[asked.axis + 1:])
        if is_symbolic(extent):
            taps: tuple[int, ...] = (min(widest, self.longest),)
            laid = plan_conv_layout(shape, _FP16_BYTES, asked.axis, taps[0], _MAX_WEIGHT_BYTES, most, reshaped=False)
            return laid if isinstance(laid, str) else _SumPlan(asked, laid, taps)
        if extent + int(asked.exclusive) > most[1]:
            if asked.reverse or inner != 1:
                return f"an axis of more than {most[1]} elements has to be the last one and summed forwards"
            rows = -(-int(extent) // _ROW_ELEMENTS)
            rows = next((each for each in range(rows, 2 * rows) if extent % each == 0), rows)
            return (
                _SumPlan(asked, rows=rows) if rows <= _ROW_ELEMENTS else f"{rows} rows of {_ROW_ELEMENTS} are too many"
            )
        chosen = choose_window_sizes(int(extent), inner, widest, most[1], int(asked.exclusive))
        if chosen is None:
            return f"{inner} elements apart, they fit no two axes of up to {most[1]}"
        laid = plan_conv_layout(
            shape, _FP16_BYTES, asked.axis, max(chosen[0]), _MAX_WEIGHT_BYTES, most, reshaped=len(chosen[0]) > 1
        )
        return laid if isinstance(laid, str) else _SumPlan(asked, laid, *chosen)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        x = hit.op.x if hit.turns == 1 else mb.mul(x=hit.op.x, y=np.float16(hit.turns))
        sizes = [-1 if is_symbolic(size) else int(size) for size in x.shape]
        batch, count, inner = split_shape_at_axis(hit.op, read_cumsum_settings(hit.op).axis)
        laid = _reshape_if_needed(
            mb, _wrap_to_half_turn(mb, x), [batch, count] if inner == 1 else [batch, count, inner]
        )
        coarse = _round_to_coarse_step(mb, laid)
        pair = mb.concat(values=[coarse, mb.sub(x=laid, y=coarse)], axis=0)
        first, second = mb.split(x=self._sum_pair(mb, pair, hit.plan), num_splits=2, axis=0)
        total = _reshape_if_needed(mb, mb.add(x=first, y=second), sizes)
        return total if hit.turns == 1 else mb.mul(x=total, y=np.float16(1 / hit.turns))

    def _sum_pair(self, mb: RewriteBuilder, pair: Var, plan: _SumPlan) -> Var:
        """Build the running sums of coarse parts and rests, which are concatenated along the first axis."""
        if plan.rows:
            return self._sum_in_rows(mb, pair, plan)
        assert plan.laid is not None
        halves = next(place for place, axes in enumerate(plan.laid.groups) if 0 in axes)
        summed = VirtualCumsum(pair, plan.asked)

        def normalized(y: Var) -> Var:
            return _normalize_pair(mb, y, halves)

        if plan.extent:
            return build_window_convs(mb, summed, plan.laid, plan.taps, plan.extent, normalized)
        return build_doubling_windows(mb, summed, plan.laid, plan.taps[0], self.longest, normalized)

    def _sum_in_rows(self, mb: RewriteBuilder, pair: Var, plan: _SumPlan) -> Var:
        """Sum each row, then the rows before it, and add the two."""
        batch, count = int(pair.shape[0]), int(pair.shape[1])
        width = -(-count // plan.rows)
        more = plan.rows * width - count
        flat = mb.pad(x=pair, pad=[0, 0, 0, more], mode="constant", constant_val=np.float16(0)) if more else pair
        rows = mb.reshape(x=flat, shape=[batch, plan.rows, width])
        inside = self._parts(mb, rows, CumsumSettings(2, False, False))
        ends = mb.reshape(x=slice_axis(mb, inside, 2, width - 1, width), shape=[batch, plan.rows])
        before = mb.expand_dims(x=self._parts(mb, ends, CumsumSettings(1, True, False)), axes=[2])
        total = _normalize_pair(mb, mb.add(x=inside, y=before), 0)
        if plan.asked.exclusive:
            total = _normalize_pair(mb, mb.sub(x=total, y=rows), 0)
        result: Var = mb.reshape(x=total, shape=[batch, plan.rows * width])
        return slice_axis(mb, result, 1, 0, count) if more else result

    def _parts(self, mb: RewriteBuilder, pair: Var, asked: CumsumSettings) -> Var:
        plan = self._plan(tuple(pair.shape), asked)
        assert isinstance(plan, _SumPlan), f"rows were chosen so that they can be laid out: {plan}"
        return self._sum_pair(mb, pair, plan)

    def examples(self) -> Iterable[Example]:
        return _iterate_examples()


def _wrap_to_half_turn(mb: RewriteBuilder, turns: Var) -> Var:
    """Return the part of a turn from -1/2 to 1/2, exact in fp16."""
    result: Var = mb.sub(x=turns, y=mb.round(x=turns))
    return result


def _reshape_if_needed(mb: RewriteBuilder, x: Var, shape: list[int]) -> Var:
    """Reshape `x` if it has another shape."""
    same = [-1 if is_symbolic(size) else int(size) for size in x.shape] == shape
    result: Var = x if same else mb.reshape(x=x, shape=shape)
    return result


def _round_to_coarse_step(mb: RewriteBuilder, turns: Var) -> Var:
    """Round to the nearest multiple of the coarse step, exact in fp16."""
    steps = mb.round(x=mb.mul(x=turns, y=np.float16(1 / _COARSE_STEP)))
    result: Var = mb.mul(x=steps, y=np.float16(_COARSE_STEP))
    return result


def _normalize_pair(mb: RewriteBuilder, pair: Var, axis: int) -> Var:
    """Normalize coarse parts to half a turn and rests to half a coarse step, all exact."""
    coarse, rest = mb.split(x=pair, num_splits=2, axis=axis)
    carry = _round_to_coarse_step(mb, rest)
    coarse = _wrap_to_half_turn(mb, mb.add(x=coarse, y=carry))
    result: Var = mb.concat(values=[coarse, mb.sub(x=rest, y=carry)], axis=axis)
    return result


def _find_angle_factors(total: Var) -> list[float] | str:
    """Return the factors of a sum on its paths to sines and cosines, or why the sum must not be wrapped."""
    found: set[float] = set()
    pending: list[tuple[Var, float]] = [(total, 1.0)]
    seen: set[tuple[Var, float]] = set()
    phase = False
    refusal = ""
    while pending:
        var, factor = pending.pop()
        if (var, factor) in seen:
            continue
        seen.add((var, factor))
        if var in var.op.enclosing_block.outputs:
            refusal = refusal or f"'{var.name}' is returned, which needs the sum whole"
        for reader in var.child_ops:
            if reader.op_type in _PERIODIC_OPS:
                phase = True
                found.add(factor)
                continue
            following = _read_factors(reader, var)
            if following is None:
                refusal = refusal or _needs_whole(reader)
                following = [1.0] if reader.op_type in _INTERPOLATING_OPS else []
            pending += [(output, factor * each) for each in following for output in reader.outputs]
    if not phase:
        return "no sine of it is taken"
    return f"a phase, but {refusal}" if refusal else sorted(found)


def _needs_whole(reader: Operation) -> str:
    if reader.op_type not in _INTERPOLATING_OPS:
        return f"{reader.op_type} '{reader.name}' reads the sum, too, and needs it whole"
    return (f"{reader.op_type} '{reader.name}' interpolates it: between sums that lost different whole turns lie other "
            "angles; lengthen what is summed up, and sum at the rate of the output")


def _read_factors(reader: Operation, var: Var) -> list[float] | None:
    """Return the constants that an op multiplies `var` by, each once; None for another kind of op."""
    if reader.op_type in _LAYOUT_OPS:
        return [1.0]
    if reader.op_type in ("add", "sub"):
        if reader.x is reader.y:
            return None
        return [1.0 if reader.x is var or reader.op_type == "add" else -1.0]
    if reader.op_type not in ("mul", "real_div"):
        return None
    other = reader.y if reader.x is var else reader.x
    if other.val is None or (reader.op_type == "real_div" and reader.x is not var):
        return None
    values = np.unique(np.asarray(other.val, np.float64))
    if len(values) > 32 or not np.all(np.isfinite(values)) or (reader.op_type == "real_div" and not np.all(values)):
        return None
    return [float(value if reader.op_type == "mul" else 1 / value) for value in values]


def _count_whole_turns(factor: float) -> int | None:
    """Return the turns in a unit of the sum; None where the factor is not 2 pi k as fp16 may round it."""
    turns = factor / (2 * math.pi)
    count = round(turns)
    close = abs(turns - count) <= abs(count) * 2.0**-10
    return abs(count) if close and abs(count) <= _MAX_TURNS else None


def _compute_angle_error(factor: float) -> float:
    """Compute how far the angle of a unit is from integer turns, in radians."""
    return abs(factor - round(factor / (2 * math.pi)) * 2 * math.pi)


def _iterate_examples() -> Iterator[Example]:
    yield Example("an oscillator", lambda: _build_wave((1, 12)), within=1.0)
    yield Example("of two convs", lambda: _build_wave((1, 40)), within=0.3)
    yield Example("of 200 elements", lambda: _build_wave((1, 200)), within=0.1)
    yield Example("along the middle", lambda: _build_wave((2, 30, 3), axis=1), within=0.3)
    yield Example("exclusive and backwards", lambda: _build_wave((2, 20), exclusive=True, reverse=True), within=0.3)
    yield Example("8 turns each", lambda: _build_wave((1, 40), factor=16 * math.pi), within=0.03)
    yield Example("harmonics", _build_two_harmonics, within=0.1)
    yield Example("with another phase", _build_sum_of_phases, within=0.2)
    yield Example("longer than an axis may be", lambda: _build_wave((1, 20000)), within=0.0015)
    yield Example("any length up to", lambda: _build_wave((1, None)), options={"longest": 100}, within=0.3)
    yield Example("any length", lambda: _build_wave((1, None)),
                  reason="sums a phase along an axis of symbolic length; longest=N takes up to N elements")
    yield Example("few elements", lambda: _build_wave((1, 8)), reason="sums up a phase of 8 elements only, least=10")
    yield Example("in radians", lambda: _build_wave((1, 40), factor=3.0),
                  reason="the phase is 3 times the sum, which is no whole number of turns: 2 pi k is expected")
    yield Example("read elsewhere", lambda: _build_wave((1, 40), beside=lambda total: Builder.relu(x=total, name="z")),
                  reason="a phase, but relu 'z' reads the sum, too, and needs it whole")
    yield Example("lengthened by its nearest elements", lambda: _lengthened(Builder.upsample_nearest_neighbor),
                  within=0.1)
    yield Example("lengthened linearly", lambda: _lengthened(Builder.upsample_bilinear, align_corners=False),
                  reason="a phase, but upsample_bilinear 'long' interpolates it: between sums that lost different "
                         "whole turns lie other angles; lengthen what is summed up, and sum at the rate of the output")
    yield Example("in fp32", lambda: _build_wave((1, 40), dtype=types.fp32), reason=FP32_UNSUPPORTED_REASON)
    yield make_example(
        "no sine", lambda x: Builder.cumsum(x=x, axis=1, name="y"), reason="no sine of it is taken", x=(1, 40)
    )


def _build_wave(shape: tuple[int | None, ...], factor: Any = 2 * math.pi, axis: int = 1, dtype: Any = types.fp16,
                beside: Callable[[Var], Var] | None = None, **how: Any) -> Program:
    def body(x: Var) -> Any:
        total = Builder.cumsum(x=x, axis=axis, **how)
        angle = Builder.mul(x=total, y=np.asarray(factor).astype(types.nptype_from_builtin(dtype)))
        # the cosine of integer turns is 1, the largest value in the comparison
        wave = Builder.cos(x=angle, name="y")
        return wave if beside is None else (wave, beside(total))

    return build_program(body, dtype=dtype, x=shape)


def _lengthened(upsample: Any, **how: Any) -> Program:
    """Build an example as in vocoders of the iSTFTNet kind: the sum at a lower rate, times its upsampling factor."""
    def body(x: Var) -> Var:
        angle = Builder.mul(x=Builder.cumsum(x=x, axis=1), y=np.float16(2 * math.pi * 4))
        spread = Builder.expand_dims(x=angle, axes=[0, 1])
        long = upsample(x=spread, scale_factor_height=1, scale_factor_width=4, name="long", **how)
        result: Var = Builder.cos(x=Builder.squeeze(x=long, axes=[0, 1]), name="y")
        return result

    return build_program(body, x=(1, 30))


def _build_two_harmonics() -> Program:
    def body(x: Var) -> Var:
        total = Builder.cumsum(x=x, axis=1)
        waves = [Builder.cos(x=Builder.mul(x=total, y=np.float16(2 * math.pi * order))) for order in (2, 4)]
        result: Var = Builder.add(x=waves[0], y=waves[1], name="y")
        return result

    return build_program(body, x=(1, 30, 2))


def _build_sum_of_phases() -> Program:
    def body(x: Var, offset: Var) -> Var:
        phase = Builder.add(x=Builder.cumsum(x=x, axis=1), y=offset)
        angle = Builder.mul(x=Builder.mul(x=phase, y=np.float16(2)), y=np.float16(math.pi))
        turned = Builder.transpose(x=angle, perm=[1, 0])
        result: Var = Builder.add(x=Builder.sin(x=turned), y=Builder.cos(x=turned), name="y")
        return result

    return build_program(body, x=(2, 50), offset=(2, 1))
