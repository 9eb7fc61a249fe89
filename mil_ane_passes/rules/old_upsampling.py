"""Find upsampling by another factor than 2 on older chips."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coremltools.converters.mil.mil import Builder, Operation
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..ane.limits import collect_evidence
from ..passes.contract import Example, Hit, Miss, Rule
from ..passes.evidence import cite_2020_layer_list, cite_m4_study
from ..passes.examples import make_example
from ..passes.targets import Gate

_RESIZE_OPS = ("resize_bilinear", "resize_nearest_neighbor", "resize")


class OldUpsampling(Rule):
    """Upsampling by another factor than 2, which the ANE of older chips does not take.

    why     A log of Core ML of 2020 says that only a factor of 2 is supported; the newest chip of that day was A13. An
            M4 accepts all modes with 2, 3 and fractions.
    when    Chips up to A13: upsample_* and resize* whose height or width grows by another factor than 2.
    fix     Nearest neighbour by 4: twice by 2 (the same bits). Bilinear by 4 is not twice by 2: use a depthwise
            conv_transpose with the weights of the interpolation, or leave it.
    """

    code, slug = "ANE230", "old-upsampling"
    roots = ("upsample_nearest_neighbor", "upsample_bilinear", *_RESIZE_OPS)
    targets = Gate(last="a13")
    refuses, confidence = True, "medium"
    advice = "Nearest neighbour by 4 is twice by 2 (the same bits); bilinear needs a depthwise conv_transpose."
    evidence = (
        *collect_evidence("upsampling"),
        cite_2020_layer_list(
            "upsampling by more than 2 is among the layers that leave the ANE, some of them guessed; upsampling as "
            "such works there"
        ),
        cite_m4_study("contradicts it for M4: all upsampling modes and scales are accepted"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        extents = zip(op.x.shape[-2:], op.outputs[0].shape[-2:])
        factors = [_compute_factor(before, after) for before, after in extents]
        if any(factor is None for factor in factors):
            return Miss(op, "sizes that are known only at run time", near=False)
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
            reason="sizes that are known only at run time",
            x=(1, 2, None, 4),
        )


def _compute_factor(before: object, after: object) -> float | None:
    return None if is_symbolic(before) or is_symbolic(after) else int(str(after)) / int(str(before))


def _format_factors(factors: Sequence[float]) -> str:
    return " x ".join(f"{factor:g}" for factor in factors)
