"""Split products whose weight has a size that streams slowly on an M4."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var

from ...ane.latency_terms import is_on_notch
from ...ir.builder import RewriteBuilder
from ...passes.contract import Community, Exactness, Example, Hit, Miss, Rewrite
from ...passes.examples import make_example, make_weight
from ...rules.weights import DmaNotch
from .._weights import split_aligned
from ._sums_of_parts import (
    CHANNEL_STEP,
    Parts,
    StoredProduct,
    build_sum_of_parts,
    compute_work_of_parts,
    find_form_obstacle,
    find_gain_obstacle,
    find_stored_product,
    find_weight_obstacle,
)

_CHIP = "m4"
"The chip on which such sizes were measured to be slow."


class SplitDmaNotch(Rewrite):
    """Split a product along its inner dimension if a core's share of its weight streams slowly on an M4.

    why     Each of 16 cores streams its share of a weight. Shares within 16 KiB of a multiple of 1 MiB stream at a
            third of the rate: a 2048x4096 layer took 840 us, 430 us when split in two; a step of Llama-3.2-1B took 76.1
            ms, 31.7 ms with 48 of its layers (2 MiB per core) split in three.
    when    fp16, an uncompressed stored weight of such a size, and an estimated gain of at least 10 % of the latency on
            an M4, including adds (not with hundreds of rows, which are compute-bound). The smallest number of parts
            without such a size is used. Only for target m4: on an M2 and M2 Pro such sizes stream as fast as others,
            and other chips were not timed.
    exact   rounding: the same products; each part's sum is rounded to fp16, and each add.
    cost    one add of the result's size per additional part. Core ML's segmenter estimates a higher cost; the guard
            keeps the rewrite because of its latency gain.

    before
        %y: fp16[1, 2048] = linear(x=%x, weight=<fp16[2048, 4096]>, bias=<fp16[2048]>)
    after
        %0: fp16[1, 2048], %1: fp16[1, 2048] = split(x=%x, split_sizes=[2048, 2048], axis=-1)
        %2: fp16[1, 2048] = linear(x=%0, weight=<fp16[2048, 2048]>, bias=<fp16[2048]>)
        %3: fp16[1, 2048] = linear(x=%1, weight=<fp16[2048, 2048]>, bias=<fp16[2048]>)
        %y: fp16[1, 2048] = add(x=%2, y=%3)
    """

    fixes = (DmaNotch,)
    stage = "decompose"
    after = ("split_inner_product", "split_linear_inner", "split_wide_linear")
    targets = DmaNotch.targets
    exactness = Exactness.ROUNDING
    bound = ("half a unit in the last place for each part and each add; a part that overflows fp16 although the sum "
             "does not is infinite")
    keeps_nonfinite = False  # parts that overflow with both signs sum to NaN
    preset = "full"
    roots = ("linear", "matmul", "conv")
    evidence = (
        *DmaNotch.evidence,
        Community("a step of Llama-3.2-1B: 76.12 ms, 31.65 ms with 48 1x1 convs of 2048 to 8192 channels (2 MiB per "
                  "core) in three parts each, all of it on the ANE", chip="M4",
                  source="https://github.com/kasper0406/stablehlo-coreml/pull/110"),
        Community("4096 x 4096 (2 MiB per core): 36.6 GB/s, 57.9 at 3072 x 3072 and 59.1 at 2048 x 2048 (not "
                  "through Core ML)", source="https://github.com/maderix/ANE", chip="M4"),
        Community("contradicts it: 4096 x 4096, 2 MiB per core, streams at 59 GB/s, as fast as 2048 x 2048 "
                  "(not "
                  "through Core ML)", source="trisanths/ane-llm-prefill", chip="M2 Pro", os="macOS 27"),
    )

    max_parts: int = 8
    "Maximum number of parts of one product."
    max_bytes: int = 1 << 24
    "Maximum additional weight bytes for one op, if another op uses the entire weight."
    always: bool = False
    "Rewrite for any target, whatever the estimated latency."

    def match(self, op: Operation) -> Hit | Miss:
        product = find_stored_product(op)
        if isinstance(product, str):
            return Miss(op, product, near=False)
        reason = find_form_obstacle(product)
        if reason:
            return Miss(op, reason, near=DmaNotch().reports_op(op))
        if not is_on_notch(product.work):
            return Miss(op, "no such size", near=False)
        parts = self._find_parts_off_notch(product)
        if parts is None:
            return Miss(op, f"no split into at most {self.max_parts} parts avoids such sizes")
        reason = self._find_speed_obstacle(product, parts) or find_weight_obstacle(
            product, parts, self._find_parts, self.max_bytes)
        if reason:
            return Miss(op, reason)
        share = product.work.dense_bytes / 16 / (1 << 20)
        note = f"{share:.2f} MiB for each of 16 cores, in {len(parts)} parts"
        return Hit(op, product=product, parts=parts, note=note)

    def _find_parts_off_notch(self, product: StoredProduct) -> Parts | None:
        for count in range(2, self.max_parts + 1):
            parts = split_aligned(product.inner, count, CHANNEL_STEP)
            if len(parts) > 1 and not any(map(is_on_notch, compute_work_of_parts(product.work, product.inner, parts))):
                return parts
        return None

    def _find_speed_obstacle(self, product: StoredProduct, parts: Parts) -> str:
        if self.always:
            return ""
        return find_gain_obstacle(product, parts, _CHIP, self.generations, ", and are not needed on M2")

    def _find_parts(self, op: Operation) -> Parts | None:
        """Find the parts that another reader of a weight is cut into; None if it is not."""
        product = find_stored_product(op)
        if isinstance(product, str) or find_form_obstacle(product) or not is_on_notch(product.work):
            return None
        parts = self._find_parts_off_notch(product)
        return None if parts is None or self._find_speed_obstacle(product, parts) else parts

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        return build_sum_of_parts(mb, hit.product, hit.parts)

    def examples(self) -> Iterable[Example]:
        always = {"always": True}
        yield make_example(
            "linear", lambda x: Builder.linear(x=x, weight=make_weight(2048, 4096), bias=make_weight(2048), name="y"),
            options=always, within=1.0, x=(1, 4096))
        # 2 MiB in all, as only two of the 16 cores have a share: quick to check.
        yield make_example(
            "matmul", lambda x: Builder.matmul(x=x, y=make_weight(524292, 2), name="y"), options=always, within=1.0,
            x=(1, 524292))
        yield make_example(
            "conv", lambda x: Builder.conv(x=x, weight=make_weight(256, 16384, 2, 1), name="y"), options=always,
            within=1.0, x=(1, 16384, 2, 1))
        yield _make_linear_example(
            "other chips", 1, 4096,
            reason="parts were measured to be faster on M4 only, and are not needed on M2; choose that target, or "
                   "always=true")
        yield _make_linear_example(
            "many rows", 2048, 4096,
            reason="weights are streamed once: 2 parts are estimated to add 7% of its time on M4, less than the "
                   "required 10%")
        yield _make_linear_example("another size", 1, 3072, reason="no such size")
        yield _make_linear_example(
            "rows not known", None, 4096,
            reason="the number of rows is dynamic, and for some numbers parts may be slower")


def _make_linear_example(name: str, rows: int | None, inputs: int, *, reason: str) -> Example:
    weight = np.broadcast_to(np.float16(0.5), (2048, inputs))
    return make_example(name, lambda x: Builder.linear(x=x, weight=weight, name="y"), reason=reason, x=(rows, inputs))
