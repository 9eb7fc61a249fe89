"""Find weights of a size that the ANE streams slowly."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, types

from ..ane.op_support import M4
from ..ir.query import get_const_value, get_type_info, is_const
from ..passes.contract import Community, Example, Hit, Miss, Rule
from ..passes.examples import build_program

_CORES, _SLOW_SHARE_STEP, _SLOW_SHARE_MARGIN = 16, 1 << 20, 16 << 10
"Cores of an M4's ANE; a core's share of a weight streams slowly within 16 KiB of a multiple of 1 MiB."


class DmaNotch(Rule):
    """Each core's share of a weight is close to a whole number of MiB, where weights stream slowly on an M4.

    why     A write-up found that an M4 streams weights at 17 to 25 GB/s where a core's share is within 16 KiB of a
            multiple of 1 MiB, and another author saw the same: a 2048x4096 layer took 840 us, and 430 us cut in two.
            The share is reckoned as ceil(outputs / 16) * inputs * taps * 2 bytes, for 16 cores that share evenly. Both
            timed convs; that linear and matmul are alike is predicted.
    when    On an M4: conv, linear and matmul with an uncompressed fp16 weight of such a size.
    fix     Cut the weight along the input channels, two layers that are added (rounded otherwise), so that neither
            part is of such a size; or change a width that is free by a few channels.
    """

    code, slug = "ANE521", "slow-weight-size"
    roots = ("conv", "linear", "matmul")
    targets = M4
    level, confidence = "note", "medium"
    advice = "Cut the weight along its input channels into two layers that are added, or change a width that is free."
    evidence = (
        Community("shares within 16 KiB of a multiple of 1 MiB stream at 17 to 25 GB/s; 2048x4096: 840 us, 430 us when "
                  "cut in two; not checked on M3 and A chips", chip="M4",
                  source="https://github.com/kasper0406/stablehlo-coreml/pull/110"),
        Community("the erratum, the model of a core's share and the way round it",
                  source="https://eiln.github.io/posts/ane-dma.html"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        weight = op.y if op.op_type == "matmul" else op.weight
        if not is_const(weight) or weight.dtype != types.fp16 or weight.rank < 2:
            return Miss(op, "no stored fp16 weight", near=False)
        shape = get_type_info(weight).shape or ()
        turned = op.op_type == "matmul" and not get_const_value(op.transpose_y, False)
        if op.op_type == "matmul" and prod(shape[:-2]) != 1:
            return Miss(op, "a batch of weights", near=False)
        outputs, inputs = (shape[-1], shape[-2]) if turned else (shape[-2], shape[-1])
        taps = 1
        if op.op_type == "conv":
            outputs, inputs, taps = shape[0], shape[1], prod(shape[2:])
        share = -(-outputs // _CORES) * inputs * taps * 2
        away = min(share % _SLOW_SHARE_STEP, _SLOW_SHARE_STEP - share % _SLOW_SHARE_STEP)
        if share < _SLOW_SHARE_STEP - _SLOW_SHARE_MARGIN or away > _SLOW_SHARE_MARGIN:
            return Miss(op, "no such size", near=False)
        return Hit(op, note=f"{'x'.join(map(str, shape))}: {share} bytes for each of {_CORES} cores, "
                            f"{'exactly' if not away else f'{away} bytes from'} {round(share / _SLOW_SHARE_STEP)} MiB")

    def examples(self) -> Iterable[Example]:
        yield Example("2048x4096", lambda: _build_linear(2048, 4096))
        yield Example("close to it", lambda: _build_linear(2048, 4100))
        yield Example("off it", lambda: _build_linear(2048, 3072), reason="no such size")
        yield Example("small", lambda: _build_linear(64, 64), reason="no such size")


def _build_linear(outputs: int, inputs: int) -> Program:
    return build_program(lambda x: Builder.linear(x=x, weight=np.zeros((outputs, inputs), np.float16), name="y"),
                         x=(1, inputs))
