"""Compute values of rank 6 and more with at most five axes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Var

from ...ane.limits import collect_evidence, find_limit
from ...ir.builder import RewriteBuilder
from ...ir.large_values import group_ops_by_large_values
from ...passes.contract import BlockRewrite, Community, Exactness, Example, Hit, Miss, Vendor
from ...passes.examples import make_example, make_weight
from ...rules.shapes import RankAbove5
from ._rank_lowering import BITWISE_OPS, RankBounds, build_region, plan_region


class LowerRank(BlockRewrite):
    """Reshape values of rank 6 and more to rank 5 or less by merging adjacent axes that all ops treat alike.

    why     The maximum rank is 5 for Core ML and for the ANE. Swin windows, patches, pixel shuffles and grouped heads
            are implemented as reshape to 6 axes, transpose, reshape. coremltools' own pass fixes exactly this sequence;
            with an op between them, or with two transposes, conversion fails.
    when    All ops of a region of such values are of these types: reshapes, transposes, elementwise ops, broadcasts,
            select, reductions, softmax, layer norm, concat, stack, split, slices, tile, matmul, linear, shape. At most
            one dimension is dynamic after axes are merged, or all dynamic sizes are elements of the operand `shape` of
            a reshape. Merged axes are within the limits of all chips of the target (16384 up to M3). A transpose whose
            axes cannot be merged to five becomes two, or up to `max_transposes`.
    exact   bitwise, except for sums: sums over merged axes are rounded in a different order.
    cost    the original reshapes; more transposes if one is not enough, each a pass over the data.

    before
        %0: fp16[1, 2, 4, 2, 4, 4] = reshape(x=%x, shape=[-1, 2, 4, 2, 4, 4])
        %1: fp16[1, 2, 2, 4, 4, 4] = transpose(x=%0, perm=[0, 1, 3, 2, 4, 5])
        %y: fp16[4, 16, 4] = reshape(x=%1, shape=[-1, 16, 4])
    after
        %0: fp16[2, 4, 2, 4, 4] = reshape(x=%x, shape=[2, 4, 2, 4, 4])
        %1: fp16[2, 2, 4, 4, 4] = transpose(x=%0, perm=[0, 2, 1, 3, 4])
        %y: fp16[4, 16, 4] = reshape(x=%1, shape=[4, 16, 4])
    """

    fixes = (RankAbove5,)
    stage = "decompose"
    exactness = Exactness.ROUNDING
    bound = "sums, means and softmaxes over merged axes add the same numbers in a different order; the rest is bitwise"
    preset = "full"
    confidence = "high"
    evidence = (
        *collect_evidence("rank"),
        Vendor("Core ML does not support tensors with a rank greater than five (a maintainer)", date="2023-01-09",
               source="https://github.com/apple/coremltools/issues/1723"),
        Community("a log of Core ML's: ANE does not support blob with rank: 6", date="2023-08-09",
                  source="https://github.com/microsoft/onnxruntime/issues/14212"),
    )

    max_transposes: int = 3
    "Maximum number of transposes that replace one."
    any_extent: bool = False
    """Merge axes beyond the ANE's limit, too: a program of rank 6 cannot run at all, a merged one can run on the
    CPU."""

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        most = find_limit("rank", self.generations)
        longest = find_limit("spatial", self.generations)
        if most is None or longest is None:
            return
        bounds = RankBounds(most.most, sys.maxsize if self.any_extent else longest.most, self.max_transposes)
        for ops, var in group_ops_by_large_values(block, lambda shape: len(shape) > most.most):
            plans = plan_region(block, ops, bounds)
            if isinstance(plans, str):
                yield Miss(ops[0], plans)
                continue
            exact = Exactness.BITWISE if all(op.op_type in BITWISE_OPS for op in ops) else None
            yield Hit(ops[0], plans=plans, most=most.most, exactness=exact, covers=ops,
                      note=f"'{var.name}' of rank {var.rank} and {len(ops)} ops in {most.most} axes and fewer")

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        return build_region(mb, hit.plans, hit.most)

    def examples(self) -> Iterable[Example]:
        yield _make_windows_example("windows")
        yield _make_windows_example("an op between", lambda v: Builder.relu(x=v))
        yield _make_windows_example("a sum", lambda v: Builder.reduce_sum(x=v, axes=[2, 4], keep_dims=True), (-1, 4))
        yield _make_windows_example("a norm", lambda v: Builder.layer_norm(
            x=v, axes=[5], gamma=make_weight(4), epsilon=np.float16(0.125)))
        yield make_example("two transposes", _build_shuffle, x=(8, 16))
        yield _make_windows_example("a table is added", lambda v: Builder.add(x=v, y=make_weight(2, 1, 4)))
        yield _make_windows_example("sorted", lambda v: Builder.topk(x=v, k=2, name="best")[0], (-1, 2),
                                    reason="topk 'best_0': topk is not known to be equivalent with fewer axes")
        yield make_example("rank 5", lambda x: Builder.reshape(x=x, shape=[2, 4, 2, 4, 3]), reason="", x=(1, 8, 8, 3))


def _make_windows_example(
    name: str,
    between: Callable[[Var], Var] | None = None,
    last: Sequence[int] = (-1, 16, 4),
    reason: str | None = None,
) -> Example:
    """Make an example of windows of an image, with `between` before they are transposed."""

    def build_body(x: Var) -> Var:
        value = Builder.reshape(x=x, shape=[-1, 2, 4, 2, 4, 4])
        value = Builder.transpose(x=between(value) if between is not None else value, perm=[0, 1, 3, 2, 4, 5])
        result: Var = Builder.reshape(x=value, shape=list(last), name="y")
        return result

    return make_example(name, build_body, reason=reason, x=(1, 8, 8, 4))


def _build_shuffle(x: Var) -> Var:
    value = Builder.transpose(x=Builder.reshape(x=x, shape=[-1, 2, 4, 2, 2, 2]), perm=[5, 3, 1, 4, 2, 0])
    result: Var = Builder.reshape(x=value, shape=[-1, 8], name="y")
    return result
