"""Run a 1-D conv_transpose with a bias as a 2-D one, which is computed correctly on the ANE."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from coremltools.converters.mil.mil import Operation, Var

from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import is_all_zero
from ...passes.contract import Community, Exactness, Example, Hit, Miss, Rewrite, Severity
from ._conv_1d_lifting import describe_lift_cost, find_lift_obstacle, lift_conv
from ._examples import make_conv_transpose_example


class LiftConvTranspose1d(Rewrite):
    """Lift 1-D conv_transpose with a bias to 2-D, so that the ANE adds the bias to every element.

    why     On the ANE the bias of a 1-D conv_transpose of some sizes reaches only the first values of each channel:
            wrong numbers, no error. CPU and GPU are correct. The 2-D op with a dummy axis was verified to be correct.
    when    x of rank 3 with a bias. A bias that is all zero is dropped instead: the fault needs a non-zero one.
    exact   bitwise: the dummy axis has kernel 1, stride 1 and no padding; the weight is a view of the same bytes.
    cost    axis=-1 (the form that was verified) makes the last axis 1, which is padded to 64 bytes, 32 times its size
            at fp16: 29.49 MB instead of 0.93 MB for a (1, 768, 600) input. axis=2 keeps the last axis, but has the
            limit on kernel width, and no report verifies it on an ANE: Core ML may use this form for rank 3. So the
            axis is not chosen by speed, unlike in `ane::lift_conv_1d`, and `ane::orient_conv` does not change it. The
            alternative, `ane::split_conv_transpose_bias`, keeps the layout and costs one add, which is rounded. The
            preset `full` uses it if the target supports the kernel on the width; no comparison of their speed is
            published.

    before
        %y: fp16[1, 2, 26] = conv_transpose(x=%x, weight=<fp16[4, 2, 5]>, bias=[0.5, -1.0], strides=[3])
    after
        %0: fp16[1, 4, 8, 1] = expand_dims(x=%x, axes=[-1])
        %1: fp16[1, 2, 26, 1] = conv_transpose(x=%0, weight=<fp16[4, 2, 5, 1]>, bias=[0.5, -1.0], strides=[3, 1])
        %y: fp16[1, 2, 26] = squeeze(x=%1, axes=[-1])
    """

    code, slug = "ANE301", "conv-transpose-1d-bias"
    severity = Severity.WRONG
    stage = "numerics"
    after = ("split_conv_transpose_bias",)
    exactness = Exactness.BITWISE
    preset = "safe"
    roots = ("conv_transpose",)
    evidence = (
        Community(
            "ConvTranspose1d(768, 384, 7, stride=3, padding=2) on (1, 768, 600): compute unit ALL loses the bias, "
            "CPU_ONLY and CPU_AND_GPU are correct; lifted to ConvTranspose2d it is correct",
            source="https://zhaode.wang/2025/08/18/coreml-conv1d", date="2025-08",
        ),
    )

    axis: Literal[-1, 2] = -1
    "Position of the dummy axis: -1 puts the kernel on the height, 2 on the width (kernels that cover up to 13)."

    def match(self, op: Operation) -> Hit | Miss:
        if op.x.rank != 3:
            return Miss(op, f"x has rank {op.x.rank}, not 3", near=False)
        if op.bias is None:
            return Miss(op, "no bias, so the fault has no effect", near=False)
        if is_all_zero(op.bias):
            return Hit(op, note="bias is all zero: dropped, no lift needed", drop=True)
        reason = find_lift_obstacle(op, self.axis)
        if reason:
            return Miss(op, reason)
        return Hit(op, note=describe_lift_cost(op, self.axis), drop=False)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        op = hit.op
        if hit.drop:
            return rebuild_op(mb, op, bias=None)
        return lift_conv(mb, op, self.axis)

    def examples(self) -> Iterable[Example]:
        example = make_conv_transpose_example
        yield example("strided", strides=[3])
        yield example("padded", strides=[2], pad_type="custom", pad=[2, 1])
        yield example("same", strides=[2], pad_type="same")
        yield example("dilated", dilations=[2])
        yield example("grouped", groups=2, strides=[2])
        yield example("output shape", strides=[2], pad_type="custom", pad=[1, 1], output_shape=[1, 2, 18])
        yield example("zero bias", bias=(0.0, -0.0), strides=[3])
        yield example("on the width", strides=[3], options={"axis": 2})
        yield example("too wide", dilations=[4], options={"axis": 2},
                      reason="kernel covers 17 on the width, above 13; use axis=-1 (the height)")
        yield example("rank 4", x=(1, 4, 8, 3), weight=(4, 2, 5, 1), reason="x has rank 4, not 3")
        yield example("no bias", bias=None, reason="no bias, so the fault has no effect")
