"""Split products that stream their weights again for each tile of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ane.latency_parameters import find_chips
from ...ane.latency_terms import compute_terms
from ...ir.builder import RewriteBuilder
from ...ir.weight_cuts import find_cut_unit
from ...passes.contract import Community, Exactness, Example, Hit, Miss, Rewrite, Severity
from ...passes.examples import make_example, make_weight
from .._weights import split_aligned
from ._sums_of_parts import (
    CHANNEL_STEP,
    Parts,
    StoredProduct,
    build_sum_of_parts,
    find_form_obstacle,
    find_gain_obstacle,
    find_stored_product,
    find_weight_obstacle,
)

_CHIP = "m2"
"The chip on which parts were measured to be faster."
_MIN_PASSES = 2.0
"How often weights have to be streamed: between once and twice the model goes from the longer of two times to a sum."
_PREFILL = "trisanths/ane-llm-prefill"


class SplitLinearInner(Rewrite):
    """Split a linear, 1x1 conv or matmul with many rows along its inner dimension, so that weights are streamed once.

    why     The ANE keeps a tile of about 1 MiB of input rows and reads all weights again for each tile. For K inputs
            and M rows it reads them M * K * 2 bytes / 1 MiB times. Parts of 2048 inputs read them less often: 1.5 to
            1.8 times faster on an M2 Pro at K 4096 and 1024 rows, up to 5.1 times at K 16384.
    when    fp16, a stored weight, more than `inner` inputs, a static number of rows, weights streamed at least twice,
            and an estimated gain of at least 10 % of the latency on an M2, including adds. Only for target m2 (and A15,
            the same generation): no gain was measured elsewhere, and on an M5 Pro parts below the threshold (K 512)
            were 4 times slower. Compressed weights are split in compressed form (tables shared), at block boundaries;
            sparse ones and tables of vectors are skipped. Splitting the outputs gained nothing.
    exact   rounding: the same products; each part's sum is rounded to fp16, and each add.
    cost    one add of the result's size per additional part, and one more part in memory. Core ML's segmenter estimates
            a higher cost; the guard keeps the rewrite because of its latency gain.

    before
        %y: fp16[3, 4] = linear(x=%x, weight=<fp16[4, 8]>, bias=[-0.6875, -0.25, 0.1875, 0.625])
    after
        %0: fp16[3, 4], %1: fp16[3, 4] = split(x=%x, split_sizes=[4, 4], axis=-1)
        %2: fp16[3, 4] = linear(x=%0, weight=<fp16[4, 4]>, bias=[-0.6875, -0.25, 0.1875, 0.625])
        %3: fp16[3, 4] = linear(x=%1, weight=<fp16[4, 4]>)
        %y: fp16[3, 4] = add(x=%2, y=%3)
    """

    code, slug = "ANE620", "weights-streamed-again"
    stage = "decompose"
    after = ("split_inner_product", "split_wide_linear")
    exactness = Exactness.ROUNDING
    bound = ("half a unit in the last place for each part and each add; a part that overflows fp16 although the sum "
             "does not is infinite")
    keeps_nonfinite = False  # parts that overflow with both signs sum to NaN
    preset = "full"
    roots = ("linear", "matmul", "conv")
    severity = Severity.SUGGESTION
    evidence = (
        Community("one linear, 1024 rows, K = N = 4096: 6.38 ms, in parts of 2048 4.23, of 1024 4.63; eight in a row "
                  "39.9, 24.8 and 22.6 ms; with int8 weights 4.18 and 4.16, eight 26.1 and 21.4 (not through Core ML)",
                  source=_PREFILL, chip="M2 Pro", os="macOS 27"),
        Community("blocks of a 14B model, 1024 rows: 5.06 TFLOP/s with K 5120, 7.69 in parts of 2560, 8.66 of 1280",
                  source=_PREFILL, chip="M2 Pro", os="macOS 27"),
        Community("contradicts it: splitting the outputs gains nothing (K = N = 8192: 38.8 ms, 39.8 in two)",
                  source=_PREFILL, chip="M2 Pro", os="macOS 27"),
        Community("contradicts it: K 512 in 16 parts of 32, int8 activations and 4-bit weights, is 4 times slower: "
                  "below the size of one tile there is no gain",
                  source="cadamcat/llms-on-apple-neural-engine", chip="M5 Pro"),
    )

    inner: int = 2048
    "Maximum number of inputs of a part."
    max_parts: int = 16
    "Maximum number of parts of one product."
    max_bytes: int = 1 << 24
    "Maximum additional weight bytes for one op, if another op uses the entire weight."
    always: bool = False
    "Rewrite every product over more than `inner` inputs, for any target and latency."

    def match(self, op: Operation) -> Hit | Miss:
        product = find_stored_product(op)
        if isinstance(product, str):
            return Miss(op, product, near=False)
        if self.inner < 1:
            return Miss(op, f"parts of {self.inner} inputs; expected at least 1")
        if product.inner <= self.inner or product.has_taps:
            return Miss(op, f"not a pointwise product over more than {self.inner} inputs", near=False)
        parts = self._compute_parts(product)
        reason = self._find_speed_obstacle(product, parts) or find_weight_obstacle(
            product, parts, self._find_parts, self.max_bytes)
        if reason:
            return Miss(op, reason)
        passes = compute_terms(product.work, find_chips(_CHIP)[0]).passes
        return Hit(op, product=product, parts=parts,
                   note=f"{product.work.positions} rows of {product.inner} inputs, so that weights are streamed "
                        f"{passes:.1f} times, in {len(parts)} parts")

    def _compute_parts(self, product: StoredProduct) -> Parts:
        """Compute parts of at most `inner` inputs, which end where blocks of a compressed weight do."""
        unit = find_cut_unit(product.weight, product.weight_axis)
        step = math.lcm(unit, CHANNEL_STEP) if isinstance(unit, int) else CHANNEL_STEP
        return split_aligned(product.inner, -(-product.inner // self.inner), min(step, self.inner))

    def _find_speed_obstacle(self, product: StoredProduct, parts: Parts) -> str:
        reason = find_form_obstacle(product)
        passes = 0.0 if reason else compute_terms(product.work, find_chips(_CHIP)[0]).passes
        if not reason and not self.always and passes < _MIN_PASSES:
            streamed = "once" if passes <= 1 else f"{passes:.1f} times"
            reason = f"weights are streamed {streamed}, and parts gain from twice on"
        if not reason and not self.always:
            reason = find_gain_obstacle(product, parts, _CHIP, self.generations, ", and slower on M5 at small sizes")
        if not reason and len(parts) > self.max_parts:
            return f"{len(parts)} parts, above max_parts={self.max_parts}"
        return reason

    def _find_parts(self, op: Operation) -> Parts | None:
        """Find the parts that another reader of a weight is cut into; None if it is not."""
        product = find_stored_product(op)
        if isinstance(product, str) or product.inner <= self.inner:
            return None
        parts = self._compute_parts(product)
        return None if self._find_speed_obstacle(product, parts) else parts

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        return build_sum_of_parts(mb, hit.product, hit.parts)

    def examples(self) -> Iterable[Example]:
        small = {"always": True, "inner": 4}
        yield make_example(
            "linear", lambda x: Builder.linear(x=x, weight=make_weight(4, 8), bias=make_weight(4), name="y"),
            options=small, within=1000, x=(3, 8))
        yield make_example(
            "conv", lambda x: Builder.conv(x=x, weight=make_weight(4, 10, 1, 1), bias=make_weight(4), name="y"),
            options=small, within=1000, x=(1, 10, 2, 3))
        yield make_example(
            "matmul", lambda x: Builder.matmul(x=x, y=make_weight(4, 8), transpose_x=True, transpose_y=True, name="y"),
            options=small, within=1000, x=(2, 8, 3))
        yield make_example(
            "palette", lambda x: Builder.linear(x=x, weight=_build_palette(4, 8), name="y"), options=small,
            within=1000, opset=ct.target.iOS18, x=(3, 8))
        yield _make_large_example(
            "named chip", 1024,
            reason="parts were measured to be faster on M2 only, and slower on M5 at small sizes; choose that target, "
                   "or always=true")
        yield _make_large_example(
            "few rows", 64,
            reason="weights are streamed once, and parts gain from twice on")
        yield _make_large_example(
            "rows not known", None,
            reason="the number of rows is dynamic, and for some numbers parts may be slower")
        yield make_example(
            "many parts", lambda x: Builder.linear(x=x, weight=make_weight(4, 16), name="y"),
            options={**small, "max_parts": 3}, reason="4 parts, above max_parts=3", x=(3, 16))
        yield make_example(
            "taps", lambda x: Builder.conv(x=x, weight=make_weight(4, 8, 1, 3), name="y"), options=small,
            reason="not a pointwise product over more than 4 inputs", x=(1, 8, 2, 3))
        yield make_example(
            "sparse", lambda x: Builder.linear(x=x, weight=_build_sparse(4, 8), name="y"), options=small,
            opset=ct.target.iOS18, x=(3, 8),
            reason="the weight is made by constexpr_sparse_to_dense, which cannot be split")


def _make_large_example(name: str, rows: int | None, *, reason: str) -> Example:
    weight = np.broadcast_to(np.float16(0.5), (4096, 4096))
    return make_example(name, lambda x: Builder.linear(x=x, weight=weight, name="y"), reason=reason, x=(rows, 4096))


def _build_palette(*shape: int) -> Var:
    indices = (np.arange(math.prod(shape)) * 5 % 16).reshape(shape).astype(types.np_uint4_dtype)
    built: Var = Builder.constexpr_lut_to_dense(indices=indices, lut=make_weight(*[1] * len(shape), 16, 1))
    return built


def _build_sparse(*shape: int) -> Var:
    mask = (np.arange(math.prod(shape)) % 2).reshape(shape).astype(types.np_uint1_dtype)
    built: Var = Builder.constexpr_sparse_to_dense(nonzero_data=make_weight(math.prod(shape) // 2), mask=mask)
    return built
