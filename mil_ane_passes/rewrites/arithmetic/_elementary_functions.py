"""Shared parts of the rewrites of elementary functions: conditions, sources, and the error of each replacement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from coremltools.converters.mil.mil import Operation, types

from ...passes.contract import FP32_UNSUPPORTED_REASON, Community, Evidence, Exactness, Hit, Miss, Rewrite
from ...passes.evidence import cite_ane_compiler, cite_m4_study
from ...rules.unsupported_ops import ElementaryFunctions

LOOKUP_TABLE_EVIDENCE = Community(
    "functions are read from tables of 33 points: sine within 6.3e-4, tanh within 1.6e-3",
    source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/numerics.md",
    chip="M4, M6",
    date="2026-10-02",
)


class ElementaryRewrite(Rewrite):
    """Compute fp16 functions that are unsupported on the ANE from supported ones, where that is accurate enough."""

    fixes = (ElementaryFunctions,)
    stage = "decompose"
    exactness = Exactness.ROUNDING
    preset = "full"
    evidence: ClassVar[tuple[Evidence, ...]] = (
        cite_m4_study(
            "asin, acos, tan, sinh, cosh and atanh are unsupported; atan, sin, cos, tanh, exp and log are accepted"
        ),
        cite_ane_compiler("asin, acos, tan, sinh, cosh and atanh have no equivalent on any generation"),
    )
    forms: ClassVar[Mapping[str, tuple[str, float]]]
    "By op type: the replacement, and its largest error in units in the last place, over all fp16 numbers."

    max_error: float = 4.0
    "Maximum accepted error in units in the last place."

    def match(self, op: Operation) -> Hit | Miss:
        form, error = self.forms[op.op_type]
        if op.x.dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        if error > self.max_error:
            return Miss(op, f"off by up to {error:g} units in the last place, max_error={self.max_error:g}")
        return Hit(op, note=form, ulps=error)
