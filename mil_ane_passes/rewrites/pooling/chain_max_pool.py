"""Compute the maximum of a large window in steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from coremltools.converters.mil.mil import Operation, Var, types

from ...ane.limits import collect_evidence
from ...ir.builder import RewriteBuilder
from ...passes.contract import FP32_UNSUPPORTED_REASON, Community, Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_ane_compiler
from ...passes.examples import make_op_example
from ...rules.pooling import MaxPoolKernel, OldPools
from ._pool_windows import (
    Pads,
    find_fully_covered_axes,
    find_max_window_sides,
    has_supported_strides,
    match_large_window,
    read_kernel_sizes,
    read_strides,
)


class ChainMaxPool(Rewrite):
    """Replace a max_pool whose window exceeds the limit by a chain of smaller ones.

    why     An M4 supports max_pool windows up to 8 wide (Core ML's message also allows 32, which was not tried).
            Without Core ML, the ANE's compiler rejects sides over 31 (over 29 on M1, but windows of 30 and 31 are
            skipped on every chip), and iPhones of 2020 rejected windows over 13 and strides over 2. The maximum over K
            elements is that over k2 neighbouring maxima of k1 elements each, with k1 + k2 - 1 = K.
    when    An fp16 pool whose window exceeds the limit of a chip of the target. Pools that only chips up to A13 reject
            are skipped unless the target has only such chips. An axis covered by one window becomes a reduce_max. Pools
            with a window entirely in the padding, or after the input (ceil_mode), are skipped: their result is
            undefined.
    exact   the same numbers, except for the sign of a zero if zeros of both signs are the maximum. The padding, which
            counts as minus infinity, is distributed over the steps so that every window contains an element of the
            input; the last step has the stride. An unsupported stride becomes stride 1 and a slice with step s.
    cost    each step except the last is a pass over the input at full size.

    before
        %y: fp16[1, 2, 16, 16] = max_pool(x=%x, kernel_sizes=[9, 9], pad_type=same)
    after
        %0: fp16[1, 2, 16, 20] = max_pool(x=%x, kernel_sizes=[1, 5], pad_type=custom, pad=[0, 0, 4, 4])
        %y: fp16[1, 2, 16, 16] = max_pool(x=%0, kernel_sizes=[9, 5], pad_type=custom, pad=[4, 4, 0, 0])
    """

    fixes = (MaxPoolKernel, OldPools)
    stage = "decompose"
    exactness = Exactness.ROUNDING
    bound = "no rounding: the same numbers, but for the sign of a zero where zeros of both signs are the maximum"
    preset = "full"
    roots = ("max_pool",)
    evidence = (
        *collect_evidence("max-pool-width", "pool-kernel", "pool-stride"),
        cite_ane_compiler("the limit of a pool's window is 29 on M1, 31 later"),
        Community("kernel size > 13 is not supported in ANE", date="2020-07-14",
                  source="https://github.com/hollance/neural-engine/issues/1"),
    )

    always: bool = False
    "Rewrite pools that are unsupported only on chips up to A13, for any target."
    max_steps: int = 16
    "Maximum number of steps that replace one op."

    def match(self, op: Operation) -> Hit | Miss:
        match = match_large_window(op, self.generations, self.always)
        if isinstance(match, Miss):
            return match
        unsupported, pads = match
        covered = find_fully_covered_axes(op, pads)
        most = find_max_window_sides(op, self.generations, self.always)
        count = max(_count_steps(op, covered, most))
        if count > self.max_steps:
            return Miss(op, f"would need {count} steps, max_steps is {self.max_steps}")
        steps = _plan_steps(op, covered, most)
        return Hit(op, note=f"{unsupported}: {_describe_steps(steps, covered)}", covered=covered, steps=steps,
                   pads=pads, keeps_strides=has_supported_strides(op, self.generations, self.always))

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        op, covered = hit.op, hit.covered
        x: Var = mb.reduce_max(x=op.x, axes=covered, keep_dims=True) if covered else op.x
        rest: Pads = [(0, 0) if axis in covered else pads for axis, pads in enumerate(hit.pads, start=2)]
        strides = [1 if axis in covered else stride for axis, stride in enumerate(read_strides(op), start=2)]
        for number, sizes in enumerate(hit.steps):
            pads = [(min(before, size - 1), min(after, size - 1)) for (before, after), size in zip(rest, sizes)]
            rest = [(old[0] - new[0], old[1] - new[1]) for old, new in zip(rest, pads)]
            is_last = number == len(hit.steps) - 1
            padding: dict[str, Any] = {"pad_type": "valid"}
            if any(map(any, pads)):
                padding = {"pad_type": "custom", "pad": [amount for pair in pads for amount in pair]}
            step_strides = strides if is_last and hit.keeps_strides else [1] * len(sizes)
            x = mb.max_pool(x=x, kernel_sizes=sizes, strides=step_strides, **padding)
        if not hit.keeps_strides and max(strides) > 1:
            x = mb.slice_by_index(x=x, begin=[0] * x.rank, end=[0] * x.rank, stride=[1, 1, *strides],
                                  end_mask=[True] * x.rank)
        return x

    def examples(self) -> Iterable[Example]:
        yield _make_pool_example("9x9", [9, 9])
        yield _make_pool_example("one row, strided", [1, 20], strides=[1, 2], pad_type="custom", pad=[0, 0, 7, 5])
        yield _make_pool_example(
            "more counted", [3, 9], strides=[2, 4], pad_type="custom", pad=[1, 1, 2, 2], ceil_mode=True)
        yield _make_pool_example("all of one axis", [3, 9], strides=[1, 9], pad_type="custom", pad=[0, 0, 0, 1],
                                 shape=(1, 2, 16, 8))
        yield _make_pool_example("all", [9, 9], pad_type="custom", pad=[0, 1, 0, 1], shape=(1, 2, 8, 8))
        yield _make_pool_example("1-D", [10], pad_type="same_lower", shape=(1, 3, 30))
        yield _make_pool_example("3-D", [2, 3, 9], shape=(1, 2, 3, 5, 12))
        yield _make_pool_example("a long stride", [3, 3], {"options": {"always": True}}, strides=[3, 3],
                                 pad_type="valid")
        yield _make_pool_example("fits", [9, 8], {"reason": "fits"})
        yield _make_pool_example("old chips only", [3, 3], {
            "reason": "unsupported on A12 and A13 only; choose one of them as the target"}, strides=[3, 3])
        yield _make_pool_example("too many steps", [9, 9], {
            "options": {"max_steps": 1}, "reason": "would need 2 steps, max_steps is 1"})
        yield _make_pool_example("fp32", [9, 9], {"dtype": types.fp32, "reason": FP32_UNSUPPORTED_REASON})
        yield _make_pool_example("padding alone", [1, 9], {"reason": "a window may be entirely in the padding"},
                                 pad_type="custom", pad=[0, 0, 9, 9])
        yield _make_pool_example("symbolic, same", [9, 9], {
            "reason": "pad_type same depends on the input's size, which is symbolic"}, strides=[2, 2],
            shape=(1, 2, 16, None))


def _count_steps(op: Operation, covered: list[int], most: list[int]) -> list[int]:
    """Count the windows of at most `most` elements that each axis needs."""
    return [math.ceil(reach / (limit - 1)) for reach, limit in zip(_compute_reaches(op, covered), most)]


def _compute_reaches(op: Operation, covered: list[int]) -> list[int]:
    """Compute how far the windows extend beyond one element, by axis."""
    return [0 if axis in covered else int(size) - 1 for axis, size in enumerate(read_kernel_sizes(op), start=2)]


def _plan_steps(op: Operation, covered: list[int], most: list[int]) -> list[list[int]]:
    """Plan the windows of each step; an axis with fewer windows has them in the last steps, where the stride is."""
    windows = [_split_reach(reach, count)
               for reach, count in zip(_compute_reaches(op, covered), _count_steps(op, covered, most))]
    is_strided = any(stride > 1 and axis not in covered for axis, stride in enumerate(read_strides(op), start=2))
    length = max(int(is_strided), *map(len, windows))
    return [list(sizes) for sizes in zip(*([1] * (length - len(sizes)) + sizes for sizes in windows))]


def _split_reach(reach: int, count: int) -> list[int]:
    """Split a window that extends `reach` beyond one element into `count` windows, the larger ones first."""
    return [1 + reach // count + (number < reach % count) for number in range(count)]


def _describe_steps(steps: list[list[int]], covered: list[int]) -> str:
    reduced = [f"reduce_max over axes {', '.join(map(str, covered))}"] if covered else []
    return ", ".join(reduced + ["x".join(map(str, sizes)) for sizes in steps])


def _make_pool_example(
    name: str, sizes: list[int], settings: dict[str, Any] | None = None, *, strides: list[int] | None = None,
    pad_type: str = "same", shape: tuple[int | None, ...] = (1, 2, 16, 16), **parameters: Any,
) -> Example:
    shared = {"kernel_sizes": sizes, "strides": strides or [1] * len(sizes), "pad_type": pad_type}
    return make_op_example(name, "max_pool", shape, {**shared, **parameters}, **(settings or {}))
