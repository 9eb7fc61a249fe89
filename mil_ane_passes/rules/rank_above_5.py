"""Find tensors of more than 5 dimensions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from coremltools.converters.mil.mil import Block, Builder, Program, Var

from ..ane.limits import collect_evidence
from ..ir.large_values import group_ops_by_large_values
from ..passes.contract import BlockRule, Community, Example, Hit, Miss, Vendor
from ..passes.examples import build_program


class RankAbove5(BlockRule):
    """A tensor has more dimensions than the ANE's five.

    why     Apple and the reports agree: five dimensions are the most, for Core ML as a whole and for the ANE.
    when    A value of rank 6 and more that is read or made. Ops that hand such values to one another are one finding.
    fix     Merge axes that stay together, or do the reshape and transpose in two steps of rank 4 or 5: the same bits.
            coremltools' expand_high_rank_reshape_and_transpose does it for a reshape, transpose, reshape.
    """

    code, slug = "ANE225", "rank-above-5"
    refuses, confidence = True, "high"
    advice = "Merge axes that stay together, or transpose in two steps of rank 4 or 5: the same bits."
    evidence = (
        *collect_evidence("rank"),
        Vendor("Core ML does not support tensors with a rank greater than five (a maintainer)", date="2023-01-09",
               source="https://github.com/apple/coremltools/issues/1723"),
        Community("a log of Core ML's: ANE does not support blob with rank: 6", date="2023-08-09",
                  source="https://github.com/microsoft/onnxruntime/issues/14212"),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        for ops, var in group_ops_by_large_values(block, lambda shape: len(shape) > 5):
            more = f"; {len(ops)} ops read or make such values" if len(ops) > 1 else ""
            yield Hit(ops[0], covers=ops, note=f"'{var.name}' has rank {var.rank}, the limit is 5{more}")

    def examples(self) -> Iterable[Example]:
        yield Example("windows", lambda: _build_window_partition(1, 2, 4, 2, 4, 3))
        yield Example("rank 5", lambda: _build_window_partition(2, 4, 2, 4, 3), reason="")


def _build_window_partition(*shape: int) -> Program:
    def body(x: Var) -> Var:
        split = Builder.reshape(x=x, shape=list(shape))
        turned = Builder.transpose(x=split, perm=[*range(len(shape) - 2), len(shape) - 1, len(shape) - 2])
        result: Var = Builder.reshape(x=turned, shape=[1, 8, 8, 3], name="y")
        return result

    return build_program(body, x=(1, 8, 8, 3))
