"""Compute the means of large windows from smaller ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from coremltools.converters.mil.mil import Operation, Var, types

from ...ane.limits import collect_evidence
from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, get_reshape_extents, is_symbolic
from ...passes.contract import FP32_UNSUPPORTED_REASON, Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_ane_compiler
from ...passes.examples import make_op_example
from ...rules.pooling import MaxPoolKernel, OldPools
from ._pool_windows import (
    find_fully_covered_axes,
    find_max_window_sides,
    has_supported_strides,
    match_large_window,
    read_custom_pads,
    read_kernel_sizes,
    read_strides,
)

_MAX_OLD_STRIDE = 2
"Largest stride that every chip supports."

class ChainAvgPool(Rewrite):
    """Replace an avg_pool whose window exceeds the limit by a reduce_mean, or by the mean of smaller pools.

    why     Without Core ML, the ANE's compiler rejects pool windows with a side over 31 (over 29 on M1, but windows of
            30 and 31 are skipped on every chip), and iPhones of 2020 rejected windows over 13 and strides over 2. An M4
            accepts windows up to 14x14; larger ones were not tried.
    when    An fp16 pool whose window exceeds the limit of a chip of the target. Pools that only chips up to A13 reject
            are skipped unless the target has only such chips. An axis covered by one window becomes a reduce_mean
            (l2_pool: reduce_l2_norm, if it covers all). Other unsupported axes, one by one: strided windows are
            concatenated and averaged; with K = n * k the n means of k elements are averaged; for an unsupported stride
            every s-th element is kept. Pools with a window entirely in the padding, or after the input (ceil_mode), are
            skipped: their result is undefined.
    exact   rounding: the mean of equally many means is the mean of all, and each one is rounded. There is no division
            by a constant. Means without padding, or cut off by ceil_mode, are skipped on such an axis.
    cost    windows copy the input ceil(K / s) times, parts read it n times.

    before
        %y: fp16[1, 2, 1, 1] = avg_pool(x=%x, kernel_sizes=[40, 8], pad_type=valid)
    after
        %y: fp16[1, 2, 1, 1] = reduce_mean(x=%x, axes=[2, 3], keep_dims=True)
    """

    fixes = (MaxPoolKernel, OldPools)
    stage = "decompose"
    exactness = Exactness.ROUNDING
    bound = ("half a unit in the last place of the mean of each part, and of the mean over one axis before the next; "
             "measured for a window of 36 in 2 parts: 4e-4 for results up to 0.7, 2.4e-4 for the original pool")
    preset = "full"
    roots = ("avg_pool", "l2_pool")
    evidence = (
        cite_ane_compiler("the limit of a pool's window is 29 on M1, 31 later"),
        *collect_evidence("pool-kernel", "pool-stride"),
    )

    always: bool = False
    "Rewrite pools that are unsupported only on chips up to A13, for any target."
    max_copies: int = 8
    "Maximum number of parts of one window, and of copies of the input."

    def match(self, op: Operation) -> Hit | Miss:
        match = match_large_window(op, self.generations, self.always)
        if isinstance(match, Miss):
            return match
        unsupported, pads = match
        reduced = find_fully_covered_axes(op, pads)
        if op.op_type == "avg_pool" and not get_const_value(op.exclude_padding_from_average, False):
            reduced = [axis for axis in reduced if not any(pads[axis - 2])]  # padding counts as zeros
        if op.op_type == "l2_pool" and len(reduced) < len(pads):
            return Miss(op, "an l2_pool of more than one window: its parts would have to be squared again")
        plans: list[_AxisPlan] = []
        sides = find_max_window_sides(op, self.generations, self.always)
        strides_fit = has_supported_strides(op, self.generations, self.always)
        for axis, (size, stride, most) in enumerate(zip(read_kernel_sizes(op), read_strides(op), sides), start=2):
            stride_fits = strides_fit or stride <= _MAX_OLD_STRIDE
            if axis in reduced or (size <= most and stride_fits):
                continue
            plan = _plan_axis(op, axis, pads[axis - 2], most, stride_fits, self.max_copies)
            if isinstance(plan, str):
                return Miss(op, plan)
            plans.append(plan)
        steps = [f"a reduction over axes {', '.join(map(str, reduced))}"] if reduced else []
        return Hit(op, note=f"{unsupported}: {', '.join([*steps, *map(str, plans)])}", reduced=reduced, plans=plans)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        op, done = hit.op, [*hit.reduced, *(plan.axis for plan in hit.plans)]
        x: Var = op.x
        if hit.reduced:
            reduce = mb.reduce_mean if op.op_type == "avg_pool" else mb.reduce_l2_norm
            x = reduce(x=x, axes=hit.reduced, keep_dims=True)
        for plan in hit.plans:
            x = _build_axis_means(mb, x, plan)
        left = [axis for axis in range(2, x.rank) if axis not in done]
        if any(numbers[axis - 2] > 1 for axis in left for numbers in (read_kernel_sizes(op), read_strides(op))):
            x = mb.avg_pool(x=x, **_read_remaining_inputs(op, done))
        return x

    def examples(self) -> Iterable[Example]:
        yield _make_pool_example("all", [40, 8], shape=(1, 2, 40, 8))
        yield _make_pool_example("windows", [2, 40], strides=[2, 40], shape=(1, 2, 6, 85), pad_type="same")
        yield _make_pool_example("overlapping windows", [40], strides=[16], pad_type="same", shape=(1, 2, 90))
        yield _make_pool_example("parts", [2, 36], pad_type="same", shape=(2, 2, 6, 50))
        yield _make_pool_example("both axes", [34, 35], strides=[17, 1], pad_type="same", shape=(1, 2, 60, 40))
        yield _make_pool_example("a long stride", [3, 2], {"options": {"always": True}}, strides=[1, 3],
                                 shape=(1, 2, 4, 12))
        yield _make_pool_example("fits", [13, 13], {"reason": "fits"})
        yield _make_pool_example("a prime", [1, 37], {
            "reason": "window 37 cannot be split into 8 or fewer equal parts of at most 31"})
        yield _make_pool_example("padding left out", [1, 36], {
            "reason": "padding is excluded from the average, so the divisor is not constant"},
            pad_type="same", exclude_padding_from_average=True)
        yield _make_pool_example("old chips only", [4, 4], {
            "reason": "unsupported on A12 and A13 only; choose one of them as the target"}, strides=[4, 4])
        yield _make_pool_example("fp32", [40, 40], {"dtype": types.fp32, "reason": FP32_UNSUPPORTED_REASON})


@dataclass(frozen=True)
class _AxisPlan:
    """The computation on one axis of x.

    `part` is the window length of a part, and `count` the number of windows.
    """

    axis: int
    form: Literal["windows", "parts", "steps"]
    size: int
    stride: int
    pads: tuple[int, int]
    part: int = 0
    count: int = 0

    def __str__(self) -> str:
        if self.form == "parts":
            return f"{self.size // self.part} parts of {self.part} on axis {self.axis}"
        return f"{self.form if self.form == 'windows' else 'every position'} on axis {self.axis}"


def _plan_axis(
    op: Operation, axis: int, pads: tuple[int, int], most: int, stride_fits: bool, max_copies: int
) -> _AxisPlan | str:
    """Plan how to compute the means on `axis` of x, or return why they cannot be computed."""
    size, stride = read_kernel_sizes(op)[axis - 2], read_strides(op)[axis - 2]
    reason = _find_averaging_obstacle(op, axis, pads)
    if reason:
        return reason
    extent, copies = op.x.shape[axis], math.ceil(size / stride)
    # The reshape into rows needs an axis more, and can infer one symbolic size.
    can_reshape = op.x.rank < 5 and not is_symbolic(extent) and sum(map(is_symbolic, op.x.shape)) < 2
    if can_reshape and stride > 1 and copies <= max_copies:
        return _AxisPlan(axis, "windows", size, stride, pads, count=int(op.outputs[0].shape[axis]))
    if size <= most:
        return _AxisPlan(axis, "steps", size, stride, pads)
    part = max((part for part in range(2, most + 1) if size % part == 0), default=0)
    if not part or size // part > max_copies:
        return f"window {size} cannot be split into {max_copies} or fewer equal parts of at most {most}"
    if not stride_fits:
        return f"window {size} would be split into parts of stride {stride}, which is unsupported, too"
    if op.x.rank == 5:
        return f"window {size} of a 3-D pool: the concat of its parts would need rank 6"
    return _AxisPlan(axis, "parts", size, stride, pads, part=part)


def _find_averaging_obstacle(op: Operation, axis: int, pads: tuple[int, int]) -> str | None:
    """Return why some mean on an axis is over fewer elements than the window has, or None."""
    if any(pads) and get_const_value(op.exclude_padding_from_average, False):
        return "padding is excluded from the average, so the divisor is not constant"
    after = read_custom_pads(op)[2 * axis - 3]
    if get_const_value(op.ceil_mode, False) and (is_symbolic(op.x.shape[axis]) or pads[1] > after):
        return "ceil_mode averages fewer elements in the last window"
    return None


def _build_axis_means(mb: RewriteBuilder, x: Var, plan: _AxisPlan) -> Var:
    """Compute the means of `x` on one axis."""
    axis = plan.axis
    if any(plan.pads):
        x = _pad_axis(mb, x, axis, plan.pads)
    if plan.form == "windows":
        return _average_windows(mb, x, plan)
    result: Var
    if plan.form == "steps":
        strides = [plan.stride if each == axis else 1 for each in range(x.rank)]
        means = _average_axis(mb, x, axis, plan.size, 1)
        result = mb.slice_by_index(x=means, begin=[0] * x.rank, end=[0] * x.rank, stride=strides,
                                   end_mask=[True] * x.rank)
        return result
    parts = []
    for start in range(0, plan.size, plan.part):
        part = _slice_axis(mb, x, axis, start, start + plan.part - plan.size)
        parts.append(_average_axis(mb, part, axis, plan.part, plan.stride))
    result = mb.reduce_mean(x=mb.stack(values=parts, axis=axis), axes=[axis], keep_dims=False)
    return result


def _pad_axis(mb: RewriteBuilder, x: Var, axis: int, pads: tuple[int, int]) -> Var:
    """Pad one axis with zeros."""
    flat = [0] * 2 * x.rank
    flat[2 * axis:2 * axis + 2] = pads
    result: Var = mb.pad(x=x, pad=flat, mode="constant", constant_val=types.nptype_from_builtin(x.dtype)(0))
    return result


def _average_axis(mb: RewriteBuilder, x: Var, axis: int, size: int, stride: int) -> Var:
    def make_parameter(number: int) -> list[int]:
        return [number if each == axis else 1 for each in range(2, x.rank)]

    mean: Var = mb.avg_pool(x=x, kernel_sizes=make_parameter(size), strides=make_parameter(stride), pad_type="valid")
    return mean


def _slice_axis(mb: RewriteBuilder, x: Var, axis: int, begin: int, end: int) -> Var:
    """Slice one axis of `x` from `begin` to `end`, which is at most 0 and counts from the end of the axis."""
    begins, ends = [0] * x.rank, [0] * x.rank
    begins[axis], ends[axis] = begin, end
    part: Var = mb.slice_by_index(x=x, begin=begins, end=ends, end_mask=[each == 0 for each in ends])
    return part


def _average_windows(mb: RewriteBuilder, x: Var, plan: _AxisPlan) -> Var:
    """Lay the rows of the stride that follow a row beside it, up to the length of a window, and average them."""
    axis, stride, rows_per_window = plan.axis, plan.stride, math.ceil(plan.size / plan.stride)
    rows = plan.count + rows_per_window - 1
    missing = rows * stride - int(x.shape[axis])
    if missing < 0:
        x = _slice_axis(mb, x, axis, 0, missing)
    if missing > 0:  # zeros after the last window, which reads none of them
        x = _pad_axis(mb, x, axis, (0, missing))
    shape = get_reshape_extents(x.shape)
    x = mb.reshape(x=x, shape=[*shape[:axis], rows, stride, *shape[axis + 1:]])
    parts: list[Any] = []
    for number in range(rows_per_window):
        begins, ends = [0] * x.rank, [0] * x.rank
        begins[axis], ends[axis] = number, number + plan.count
        ends[axis + 1] = min(stride, plan.size - number * stride)
        is_all = rows == plan.count and ends[axis + 1] == stride
        parts.append(x if is_all else mb.slice_by_index(
            x=x, begin=begins, end=ends, end_mask=[end == 0 for end in ends]))
    window = mb.concat(values=parts, axis=axis + 1) if len(parts) > 1 else parts[0]
    mean: Var = mb.reduce_mean(x=window, axes=[axis + 1], keep_dims=False)
    return mean


def _read_remaining_inputs(op: Operation, done: list[int]) -> dict[str, Any]:
    """Return the inputs of `op` except x, for the axes that are not done."""
    inputs = {name: get_const_value(var) for name, var in op.inputs.items() if name != "x" and var is not None}
    for axis in done:
        for name in {"kernel_sizes", "strides"} & inputs.keys():
            inputs[name][axis - 2] = 1
        if "pad" in inputs:
            inputs["pad"][2 * (axis - 2):2 * (axis - 1)] = [0, 0]
    return inputs


def _make_pool_example(
    name: str, sizes: list[int], settings: dict[str, Any] | None = None, *, strides: list[int] | None = None,
    pad_type: str = "valid", shape: tuple[int | None, ...] = (1, 2, 45, 45), **parameters: Any,
) -> Example:
    shared = {"kernel_sizes": sizes, "strides": strides or [1] * len(sizes), "pad_type": pad_type}
    return make_op_example(name, "avg_pool", shape, {**shared, **parameters}, **(settings or {}))
