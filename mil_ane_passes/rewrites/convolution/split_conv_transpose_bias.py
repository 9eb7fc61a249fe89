"""Add the bias of a conv_transpose in a separate op."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var

from ...ane.limits import find_exceeded_limit
from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import get_const_value, get_itemsize, get_static_shape, is_all_zero, is_const
from ...passes.contract import Community, Exactness, Example, Hit, Miss, Rewrite, Severity
from ...passes.examples import make_example, make_weight
from ...passes.layout import compute_padded_bytes, format_bytes
from ._examples import make_conv_transpose_example


class SplitConvTransposeBias(Rewrite):
    """Split the bias off a conv_transpose and add it in a separate op, which is correct on the ANE.

    why     The fault of `ane::lift_conv_transpose_1d`, fixed without changing the layout: one more add, no dummy axis.
            The lift is bitwise, but its verified form makes rows of one element, 32 times the bytes at fp16. So the
            preset `safe` lifts, and `full` splits ops that the target supports without a lift.
    when    x of rank 3 (any rank with any_rank=true), a constant bias of the output's dtype. A bias that is all zero
            is dropped, which is bitwise. A kernel that covers more than the target supports on the width is lifted to
            the height instead (any_kernel=true splits it, too).
    exact   rounding: the sum is rounded once before the bias is added and once after.
    cost    one add over the output; the layout stays. None for a bias that is dropped.
    undone  by coremltools' `common::fuse_conv_bias`, which folds the add back. In `ane.pipeline()` this pass runs after
            it; a later run of coremltools' default pipeline over the result folds it again.

    before
        %y: fp16[1, 2, 26] = conv_transpose(x=%x, weight=<fp16[4, 2, 5]>, bias=[0.5, -1.0], strides=[3])
    after
        %0: fp16[1, 2, 26] = conv_transpose(x=%x, weight=<fp16[4, 2, 5]>, strides=[3])
        %y: fp16[1, 2, 26] = add(x=%0, y=[[[0.5], [-1.0]]])
    """

    code, slug = "ANE302", "conv-transpose-bias-fused"
    stage = "numerics"
    exactness = Exactness.ROUNDING
    bound = "half a unit in the last place of the sum without bias, plus half of the result"
    preset = "full"
    severity = Severity.SUGGESTION
    roots = ("conv_transpose",)
    evidence = (
        Community(
            "conv_transpose without bias, then add, is correct on the ANE",
            source="https://zhaode.wang/2025/08/18/coreml-conv1d", date="2025-08",
        ),
    )

    any_rank: bool = False
    "Split 2-D and 3-D conv_transpose, too; the defect is reported for 1-D only."

    any_kernel: bool = False
    "Split even if the kernel is too wide for the target, so that the op stays off the ANE."

    def match(self, op: Operation) -> Hit | Miss:
        if op.bias is None:
            return Miss(op, "no bias to split off", near=False)
        if op.x.rank != 3 and not self.any_rank:
            return Miss(op, f"x has rank {op.x.rank}, not 3; any_rank=true splits it too", near=False)
        if is_all_zero(op.bias):
            return Hit(op, note="bias is all zero: dropped", exactness=Exactness.BITWISE, drop=True)
        if not is_const(op.bias):
            return Miss(op, "bias is not a plain const")
        if op.bias.dtype != op.outputs[0].dtype:
            return Miss(op, "bias has a dtype other than the output, so an add would need a cast")
        covered = self._unsupported_width(op)
        if covered:
            return Miss(op, f"kernel covers {covered} on the width, more than the target supports; use "
                            f"ane::lift_conv_transpose_1d (any_kernel=true splits it)")
        return Hit(op, note=_describe_cost(op), drop=False)

    def _unsupported_width(self, op: Operation) -> int:
        """Return the width that the kernel of a 1-D op covers, if it is too wide for the target; else 0."""
        if self.any_kernel or op.x.rank != 3:
            return 0
        covered = (int(op.weight.shape[2]) - 1) * int(get_const_value(op.dilations, [1])[0]) + 1
        return covered if find_exceeded_limit("conv-kernel-width", covered, tuple(self.generations)) else 0

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        op = hit.op
        unbiased = rebuild_op(mb, op, bias=None)
        if hit.drop:
            return unbiased
        channels = (1, int(op.bias.shape[0]), *[1] * (op.x.rank - 2))
        total: Var = mb.add(x=unbiased, y=mb.reshaped(op.bias, channels))
        return total

    def examples(self) -> Iterable[Example]:
        example = make_conv_transpose_example
        image: dict[str, Any] = {"x": (1, 4, 8, 3), "weight": (4, 2, 5, 1)}
        yield example("strided", strides=[3])
        yield example("output shape", strides=[2], pad_type="custom", pad=[1, 1], output_shape=[1, 2, 18])
        yield example("zero bias", bias=(0.0, 0.0))
        yield example("first bias 0", bias=(0.0, 0.5))
        yield example("rank 4", **image, options={"any_rank": True})
        yield example("wide", strides=[2], dilations=[4], options={"any_kernel": True})
        yield example("wide left alone", strides=[2], dilations=[4],
                      reason="kernel covers 17 on the width, more than the target supports; use "
                             "ane::lift_conv_transpose_1d (any_kernel=true splits it)")
        yield example("rank 4 left alone", **image, reason="x has rank 4, not 3; any_rank=true splits it too")
        yield example("no bias", bias=None, reason="no bias to split off")
        yield make_example("bias of another dtype", _build_fp32_weights, x=(1, 4, 8),
                           reason="bias has a dtype other than the output, so an add would need a cast")


def _describe_cost(op: Operation) -> str:
    """Describe the cost in the format of the lift's note: buffers unchanged, one more pass over the output."""
    y, size = op.outputs[0], "of symbolic size"
    shape = get_static_shape(y)
    if shape is not None:
        size = format_bytes(compute_padded_bytes(shape, get_itemsize(y)))
    return f"same layout; one more add over the output (buffer {size}, computed, 64-byte rows)"


def _build_fp32_weights(x: Var) -> Var:
    bias = np.array([0.5, -1.0], np.float32)
    built: Var = Builder.conv_transpose(x=x, weight=make_weight(4, 2, 5, dtype=np.float32), name="y", bias=bias)
    return built
