"""Run a 1-D conv as a 2-D one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from coremltools.converters.mil.mil import Operation, Var

from ...ane.limits import find_exceeded_limit
from ...ir.builder import RewriteBuilder
from ...passes.contract import Community, Exactness, Example, Hit, Miss, Rewrite, Severity
from ...passes.evidence import cite_m4_study
from ...rules.convolution import Conv1dKernel
from ._conv_1d_lifting import choose_dummy_axis, describe_lift_cost, find_lift_obstacle, lift_conv
from ._examples import make_conv_example


class LiftConv1d(Rewrite):
    """Lift 1-D conv to 2-D with a dummy axis.

    why     With axis=-1 the kernel lies on the height, where an M4 supports 31 against 15 on the width. The report
            behind `ane::lift_conv_transpose_1d` advises Conv2d over Conv1d in general, for the transposed case only.
            Together with `ane::carry_lift` it keeps an entire 1-D network in one layout.
    when    x of rank 3, and a kernel that covers more than the target supports on the width (to which Core ML is
            predicted to map it); others need no lift. With `always` every conv of rank 3 is lifted.
    exact   bitwise: the dummy axis has kernel 1, stride 1 and no padding; the weight is a view of the same bytes.
    undone  axis=2 by coremltools' `common::compose_conv1d` (a second run of its default pipeline); axis=-1 by no pass.
            `ane.pipeline()` places this pass after it.
    cost    axis=-1 makes the last axis 1, which is padded to 64 bytes: 32 times its size at fp16. It is used if the
            kernel covers more than 13, or on request: narrower kernels use the width (axis=auto).

    before
        %y: fp16[1, 6, 40] = conv(x=%x, weight=<fp16[6, 4, 16]>, pad_type=same)
    after
        %0: fp16[1, 4, 40, 1] = expand_dims(x=%x, axes=[-1])
        %1: fp16[1, 6, 40, 1] = conv(x=%0, weight=<fp16[6, 4, 16, 1]>, pad_type=same)
        %y: fp16[1, 6, 40] = squeeze(x=%1, axes=[-1])
    """

    fixes = (Conv1dKernel,)
    stage = "layout"
    exactness = Exactness.BITWISE
    preset = "full"
    severity, confidence = Severity.SUGGESTION, "low"
    roots = ("conv",)
    evidence = (
        cite_m4_study("conv kernels 1x16 are unsupported by the ANE, Kx1 up to 31 are supported"),
        Community("use Conv2d rather than Conv1d (shown for the transposed case)",
                  source="https://zhaode.wang/2025/08/18/coreml-conv1d", date="2025-08"),
    )

    axis: Literal["auto", -1, 2] = "auto"
    "Position of the dummy axis: -1 puts the kernel on the height, 2 on the width (kernels that cover up to 13, auto)."

    always: bool = False
    "Lift also convs that the target supports without it."

    def match(self, op: Operation) -> Hit | Miss:
        if op.x.rank != 3:
            return Miss(op, f"x has rank {op.x.rank}, not 3", near=False)
        kernel = int(op.weight.shape[2])
        if not self.always and find_exceeded_limit("conv-kernel-width", kernel, tuple(self.generations)) is None:
            return Miss(op, f"a kernel of {kernel} is supported in one dimension; after lifting, its buffers would "
                            f"have rows of one element (always=true lifts it)", near=False)
        axis = choose_dummy_axis(op, self.axis)
        reason = find_lift_obstacle(op, axis)
        if reason:
            return Miss(op, reason)
        return Hit(op, note=describe_lift_cost(op, axis))

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        return lift_conv(mb, hit.op, choose_dummy_axis(hit.op, self.axis))

    def examples(self) -> Iterable[Example]:
        def make_case(
            name: str, always: bool = True, axis: int = -1, reason: str | None = None, **rest: Any,
        ) -> Example:
            options = {"axis": axis} | ({"always": True} if always else {})
            return make_conv_example(name, (1, 4, 8), (6, 4, 5), options=options, reason=reason, **rest)

        yield make_conv_example("wide", (1, 4, 40), (6, 4, 16), pad_type="same")
        yield make_case("valid")
        yield make_case("padded", strides=[2], pad_type="custom", pad=[2, 1])
        yield make_case("same", strides=[2], pad_type="same")
        yield make_case("same_lower", strides=[2], pad_type="same_lower")
        yield make_conv_example("depthwise", (1, 4, 8), (4, 1, 5), groups=4, dilations=[2], pad_type="same",
                                options={"always": True})
        yield make_case("on the width", axis=2)
        yield make_conv_example("by its width", (1, 4, 8), (6, 4, 5), options={"always": True})
        yield make_case("small", always=False,
                   reason="a kernel of 5 is supported in one dimension; after lifting, its buffers would have rows of "
                          "one element (always=true lifts it)")
        yield make_case("too wide", axis=2, dilations=[4], pad_type="same",
                   reason="kernel covers 17 on the width, above 13; use axis=-1 (the height)")
        yield make_conv_example("rank 4", (1, 4, 8, 8), (6, 4, 3, 3), reason="x has rank 4, not 3")
