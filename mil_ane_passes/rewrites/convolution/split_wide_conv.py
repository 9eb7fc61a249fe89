"""Run a conv with a large kernel as convs with small ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ...ane.limits import collect_evidence, find_exceeded_limit
from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_compressed, is_symbolic
from ...passes.contract import FP32_UNSUPPORTED_REASON, Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_m4_study
from ...passes.examples import make_weight
from ...passes.targets import parse_target
from ...rules.conv_kernel_size import ConvKernelSize
from .._weights import find_reshape_obstacle, has_uniform_readers
from ._conv_phases import resolve_conv_pads
from ._examples import make_conv_example
from ._large_kernel_convs import SLOW_KERNEL_SIZES, ConvPlan, plan_conv, read_conv_sizes

_KERNEL_16_CHIPS = (*parse_target("m4"), *parse_target("m6"))
"Chips that support a square kernel of 16, though other kernels of width 16 are unsupported."


class SplitWideConv(Rewrite):
    """Run a conv whose kernel is too large for the ANE as one of kernel 1 over windows, or as several that are added.

    why     Kernels end at 15 wide and 31 tall on an M4, at 13 wide on an M1, and on an M6 one that is larger takes the
            model off the ANE. A square one of 16 is taken by an M4 after minutes and 11.7 GB.
    when    A kernel that is too large, or 14 to 16 square, in fp16, the weight stored. The first form that serves:
            frames where the large axes are strided, undilated and of known size: windows become channels of a conv
            with kernel 1 (patches, spectra). upright for 1xK up to 31: the last two axes change over. fold for a 1-D
            one of stride 1 and known size with K = q * p: a q x p one over rows of p. parts for all others: pieces of
            the kernel over shifted inputs, added. 1-D kernels below 32 are ane::lift_conv_1d's.
    exact   rounding: the same products; parts round each result and each sum once more, and a partial sum must stay
            below 65504. No element is multiplied that was not before, no weight is stored twice; a compressed
            one stays so, and parts refuse it, as do frames that leave the kernel another axis.
    cost    frames copy the input up to ceil(K / s) times on each axis, fold twice; upright takes two transposes, parts
            a pass over the input and an add each. On M1 and M2 slices of large values have a fault of their own,
            ane::last_axis_slice.

    before
        %y: fp16[1, 4, 1, 2] = conv(x=%x, weight=<fp16[4, 3, 32, 32]>, strides=[32, 32], pad_type=same)
    after
        %0: fp16[3, 1, 32, 2, 32] = reshape(x=%x, shape=[3, 1, 32, 2, 32])
        %1: fp16[3, 32, 32, 1, 2] = transpose(x=%0, perm=[0, 2, 4, 1, 3])
        %2: fp16[1, 3072, 1, 2] = reshape(x=%1, shape=[1, 3072, 1, 2])
        %y: fp16[1, 4, 1, 2] = conv(x=%2, weight=<fp16[4, 3072, 1, 1]>)
    """

    fixes = (ConvKernelSize,)
    stage = "decompose"
    exactness = Exactness.ROUNDING
    bound = ("frames, upright and fold: the order of one sum. parts: half a unit in the last place of each partial sum "
             "beside; of 31x31 in 6 parts 9e-4 of the largest output was measured, 3e-4 of the one conv")
    preset = "full"
    roots = ("conv",)
    evidence = (
        *collect_evidence("conv-kernel-width", "conv-kernel-height"),
        cite_m4_study("kernel 16x16: 212 to 229 s and 11.7 GB to compile; 13x13: 2 to 23 s"),
    )

    slow: bool = True
    "Rewrite square kernels of 14 to 16 as well where they are only slow to compile."
    max_copies: int = 8
    "The most copies of the input in frames."
    max_parts: int = 16
    "The most convs that one may become."

    def match(self, op: Operation) -> Hit | Miss:
        large = self._find_large_axes(op)
        if not large:
            return Miss(op, "fits, or a 1-D kernel below 32", near=False)
        if op.outputs[0].dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        reason = find_reshape_obstacle(op.weight)
        if reason:
            return Miss(op, reason)
        pads = resolve_conv_pads(op)
        if isinstance(pads, str):
            return Miss(op, pads)
        sizes = read_conv_sizes(op, pads)
        plan = plan_conv(sizes, large, sum(map(is_symbolic, op.x.shape)), self.max_copies, self.max_parts)
        if isinstance(plan, str):
            return Miss(op, plan)
        if plan.copies and is_compressed(op.weight):
            return Miss(op, f"weight is compressed, and {plan.form} would have to be packed anew")
        if plan.copies and not has_uniform_readers(op, op.weight.op.enclosing_block, _read_conv_settings):
            return Miss(op, "weight is read in another way as well, so it would be stored twice")
        if plan.copies and op.weight.consuming_blocks:
            return Miss(op, "weight is returned by a block")
        return Hit(op, note=f"kernel {'x'.join(map(str, sizes.kernel))} as {plan.note}", plan=plan, sizes=sizes)

    def _find_large_axes(self, op: Operation) -> list[int]:
        """Return the spatial axes on which the kernel of `op` is too large."""
        kernel = op.weight.shape[2:]
        if any(map(is_symbolic, kernel)):
            return []
        if len(kernel) == 1:
            return [0] if kernel[0] > 31 else []
        last, square = len(kernel) - 1, len(kernel) == 2 and all(int(size) in SLOW_KERNEL_SIZES for size in kernel)
        taken = _KERNEL_16_CHIPS if tuple(kernel) == (16, 16) else ()
        looked_at = [one for one in self.generations if one not in taken]
        found = [axis for axis, name in ((last - 1, "conv-kernel-height"), (last, "conv-kernel-width"))
                 if find_exceeded_limit(name, int(kernel[axis]), looked_at)]
        return [0, 1] if square and (self.slow or found) else found

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        plan: ConvPlan = hit.plan
        return plan.build(mb, hit.op, hit.sizes)

    def examples(self) -> Iterable[Example]:
        def conv(name: str, x: tuple[int | None, ...], kernel: tuple[int, ...], **rest: Any) -> Example:
            return make_conv_example(name, x, (4, *kernel), **rest)

        bias = make_weight(4)
        yield conv("patches", (1, 3, 32, 64), (3, 32, 32), strides=[32, 32], pad_type="same")
        yield conv("overlapping windows", (1, 2, 40, 44), (2, 16, 16), strides=[10, 12], pad_type="same")
        yield conv("a spectrum", (1, 1, 203), (1, 40), strides=[16], pad_type="custom", pad=[20, 20])
        yield conv("one strided axis", (1, 2, 9, 80), (2, 3, 20), strides=[1, 20], pad_type="same")
        yield conv("gaps", (1, 1, 203), (1, 40), strides=[50], pad_type="same")
        yield conv("upright", (1, 2, 4, 40), (2, 1, 20), pad_type="same", bias=bias)
        yield conv("folded", (1, 4, 50), (2, 64), groups=2, pad_type="custom", pad=[32, 31], within=200)
        yield conv("parts", (2, 4, 20, 20), (1, 17, 17), groups=4, pad_type="same", bias=bias, within=200)
        yield conv("dilated parts", (1, 2, 90), (2, 37), dilations=[2], pad_type="same", within=500)
        yield conv("tall", (1, 2, 40, 3), (2, 35, 1), pad_type="same_lower", within=500)
        yield conv("3-D", (1, 2, 3, 4, 16), (2, 2, 2, 16), pad_type="same", within=200)
        yield conv("fits", (1, 2, 9, 30), (2, 3, 13), reason="fits, or a 1-D kernel below 32")
        yield conv("fp32", (1, 2, 9, 30), (2, 1, 20), dtype=np.float32, reason=FP32_UNSUPPORTED_REASON)
        yield conv("symbolic, same", (1, 2, 4, None), (2, 1, 20), strides=[1, 2], pad_type="same",
                   reason="pad_type same pads by the input's size, which is symbolic")
        yield conv("too many parts", (1, 2, 4, 90), (2, 1, 40), options={"max_parts": 3},
                   reason="kernel 1x40 would take 4 parts, max_parts is 3")


def _read_conv_settings(op: Operation) -> tuple[Any, ...]:
    """Return the parameters of a conv that determine its form and pieces."""
    return (op.x.dtype, get_const_value(op.strides), get_const_value(op.dilations), get_const_value(op.groups),
            [is_symbolic(extent) for extent in op.x.shape])
