"""Find 1-D convs whose kernel is too wide on the width, and fits on the height."""

from __future__ import annotations

from collections.abc import Iterable

from coremltools.converters.mil.mil import Builder, Operation, Program

from ..ane.limits import collect_evidence, find_exceeded_limit, find_limit
from ..passes.contract import Example, Hit, Miss, Rule
from ..passes.evidence import cite_m4_study
from ..passes.examples import build_program, make_example, make_weight
from ._sizes import read_kernel_size


class Conv1dKernel(Rule):
    """A 1-D conv's kernel is longer than the ANE's kernels are wide.

    why     The limit of a kernel's width is 15 on an M4 and 13 on an M1, that of its height 31 on an M4. That a 1-D
            conv is laid on the width is predicted: only a kernel of 3 was measured in one dimension.
    when    conv of rank 3 with a kernel longer than the width's limit and shorter than 32.
    fix     ane::lift_conv_1d turns it into a 2-D conv whose kernel lies on the height: the same bits.
    """

    code, slug = "ANE239", "conv-1d-kernel"
    roots = ("conv",)
    refuses, confidence = True, "medium"
    advice = "Lift it to a 2-D conv whose kernel lies on the height."
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
        yield Example("kernel 16", lambda: _build_conv(16))
        yield Example("kernel 31", lambda: _build_conv(31))
        yield Example("wide for an M1", lambda: _build_conv(14))
        yield Example("at the limit", lambda: _build_conv(13), reason="kernel 13, the limit is 13")
        yield Example("small", lambda: _build_conv(3), reason="fits")
        yield make_example(
            "2-D",
            lambda x: Builder.conv(x=x, weight=make_weight(2, 2, 1, 20), name="y"),
            reason="no 1-D conv with a kernel below 32",
            x=(1, 2, 3, 32),
        )


def _build_conv(length: int) -> Program:
    return build_program(lambda x: Builder.conv(x=x, weight=make_weight(2, 2, length), name="y"), x=(1, 2, 40))
