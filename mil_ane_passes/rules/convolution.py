"""Convs whose kernel, dilation, stride or number the ANE or its compiler does not support, or runs slowly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ..ane.limits import collect_evidence, find_exceeded_limit, find_limit
from ..ane.partitions import iterate_rows_by_function
from ..ir.query import get_const_value, is_compressed, is_const, is_symbolic
from ..passes.contract import Community, Example, Hit, Miss, PlanRule, Rule, Severity
from ..passes.evidence import cite_2020_layer_list, cite_apple_authoring_rules, cite_m4_study
from ..passes.examples import build_program, make_example, make_weight
from ..passes.plan import Plan
from ..passes.targets import Gate
from ._sizes import read_kernel_size, select_generations

_COREML_MESSAGE = "Error: conv with large kernel does not meet decomposition preconditions"
_MAX_KERNEL_WIDTH_2020 = 13
"Limit in the cited log of 2020, which is about a pool; `ane.limits` has the limits of convs."
_LUT_OP = "constexpr_lut_to_dense"
_SLOW_KERNEL_SIZES = range(14, 17)
"Square kernels above 13, which compiles in seconds, to 16, which takes minutes; wider ones are unsupported."
_CONV_OPS = ("conv", "conv_transpose")


class Conv1dKernel(Rule):
    """The kernel of a 1-D conv is longer than the ANE's limit on kernel width.

    why     Kernel widths are limited to 15 on an M4 and 13 on an M1, heights to 31 on an M4. It is predicted that a 1-D
            conv is mapped to the width: only a 1-D kernel of 3 was measured.
    when    conv of rank 3 with a kernel longer than the width's limit and shorter than 32.
    fix     ane::lift_conv_1d rewrites it to a 2-D conv with the kernel along the height: the same bits.
    """

    code, slug = "ANE239", "conv-1d-kernel"
    roots = ("conv",)
    refuses, confidence = True, "medium"
    advice = "Lift it to a 2-D conv with the kernel along the height."
    evidence = (
        *collect_evidence("conv-kernel-width", "conv-kernel-height"),
        cite_m4_study("a 1-D conv with kernel 3 is accepted"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        kernel = read_kernel_size(op)
        if kernel is None or len(kernel) != 1 or kernel[0] > 31:
            return Miss(op, "no 1-D conv with a kernel below 32", near=False)
        wide = find_exceeded_limit("conv-kernel-width", kernel[0], tuple(self.generations))
        if wide is None:
            most = find_limit("conv-kernel-width", tuple(self.generations))
            at_limit = most is not None and most.most == kernel[0]
            return Miss(op, f"kernel {kernel[0]}, the limit is {kernel[0]}" if at_limit else "fits", near=at_limit)
        return Hit(op, sure=False, note=f"a 1-D kernel of {kernel[0]}, if laid on the width, is {wide.words}; on the "
                                        "height 31 fit on M4")

    def examples(self) -> Iterable[Example]:
        yield Example("kernel 16", lambda: _build_conv_1d(16))
        yield Example("kernel 31", lambda: _build_conv_1d(31))
        yield Example("wide for an M1", lambda: _build_conv_1d(14))
        yield Example("at the limit", lambda: _build_conv_1d(13), reason="kernel 13, the limit is 13")
        yield Example("small", lambda: _build_conv_1d(3), reason="fits")
        yield make_example(
            "2-D",
            lambda x: Builder.conv(x=x, weight=make_weight(2, 2, 1, 20), name="y"),
            reason="no 1-D conv with a kernel below 32",
            x=(1, 2, 3, 32),
        )


def _build_conv_1d(length: int) -> Program:
    return build_program(lambda x: Builder.conv(x=x, weight=make_weight(2, 2, length), name="y"), x=(1, 2, 40))


class ConvKernelSize(Rule):
    """The conv kernel is wider or taller than the ANE's limit.

    why     The limit on width is lower than that on height: 15 and 31 on an M4; the width is at most 13 on an M1. On an
            M6 an entire model with a wider kernel is reported to fail to compile, and to run on the CPU.
    when    A kernel wider or taller than the limit of the strictest generation of the target; the last axis is the
            width. Unmeasured forms are reported as unknown: kernels both wide and tall that are not square, 3-D and
            transposed convs, weights that are not constant. 16x16 is accepted on an M4, but takes minutes and 11.7 GB
            to compile. 1-D kernels below 32 belong to conv_1d_kernel; from 32 on they are unsupported on either axis.
    fix     ane::split_wide_conv turns a 1xK kernel to the height, moves the windows of a strided conv to channels, and
            splits other kernels into convs that are added. ane::lift_conv_transpose_1d turns the kernel of a 1-D
            conv_transpose with a bias to the height.
    """

    code, slug = "ANE221", "conv-kernel-size"
    roots = ("conv", "conv_transpose")
    refuses, confidence = True, "high"
    advice = ("Turn the kernel to the height by swapping the last two axes (the same sums), or split it along the "
              "width into convs that are added (different rounding).")
    evidence = (*collect_evidence("conv-kernel-width", "conv-kernel-height"),
                cite_m4_study("16x16 is accepted; compiling it takes 212 to 229 s and 11.7 GB"))

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
        yield Example("too wide", lambda: _build_same_conv(1, 16))
        yield Example("too tall", lambda: _build_same_conv(32, 1))
        yield Example("a large square", lambda: _build_same_conv(17, 17))
        yield Example("wide and tall", lambda: _build_same_conv(3, 20))
        yield Example("wide for an M1", lambda: _build_same_conv(1, 14))
        yield make_example(
            "transposed",
            lambda x: Builder.conv_transpose(x=x, weight=make_weight(2, 2, 1, 17), name="y"),
            x=(1, 2, 4, 4),
        )
        yield make_example("1-D", lambda x: Builder.conv(x=x, weight=make_weight(2, 2, 33), name="y"), x=(1, 2, 40))
        yield make_example(
            "3-D", lambda x: Builder.conv(x=x, weight=make_weight(2, 2, 1, 1, 16), name="y"), x=(1, 2, 3, 4, 20)
        )
        yield Example("at the limit", lambda: _build_same_conv(2, 13), reason="kernel width 13, the limit is 13")
        yield Example("small", lambda: _build_same_conv(3, 3), reason="fits")


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


def _build_same_conv(height: int, width: int) -> Program:
    return build_program(
        lambda x: Builder.conv(x=x, weight=make_weight(2, 2, height, width), pad_type="same", name="y"),
        x=(1, 2, 32, 32),
    )


class DilatedConv(Rule):
    """Dilated convs were reported to leave the ANE on older chips.

    why     A list of 2020 includes dilated convs in the layers that do not work (some entries are guesses), and a log
            of that year counts the dilated extent of a pool's kernel: (dilated)kernel width = 28 > 13. An M4 accepts a
            3x3 kernel with dilation 2, and a vocoder's dilated convs are reported on an M2 up to a width of 16384.
    when    Any dilation of a kernel longer than 1, on chips up to A13. This is uncertain.
    fix     ane::undilate_conv splits the input into phases, runs the conv without dilation, and interleaves the results
            (the same sums). Small kernels can have zeros between the taps instead, up to a width of 13.
    """

    code, slug = "ANE228", "dilated-conv"
    roots = ("conv",)
    targets = Gate(last="a13")
    refuses, confidence = True, "low"
    advice = "Split the input into phases and run the conv undilated, or put zeros between the kernel's taps."
    evidence = (
        cite_2020_layer_list(
            "dilated convolutions are among the layers known not to work; parts of the list are guesses"
        ),
        *collect_evidence("pool-kernel"),
        cite_m4_study("contradicts it: dilated convs are accepted (3x3, dilation 2)"),
        Community(
            "contradicts it: dilated convs leave the ANE only from a width of 16384",
            chip="M2",
            source="https://github.com/FluidInference/mobius/pull/53",
            date="2026-05-05",
        ),
        cite_apple_authoring_rules("large dilations are expensive"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        dilations = get_const_value(op.dilations)
        kernel = read_kernel_size(op)
        if kernel is None or not dilations or all(step == 1 or size == 1 for step, size in zip(dilations, kernel)):
            return Miss(op, "is not dilated", near=False)
        reach, extent = (kernel[-1] - 1) * dilations[-1] + 1, "x".join(map(str, dilations))
        beside = f", and {reach} > {_MAX_KERNEL_WIDTH_2020}" if reach > _MAX_KERNEL_WIDTH_2020 else ""
        return Hit(op, sure=False, note=f"dilation {extent} makes the kernel {reach} wide: dilated convs were reported "
                                        f"off the ANE in 2020{beside}")

    def examples(self) -> Iterable[Example]:
        yield Example("dilation 2", lambda: _build_dilated_conv(3, 2))
        yield Example("wide", lambda: _build_dilated_conv(3, 8))
        yield Example("undilated", lambda: _build_dilated_conv(3, 1), reason="is not dilated")
        yield Example("one tap", lambda: _build_dilated_conv(1, 4), reason="is not dilated")


def _build_dilated_conv(size: int, dilation: int) -> Program:
    return build_program(lambda x: Builder.conv(x=x, weight=make_weight(2, 2, size, size), dilations=[dilation] * 2,
                                                pad_type="same", name="y"), x=(1, 2, 32, 32))


class StridedPalettizedConv(Rule):
    """A conv with palettized weights has a stride above 2, for which Apple states limited support.

    why     Apple's rules for the Neural Engine: strides over 2 have limited support with palettized weights. They do
            not state the effect or the chips. They are written for Core AI, another front end of the same engine.
    when    conv with a stride over 2 on any axis and a weight that is palettized, joint compression included.
    fix     Leave this weight uncompressed (op_name_configs of coremltools.optimize maps its name to None). Or move the
            phases of the input to channels and use stride 1. For a patch embedding, whose kernel equals its stride,
            this is a reshape, a transpose and a 1x1 conv (the same sums).
    """

    code, slug = "ANE517", "strided-palettized-conv"
    roots = ("conv",)
    severity, confidence = Severity.SUGGESTION, "high"
    advice = "Leave this conv's weight uncompressed, or move the phases of the input to channels first."
    evidence = (
        cite_apple_authoring_rules("strides over 2 have limited support with palettized weights"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        strides = get_const_value(op.strides, [1])
        if max(strides) <= 2 or not _is_palettized(op.weight):
            return Miss(op, "stride up to 2, or no palettized weight", near=False)
        return Hit(op, note=f"stride {'x'.join(map(str, strides))} with palettized weights")

    def examples(self) -> Iterable[Example]:
        yield Example("patches", lambda: _build_palettized_conv(4))
        yield Example("stride 2", lambda: _build_palettized_conv(2), reason="stride up to 2, or no palettized weight")
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


def _build_palettized_conv(stride: int) -> Program:
    def build_body(x: Var) -> Var:
        indices = (np.arange(4 * 2 * 16) % 4).reshape(4, 2, 4, 4).astype(np.uint8)
        stored = Builder.constexpr_lut_to_dense(indices=indices, lut=make_weight(1, 1, 1, 1, 256, 1))
        result: Var = Builder.conv(x=x, weight=stored, strides=[stride, stride], name="y")
        return result

    return build_program(build_body, opset=ct.target.iOS18, x=(1, 2, 16, 16))


class WideKernelSlow(Rule):
    """A kernel 9 to 15 wide is supported on an M6, but slower than the same kernel along the height.

    why     On an M6 the compiler rewrites such a conv to stride 2 with about twice the weights; 1xN was slower than
            Nx1. Other chips were not measured. Wider kernels are unsupported (ANE221).
    when    On an M6: a 2-D conv with a kernel 9 to 15 wide that is wider than tall.
    fix     Turn the kernel to the height: swap the last two axes of input and weight (the same sums). This pays off if
            the transposes cancel.
    """

    code, slug = "ANE522", "wide-kernel"
    roots = ("conv",)
    targets = Gate(first="m6")
    severity, confidence = Severity.SUGGESTION, "medium"
    advice = "Turn the kernel to the height by swapping the last two axes (the same sums)."
    evidence = (
        Community("kernels 9 to 15 wide are rewritten to stride 2 with about twice the weights; 1xN is slower than Nx1",
                  source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/defects.md", chip="M6",
                  date="2026"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        kernel = read_kernel_size(op)
        if kernel is None or len(kernel) != 2 or not kernel[0] < kernel[1] or not 9 <= kernel[1] <= 15:
            return Miss(op, "no kernel 9 to 15 wide that is wider than tall", near=False)
        return Hit(op, note=f"kernel {kernel[0]}x{kernel[1]}: about twice the weights on an M6; it is faster along "
                            f"the height")

    def examples(self) -> Iterable[Example]:
        yield Example("1x9", lambda: _build_same_conv(1, 9))
        yield Example("9x1", lambda: _build_same_conv(9, 1), reason="no kernel 9 to 15 wide that is wider than tall")
        yield Example("1x7", lambda: _build_same_conv(1, 7), reason="no kernel 9 to 15 wide that is wider than tall")


class CompileTraps(Rule):
    """Compilation of this conv for the ANE takes minutes, or hangs.

    why     A 16x16 kernel took 212 to 229 s and 11.7 GB to compile on an M4, a 13x13 kernel 2 to 23 s; sizes between
            were not timed. A 1-D conv with kernel 12 and stride 6 over 18001 values hangs at load in fp16. Strides with
            prime factors other than 2 and 3 hang or take half a minute in one report; an M4 accepted all strides from 2
            to 8.
    when    An fp16 conv with a kernel of 14 to 16 on both axes; with kernel 12 and stride 6 on a length of 18001 or
            more; with a stride that has other prime factors than 2 and 3, if ANE314 does not match the conv because it
            is dilated, of dynamic size, of rank 5, or has a computed or compressed weight.
    fix     ane::split_wide_conv replaces it by two convs with half the kernel on shifted inputs, which are added, or
            moves the windows of a strided conv to channels: these compile normally. For the strides,
            ane::factor_conv_stride{form=slice} computes stride 1 and keeps every s-th element.
    """

    code, slug = "ANE512", "compile-trap"
    roots = ("conv",)
    advice = ("Split a large kernel into smaller ones on shifted inputs and add (ane::split_wide_conv); for strides "
              "use ane::factor_conv_stride{form=slice}.")
    evidence = (
        cite_m4_study("kernel 16x16: 212 to 229 s and 11.7 GB to compile; 13x13: 2 to 23 s"),
        Community("fp16, kernel 12, stride 6, length 18001: loading hangs; with fp32 or on the GPU it does not",
                  source="https://github.com/apple/coremltools/issues/2660", date="2026-03-09"),
        Community("strides 5 and 7 do not finish in 5 minutes, 10 and 11 take 30 s, all others up to 18 less than 10 s",
                  source="https://github.com/apple/coremltools/issues/2473", date="2025-03-19"),
        cite_m4_study("contradicts it: strides 2 to 8 are all supported"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if op.outputs[0].dtype != types.fp16:
            return Miss(op, "not computed in fp16", near=False)
        kernel = [int(extent) for extent in op.weight.shape[2:] if not is_symbolic(extent)]
        strides = get_const_value(op.strides, [1] * len(kernel))
        if len(kernel) == 2 and all(extent in _SLOW_KERNEL_SIZES for extent in kernel):
            return Hit(op, note=f"kernel {kernel[0]}x{kernel[1]}: 16x16 took 212 to 229 s and 11.7 GB to compile (M4), "
                                "13x13 2 to 23 s", fixed_by="split_wide_conv")
        length = op.x.shape[-1]
        if kernel == [12] and strides == [6] and not is_symbolic(length):
            if length >= 18001:
                return Hit(op, note=f"kernel 12, stride 6, length {length}: loading hangs at a length of 18001")
            return Miss(op, f"kernel 12, stride 6, length {length}; a length of 18001 hangs")
        axes = [axis for axis, stride in enumerate(strides) if _has_large_prime_factor(stride)]
        if not axes or not _explain_unfixed_stride(op, axes):
            return Miss(op, "not one of the forms that were slow to compile", near=False)
        return Hit(op, note=f"stride {', '.join(str(strides[axis]) for axis in axes)} with a prime factor other than 2 "
                            f"and 3: 5 and 7 did not compile in 5 minutes; {_explain_unfixed_stride(op, axes)}")

    def examples(self) -> Iterable[Example]:
        yield Example("16x16", lambda: _build_conv((1, 2, 20, 20), (16, 16)))
        yield Example("a long signal", lambda: _build_conv((1, 2, 18001), (12,), strides=[6]))
        yield Example("an open length", lambda: _build_conv((1, 2, None), (5,), strides=[5]))
        yield Example("13x13", lambda: _build_conv((1, 2, 20, 20), (13, 13)), reason="not one of the forms that were "
                                                                                     "slow to compile")
        yield Example("a short signal", lambda: _build_conv((1, 2, 1800), (12,), strides=[6]),
                      reason="kernel 12, stride 6, length 1800; a length of 18001 hangs")
        yield Example("another rule's", lambda: _build_conv((1, 2, 25), (5,), strides=[5]),
                      reason="not one of the forms that were slow to compile")


def _has_large_prime_factor(stride: int) -> bool:
    """Return whether a stride has a prime factor other than 2 and 3."""
    for factor in (2, 3):
        while stride % factor == 0 and stride:
            stride //= factor
    return stride > 1


def _explain_unfixed_stride(op: Operation, axes: list[int]) -> str | None:
    """Return why ANE314, which otherwise fixes such strides, does not rewrite `op`, or None."""
    if not is_const(op.weight):
        return "the weight is computed or compressed"
    if op.x.rank == 5:
        return "3-D"
    if any(get_const_value(op.dilations, [1] * 3)[axis] != 1 for axis in axes):
        return "dilated"
    open_axes = sum(map(is_symbolic, op.x.shape))
    return "of open size" if open_axes > 1 or any(is_symbolic(op.x.shape[2 + axis]) for axis in axes) else None


def _build_conv(shape: tuple[int | None, ...], kernel: tuple[int, ...], **parameters: Any) -> Program:
    return build_program(
        lambda x: Builder.conv(x=x, weight=make_weight(2, 2, *kernel), name="y", **parameters), x=shape
    )


class ConvCount(PlanRule):
    """One function has more convs than the largest number known to compile for the ANE.

    why     On an M6 a chain of 387 convs overflows the compiler's stack: the model silently runs on the CPU, or loading
            hangs. 386 compile. Other chips were not tried; whether they share the limit is unknown.
    when    A function with more than `most` convs and transposed convs on the longest path on the ANE. They need not
            form one chain.
    fix     Split the model.
    """

    code, slug = "ANE511", "conv-count"
    severity = Severity.UNSUPPORTED
    confidence = "low"
    advice = "Split the model into parts with fewer convs."
    evidence = (
        Community("387 conv layers in a chain: the compiler's stack overflows, and the model runs on the CPU silently "
                  "or hangs; 386 compile", chip="M6",
                  source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/defects.md"),
    )
    most: int = 386
    "The largest number that was observed to compile."

    def match_plan(self, plan: Plan) -> Iterator[Hit | Miss]:
        for name, rows in iterate_rows_by_function(plan):
            convs = [row.op for row in rows if row.op.op_type in _CONV_OPS and row.takes]
            said = f"{len(convs)} convs in function '{name}'"
            if len(convs) > self.most:
                yield Hit(convs[0], covers=convs, note=f"{said}, the largest number known to compile is {self.most} "
                                                       f"(M6; other chips were not tried)")
            elif len(convs) > 0.9 * self.most:
                yield Miss(convs[0], f"{said}, the largest number known to compile is {self.most}")

    def examples(self) -> Iterable[Example]:
        yield Example("above", lambda: _build_convs(4), options={"most": 3})
        yield Example("at the limit", lambda: _build_convs(3), options={"most": 3},
                      reason="3 convs in function 'main', the largest number known to compile is 3")
        yield Example("few", lambda: _build_convs(2), reason="")


def _build_convs(count: int) -> Program:
    def build_body(x: Var) -> Var:
        for number in range(count):
            x = Builder.conv(x=x, weight=make_weight(4, 4, 1, 1), name=f"conv{number}")
        return x

    return build_program(build_body, x=(1, 4, 8, 8))
