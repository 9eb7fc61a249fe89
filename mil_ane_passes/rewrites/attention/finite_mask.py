"""Make the infinities of masks finite before a softmax."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
from coremltools.converters.mil.mil import Block, Operation, Var

from ...ir.builder import RewriteBuilder
from ...ir.query import is_opaque
from ...passes.contract import BlockRewrite, Community, Exactness, Example, Hit, Miss, Vendor
from ...passes.evidence import cite_apple_authoring_rules
from ...utils.errors import InputError
from ..convolution._conv_1d_lifting import rebuild_op
from . import _mask_examples as shown
from ._mask_flow import (
    CARRIED_INPUTS,
    FP16_MAX,
    MaskDestination,
    MaskFlow,
    can_hold_mask,
    count_const_bytes,
    find_non_binary_factor,
    has_softmax,
    iterate_float_constants,
    replace_infinities,
)

_MAX_MASK_SUM, _MIN_MASK_MARGIN = 62500.0, 1000.0
"Largest sum of masks in fp16, with room for scores; smallest margin of a mask below every score it masks."
_UNDERFLOW = 745.0
"exp of anything below minus this number is 0 in every precision."
_SPREAD, _LARGEST = 10.0, 30.0
"""For inputs up to M, at most `_LARGEST`, scores lie within `_SPREAD` M^2 of each other. Where elements of queries and
keys are M in size, their product over the root of their length deviates by M^2 whatever the length, and two of them lie
within 10 M^2, which is 7 deviations of their difference. At `value=-1e4` the largest M is 30."""
_MAX_VALUE = 60000.0
"Largest magnitude of `value`, so that adding a score does not overflow."
_MAX_SEARCHED_BYTES = 1 << 16
"""Largest size in bytes of a const that is searched for infinities although it does not reach a softmax.

The search is only for the report of why it is not rewritten.
"""


class FiniteMask(BlockRewrite):
    """Replace -inf, and what fp16 cannot hold, in additive masks by a number that silences as well and stays finite.

    why     The ANE treats infinities as ordinary numbers in a softmax. In fp16 a mask of -1e9 or finfo(float32).min is
            -inf on any machine, 0 * -inf in (1 - mask) * -inf is NaN, and so is the softmax of a row of -inf.
    when    A const with numbers of 65504 and more is added, multiplied, selected, filled in or looked up, in fp16 or on
            the way to it, and every reader of the result ends in a softmax (or the mask of an attention op). They
            become `value`; where a finite mask reaches the same softmax, they go below that one, as far as fp16 has
            room. Left alone: masks that something else looks at (a test for -inf, a maximum, an output), whose softmax
            is tested for NaN, or that computed numbers scale, unless those are whole; and bounds of scores.
    exact   rounding, in effect: a masked weight is exactly 0 before and after. Only a row that is masked throughout
            changes: NaN becomes the softmax of its scores, or even weights where the mask took their place, as with
            ever larger finite masks. Proved for inputs up to 30 (at -1e3 up to 5): larger queries and keys may make
            scores that outrank the mask. Apple writes -1e4 (ml-ane-transformers) and -4e4 (coreai-models).
    cost    none at run time; a const that something else reads, too, stays beside the new one.

    before
        %0: bool[2, 1, 8] = greater(x=%m, y=0.0)
        %1: fp16[2, 1, 8] = cast(x=%0, dtype=fp16)
        %2: fp16[2, 1, 8] = sub(x=1.0, y=%1)
        %3: fp16[2, 1, 8] = mul(x=%2, y=-inf)
        %4: fp16[2, 3, 8] = add(x=%x, y=%3)
        %y: fp16[2, 3, 8] = softmax(x=%4)
    after
        %0: bool[2, 1, 8] = greater(x=%m, y=0.0)
        %1: fp16[2, 1, 8] = cast(x=%0, dtype=fp16)
        %2: fp16[2, 1, 8] = sub(x=1.0, y=%1)
        %3: fp16[2, 1, 8] = mul(x=%2, y=-10000.0)
        %4: fp16[2, 3, 8] = add(x=%x, y=%3)
        %y: fp16[2, 3, 8] = softmax(x=%4)
    """

    code, slug = "ANE310", "infinite-mask"
    after = ("fp16_compute",)
    exactness = Exactness.ROUNDING
    bound = ("none where the scores of a row lie within 8000 of each other (at value=-1e4), as a masked weight is then "
             "0 in every precision; a row masked throughout: an fp16 score beside -1e4 is rounded to a multiple of 8")
    preset = "safe"
    fixes_nonfinite = True
    within = (0.0, _LARGEST)  # range of a model's inputs; less where a hit's mask is smaller
    evidence = (
        cite_apple_authoring_rules("the ANE does not handle minus infinity in softmax correctly; masks use -40000"),
        Vendor("attention masks for the ANE hold -1e4 where nothing is to be attended to",
               source="https://github.com/apple/ml-ane-transformers", date="2022"),
        Community("the exponent field of all ones is read as an ordinary one: infinity is 2**16, NaN 1.5 * 2**16",
                  source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/numerics.md", chip="M4, M6"),
        Community("a mask of -1e9 is minus infinity in fp16: NaN on the CPU, something else on the ANE",
                  source="https://github.com/cactus-compute/cactus/pull/734"),
    )

    value: float = -1e4
    "The number that a masked score is set to or lowered by: -60000 to -1000."

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        if not -_MAX_VALUE <= self.value <= -_MIN_MASK_MARGIN:
            raise InputError(f"finite_mask: option 'value' is {self.value:g}; expected -60000 to -1000")
        if not has_softmax(block):
            return
        flow = None
        for op in block.operations:
            if (
                op.op_type in CARRIED_INPUTS
                and not is_opaque(op)
                and len(op.outputs) == 1
                and can_hold_mask(op, _MAX_SEARCHED_BYTES)
            ):
                flow = flow or MaskFlow(block)
                answer = self._match_op(op, flow)
                if answer is not None:
                    yield answer

    def _match_op(self, op: Operation, flow: MaskFlow) -> Hit | Miss | None:
        fate = flow.find_destination(op.outputs[0])
        looked_at = [
            (name, var)
            for name, var in iterate_float_constants(op)
            if not fate.reason or count_const_bytes(var) <= _MAX_SEARCHED_BYTES
        ]
        found = [(name, var) for name, var in looked_at if flow.beyond(var)]
        if op.op_type == "minimum":  # an upper bound, which masks nothing, would clip scores
            found = [(name, var) for name, var in found if np.min(var.val) <= -FP16_MAX]
        if not found or op.op_type == "maximum":  # the larger of a value and minus infinity is the value
            return None
        if fate.reason:
            return Miss(op, f"an infinite constant, but {fate.reason}")
        if not fate.half:
            return Miss(op, "the mask and its softmax are held in fp32, which has numbers of that size")
        if (by := find_non_binary_factor(op)) is not None:
            return Miss(op, f"the infinite constant is scaled by '{by.name}', which may be no mask of 0 and 1")
        level = self._choose_level(fate)
        if level * fate.factor - fate.finite < _MIN_MASK_MARGIN:
            met = f", beside a finite mask of {-fate.finite:g}" if fate.finite >= _MIN_MASK_MARGIN else ""
            return Miss(op, f"the mask is scaled by {fate.factor:g} on its way{met}: {-level * fate.factor:g} would "
                            "not silence every score, and fp16 has no room for more")
        total = max(fate.copies, 1.0) * level + fate.finite
        if total > _MAX_MASK_SUM:
            return Miss(op, f"masks on the way to the same softmax would add up to {-total:g}, which fp16 has no room "
                            f"for beside a score; value={self.value:g} is too large for that many")
        room = level * fate.factor - fate.finite - _UNDERFLOW
        return Hit(op, found=found, level=level, within=(0.0, min(_LARGEST, math.sqrt(room / _SPREAD))),
                   note=f"what is infinite in fp16 becomes {-level:g}")

    def _choose_level(self, fate: MaskDestination) -> float:
        """Choose the mask's magnitude: that of `value`, or larger than the finite masks added to it, to outrank
        them."""
        level = abs(self.value)
        if level * fate.factor - fate.finite >= _MIN_MASK_MARGIN:
            return level
        return min((fate.finite + level) / fate.factor, (_MAX_MASK_SUM - fate.finite) / max(fate.copies, 1.0))

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        changed: dict[Var, Var] = {}
        above = hit.op.op_type != "minimum"
        for _, var in hit.found:
            def make(var: Var = var) -> Var:
                made: Var = mb.const(val=replace_infinities(var.val, hit.level, above), name=f"{var.name}_finite")
                return made

            changed[var] = mb.once((var, hit.level, above), make)
        inputs = {}
        for name in {name for name, _ in hit.found}:
            bound = hit.op.inputs[name]
            inputs[name] = [changed.get(each, each) for each in bound] if isinstance(bound, (list, tuple)) \
                else changed[bound]
        return {hit.op.outputs[0]: rebuild_op(mb, hit.op, **inputs)}

    def examples(self) -> Iterable[Example]:
        yield Example("product", shown.build_product_mask, within=shown.MAX_SCORE)
        for name, build in shown.REWRITTEN_EXAMPLES.items():
            yield Example(name, build, within=shown.MAX_SCORE)
        yield Example("attention op", shown.build_attention_op, within=40.0)
        yield Example("another value", shown.build_product_mask, options={"value": -4e4}, within=shown.MAX_SCORE)
        yield Example("below a finite mask", shown.build_infinite_and_finite_mask, within=shown.MAX_SCORE)
        for name, (build, reason) in shown.UNCHANGED_EXAMPLES.items():
            yield Example(name, build, reason=reason)
        yield Example("two of -40000", shown.build_causal_and_padding, options={"value": -4e4},
                      reason="masks on the way to the same softmax would add up to -80000, which fp16 has no room for "
                             "beside a score; value=-40000 is too large for that many")
