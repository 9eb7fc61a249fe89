"""Compute cumulative sums of phases modulo one turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_reshape_extents, is_symbolic
from ...passes.contract import FP32_UNSUPPORTED_REASON, Community, Exactness, Example, Hit, Miss, Rewrite, Severity
from ...passes.evidence import cite_m4_study
from ...passes.examples import make_example
from ._cumulative_sums import (
    CumsumSettings,
    WindowPlan,
    build_running_sums,
    find_conv_limits,
    multiply_extents,
    plan_windows,
    read_cumsum_settings,
    slice_axis,
    split_shape_at_axis,
)

_LAYOUT_OPS = (
    "expand_dims", "squeeze", "reshape", "transpose", "identity", "concat", "slice_by_index", "split", "tile",
    "upsample_nearest_neighbor", "resize_nearest_neighbor",
)
"Ops that only move elements, so that a sum may differ by integer turns before them."
_INTERPOLATING_OPS = ("upsample_bilinear", "resize_bilinear", "resize", "crop_resize")
"Ops that interpolate between sums, which is wrong where these differ by different integer turns."
_PERIODIC_OPS = ("sin", "cos")
_MAX_FACTORS = 32
"Maximum number of different values in a constant factor: there are few harmonics, and each is traced to the sines."
_MAX_TURNS = 512
"""Maximum number of turns of a factor.

Beyond it fp16 does not determine the integer, as a factor is rounded to 2^-12 of itself.
"""
_FACTOR_TOLERANCE = 2.0**-10
"Maximum relative distance of a factor from 2 pi k: twice the rounding error of 2 pi k and of one of its factors."
_CONSTANT_ERROR = 2.0**-11
"Maximum relative error of 2 pi k in fp16, as a share of the angle: the rewrite removes this accumulated error."
_COARSE_STEP = 2.0**-8
"Step of coarse parts, in turns: the sum of 13 parts of at most half a turn is below 8, and exact in fp16."
_ROW_ELEMENTS = 2197
"Elements per row if a long axis is split into rows: the number that three convs of up to 13 ones sum up."
_FP16_BYTES = 2
"Bytes of an fp16 number."
_MAX_WEIGHT_BYTES = 2 << 20
"Maximum bytes of ones for one sum."


class WrapPhase(Rewrite):
    """Accumulate a phase modulo one turn, so that its sine is accurate in fp16 for sums of any length.

    why     An oscillator is sin(2 pi cumsum(f / rate)). After 100 turns fp16 resolves the angle to 0.25 rad, after 330
            to 1 rad: the sine is noise. Also, fp16 rounds 2 pi to 6.28125, which adds an error of 0.0019 rad per turn.
            No op after the sum can restore the phase. A sine needs only the fraction of a turn, which stays small.
    when    cumsum in fp16 whose users all lead to sin and cos, through constant factors with product 2 pi k (k an
            integer up to 512), sums with other phases, and data movement. The phase is wrapped at the greatest common
            divisor of all k. An axis of symbolic length needs `longest`. Not if the sum has other users, or is
            interpolated: between 0.9 and 1.1 turns the mean is 1.0, between 0.9 and 0.1 it is 0.5. If the phase is
            accumulated at a lower rate and upsampled linearly (iSTFTNet, Kokoro), the interpolated increments reach
            tens of turns, which fp16 does not represent to a small fraction of a turn.
    exact   rounding: x minus its nearest integer is exact, and is split into a multiple of 2^-8 turn and a remainder.
            Both are summed by convs with up to 13 ones; after each conv, whole steps of the remainders move to the
            multiples, and whole turns are removed, exactly: sin(2 pi (s - n)) = sin(2 pi s). A conv rounds remainders
            by up to 2^-17 turn, and the final sum by 2^-13. The error of the program's constant for 2 pi k is no longer
            accumulated, which makes results more accurate, but different. x itself is rounded to fp16: a frequency has
            a relative error of 2^-12.
    cost    a conv, a reshape and nine ops of the same size for each factor (up to 13) of the length, and ten more,
            instead of a cumsum on the CPU.

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
    severity = Severity.WRONG
    stage = "numerics"
    after = ("fp16_compute",)
    exactness = Exactness.ROUNDING
    bound = "2^-13 turn, plus 2^-17 turn for each conv and element that it sums; then angle and sine are rounded. " \
            "Largest error of the sine, 200 Hz at 24 kHz in fp16: 2.1e-3 for 100 samples, 2.4e-3 for 1000, 2.6e-3 " \
            "for 24000; before the rewrite 2.6e-3, 0.041, 1.1"
    preset = "safe"
    moves = 2.0**-5
    moves_of = "result"
    measures = True
    roots = ("cumsum",)
    evidence = (
        Community("a vocoder's sine of an accumulated phase in the thousands is noise once the phase is rounded "
                  "(bfloat16, "
                  "another machine, the same arithmetic)", source="https://github.com/tenstorrent/tt-xla/issues/5332",
                  chip="n150 (no Apple chip)", date="2026-06-22"),
        cite_m4_study("sin, cos, conv, round, mul and sub are accepted; cumsum is unsupported"),
    )

    longest: int = 0
    "Maximum extent of a symbolic axis; 0 skips such axes."
    least: int = 10
    "Minimum elements of a sum to wrap; shorter ones have few turns."

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
            return Miss(op, f"the phase is {factors[counts.index(None)]:g} times the sum, which is not an integer "
                            f"number of turns (2 pi k)")
        turns = max(1, math.gcd(*(count for count in counts if count is not None)))
        return self._match_layout(op, turns, max(map(_compute_angle_error, factors)))

    def _match_layout(self, op: Operation, turns: int, angle_error: float) -> Hit | Miss:
        """Match a layout of the sum for convs.

        A unit of the sum is `turns` turns, and its angle differs from that by `angle_error`.
        """
        settings = read_cumsum_settings(op)
        extent = op.x.shape[settings.axis]
        symbolic = is_symbolic(extent)
        if symbolic and self.longest < 1:
            return Miss(op, "sums a phase along an axis of symbolic length; longest=N supports up to N elements")
        if sum(map(is_symbolic, op.x.shape)) > symbolic:
            return Miss(op, "the phase has a symbolic axis other than the summed one")
        count = self.longest if symbolic else int(extent)
        if count < self.least:
            return Miss(op, f"sums up a phase of {count} elements only, least={self.least}")
        batch, _, inner = split_shape_at_axis(op.x, settings.axis)
        shape = (2 * batch, extent) if inner == 1 else (2 * batch, extent, inner)
        plan = self._plan_sum(shape, settings._replace(axis=1))
        if isinstance(plan, str):
            return Miss(op, f"the phase of {count} elements cannot be summed by convs: {plan}")
        measured = None if self.measured is None else self.measured.get(op.outputs[0])
        # An angle is off by that of a unit times the sum, and two sines differ by 2 at most.
        moves = self.moves if measured is None else max(self.moves, min(2.0, angle_error * measured.largest))
        return Hit(op, note=f"a phase is summed over {'up to ' if symbolic else ''}{count} elements", plan=plan,
                   turns=turns, moves_at_op=_CONSTANT_ERROR, largest_size=self.longest if symbolic else math.inf,
                   moves=moves)

    def _plan_sum(self, shape: tuple[Any, ...], settings: CumsumSettings) -> WindowPlan | _RowPlan | str:
        """Plan the sum of a value of `shape` by convs, in rows where its axis is too long, or return why it fails."""
        limits = find_conv_limits(self.generations)
        extent, inner = shape[settings.axis], multiply_extents(shape[settings.axis + 1:])
        if is_symbolic(extent) or extent + int(settings.exclusive) <= limits.extent:
            plan = plan_windows(shape, _FP16_BYTES, settings, limits, _MAX_WEIGHT_BYTES, self.longest)
            return plan or f"{inner} elements apart do not fit on two axes of up to {limits.extent}"
        if settings.reverse or inner != 1:
            return f"an axis of more than {limits.extent} elements must be the last one, and summed forwards"
        rows = math.ceil(extent / _ROW_ELEMENTS)
        rows = next((each for each in range(rows, 2 * rows) if extent % each == 0), rows)  # without padding, if any is
        if rows > _ROW_ELEMENTS:
            return f"{rows} rows of {_ROW_ELEMENTS} are too many"
        return _RowPlan(settings.exclusive, rows)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        x = hit.op.x if hit.turns == 1 else mb.mul(x=hit.op.x, y=np.float16(hit.turns))
        sizes = get_reshape_extents(x.shape)
        batch, count, inner = split_shape_at_axis(x, read_cumsum_settings(hit.op).axis)
        phase = _reshape_if_needed(
            mb, _wrap_to_half_turn(mb, x), [batch, count] if inner == 1 else [batch, count, inner]
        )
        coarse = _round_to_coarse_step(mb, phase)
        pair = mb.concat(values=[coarse, mb.sub(x=phase, y=coarse)], axis=0)
        first, second = mb.split(x=self._sum_pair(mb, pair, hit.plan), num_splits=2, axis=0)
        total = _reshape_if_needed(mb, mb.add(x=first, y=second), sizes)
        return total if hit.turns == 1 else mb.mul(x=total, y=np.float16(1 / hit.turns))

    def _sum_pair(self, mb: RewriteBuilder, pair: Var, plan: WindowPlan | _RowPlan) -> Var:
        """Build the running sums of coarse parts and rests, which are concatenated along the first axis."""
        if isinstance(plan, _RowPlan):
            return self._sum_in_rows(mb, pair, plan)
        pair_axis = next(position for position, axes in enumerate(plan.layout.groups) if 0 in axes)
        return build_running_sums(mb, pair, plan, lambda y: _normalize_pair(mb, y, pair_axis))

    def _sum_in_rows(self, mb: RewriteBuilder, pair: Var, plan: _RowPlan) -> Var:
        """Sum each row, then the rows before it, and add the two."""
        batch, count = int(pair.shape[0]), int(pair.shape[1])
        width = math.ceil(count / plan.rows)
        padding = plan.rows * width - count
        if padding:
            pair = mb.pad(x=pair, pad=[0, 0, 0, padding], mode="constant", constant_val=np.float16(0))
        rows = mb.reshape(x=pair, shape=[batch, plan.rows, width])
        within_rows = self._plan_and_sum(mb, rows, CumsumSettings(2))
        row_sums = mb.reshape(x=slice_axis(mb, within_rows, 2, width - 1, width), shape=[batch, plan.rows])
        before = mb.expand_dims(x=self._plan_and_sum(mb, row_sums, CumsumSettings(1, exclusive=True)), axes=[2])
        total = _normalize_pair(mb, mb.add(x=within_rows, y=before), 0)
        if plan.exclusive:
            total = _normalize_pair(mb, mb.sub(x=total, y=rows), 0)
        result: Var = mb.reshape(x=total, shape=[batch, plan.rows * width])
        return slice_axis(mb, result, 1, 0, count) if padding else result

    def _plan_and_sum(self, mb: RewriteBuilder, pair: Var, settings: CumsumSettings) -> Var:
        plan = self._plan_sum(tuple(pair.shape), settings)
        assert not isinstance(plan, str), f"rows are chosen such that a layout exists: {plan}"
        return self._sum_pair(mb, pair, plan)

    def examples(self) -> Iterable[Example]:
        yield _make_wave_example("an oscillator", (1, 12), within=1.0)
        yield _make_wave_example("of two convs", (1, 40), within=0.3)
        yield _make_wave_example("of 200 elements", (1, 200), within=0.1)
        yield _make_wave_example("along the middle", (2, 30, 3), within=0.3)
        yield _make_wave_example(
            "exclusive and backwards", (2, 20), parameters={"exclusive": True, "reverse": True}, within=0.3)
        yield _make_wave_example("8 turns each", (1, 40), factor=16 * math.pi, within=0.03)
        yield make_example("harmonics", _build_two_harmonics, within=0.1, x=(1, 30, 2))
        yield make_example("with another phase", _build_sum_of_phases, within=0.2, x=(2, 50), offset=(2, 1))
        yield _make_wave_example("longer than the axis limit", (1, 20000), within=0.0015)
        yield _make_wave_example("any length up to", (1, None), options={"longest": 100}, within=0.3)
        yield _make_wave_example(
            "any length", (1, None),
            reason="sums a phase along an axis of symbolic length; longest=N supports up to N elements")
        yield _make_wave_example("few elements", (1, 8), reason="sums up a phase of 8 elements only, least=10")
        yield _make_wave_example(
            "in radians", (1, 40), factor=3.0,
            reason="the phase is 3 times the sum, which is not an integer number of turns (2 pi k)")
        yield _make_wave_example(
            "read elsewhere", (1, 40), other_reader=lambda total: Builder.relu(x=total, name="z"),
            reason="a phase, but relu 'z' needs the entire sum, not its fraction")
        yield make_example("upsampled by nearest neighbours", _build_nearest_upsampling, within=0.1, x=(1, 30))
        yield make_example(
            "lengthened linearly", _build_linear_upsampling, x=(1, 30),
            reason="a phase, but upsample_bilinear 'long' interpolates it, which is wrong between sums without their "
                   "integer turns; upsample before the cumsum, and sum at the rate of the output")
        yield _make_wave_example("in fp32", (1, 40), dtype=types.fp32, reason=FP32_UNSUPPORTED_REASON)
        yield make_example(
            "no sine", lambda x: Builder.cumsum(x=x, axis=1, name="y"), reason="it does not lead to a sine", x=(1, 40)
        )


@dataclass(frozen=True)
class _RowPlan:
    """A sum in rows, for an axis above the limit."""

    exclusive: bool
    rows: int


def _find_angle_factors(total: Var) -> list[float] | str:
    """Return the factors of a sum on its paths to sines and cosines, or why the sum must not be wrapped."""
    factors: set[float] = set()
    pending: list[tuple[Var, float]] = [(total, 1.0)]
    seen: set[tuple[Var, float]] = set()
    obstacle = ""
    while pending:
        var, factor = pending.pop()
        if (var, factor) in seen:
            continue
        seen.add((var, factor))
        if var in var.op.enclosing_block.outputs:
            obstacle = obstacle or f"'{var.name}' is returned, so the entire sum is needed"
        for reader in var.child_ops:
            if reader.op_type in _PERIODIC_OPS:
                factors.add(factor)
                continue
            steps = _read_factors(reader, var)
            if steps is None:
                obstacle = obstacle or _describe_other_reader(reader)
                # Sines after an interpolation show that it is a phase.
                steps = [1.0] if reader.op_type in _INTERPOLATING_OPS else []
            pending += [(output, factor * step) for step in steps for output in reader.outputs]
    if not factors:
        return "it does not lead to a sine"
    return f"a phase, but {obstacle}" if obstacle else sorted(factors)


def _describe_other_reader(reader: Operation) -> str:
    if reader.op_type not in _INTERPOLATING_OPS:
        return f"{reader.op_type} '{reader.name}' needs the entire sum, not its fraction"
    return (f"{reader.op_type} '{reader.name}' interpolates it, which is wrong between sums without their integer "
            f"turns; upsample before the cumsum, and sum at the rate of the output")


def _read_factors(reader: Operation, var: Var) -> list[float] | None:
    """Return the constants that an op multiplies `var` by, each once; None for another kind of op."""
    if reader.op_type in _LAYOUT_OPS:
        return [1.0]
    if reader.op_type in ("add", "sub"):
        if reader.x is reader.y:
            return None
        return [1.0 if reader.x is var or reader.op_type == "add" else -1.0]
    divides = reader.op_type == "real_div"
    if reader.op_type != "mul" and not (divides and reader.x is var):
        return None
    other = reader.y if reader.x is var else reader.x
    if other.val is None:
        return None
    values = np.unique(np.asarray(other.val, np.float64))
    if len(values) > _MAX_FACTORS or not np.all(np.isfinite(values)) or (divides and not np.all(values)):
        return None
    return [float(1 / value if divides else value) for value in values]


def _count_whole_turns(factor: float) -> int | None:
    """Return the turns in a unit of the sum; None where the factor is not 2 pi k as fp16 may round it."""
    turns = factor / (2 * math.pi)
    count = round(turns)
    is_close = abs(turns - count) <= abs(count) * _FACTOR_TOLERANCE
    return abs(count) if is_close and abs(count) <= _MAX_TURNS else None


def _compute_angle_error(factor: float) -> float:
    """Compute how far the angle of a unit is from integer turns, in radians."""
    return abs(factor - round(factor / (2 * math.pi)) * 2 * math.pi)


def _wrap_to_half_turn(mb: RewriteBuilder, turns: Var) -> Var:
    """Return the part of a turn from -1/2 to 1/2, exact in fp16."""
    result: Var = mb.sub(x=turns, y=mb.round(x=turns))
    return result


def _reshape_if_needed(mb: RewriteBuilder, x: Var, shape: list[int]) -> Var:
    """Reshape `x` if it has another shape."""
    same = get_reshape_extents(x.shape) == shape
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


def _make_wave_example(
    name: str, shape: tuple[int | None, ...], factor: float = 2 * math.pi, dtype: Any = types.fp16,
    parameters: dict[str, bool] | None = None, other_reader: Callable[[Var], Var] | None = None, **settings: Any,
) -> Example:
    def build_body(x: Var) -> Any:
        total = Builder.cumsum(x=x, axis=1, **(parameters or {}))
        angle = Builder.mul(x=total, y=np.asarray(factor).astype(types.nptype_from_builtin(dtype)))
        # the cosine of integer turns is 1, the largest value in the comparison
        wave = Builder.cos(x=angle, name="y")
        return wave if other_reader is None else (wave, other_reader(total))

    return make_example(name, build_body, dtype=dtype, x=shape, **settings)


def _build_two_harmonics(x: Var) -> Any:
    total = Builder.cumsum(x=x, axis=1)
    waves = [Builder.cos(x=Builder.mul(x=total, y=np.float16(2 * math.pi * order))) for order in (2, 4)]
    return Builder.add(x=waves[0], y=waves[1], name="y")


def _build_sum_of_phases(x: Var, offset: Var) -> Any:
    phase = Builder.add(x=Builder.cumsum(x=x, axis=1), y=offset)
    angle = Builder.mul(x=Builder.mul(x=phase, y=np.float16(2)), y=np.float16(math.pi))
    turned = Builder.transpose(x=angle, perm=[1, 0])
    return Builder.add(x=Builder.sin(x=turned), y=Builder.cos(x=turned), name="y")


def _build_nearest_upsampling(x: Var) -> Any:
    return _build_upsampled_wave(x, Builder.upsample_nearest_neighbor)


def _build_linear_upsampling(x: Var) -> Any:
    return _build_upsampled_wave(x, Builder.upsample_bilinear, align_corners=False)


def _build_upsampled_wave(x: Var, upsample: Any, **parameters: Any) -> Any:
    """Build an example as in vocoders of the iSTFTNet kind: the sum at a lower rate, times its upsampling factor."""
    angle = Builder.mul(x=Builder.cumsum(x=x, axis=1), y=np.float16(2 * math.pi * 4))
    spread = Builder.expand_dims(x=angle, axes=[0, 1])
    long = upsample(x=spread, scale_factor_height=1, scale_factor_width=4, name="long", **parameters)
    return Builder.cos(x=Builder.squeeze(x=long, axes=[0, 1]), name="y")
