"""Find pools that are too large or stride too far for older chips."""

from __future__ import annotations

from collections.abc import Iterable

from coremltools.converters.mil.mil import Builder, Operation, Program

from ..core.contract import Community, Example, Hit, Miss, Rule
from ..core.evidence import for_authors, in_2020
from ..core.examples import program
from ..core.limits import evidence_of, over
from ..core.query import value
from ..core.targets import Gate, listed
from ._sizes import among, spatial


class OldPools(Rule):
    """A pool's window is over 13 or its stride over 2, which the ANE of older chips does not take.

    why     Logs of Core ML of 2020 refuse a pool 28 wide ("> 13") and one with stride 4 ("> 2"). The newest chip of
            that day was A13. Later ones were not measured, but for windows up to 14 on an M4; Apple advises strides of
            2 or 4 for pools.
    when    Chips up to A13: any pool with such a window or stride. M1 to M3: a stride over 2 that is not 4, which is
            not known.
    cure    max_pool: a chain of smaller windows, stride 1 and then the real one, or stride 1 and slice_by_index with
            the stride (the same bits). avg_pool over the whole: reduce_mean.
    """

    code, slug = "ANE229", "old-pool-limits"
    roots = ("max_pool", "avg_pool", "l2_pool")
    targets = Gate(last="m3")
    refuses, confidence = True, "medium"
    advice = "Pool with stride 1 and slice with the stride, or chain smaller max pools: the same bits."
    evidence = (
        *evidence_of("pool-kernel", "pool-stride"),
        Community("kernel size > 13 is not supported in ANE", date="2020-07-14",
                  source="https://github.com/hollance/neural-engine/issues/1"),
        in_2020("pools with a kernel over 13 or a stride over 2 are among the layers that leave the ANE; some of the "
                "list is guessed"),
        for_authors("use pooling strides of 2 or 4"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        window, strides = spatial(op), value(op.strides)
        if window is None:
            return Miss(op, "the window is not constant", near=False)
        looked_at, steps = tuple(self.generations), strides or [1] * len(window)
        large = over("pool-kernel", max(window), looked_at)
        far = over("pool-stride", max(steps), looked_at)
        found = [f"window {max(window)} {large.words}"] if large else []
        found += [f"stride {max(steps)} {far.words}"] if far else []
        if found:
            return Hit(op, note=" and ".join(found), sure=any(one.sure for one in (large, far) if one))
        later = among(looked_at, "m1", "m2", "m3")
        if later and any(step not in (1, 2, 4) for step in steps):
            return Hit(op, sure=False, note=f"stride {max(steps)}: refused up to A13, not measured on {listed(later)}")
        return Miss(op, "fits", near=False)

    def examples(self) -> Iterable[Example]:
        yield Example("window 14", lambda: _pool(14, 1))
        yield Example("stride 3", lambda: _pool(3, 3))
        yield Example("stride 4", lambda: _pool(4, 4))
        yield Example("window 13, stride 2", lambda: _pool(13, 2), reason="fits")


def _pool(size: int, stride: int) -> Program:
    return program(lambda x: Builder.avg_pool(x=x, kernel_sizes=[size] * 2, strides=[stride] * 2, pad_type="valid",
                                              name="y"), x=(1, 2, 28, 28))
