"""Resizing and padding in forms that the ANE does not support."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..ane.limits import collect_evidence
from ..ir.query import get_const_value
from ..passes.contract import Community, Example, Hit, Miss, Rule
from ..passes.evidence import cite_2020_layer_list, cite_m4_study
from ..passes.examples import build_program, make_example
from ..passes.targets import Gate

_RESIZE_OPS = ("resize_bilinear", "resize_nearest_neighbor", "resize")


class OldUpsampling(Rule):
    """Upsampling by a factor other than 2 is unsupported on the ANE of older chips.

    why     According to a log of Core ML of 2020 only a factor of 2 is supported; the newest chip at that time was A13.
            An M4 accepts all modes with 2, 3 and fractions.
    when    Chips up to A13: upsample_* and resize* that scale height or width by a factor other than 2.
    fix     Nearest neighbour by 4: twice by 2 (the same bits). Bilinear by 4 differs from twice by 2: use a depthwise
            conv_transpose with the interpolation weights, or keep it.
    """

    code, slug = "ANE230", "old-upsampling"
    roots = ("upsample_nearest_neighbor", "upsample_bilinear", *_RESIZE_OPS)
    targets = Gate(last="a13")
    refuses, confidence = True, "medium"
    advice = ("Replace nearest neighbour by 4 by two steps of 2 (the same bits); bilinear needs a depthwise "
              "conv_transpose.")
    evidence = (
        *collect_evidence("upsampling"),
        cite_2020_layer_list(
            "upsampling by more than 2 is among the layers that leave the ANE (parts of the list are guesses); "
            "upsampling in general works there"
        ),
        cite_m4_study("contradicts it for M4: all upsampling modes and scales are accepted"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        extents = zip(op.x.shape[-2:], op.outputs[0].shape[-2:])
        factors = [_compute_factor(before, after) for before, after in extents]
        if any(factor is None for factor in factors):
            return Miss(op, "dynamic sizes", near=False)
        shown = [factor for factor in factors if factor is not None]
        if all(factor <= 1 or factor == 2 for factor in shown):
            return Miss(op, f"by {_format_factors(shown)}", near=False)
        return Hit(op, note=f"upsampling by {_format_factors(shown)}: only 2 is supported up to A13")

    def examples(self) -> Iterable[Example]:
        yield make_example(
            "by 4",
            lambda x: Builder.upsample_nearest_neighbor(x=x, scale_factor_height=4, scale_factor_width=4, name="y"),
            x=(1, 2, 4, 4),
        )
        yield make_example(
            "to a size",
            lambda x: Builder.resize_bilinear(x=x, target_size_height=6, target_size_width=6, name="y"),
            x=(1, 2, 4, 4),
        )
        yield make_example(
            "by 2",
            lambda x: Builder.upsample_bilinear(x=x, scale_factor_height=2, scale_factor_width=2, name="y"),
            reason="by 2 x 2",
            x=(1, 2, 4, 4),
        )
        yield make_example(
            "smaller and by 2",
            lambda x: Builder.resize_bilinear(x=x, target_size_height=8, target_size_width=2, name="y"),
            reason="by 2 x 0.5",
            x=(1, 2, 4, 4),
        )
        yield make_example(
            "flexible",
            lambda x: Builder.upsample_nearest_neighbor(x=x, scale_factor_height=4, scale_factor_width=4, name="y"),
            reason="dynamic sizes",
            x=(1, 2, None, 4),
        )


def _compute_factor(before: object, after: object) -> float | None:
    return None if is_symbolic(before) or is_symbolic(after) else int(str(after)) / int(str(before))


def _format_factors(factors: Sequence[float]) -> str:
    return " x ".join(f"{factor:g}" for factor in factors)


class PadConstantNonzero(Rule):
    """A pad with a nonzero constant may be unsupported on the ANE.

    why     Core ML contains a message that pads with nonzero values are not supported on the ANE. The conditions are
            unknown: no such model was published.
    when    pad with mode constant and a nonzero or dynamic value.
    fix     Concat constant blocks; or pad with zero and add a constant with the fill value in the border and -0.0
            inside. The same bits.
    """

    code, slug = "ANE226", "pad-constant-nonzero"
    roots = ("pad",)
    refuses, confidence = True, "medium"
    advice = ("Concat constant blocks instead, or pad with zero and add a constant with the fill value in the border "
              "and -0.0 inside.")
    evidence = (
        Community('a string in Core ML: "Constnt Pad fill mode with non-zero values is not supported on ANE"',
                  source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/coreml_dispatch.md", date="2026"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if get_const_value(op.mode, "constant") != "constant":
            return Miss(op, "repeats values", near=False)
        if not types.is_float(op.x.dtype):
            return Miss(op, "no numbers", near=False)
        fill = (
            get_const_value(op.constant_val, 0.0)
            if op.constant_val is None or op.constant_val.val is not None
            else None
        )
        if fill == 0:
            return Miss(op, "pads with zero", near=False)
        what = "a dynamic value" if fill is None else f"{fill:g}"
        return Hit(op, sure=False, note=f"pads with {what}; according to a message in Core ML the ANE pads with zero "
                                        f"only; not measured")

    def examples(self) -> Iterable[Example]:
        yield Example("ones", lambda: _build_pad("constant", 1.0))
        yield Example("a mask's filler", lambda: _build_pad("constant", -1e4))
        yield Example("zeros", lambda: _build_pad("constant", 0.0), reason="pads with zero")
        yield Example("reflect", lambda: _build_pad("reflect", 0.0), reason="repeats values")


def _build_pad(mode: str, fill: float) -> Program:
    return build_program(
        lambda x: Builder.pad(x=x, pad=[1, 1, 1, 1], mode=mode, constant_val=np.float16(fill), name="y"), x=(1, 2, 4, 4)
    )
