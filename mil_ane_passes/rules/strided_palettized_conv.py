"""Find palettized convs with a stride over 2."""

from __future__ import annotations

from collections.abc import Iterable

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var

from ..ir.query import get_const_value, is_compressed
from ..passes.contract import Example, Hit, Miss, Rule
from ..passes.evidence import cite_apple_authoring_rules
from ..passes.examples import build_program, make_example, make_weight

_LUT_OP = "constexpr_lut_to_dense"


class StridedPalettizedConv(Rule):
    """A conv with palettized weights strides further than 2, for which Apple says support is limited.

    why     Apple's rules for the Neural Engine: strides over 2 have limited support with palettized weights. What
            happens then, and on which chips, they do not say; they are written for Core AI, the same engine behind
            another front end.
    when    conv with a stride over 2 on any axis and a weight that is palettized, joint compression included.
    fix     Leave this weight uncompressed (op_name_configs of coremltools.optimize takes a name to None). Or bring the
            phases of the input into its channels and run at stride 1; a patch embedding is that already where its
            kernel equals its stride: a reshape and a transpose, then a 1x1 conv (the same sums).
    """

    code, slug = "ANE517", "strided-palettized-conv"
    roots = ("conv",)
    level, confidence = "note", "high"
    advice = "Leave this conv's weight uncompressed, or bring the phases of the input into its channels first."
    evidence = (
        cite_apple_authoring_rules("strides over 2 have limited support with palettized weights"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        strides = get_const_value(op.strides, [1])
        if max(strides) <= 2 or not _is_palettized(op.weight):
            return Miss(op, "stride up to 2, or no palettized weight", near=False)
        return Hit(op, note=f"stride {'x'.join(map(str, strides))} with palettized weights")

    def examples(self) -> Iterable[Example]:
        yield Example("patches", lambda: _build_conv(4))
        yield Example("stride 2", lambda: _build_conv(2), reason="stride up to 2, or no palettized weight")
        yield make_example(
            "plain weight",
            lambda x: Builder.conv(x=x, weight=make_weight(4, 2, 4, 4), strides=[4, 4], name="y"),
            reason="stride up to 2, or no palettized weight",
            x=(1, 2, 16, 16),
        )


def _is_palettized(var: Var) -> bool:
    """Return whether the ops that decompress `var` include a lookup table."""
    while is_compressed(var):
        if var.op.op_type == _LUT_OP:
            return True
        data = var.op.inputs.get("data")
        if data is None:
            return False
        var = data
    return False


def _build_conv(stride: int) -> Program:
    def body(x: Var) -> Var:
        indices = (np.arange(4 * 2 * 16) % 4).reshape(4, 2, 4, 4).astype(np.uint8)
        stored = Builder.constexpr_lut_to_dense(indices=indices, lut=make_weight(1, 1, 1, 1, 256, 1))
        result: Var = Builder.conv(x=x, weight=stored, strides=[stride, stride], name="y")
        return result

    return build_program(body, opset=ct.target.iOS18, x=(1, 2, 16, 16))

