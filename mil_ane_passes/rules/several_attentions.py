"""Find functions with several fused attentions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import coremltools as ct
from coremltools.converters.mil.mil import Block, Builder, Function, Operation, Program, Var

from ..ir.query import is_opaque
from ..passes.contract import BlockRule, Community, Example, Hit, Miss
from ..passes.evidence import cite_apple_authoring_rules, cite_m4_study
from ..passes.examples import build_program

_ATTENTION_OP = "scaled_dot_product_attention"


class SeveralAttentions(BlockRule):
    """Two fused attentions in one function may send the whole model to the CPU.

    why     Reported for attentions over all of a long sequence with large heads: with two of them in one function the
            ANE's compiler fails ("live input tensor not used in network"), and the model runs on the CPU without a
            word; with one it compiles, and attentions over a sliding window did no harm. One alone is accepted on an
            M4, with and without a mask; Apple's own advice for the ANE is to write attention out.
    when    A function, nested blocks included, with two and more scaled_dot_product_attention. Which of them are too
            large is not known, so the longest keys and the largest head are named.
    fix     Write it out: matmul, softmax, matmul (rounded otherwise), one head at a time as Apple does; converting for
            iOS17 and before does it. coremltools' scaled_dot_product_attention_sliced_q slices the queries.
    """

    code, slug = "ANE232", "several-fused-attentions"
    confidence = "medium"
    advice = "Write attention out as matmul, softmax, matmul (rounded otherwise), or convert for iOS17."
    evidence = (
        Community("with two or more fused attentions over long keys in one function ANECCompile fails and the model "
                  "falls back to the CPU without an error; 9 layers with one compile, 10 layers with two do not",
                  source="https://github.com/kasper0406/stablehlo-coreml/pull/89", os="macOS 26.5 and 26.6",
                  date="2026-08-26"),
        cite_m4_study("one scaled_dot_product_attention is accepted, with a mask, too"),
        cite_apple_authoring_rules("no fused attention on the ANE's path: split heads, einsum, softmax, einsum"),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        if not isinstance(block, Function):
            return
        found = list(_iterate_attentions(block))
        if len(found) == 1:
            yield Miss(found[0], "one fused attention in the function, two are reported to fail")
        elif found:
            keys, heads = (max((op.key.shape[at] for op in found), key=_to_number) for at in (-2, -1))
            yield Hit(found[0], covers=found, note=f"{len(found)} fused attentions in one function (keys up to {keys} "
                                                   f"long, heads up to {heads}); two large ones are reported to fail")

    def examples(self) -> Iterable[Example]:
        yield Example("two", lambda: _build_attentions(2))
        yield Example(
            "one", lambda: _build_attentions(1), reason="one fused attention in the function, two are reported to fail"
        )
        yield Example("none", lambda: _build_attentions(0), reason="")


def _iterate_attentions(block: Block) -> Iterator[Operation]:
    pending = [block]
    while pending:
        for op in pending.pop().operations:
            pending.extend(op.blocks)
            if op.op_type == _ATTENTION_OP and not is_opaque(op):
                yield op


def _to_number(extent: object) -> int:
    return int(str(extent)) if str(extent).isdigit() else 0


def _build_attentions(count: int) -> Program:
    def body(q: Var, k: Var, v: Var) -> Var:
        for _ in range(count):
            q = Builder.scaled_dot_product_attention(query=q, key=k, value=v)
        result: Var = Builder.relu(x=q, name="y")
        return result

    return build_program(body, opset=ct.target.iOS18, q=(1, 2, 3, 4), k=(1, 2, 5, 4), v=(1, 2, 5, 4))
