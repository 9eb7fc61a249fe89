"""Decompose fused attention into matmuls and a softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import is_symbolic
from ...passes.contract import FP32_UNSUPPORTED_REASON, Community, Exactness, Example, Hit, Miss, Rewrite, Severity
from ...passes.evidence import cite_m4_study
from ...passes.examples import make_example
from ...rules.attention import SeveralAttentions

_MASKED_SCORE = -4e4
"Score that replaces those where a boolean mask is false: Apple's number."


class DecomposeAttention(Rewrite):
    """Decompose scaled_dot_product_attention into scale, matmul, mask, softmax, matmul.

    why     Two or more fused attentions in one function are reported to move the entire model to the CPU, and Apple
            advises to write attention as separate ops. In contrast, an M4 accepts a single one, also with a mask.
    when    fp16, with heads of static width; a mask of fp16 or bool, not larger than the scores. By name only, because
            the limit is unknown.
    exact   rounding: scores, weights and sums are rounded once each, as in coremltools' own decomposition for iOS17.
            The queries are multiplied by 1 / sqrt(E), E being the width of a head: by one fp16 number if E is a power
            of 4, otherwise by two whose product is within 5e-6 of it. A boolean mask replaces scores by -40000, so that
            an entirely masked row gives the mean of the values instead of NaN.
    cost    the scores are written to memory: queries * keys * heads numbers.

    before
        %y: fp16[1, 2, 3, 8] = scaled_dot_product_attention(query=%q, key=%k, value=%v)
    after
        %0: fp16[1, 2, 3, 16] = mul(x=%q, y=0.25)
        %1: fp16[1, 2, 3, 8] = matmul(x=%0, y=%k, transpose_y=True)
        %2: fp16[1, 2, 3, 8] = softmax(x=%1)
        %y: fp16[1, 2, 3, 8] = matmul(x=%2, y=%v)
    """

    code, slug = "ANE285", "fused-attention"
    fixes = (SeveralAttentions,)
    stage = "decompose"
    exactness = Exactness.ROUNDING
    bound = ("the fp16 roundings of scaled queries, scores and weights, which the fused op may keep (measured: "
             "2e-3 of the largest output, with heads of 64 and 64 keys; rounded once, 3e-4)")
    preset = "named"
    fixes_nonfinite = True
    moves = 1e-4
    within = (0.0, 8.0)  # larger scores would have visible rounding errors, which the fused op may avoid
    severity, confidence = Severity.SUGGESTION, "medium"
    roots = ("scaled_dot_product_attention",)
    evidence = (
        Community("with two or more fused attentions over long keys in one function ANECCompile fails and the model "
                  "falls back to the CPU without an error", os="macOS 26.5 and 26.6", date="2026-08-26",
                  source="https://github.com/kasper0406/stablehlo-coreml/pull/89"),
        cite_m4_study("contradicts it for one: scaled_dot_product_attention is accepted, with a mask, too"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        width, mask = op.query.shape[-1], op.attn_mask
        if op.query.dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        if is_symbolic(width):
            return Miss(op, "the width of a head is dynamic")
        if mask is not None and mask.dtype not in (types.bool, types.fp16):
            return Miss(op, "the mask is fp32, but queries are fp16: rounding the mask might make it infinite")
        if mask is not None and not _can_broadcast_mask(mask.shape, (*op.query.shape[:-1], op.key.shape[-2])):
            return Miss(op, "the mask has more rows or heads than the queries")
        return Hit(op, note=f"attention over {op.key.shape[-2]} keys, heads of {width}",
                   factors=find_scale_factors(int(width)))

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        op, scaled = hit.op, hit.op.query
        for factor in hit.factors:
            scaled = mb.mul(x=scaled, y=factor)
        scores = mb.matmul(x=scaled, y=op.key, transpose_y=True)
        if op.attn_mask is not None and op.attn_mask.dtype == types.bool:
            scores = mb.select(cond=op.attn_mask, a=scores, b=np.float16(_MASKED_SCORE))
        elif op.attn_mask is not None:
            scores = mb.add(x=scores, y=op.attn_mask)
        result: Var = mb.matmul(x=mb.softmax(x=scores, axis=-1), y=op.value)
        return result

    def examples(self) -> Iterable[Example]:
        yield _make_attention_example("plain", within=2.0)
        yield _make_attention_example("a head of 48", width=48, within=2.0)
        yield _make_attention_example("float mask", mask=lambda m: m, within=2.0)
        yield _make_attention_example("boolean mask", mask=lambda m: Builder.greater(x=m, y=np.float16(0)), within=2.0)
        yield _make_attention_example("fp32", dtype=types.fp32, reason=FP32_UNSUPPORTED_REASON)
        yield _make_attention_example("fp32 mask", mask=lambda m: Builder.cast(x=m, dtype="fp32"),
                                      reason="the mask is fp32, but queries are fp16: rounding the mask might make it "
                                             "infinite")
        yield _make_attention_example("open heads", width=None,
                                      reason="the width of a head is dynamic")


@cache
def find_scale_factors(width: int) -> tuple[np.float16, ...]:
    """Return fp16 numbers whose product is 1 / sqrt(width): one where that is exact, else the nearest two."""
    scale = 1 / np.sqrt(width)
    if np.float64(np.float16(scale)) == scale:
        return (np.float16(scale),)
    first = np.arange(1024, 2048).astype(np.float16) / np.float16(1024)  # every significand of fp16
    second = (scale / first.astype(np.float64)).astype(np.float16)
    best = int(np.argmin(np.abs(first.astype(np.float64) * second.astype(np.float64) - scale)))
    return first[best], second[best]


def _can_broadcast_mask(mask: tuple[object, ...], scores: tuple[object, ...]) -> bool:
    """Return whether a mask of that shape keeps the scores' shape; symbolic dimensions are assumed to fit."""
    if len(mask) > len(scores):
        return False
    pairs = zip(reversed(mask), reversed(scores))
    return all(extent in (1, score) or is_symbolic(extent) or is_symbolic(score) for extent, score in pairs)


def _make_attention_example(
    name: str, width: int | None = 16, mask: Callable[[Var], Var] | None = None, **settings: Any
) -> Example:
    def build_body(q: Var, k: Var, v: Var, m: Var | None = None) -> Any:
        masks = {"attn_mask": mask(m)} if mask is not None and m is not None else {}
        return Builder.scaled_dot_product_attention(query=q, key=k, value=v, name="y", **masks)

    shapes: dict[str, Any] = {"q": (1, 2, 3, width), "k": (1, 2, 8, width), "v": (1, 2, 8, 8)}
    if mask is not None:
        shapes["m"] = (1, 2, 3, 8)
    return make_example(name, build_body, opset=ct.target.iOS18, **shapes, **settings)
