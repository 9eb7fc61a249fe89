"""Find pools with a window or stride that is too large for older chips."""

from __future__ import annotations

from collections.abc import Iterable

from coremltools.converters.mil.mil import Builder, Operation, Program

from ..ane.limits import collect_evidence, find_exceeded_limit
from ..ir.query import get_const_value
from ..passes.contract import Community, Example, Hit, Miss, Rule
from ..passes.evidence import cite_2020_layer_list, cite_apple_authoring_rules
from ..passes.examples import build_program
from ..passes.targets import Gate, format_generations
from ._sizes import read_kernel_size, select_generations


class OldPools(Rule):
    """A pool's window is over 13 or its stride over 2, which the ANE of older chips does not take.

    why     Logs of Core ML of 2020 refuse a pool 28 wide ("> 13") and one with stride 4 ("> 2"). The newest chip of
            that day was A13. Later ones were not measured, but for windows up to 14 on an M4; Apple advises strides of
            2 or 4 for pools.
    when    Chips up to A13: any pool with such a window or stride. M1 to M3: a stride over 2 that is not 4, which is
            not known.
    fix     max_pool: a chain of smaller windows, stride 1 and then the real one, or stride 1 and slice_by_index with
            the stride (the same bits). avg_pool over the whole: reduce_mean.
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
            "pools with a kernel over 13 or a stride over 2 are among the layers that leave the ANE; some of the "
            "list is guessed"
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
                note=f"stride {max(steps)}: refused up to A13, not measured on {format_generations(later)}",
            )
        return Miss(op, "fits", near=False)

    def examples(self) -> Iterable[Example]:
        yield Example("window 14", lambda: _build_pool(14, 1))
        yield Example("stride 3", lambda: _build_pool(3, 3))
        yield Example("stride 4", lambda: _build_pool(4, 4))
        yield Example("window 13, stride 2", lambda: _build_pool(13, 2), reason="fits")


def _build_pool(size: int, stride: int) -> Program:
    return build_program(
        lambda x: Builder.avg_pool(x=x, kernel_sizes=[size] * 2, strides=[stride] * 2, pad_type="valid", name="y"),
        x=(1, 2, 28, 28),
    )
