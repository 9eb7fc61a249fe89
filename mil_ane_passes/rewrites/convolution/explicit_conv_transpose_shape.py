"""Define the output window of a conv_transpose by pads alone."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from coremltools.converters.mil.mil import Operation, Var

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value
from ...passes.contract import Community, Exactness, Example, Hit, Miss, Rewrite, Severity
from ._conv_transpose_windows import build_symmetric_crop, compute_crop_window, describe_crop, has_explicit_window
from ._examples import make_conv_transpose_example


class ExplicitConvTransposeShape(Rewrite):
    """Replace an ambiguous output_shape or pad_type `same` of conv_transpose by equal pads and a slice.

    why     An output_shape that the pads do not imply is ambiguous: CPU_ONLY and ALL gave different outputs. ONNX
            Runtime declines it, and `same`, for Core ML.
    when    pad_type same (same_lower), or an output_shape that differs from the one that the pads (none for valid)
            imply. The output_shape that coremltools' `add_conv_transpose_output_shape` adds is the implied one, which
            is skipped. fp16 and fp32: the report does not depend on the precision.
    exact   bitwise with MIL's definition as interpreted by the reference runtime: output_shape sets the lengths, and
            the window begins at the pad in front (`same`: centered). A window that exceeds the full transposed
            convolution is skipped. ONNX centers the window for any output_shape; MIL's definition is ambiguous, and the
            report does not state the interpretation of each unit: check such ops.
    cost    none if the window is centered; otherwise as many more rows as the difference of both sides.

    before
        %y: fp16[1, 2, 10] = conv_transpose(x=%x, weight=<fp16[4, 2, 5]>, output_shape=[1, 2, 10])
    after
        %0: fp16[1, 2, 12] = conv_transpose(x=%x, weight=<fp16[4, 2, 5]>, output_shape=[1, 2, 12], pad_type=custom)
        %y: fp16[1, 2, 10] = slice_by_index(x=%0, begin=[0, 0, 0], end=[0, 0, 10], end_mask=[True, True, False])
    """

    code, slug = "ANE304", "conv-transpose-output-shape"
    severity = Severity.WRONG
    stage = "numerics"
    after = ("lift_conv_transpose_1d",)
    exactness = Exactness.BITWISE
    preset = "safe"
    roots = ("conv_transpose",)
    evidence = (
        Community(
            "x (1, 3, 4, 4), kernel 3, output_shape (1, 3, 4, 4), pad_type left out: CPU_ONLY and ALL differ "
            "completely",
            source="https://github.com/apple/coremltools/issues/2281", date="2024-07",
        ),
        Community(
            "ONNX Runtime's CoreML provider declines ConvTranspose with output_shape and with auto_pad SAME_*; where "
            "the units differed, the one that is not the CPU matched ONNX",
            source="https://github.com/microsoft/onnxruntime/pull/21416", date="2024-07",
        ),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if get_const_value(op.pad_type, "valid") in ("custom", "valid") and op.output_shape is None:
            return Miss(op, "pads are explicit and there is no output_shape", near=False)
        window = compute_crop_window(op)
        if isinstance(window, str):
            return Miss(op, window)
        if has_explicit_window(op):
            return Miss(op, "output_shape is what the pads imply", near=False)
        beyond = -min(min(pair) for pair in window)
        if beyond > 0:
            return Miss(op, f"the output reaches {beyond} beyond the full transposed convolution, which pads cannot "
                            f"express")
        return Hit(op, note=describe_crop(window), window=window)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        return build_symmetric_crop(mb, hit.op, hit.window)

    def examples(self) -> Iterable[Example]:
        example = partial(make_conv_transpose_example, strides=[2])
        image = partial(example, x=(2, 4, 5, 6), weight=(4, 2, 3, 4), strides=[2, 3], bias=None)
        yield make_conv_transpose_example("no pads", output_shape=[1, 2, 10], bias=None)
        yield example("strided, with bias", output_shape=[1, 2, 17])
        yield example("in the middle", output_shape=[1, 2, 17], pad_type="custom", pad=[1, 0])
        yield example("same", pad_type="same")
        yield example("same, in the middle", pad_type="same", strides=[3], groups=2)
        yield example("same with output_shape", pad_type="same", output_shape=[1, 2, 15])
        yield example("same_lower", pad_type="same_lower", output_shape=[1, 2, 16])
        yield image("two axes", output_shape=[2, 2, 10, 15])
        yield image("two axes, same", pad_type="same", dilations=[2, 3])
        yield example("what the pads imply", pad_type="custom", pad=[1, 0], output_shape=[1, 2, 18],
                      reason="output_shape is what the pads imply")
        yield example("no output_shape", pad_type="custom", pad=[1, 0],
                      reason="pads are explicit and there is no output_shape")
        beyond = "the output reaches {} beyond the full transposed convolution, which pads cannot express"
        yield example("same, kernel shorter than stride", pad_type="same", strides=[7], reason=beyond.format(2))
        yield example("beyond the end", output_shape=[1, 2, 22], reason=beyond.format(3))
