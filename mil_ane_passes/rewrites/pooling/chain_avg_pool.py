"""Compute the means of large windows from smaller ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ...ane.limits import collect_evidence
from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_symbolic
from ...passes.contract import FP32_UNSUPPORTED_REASON, Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_private_route
from ...passes.examples import build_program
from ...rules.pooling import MaxPoolKernel, OldPools
from . import _pool_windows as windows

__all__ = ["AxisPlan", "build_axis_means", "plan_axis"]


class ChainAvgPool(Rewrite):
    """Run an avg_pool whose window is too large as a reduce_mean, or as the mean of smaller pools.

    why     By a private route no pool takes a window with a side over 31 (29 on M1, which is not told apart: 30 and 31
            stay), and iPhones of 2020 refused 14 and strides over 2. Up to 14x14 an M4 was seen to take; what lies
            between was not tried.
    when    A window, of fp16, that is too large for a chip looked at. What only chips up to A13 refuse is left alone
            unless no other chip is looked at. On an axis that one window covers it is a reduce_mean (l2_pool:
            reduce_l2_norm, if it covers all). On others that are unsupported, one after the other: strided windows are
            laid side by side and averaged; with K = n * k the n means of k elements are averaged; a refused stride
            keeps each s-th.
            A pool that has a window in the padding alone, or behind the input (ceil_mode), is left alone: what it holds
            there is not defined.
    exact   rounding: the mean of as many means is the mean of all, and each is rounded. Nothing is divided by a
            constant. A mean that leaves out padding, or ends early by ceil_mode, is unsupported on such an axis.
    cost    Windows hold the input ceil(K / s) times, parts read it n times.

    before
        %y: fp16[1, 2, 1, 1] = avg_pool(x=%x, kernel_sizes=[40, 8], pad_type=valid)
    after
        %y: fp16[1, 2, 1, 1] = reduce_mean(x=%x, axes=[2, 3], keep_dims=True)
    """

    fixes = (MaxPoolKernel, OldPools)
    stage = "decompose"
    exactness = Exactness.ROUNDING
    bound = ("half a unit in the last place of each mean of a part, and of the mean over one axis before the next; "
             "measured 4e-4 of 0.7 against 2.4e-4 of the one pool (36 as 2 parts of 18)")
    preset = "full"
    roots = ("avg_pool", "l2_pool")
    evidence = (
        cite_private_route("a pool's window ends at 29 on M1, at 31 later"),
        *collect_evidence("pool-kernel", "pool-stride"),
    )

    always: bool = False
    "Rewrite pools that are unsupported only on chips up to A13 as well, whatever the target."
    max_copies: int = 8
    "The most parts of one window, and the most copies of the input."

    def match(self, op: Operation) -> Hit | Miss:
        looked_at = self.generations
        refused = windows.match_large_window(op, looked_at, self.always)
        if isinstance(refused, Miss):
            return refused
        large, pads = refused
        skipped = op.op_type == "avg_pool" and get_const_value(op.exclude_padding_from_average, False)
        whole = [
            at
            for at in windows.find_fully_covered_axes(op, pads)
            if skipped or op.op_type == "l2_pool" or not any(pads[at - 2])
        ]
        if op.op_type == "l2_pool" and len(whole) < len(pads):
            return Miss(op, "an l2_pool of more than one window: its parts would have to be squared again")
        axes: list[AxisPlan] = []
        most = windows.find_max_window_sides(op, looked_at, self.always)
        for at, size in enumerate(get_const_value(op.kernel_sizes), 2):
            fine = (
                windows.has_supported_strides(op, looked_at, self.always)
                or get_const_value(op.strides, [1] * 3)[at - 2] <= 2
            )
            if at not in whole and (size > most[at - 2] or not fine):
                found = plan_axis(op, at, pads[at - 2], most[at - 2], fine, self.max_copies)
                if isinstance(found, str):
                    return Miss(op, found)
                axes.append(found)
        how = ([f"a reduction over axes {', '.join(map(str, whole))}"] if whole else []) + [str(axis) for axis in axes]
        return Hit(op, note=f"{large}: {', '.join(how)}", whole=whole, axes=axes, pads=pads)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        op, done = hit.op, [*hit.whole, *(axis.at for axis in hit.axes)]
        x: Var = op.x
        if hit.whole:
            reduce = mb.reduce_mean if op.op_type == "avg_pool" else mb.reduce_l2_norm
            x = reduce(x=x, axes=hit.whole, keep_dims=True)
        for axis in hit.axes:
            x = build_axis_means(mb, x, axis)
        left = [at for at in range(2, x.rank) if at not in done]
        if any(
            get_const_value(parameter, [1] * 3)[at - 2] > 1
            for at in left
            for parameter in (op.kernel_sizes, op.strides)
        ):
            x = mb.avg_pool(x=x, **_read_remaining_inputs(op, done))
        return x

    def examples(self) -> Iterable[Example]:
        yield Example("all", lambda: _build_avg_pool([40, 8], shape=(1, 2, 40, 8)))
        yield Example(
            "windows", lambda: _build_avg_pool([2, 40], strides=[2, 40], shape=(1, 2, 6, 85), pad_type="same")
        )
        yield Example(
            "overlapping windows", lambda: _build_avg_pool([40], strides=[16], pad_type="same", shape=(1, 2, 90))
        )
        yield Example("parts", lambda: _build_avg_pool([2, 36], pad_type="same", shape=(2, 2, 6, 50)))
        yield Example(
            "both axes", lambda: _build_avg_pool([34, 35], strides=[17, 1], pad_type="same", shape=(1, 2, 60, 40))
        )
        yield Example("a long stride", lambda: _build_avg_pool([3, 2], strides=[1, 3], shape=(1, 2, 4, 12)),
                      options={"always": True})
        yield Example("fits", lambda: _build_avg_pool([13, 13]), reason="fits")
        yield Example("a prime", lambda: _build_avg_pool([1, 37]),
                      reason="window 37 is not 8 or fewer equal parts of at most 31")
        yield Example(
            "padding left out",
            lambda: _build_avg_pool([1, 36], pad_type="same", exclude_padding_from_average=True),
            reason="padding is left out of the average, so what sums are divided by differs from place to place",
        )
        yield Example("old chips only", lambda: _build_avg_pool([4, 4], strides=[4, 4]),
                      reason="refused by A12 and A13 only; name one of them as the target")
        yield Example("fp32", lambda: _build_avg_pool([40, 40], dtype=types.fp32), reason=FP32_UNSUPPORTED_REASON)


def _read_remaining_inputs(op: Operation, done: list[int]) -> dict[str, Any]:
    """Return the inputs of `op` except x, for the axes that are not done."""
    kept = {name: get_const_value(var) for name, var in op.inputs.items() if name != "x" and var is not None}
    for name in ("kernel_sizes", "strides", "pad"):
        each = 2 if name == "pad" else 1
        for at in done if name in kept else []:
            kept[name][each * (at - 2):each * (at - 1)] = [0, 0] if each == 2 else [1]
    return kept


def _build_avg_pool(
    sizes: list[int],
    *,
    shape: tuple[int | None, ...] = (1, 2, 45, 45),
    strides: list[int] | None = None,
    pad_type: str = "valid",
    dtype: Any = types.fp16,
    **parameters: Any,
) -> Program:
    return build_program(lambda x: Builder.avg_pool(x=x, kernel_sizes=sizes, strides=strides or [1] * len(sizes),
                                                    pad_type=pad_type, name="y", **parameters), dtype=dtype, x=shape)


@dataclass(frozen=True)
class AxisPlan:
    """The computation on one axis of x: `part` is the window length of a part, `count` the number of windows."""

    at: int
    form: Literal["windows", "parts", "steps"]
    size: int
    stride: int
    pads: tuple[int, int]
    part: int = 0
    count: int = 0

    def __str__(self) -> str:
        if self.form == "parts":
            return f"{self.size // self.part} parts of {self.part} on axis {self.at}"
        return f"{self.form if self.form == 'windows' else 'every place'} on axis {self.at}"


def plan_axis(op: Operation, at: int, pads: tuple[int, int], most: int, fine: bool, max_copies: int) -> AxisPlan | str:
    """Plan how to compute the means on axis `at` of x, or return why they cannot be computed."""
    size, stride = get_const_value(op.kernel_sizes)[at - 2], get_const_value(op.strides, [1] * 3)[at - 2]
    reason = _find_averaging_obstacle(op, at, pads)
    if reason:
        return reason
    extent, copies = op.x.shape[at], -(-size // stride)
    one_open = sum(map(is_symbolic, op.x.shape)) < 2
    if op.x.rank < 5 and stride > 1 and copies <= max_copies and not is_symbolic(extent) and one_open:
        return AxisPlan(at, "windows", size, stride, pads, count=int(op.outputs[0].shape[at]))
    if size <= most:
        return AxisPlan(at, "steps", size, stride, pads)
    part = max((part for part in range(2, most + 1) if size % part == 0), default=0)
    if not part or size // part > max_copies:
        return f"window {size} is not {max_copies} or fewer equal parts of at most {most}"
    if not fine:
        return f"window {size} would be cut into parts of stride {stride}, which is unsupported as well"
    if op.x.rank == 5:
        return f"window {size} of a 3-D pool: its parts side by side would need rank 6"
    return AxisPlan(at, "parts", size, stride, pads, part=part)


def _find_averaging_obstacle(op: Operation, at: int, pads: tuple[int, int]) -> str | None:
    """Return why some mean on an axis is over fewer elements than the window has, or None."""
    if any(pads) and get_const_value(op.exclude_padding_from_average, False):
        return "padding is left out of the average, so what sums are divided by differs from place to place"
    given = get_const_value(op.pad, [0] * 6) if get_const_value(op.pad_type) == "custom" else [0] * 6
    if get_const_value(op.ceil_mode, False) and (is_symbolic(op.x.shape[at]) or pads[1] > given[2 * at - 3]):
        return "ceil_mode averages fewer elements in the last window"
    return None


def build_axis_means(mb: RewriteBuilder, x: Var, axis: AxisPlan) -> Var:
    """Compute the means of `x` on one axis."""
    flat = [0] * 2 * x.rank
    flat[2 * axis.at:2 * axis.at + 2] = axis.pads
    if any(axis.pads):
        zero = types.nptype_from_builtin(x.dtype)(0)
        x = mb.pad(x=x, pad=flat, mode="constant", constant_val=zero)
    if axis.form == "windows":
        return _average_windows(mb, x, axis)
    if axis.form == "steps":
        steps = [axis.stride if at == axis.at else 1 for at in range(x.rank)]
        every = _average_axis(mb, x, axis.at, axis.size, 1)
        kept: Var = mb.slice_by_index(x=every, begin=[0] * x.rank, end=[0] * x.rank, stride=steps,
                                      end_mask=[True] * x.rank)
        return kept
    means = [_average_axis(mb, _slice_axis(mb, x, axis.at, start, start + axis.part - axis.size), axis.at, axis.part,
                           axis.stride) for start in range(0, axis.size, axis.part)]
    mean: Var = mb.reduce_mean(x=mb.stack(values=means, axis=axis.at), axes=[axis.at], keep_dims=False)
    return mean


def _average_axis(mb: RewriteBuilder, x: Var, at: int, size: int, stride: int) -> Var:
    def only(number: int) -> list[int]:
        return [number if axis == at else 1 for axis in range(2, x.rank)]

    mean: Var = mb.avg_pool(x=x, kernel_sizes=only(size), strides=only(stride), pad_type="valid")
    return mean


def _slice_axis(mb: RewriteBuilder, x: Var, at: int, begin: int, end: int) -> Var:
    """Slice axis `at` of `x` from `begin` to `end`, which is at most 0 and counts from the end of the axis."""
    begins, ends = [0] * x.rank, [0] * x.rank
    begins[at], ends[at] = begin, end
    part: Var = mb.slice_by_index(x=x, begin=begins, end=ends, end_mask=[each == 0 for each in ends])
    return part


def _average_windows(mb: RewriteBuilder, x: Var, axis: AxisPlan) -> Var:
    """Lay the rows of the stride that follow a row beside it, up to the length of a window, and average them."""
    at, rows = axis.at, axis.count + -(-axis.size // axis.stride) - 1
    missing = rows * axis.stride - int(x.shape[at])
    if missing < 0:
        x = _slice_axis(mb, x, at, 0, missing)
    if missing > 0:  # zeros after the last window, which reads none of them
        flat = [missing if place == 2 * at + 1 else 0 for place in range(2 * x.rank)]
        x = mb.pad(x=x, pad=flat, mode="constant", constant_val=types.nptype_from_builtin(x.dtype)(0))
    shape = [-1 if is_symbolic(extent) else int(extent) for extent in x.shape]
    x = mb.reshape(x=x, shape=[*shape[:at], rows, axis.stride, *shape[at + 1:]])
    parts: list[Any] = []
    for number in range(-(-axis.size // axis.stride)):
        begins, ends = [0] * x.rank, [0] * x.rank
        begins[at], ends[at] = number, number + axis.count
        ends[at + 1] = min(axis.stride, axis.size - number * axis.stride)
        whole = rows == axis.count and ends[at + 1] == axis.stride
        parts.append(x if whole else mb.slice_by_index(x=x, begin=begins, end=ends,
                                                       end_mask=[end == 0 for end in ends]))
    joined = mb.concat(values=parts, axis=at + 1) if len(parts) > 1 else parts[0]
    mean: Var = mb.reduce_mean(x=joined, axes=[at + 1], keep_dims=False)
    return mean
