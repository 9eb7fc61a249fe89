"""Compute group norms at rank 4."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Var

from ...ane.limits import find_limit
from ...ir.builder import RewriteBuilder
from ...ir.large_values import group_ops_by_large_values
from ...ir.query import get_const_value
from ...passes.contract import BlockRewrite, Exactness, Example, Hit, Miss, Severity
from ...passes.examples import make_example
from ...rules.normalization import GroupNormRank5
from ..layout._rank_lowering import RankBounds, build_region, plan_region

_GROUPED_RANK = 5
"Rank of the values that are normalized: [N, G, C / G, H, W]."


class GroupNormRank4(BlockRewrite):
    """Compute group norm at rank 4 by merging two adjacent axes of [N, G, C / G, H, W].

    why     Apple's models for Core AI compute group norm at rank 4, because at rank 5 it is "not supported" on an ANE
            of the M4's generation. In contrast, Apple's diffusion models for the ANE have torch's GroupNorm, which
            coremltools lowers at rank 5, and single ops of rank 5 are supported on an M4. The rewrite has no cost in
            either case.
    when    reduce_mean over at least the last two axes of a value of rank 5 that a reshape made of one of lower rank,
            with the elementwise ops around it, as far as values of rank 5 reach. At most one dimension is dynamic. The
            two shortest adjacent axes that all ops treat alike are merged: N and G, or two of C / G, H and W.
    exact   rounding: the means are over the same numbers.
    cost    none: the original reshapes, to another shape.

    before
        %0: fp16[2, 2, 4, 4, 8] = reshape(x=%x, shape=[2, 2, 4, 4, -1])
        %1: fp16[2, 2, 1, 1, 1] = reduce_mean(x=%0, axes=[2, 3, 4], keep_dims=True)
        %2: fp16[2, 2, 4, 4, 8] = sub(x=%0, y=%1)
        %3: fp16[2, 2, 4, 4, 8] = square(x=%2)
        %4: fp16[2, 2, 1, 1, 1] = reduce_mean(x=%3, axes=[2, 3, 4], keep_dims=True)
        %5: fp16[2, 2, 1, 1, 1] = add(x=%4, y=1.0013580322265625e-05)
        %6: fp16[2, 2, 1, 1, 1] = sqrt(x=%5)
        %7: fp16[2, 2, 4, 4, 8] = real_div(x=%2, y=%6)
        %y: fp16[2, 8, 4, 8] = reshape(x=%7, shape=[2, 8, 4, -1])
    after
        %0: fp16[4, 4, 4, 8] = reshape(x=%x, shape=[4, 4, 4, 8])
        %1: fp16[4, 1, 1, 1] = reduce_mean(x=%0, axes=[1, 2, 3], keep_dims=True)
        %2: fp16[4, 4, 4, 8] = sub(x=%0, y=%1)
        %3: fp16[4, 4, 4, 8] = square(x=%2)
        %4: fp16[4, 1, 1, 1] = reduce_mean(x=%3, axes=[1, 2, 3], keep_dims=True)
        %5: fp16[4, 1, 1, 1] = add(x=%4, y=1.0013580322265625e-05)
        %6: fp16[4, 1, 1, 1] = sqrt(x=%5)
        %7: fp16[4, 4, 4, 8] = real_div(x=%2, y=%6)
        %y: fp16[2, 8, 4, 8] = reshape(x=%7, shape=[2, 8, 4, 8])
    """

    fixes = (GroupNormRank5,)
    stage = "decompose"
    after = ("lower_rank", "triangle_cumsum")
    exactness = Exactness.ROUNDING
    bound = "the means are over the same numbers, which may be added in a different order"
    preset = "full"
    severity, confidence = Severity.SUGGESTION, "low"

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        longest = find_limit("spatial", self.generations)
        if longest is None or not any(_is_group_mean(op) for op in block.operations if op.op_type == "reduce_mean"):
            return
        for ops, _ in group_ops_by_large_values(block, lambda shape: len(shape) == _GROUPED_RANK):
            means = [op for op in ops if _is_group_mean(op)]
            if not means:
                continue
            plans = plan_region(block, ops, RankBounds(_GROUPED_RANK - 1, longest.most, 1))
            if isinstance(plans, str):
                yield Miss(means[0], plans)
                continue
            shape = "x".join(map(str, means[0].x.shape))
            yield Hit(means[0], plans=plans, note=f"a group norm of {shape} in four axes")

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        return build_region(mb, hit.plans, _GROUPED_RANK - 1)

    def examples(self) -> Iterable[Example]:
        yield make_example("torch's", _build_group_norm, x=(2, 8, 4, 8))
        yield make_example("one image", _build_group_norm, x=(1, 8, 4, 8))
        yield make_example(
            "a sequence in between",
            lambda x: _build_group_norm(x, lambda v: Builder.cumsum(x=v, axis=2, name="c")),
            reason="cumsum 'c': cumsum is not known to be equivalent with fewer axes",
            x=(2, 8, 4, 8),
        )
        yield make_example(
            "no norm",
            lambda x: Builder.reshape(x=Builder.relu(x=Builder.reshape(x=x, shape=[1, 2, 4, 8, 4])), shape=[64, 4]),
            reason="",
            x=(1, 8, 8, 4),
        )


def _is_group_mean(op: Operation) -> bool:
    """Return whether `op` is the mean of a group, of a value that a reshape has split from a lower rank."""
    if op.op_type != "reduce_mean" or op.x.rank != _GROUPED_RANK:
        return False
    axes = {int(axis) % _GROUPED_RANK for axis in get_const_value(op.axes, list(range(_GROUPED_RANK)))}
    reshape = op.x.op
    return {3, 4} <= axes and reshape is not None and reshape.op_type == "reshape" and reshape.x.rank < _GROUPED_RANK


def _build_group_norm(x: Var, compute: Callable[[Var], Var] | None = None) -> Any:
    groups = Builder.reshape(x=x, shape=[x.shape[0], 2, 4, 4, -1])
    difference = Builder.sub(x=groups, y=Builder.reduce_mean(x=groups, axes=[2, 3, 4], keep_dims=True))
    if compute is not None:
        difference = compute(difference)
    variance = Builder.reduce_mean(x=Builder.square(x=difference), axes=[2, 3, 4], keep_dims=True)
    deviation = Builder.sqrt(x=Builder.add(x=variance, y=np.float16(1e-5)))
    return Builder.reshape(x=Builder.real_div(x=difference, y=deviation), shape=[x.shape[0], 8, 4, -1], name="y")
