"""Descriptions of a pass beside its command: what it does to the results, and which preset includes it."""

from __future__ import annotations

__all__ = ["describe_exactness", "describe_pass"]

_EXACTNESS = {"bitwise": "same bits", "rounding": "changes rounding", "approximate": "approximates the function"}
"What each guarantee of a rewrite means for the results."


def describe_exactness(exactness: str) -> str:
    """Describe what a pass does to the results: `changes rounding`."""
    return _EXACTNESS[exactness]


def describe_pass(exactness: str, preset: str) -> str:
    """Describe a pass: `changes rounding; in preset full`."""
    where = "only by name" if preset == "named" else f"in preset {preset}"
    return f"{describe_exactness(exactness)}; {where}"
