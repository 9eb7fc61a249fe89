"""Find convs whose kernel is too wide or too tall."""

from __future__ import annotations

from collections.abc import Iterable

from coremltools.converters.mil.mil import Builder, Operation, Program

from ..ane.limits import collect_evidence, find_exceeded_limit, find_limit
from ..ir.query import is_compressed, is_const
from ..passes.contract import Example, Hit, Miss, Rule
from ..passes.evidence import cite_m4_study
from ..passes.examples import build_program, make_example, make_weight
from ._sizes import read_kernel_size, select_generations

_COREML_MESSAGE = "Error: conv with large kernel does not meet decomposition preconditions"


class ConvKernelSize(Rule):
    """Conv kernels are supported on the ANE up to a certain width and height.

    why     The width of a kernel is limited more than its height: to 15 and 31 on an M4, to 13 wide on an M1. On an M6
            a model with a wider one is reported to fail to compile as a whole, and to run on the CPU.
    when    A kernel wider or taller than that of the strictest generation looked at, the last axis being the width.
            What was not measured is not known: kernels both wide and tall other than squares, 3-D and transposed
            convs, weights that are no constants. 16x16 is accepted on an M4, and takes minutes and 11.7 GB to compile.
            A 1-D conv's kernel below 32 is conv_1d_kernel's; from 32 on it is unsupported on whichever axis it is laid.
    fix     ane::split_wide_conv lays a 1xK kernel on the height, makes channels of the windows of a strided one, and
            cuts others into parts that are added. ane::lift_conv_transpose_1d lays that of a 1-D conv_transpose with a
            bias on the height.
    """

    code, slug = "ANE221", "conv-kernel-size"
    roots = ("conv", "conv_transpose")
    refuses, confidence = True, "high"
    advice = ("Lay the kernel on the height by swapping the last two axes (the same sums), or split it along the width "
              "into convs that are added (rounded otherwise).")
    evidence = (*collect_evidence("conv-kernel-width", "conv-kernel-height"),
                cite_m4_study("16x16 is accepted; to ask for it takes 212 to 229 s and 11.7 GB"))

    def match(self, op: Operation) -> Hit | Miss:
        kernel = read_kernel_size(op)
        if kernel is None or (len(kernel) == 1 and op.op_type == "conv" and kernel[0] < 32):
            return Miss(op, "a 1-D conv, or a weight of symbolic shape", near=False)
        looked_at = tuple(self.generations)
        if kernel == (16, 16) and op.op_type == "conv":
            taken = select_generations(looked_at, "m4", "m6")
            looked_at = tuple(one for one in looked_at if one not in taken)
        height, width = (1, *kernel)[-2:]
        wide, tall = (
            find_exceeded_limit("conv-kernel-width", width, looked_at),
            find_exceeded_limit("conv-kernel-height", height, looked_at),
        )
        found = [f"kernel width {width} {wide.words}"] if wide else []
        found += [f"kernel height {height} {tall.words}"] if tall else []
        if not found:
            most = find_limit("conv-kernel-width", looked_at)
            at_limit = most is not None and most.most == width
            return Miss(op, f"kernel width {width}, the limit is {width}" if at_limit else "fits", near=at_limit)
        later = select_generations(looked_at, "m4", "m5", "m6")
        before = find_exceeded_limit("conv-kernel-width", width, [one for one in looked_at if one not in later])
        measured = bool(later) and _is_measured_form(op, kernel)
        sure = measured or bool(before and before.sure and _is_plain_conv(op, kernel))
        note = " and ".join(found) + (
            "" if sure else f"; a kernel {_format_kernel(kernel)} of this kind was not measured"
        )
        message = _COREML_MESSAGE if measured and len(kernel) == 2 and select_generations(looked_at, "m4") else None
        lifted = op.op_type == "conv_transpose" and len(kernel) == 1 and kernel[0] < 32 and op.bias is not None
        fixed_by = "split_wide_conv" if op.op_type == "conv" else "lift_conv_transpose_1d" if lifted else ""
        return Hit(op, note=note, sure=sure, message=message, fixed_by=fixed_by)

    def examples(self) -> Iterable[Example]:
        yield Example("too wide", lambda: _build_conv(1, 16))
        yield Example("too tall", lambda: _build_conv(32, 1))
        yield Example("a large square", lambda: _build_conv(17, 17))
        yield Example("wide and tall", lambda: _build_conv(3, 20))
        yield Example("wide for an M1", lambda: _build_conv(1, 14))
        yield make_example(
            "transposed",
            lambda x: Builder.conv_transpose(x=x, weight=make_weight(2, 2, 1, 17), name="y"),
            x=(1, 2, 4, 4),
        )
        yield make_example("1-D", lambda x: Builder.conv(x=x, weight=make_weight(2, 2, 33), name="y"), x=(1, 2, 40))
        yield make_example(
            "3-D", lambda x: Builder.conv(x=x, weight=make_weight(2, 2, 1, 1, 16), name="y"), x=(1, 2, 3, 4, 20)
        )
        yield Example("at the limit", lambda: _build_conv(2, 13), reason="kernel width 13, the limit is 13")
        yield Example("small", lambda: _build_conv(3, 3), reason="fits")


def _is_plain_conv(op: Operation, kernel: tuple[int, ...]) -> bool:
    """Return whether `op` is a conv as in the measurements: not transposed, not 3-D, its weight a constant."""
    stored = op.op_type == "conv" and (is_const(op.weight) or is_compressed(op.weight))
    return stored and len(kernel) < 3


def _is_measured_form(op: Operation, kernel: tuple[int, ...]) -> bool:
    """Return whether the kernel has a form that was measured as unsupported on an M4.

    These are one row or column, or a square; a 1-D kernel is too long either way.
    """
    height, width = (kernel[0], 1) if len(kernel) == 1 else kernel[-2:]
    return _is_plain_conv(op, kernel) and (1 in (height, width) or height == width)


def _format_kernel(kernel: tuple[int, ...]) -> str:
    return "x".join(map(str, kernel))


def _build_conv(height: int, width: int) -> Program:
    return build_program(
        lambda x: Builder.conv(x=x, weight=make_weight(2, 2, height, width), pad_type="same", name="y"),
        x=(1, 2, 32, 32),
    )
