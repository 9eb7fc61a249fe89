"""Pools whose windows or strides the ANE does not support."""

from __future__ import annotations

from collections.abc import Iterable

from coremltools.converters.mil.mil import Builder, Operation, Program

from ..ane.limits import MAX_POOL_SIDE, collect_evidence, find_exceeded_limit
from ..ir.query import get_const_value
from ..passes.contract import Community, Example, Hit, Miss, Rule
from ..passes.evidence import cite_2020_layer_list, cite_ane_compiler, cite_apple_authoring_rules, cite_m4_study
from ..passes.examples import build_program
from ..passes.targets import Gate, format_generations
from ._sizes import read_kernel_size, select_generations


class MaxPoolKernel(Rule):
    """The window of a pool exceeds the ANE's limit: a width of 8 for max_pool, more for other pools.

    why     Core ML's message for a max_pool on an M4: its width "must be [1-8] or 32". Windows 9 and 15 wide are
            unsupported; one 9 tall and 1 wide is supported. All measured windows of avg_pool are supported, up to
            14x14. Without Core ML, the ANE's compiler rejects windows longer than 31 (29 on M1) of every pool.
    when    max_pool with a window wider than 8; any pool with a side over 31. Reported as unknown: a max_pool 32 wide,
            which the message allows, 1-D and 3-D max pools, and limits that were not measured
            through Core ML.
    fix     max_pool: ane::chain_max_pool splits it into a chain of k1 and k2 with k1 + k2 - 1 = K, the first with
            stride 1 and the second with the original stride (the same values). avg_pool: ane::chain_avg_pool replaces
            it by a reduce_mean, or by the mean of smaller ones.
    """

    code, slug = "ANE222", "pool-window"
    roots = ("max_pool", "avg_pool", "l2_pool")
    refuses, confidence = True, "high"
    advice = "Chain smaller max pools (windows k1 + k2 - 1 = K); use reduce_mean for a mean over all elements."
    evidence = (
        *collect_evidence("max-pool-width"),
        cite_m4_study("avg_pool is accepted to 14x14, the largest tried; l2_pool with 2x2"),
        cite_ane_compiler("the limit of a pool's window is 29 on M1, 31 later"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        window = read_kernel_size(op)
        if window is None:
            return Miss(op, "the window is not constant", near=False)
        width, looked_at = window[-1], tuple(self.generations)
        wide = find_exceeded_limit("max-pool-width", width, looked_at) if op.op_type == "max_pool" else None
        if wide and width != 32:
            flat = len(window) == 2
            message = f"Invalid Pool kernel width ({width}), must be [1-8] or 32."
            beside = "" if flat else f"; measured in 2-D, not in {len(window)}-D"
            return Hit(op, note=f"window width {width} {wide.words}{beside}", sure=flat and wide.sure,
                       message=message if flat and select_generations(looked_at, "m4") else None)
        if max(window) > MAX_POOL_SIDE:
            allowed = ", though Core ML's message on an M4 allows a width of 32" if wide else ""
            sides = "x".join(map(str, window))
            return Hit(
                op,
                sure=False,
                note=f"window {sides} has a side over {MAX_POOL_SIDE}, the limit of the ANE's compiler without Core ML"
                f"{allowed}; not measured through Core ML",
            )
        at_limit = op.op_type == "max_pool" and width == 8
        return Miss(op, "window width 8, the limit is 8 on M4" if at_limit else "fits", near=at_limit)

    def examples(self) -> Iterable[Example]:
        yield Example("9x9", lambda: _build_wide_pool("max_pool", 9, 9))
        yield Example("1x9", lambda: _build_wide_pool("max_pool", 1, 9))
        yield Example("32 wide", lambda: _build_wide_pool("max_pool", 1, 32))
        yield Example("1-D", lambda: _build_wide_pool("max_pool", 10))
        yield Example("a large mean", lambda: _build_wide_pool("avg_pool", 40, 40))
        yield Example("9x1", lambda: _build_wide_pool("max_pool", 9, 1), reason="fits")
        yield Example("8x8", lambda: _build_wide_pool("max_pool", 8, 8), reason="window width 8, the limit is 8 on M4")
        yield Example("mean of 14x14", lambda: _build_wide_pool("avg_pool", 14, 14), reason="fits")


def _build_wide_pool(kind: str, *window: int) -> Program:
    if kind == "max_pool":
        return build_program(
            lambda x: Builder.max_pool(x=x, kernel_sizes=window, strides=[1] * len(window), pad_type="same", name="y"),
            x=(1, 2, *[48] * len(window)),
        )
    return build_program(
        lambda x: Builder.avg_pool(x=x, kernel_sizes=window, strides=[1] * len(window), pad_type="same", name="y"),
        x=(1, 2, *[48] * len(window)),
    )


class OldPools(Rule):
    """A pool has a window over 13 or a stride over 2, which is unsupported on the ANE of older chips.

    why     Logs of Core ML of 2020 reject a pool 28 wide ("> 13") and one with stride 4 ("> 2"). The newest chip at
            that time was A13. Later chips were not measured, except windows up to 14 on an M4; Apple advises strides of
            2 or 4 for pools.
    when    Chips up to A13: any pool with such a window or stride. M1 to M3: a stride over 2 other than 4, as unknown.
    fix     max_pool: a chain of smaller windows, the last one with the original stride, or stride 1 and slice_by_index
            with the stride (the same bits). avg_pool over all elements: reduce_mean.
    """

    code, slug = "ANE229", "old-pool-limits"
    roots = ("max_pool", "avg_pool", "l2_pool")
    targets = Gate(last="m3")
    refuses, confidence = True, "medium"
    advice = "Pool with stride 1 and slice with the stride, or chain smaller max pools: the same bits."
    evidence = (
        *collect_evidence("pool-kernel", "pool-stride"),
        Community(
            "kernel size > 13 is not supported in ANE",
            date="2020-07-14",
            source="https://github.com/hollance/neural-engine/issues/1",
        ),
        cite_2020_layer_list(
            "pools with a kernel over 13 or a stride over 2 are among the layers that leave the ANE; parts of the "
            "list are guesses"
        ),
        cite_apple_authoring_rules("use pooling strides of 2 or 4"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        window, strides = read_kernel_size(op), get_const_value(op.strides)
        if window is None:
            return Miss(op, "the window is not constant", near=False)
        looked_at, steps = tuple(self.generations), strides or [1] * len(window)
        large = find_exceeded_limit("pool-kernel", max(window), looked_at)
        far = find_exceeded_limit("pool-stride", max(steps), looked_at)
        found = [f"window {max(window)} {large.words}"] if large else []
        found += [f"stride {max(steps)} {far.words}"] if far else []
        if found:
            return Hit(op, note=" and ".join(found), sure=any(one.sure for one in (large, far) if one))
        later = select_generations(looked_at, "m1", "m2", "m3")
        if later and any(step not in (1, 2, 4) for step in steps):
            return Hit(
                op,
                sure=False,
                note=f"stride {max(steps)}: unsupported up to A13, not measured on {format_generations(later)}",
            )
        return Miss(op, "fits", near=False)

    def examples(self) -> Iterable[Example]:
        yield Example("window 14", lambda: _build_strided_pool(14, 1))
        yield Example("stride 3", lambda: _build_strided_pool(3, 3))
        yield Example("stride 4", lambda: _build_strided_pool(4, 4))
        yield Example("window 13, stride 2", lambda: _build_strided_pool(13, 2), reason="fits")


def _build_strided_pool(size: int, stride: int) -> Program:
    return build_program(
        lambda x: Builder.avg_pool(x=x, kernel_sizes=[size] * 2, strides=[stride] * 2, pad_type="valid", name="y"),
        x=(1, 2, 28, 28),
    )
