"""Find convs that take the ANE's compiler minutes, or that it never finishes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from coremltools.converters.mil.mil import Builder, Operation, Program, types

from ..ir.query import get_const_value, is_const, is_symbolic
from ..passes.contract import Community, Example, Hit, Miss, Rule
from ..passes.evidence import cite_m4_study
from ..passes.examples import build_program, make_weight

_SLOW_KERNEL_SIZES = range(14, 17)
"Square kernels above 13, which compiles in seconds, to 16, which takes minutes; wider ones are unsupported."


class CompileTraps(Rule):
    """A conv whose compilation for the ANE takes minutes, or hangs.

    why     A square kernel of 16 took an M4 212 to 229 s and 11.7 GB to compile, one of 13 took 2 to 23 s; what lies
            between was not timed. A 1-D conv of kernel 12 and stride 6 over 18001 values hangs at load in fp16.
            Strides with prime factors other than 2 and 3 hang or take half a minute in one report; on an M4 strides 2
            to 8 were all taken.
    when    An fp16 conv with a kernel of 14 to 16 on both axes; with kernel 12 and stride 6 on a length of 18001 or
            more; with such a stride where ANE314 does not find it: dilated, of open size, of rank 5, or with a weight
            that is computed or compressed.
    fix     ane::split_wide_conv makes two convs of half the kernel on shifted inputs, added, or channels of the
            windows of a strided one: they compile like ordinary ones. For the strides,
            ane::factor_conv_stride{form=slice} computes every place at stride 1 and keeps each s-th.
    """

    code, slug = "ANE512", "compile-trap"
    roots = ("conv",)
    advice = ("Split a large kernel into smaller ones on shifted inputs and add (ane::split_wide_conv); for strides "
              "run ane::factor_conv_stride{form=slice}.")
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
            return Miss(op, "no form that was slow to compile", near=False)
        return Hit(op, note=f"stride {', '.join(str(strides[axis]) for axis in axes)} with a prime factor other than 2 "
                            f"and 3: 5 and 7 did not compile in 5 minutes; {_explain_unfixed_stride(op, axes)}")

    def examples(self) -> Iterable[Example]:
        yield Example("16x16", lambda: _build_conv((1, 2, 20, 20), (16, 16)))
        yield Example("a long signal", lambda: _build_conv((1, 2, 18001), (12,), strides=[6]))
        yield Example("an open length", lambda: _build_conv((1, 2, None), (5,), strides=[5]))
        yield Example("13x13", lambda: _build_conv((1, 2, 20, 20), (13, 13)), reason="no form that was slow to compile")
        yield Example("a short signal", lambda: _build_conv((1, 2, 1800), (12,), strides=[6]),
                      reason="kernel 12, stride 6, length 1800; a length of 18001 hangs")
        yield Example("another rule's", lambda: _build_conv((1, 2, 25), (5,), strides=[5]),
                      reason="no form that was slow to compile")


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
