"""Give a conv_transpose equal pads on both sides and crop the rest."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value
from ...passes.contract import Community, Exactness, Example, Hit, Miss, Rewrite, Severity
from ._conv_transpose_windows import build_symmetric_crop, describe_crop, has_explicit_window, read_pads
from ._examples import make_conv_transpose_example


class SymmetrizeConvTransposePad(Rewrite):
    """Use equal pads on both sides of a conv_transpose and slice the result, so that it is not shifted.

    why     An fp16 conv_transpose with different pads before and after an axis gives a shifted output; fp32 is correct.
    when    fp16, pad_type custom with unequal pads on any axis. An output_shape, if present, must be the one that the
            pads imply (for others see `ane::explicit_conv_transpose_shape`).
    exact   bitwise: the smaller pad on both sides computes the same sums and some more, and the slice drops those.
    cost    as many more rows as the difference of the pads. A longer pad in front gives a slice with an offset; for the
            last axis on an M1 or M2, see `ane::last_axis_slice`.

    before
        %y: fp16[1, 2, 18] = conv_transpose(x=%x, weight=<fp16[4, 2, 5]>, pad=[1, 0], pad_type=custom, strides=[2])
    after
        %0: fp16[1, 2, 19] = conv_transpose(x=%x, weight=<fp16[4, 2, 5]>, pad_type=custom, strides=[2])
        %y: fp16[1, 2, 18] = slice_by_index(x=%0, begin=[0, 0, 1], end=[0, 0, 0], end_mask=[True, True, True])
    """

    code, slug = "ANE303", "conv-transpose-unequal-pads"
    severity = Severity.WRONG
    stage = "numerics"
    after = ("explicit_conv_transpose_shape", "lift_conv_transpose_1d")
    exactness = Exactness.BITWISE
    preset = "safe"
    roots = ("conv_transpose",)
    evidence = (
        Community(
            "pad [1, 0], stride 2, output_shape 8: the fp16 output is shifted and wrong, the fp32 one correct; "
            "reproduced by a maintainer",
            source="https://github.com/apple/coremltools/issues/2324", chip="M1", os="macOS 14.3", date="2024-08",
        ),
        Community(
            "ONNX Runtime's CoreML provider declines ConvTranspose with asymmetric pads: inconsistent, right on the "
            "CPU only",
            source="https://github.com/microsoft/onnxruntime/pull/21416", date="2024-07",
        ),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if get_const_value(op.pad_type, "valid") != "custom":
            return Miss(op, "pad_type is not custom, so there are no pads to differ", near=False)
        pads = read_pads(op)
        if all(before == after for before, after in pads):
            return Miss(op, "pads are equal on both sides", near=False)
        if op.outputs[0].dtype != types.fp16:
            return Miss(op, "computed in fp32, which is correct according to the report")
        if min(min(pair) for pair in pads) < 0:
            return Miss(op, "a pad is negative, so the output reaches beyond the full transposed convolution")
        if 0 in op.outputs[0].shape:
            return Miss(op, "the output is empty")
        if not has_explicit_window(op):
            return Miss(op, "output_shape is not what the pads imply; use ane::explicit_conv_transpose_shape")
        return Hit(op, note=describe_crop(pads), window=pads)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        return build_symmetric_crop(mb, hit.op, hit.window)

    def examples(self) -> Iterable[Example]:
        example = partial(make_conv_transpose_example, strides=[2], pad_type="custom")
        image = partial(example, x=(2, 4, 5, 6), strides=[2, 3], bias=None)
        yield example("longer in front", pad=[1, 0], bias=None)
        yield example("with bias", pad=[2, 0])
        yield example("longer behind", pad=[0, 2])
        yield example("with output_shape", pad=[1, 0], output_shape=[1, 2, 18])
        yield example("dilated, grouped", pad=[3, 1], groups=2, dilations=[3])
        yield image("two axes", pad=[2, 1, 0, 3], weight=(4, 8, 3, 4))
        yield image("one axis of two", pad=[1, 1, 0, 1], weight=(4, 2, 3, 4), groups=4)
        yield example("three axes", pad=[0, 1, 1, 1, 1, 0], x=(1, 2, 3, 4, 3), weight=(2, 3, 3, 2, 2),
                      strides=[2, 1, 2], bias=None)
        yield example("equal pads", pad=[1, 1], reason="pads are equal on both sides")
        yield make_conv_transpose_example("no pads", strides=[2],
                                          reason="pad_type is not custom, so there are no pads to differ")
        yield example("fp32", pad=[1, 0], dtype=np.float32, reason="computed in fp32, which is correct according to "
                                                                   "the report")
        yield example("negative pad", pad=[1, -1],
                      reason="a pad is negative, so the output reaches beyond the full transposed convolution")
        yield example("another output_shape", pad=[1, 0], output_shape=[1, 2, 17],
                      reason="output_shape is not what the pads imply; use ane::explicit_conv_transpose_shape")
