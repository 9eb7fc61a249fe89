"""Helpers of the rewrites of elementary functions: when they are skipped, and the sources of what the ANE supports."""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.mil import Builder, Operation, Program, types

from ...passes.contract import FP32_UNSUPPORTED_REASON, Community, Miss
from ...passes.evidence import cite_m4_study, cite_private_route
from ...passes.examples import build_program

__all__ = ["EVIDENCE", "LOOKUP_TABLE_EVIDENCE", "build_single_op", "reject_if_inaccurate"]

EVIDENCE = (
    cite_m4_study(
        "asin, acos, tan, sinh, cosh and atanh are unsupported; atan, sin, cos, tanh, exp and log are accepted"
    ),
    cite_private_route("asin, acos, tan, sinh, cosh and atanh have no form on any generation"),
)
LOOKUP_TABLE_EVIDENCE = Community(
    "functions are read from tables of 33 points: sine within 6.3e-4, tanh within 1.6e-3",
    source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/numerics.md",
    chip="M4, M6",
    date="2026-10-02",
)


def reject_if_inaccurate(op: Operation, error: float, most: float) -> Miss | None:
    """Return a miss where the replacement of `op` is not accepted, else None.

    It is not accepted where `op` does not compute in fp16, or where it is off by `error` units in the last place and
    `most` is less.
    """
    if op.x.dtype != types.fp16:
        return Miss(op, FP32_UNSUPPORTED_REASON)
    if error > most:
        return Miss(op, f"off by up to {error:g} units in the last place, max_error={most:g}")
    return None


def build_single_op(kind: str, *shape: int | None, dtype: Any = types.fp16, **settings: Any) -> Program:
    """Build a program of the one op `kind`."""
    return build_program(lambda x: getattr(Builder, kind)(x=x, name="y"), dtype=dtype, x=shape or (2, 8), **settings)
