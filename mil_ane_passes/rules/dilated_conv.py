"""Find dilated convs on older chips."""

from __future__ import annotations

from collections.abc import Iterable

from coremltools.converters.mil.mil import Builder, Operation, Program

from ..ane.limits import collect_evidence
from ..ir.query import get_const_value
from ..passes.contract import Community, Example, Hit, Miss, Rule
from ..passes.evidence import cite_2020_layer_list, cite_apple_authoring_rules, cite_m4_study
from ..passes.examples import build_program, make_weight
from ..passes.targets import Gate
from ._sizes import read_kernel_size

_MAX_KERNEL_WIDTH_2020 = 13
"From the log of 2020 that is cited here, about a pool; `ane.limits` has the limits of convs."


class DilatedConv(Rule):
    """A dilated conv was known to leave the ANE of older chips.

    why     A list of 2020 has dilated convs among the layers that do not work, some of them guessed, and a log of that
            year counts a pool's kernel with its dilation: (dilated)kernel width = 28 > 13. An M4 accepts a 3x3 kernel
            with dilation 2, and a vocoder's dilated convs are reported on an M2 up to a width of 16384.
    when    Any dilation of a kernel longer than 1, on chips up to A13. It is not certain.
    fix     ane::undilate_conv splits the input into its phases, runs the conv undilated, and interleaves (the same
            sums); for small kernels one with zeros between its taps would do, up to a width of 13.
    """

    code, slug = "ANE228", "dilated-conv"
    roots = ("conv",)
    targets = Gate(last="a13")
    refuses, confidence = True, "low"
    advice = "Split the input into phases and run the conv undilated, or put zeros between the kernel's taps."
    evidence = (
        cite_2020_layer_list(
            "dilated convolutions are among the layers known not to work; some of the list is guessed"
        ),
        *collect_evidence("pool-kernel"),
        cite_m4_study("contradicts it: dilated convs are accepted (3x3, dilation 2)"),
        Community(
            "contradicts it: dilated convs leave the ANE from a width of 16384 on only",
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
        yield Example("dilation 2", lambda: _build_conv(3, 2))
        yield Example("wide", lambda: _build_conv(3, 8))
        yield Example("undilated", lambda: _build_conv(3, 1), reason="is not dilated")
        yield Example("one tap", lambda: _build_conv(1, 4), reason="is not dilated")


def _build_conv(size: int, dilation: int) -> Program:
    return build_program(lambda x: Builder.conv(x=x, weight=make_weight(2, 2, size, size), dilations=[dilation] * 2,
                                                pad_type="same", name="y"), x=(1, 2, 32, 32))
