"""Find convs whose kernel is wide enough to be slow on an M6."""

from __future__ import annotations

from collections.abc import Iterable

from coremltools.converters.mil.mil import Builder, Operation, Program

from ..passes.contract import Community, Example, Hit, Miss, Rule
from ..passes.examples import build_program, make_weight
from ..passes.targets import Gate
from ._sizes import read_kernel_size


class WideKernelSlow(Rule):
    """A kernel 9 to 15 wide is taken by an M6, and costs more than the same kernel standing upright.

    why     On an M6 the compiler turns such a conv into one of stride 2 with about twice the weights; 1xN was slower
            than Nx1. Other chips were not measured. Wider ones are unsupported (ANE221).
    when    On an M6: a 2-D conv with a kernel 9 to 15 wide that is wider than tall.
    fix     Lay the kernel on the height: swap the last two axes of input and weight (the same sums). It pays where the
            transposes can be cancelled.
    """

    code, slug = "ANE522", "wide-kernel"
    roots = ("conv",)
    targets = Gate(first="m6")
    level, confidence = "note", "medium"
    advice = "Lay the kernel on the height by swapping the last two axes (the same sums)."
    evidence = (
        Community("kernels 9 to 15 wide are rewritten to stride 2 with about twice the weights; 1xN is slower than Nx1",
                  source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/defects.md", chip="M6",
                  date="2026"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        kernel = read_kernel_size(op)
        if kernel is None or len(kernel) != 2 or not kernel[0] < kernel[1] or not 9 <= kernel[1] <= 15:
            return Miss(op, "no kernel 9 to 15 wide that is wider than tall", near=False)
        return Hit(op, note=f"kernel {kernel[0]}x{kernel[1]}: about twice the weights on an M6; upright it is faster")

    def examples(self) -> Iterable[Example]:
        yield Example("1x9", lambda: _build_conv(1, 9))
        yield Example("9x1", lambda: _build_conv(9, 1), reason="no kernel 9 to 15 wide that is wider than tall")
        yield Example("1x7", lambda: _build_conv(1, 7), reason="no kernel 9 to 15 wide that is wider than tall")


def _build_conv(height: int, width: int) -> Program:
    return build_program(
        lambda x: Builder.conv(x=x, weight=make_weight(2, 2, height, width), pad_type="same", name="y"),
        x=(1, 2, 32, 32),
    )
