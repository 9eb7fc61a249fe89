"""What the rewrites of elementary functions share: when they are skipped, and the sources of what the ANE supports."""

from __future__ import annotations

from coremltools.converters.mil.mil import Operation, types

from ...passes.contract import FP32_UNSUPPORTED_REASON, Community, Miss
from ...passes.evidence import cite_m4_study, cite_private_route

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


def reject_if_inaccurate(op: Operation, error: float, max_error: float) -> Miss | None:
    """Return a miss where `op` does not compute in fp16, or its replacement, off by `error` ulps, is not accurate
    enough; else None."""
    if op.x.dtype != types.fp16:
        return Miss(op, FP32_UNSUPPORTED_REASON)
    if error > max_error:
        return Miss(op, f"off by up to {error:g} units in the last place, max_error={max_error:g}")
    return None
