"""Parsing of `max_growth`: by how much a preset may increase the predicted cost of a model."""

from __future__ import annotations

from numbers import Real
from typing import Any

from ..utils.errors import InputError
from ..utils.option_spelling import format_option_values

__all__ = ["DEFAULT_MAX_GROWTH", "check_max_growth", "parse_max_growth"]

DEFAULT_MAX_GROWTH = 0.01
"The default share."


def check_max_growth(share: Any) -> float | None:
    """Check a share such as 0.01; None means no limit. Raises InputError for anything else."""
    if share is not None and (
            isinstance(share, bool) or not isinstance(share, Real) or not 0 <= float(share) < float("inf")):
        raise InputError(f"max_growth is {share!r}; expected a share such as 0.01 (one percent), or None: no limit")
    return None if share is None else float(share)


def parse_max_growth(text: str) -> float | None:
    """Parse a percentage: "1" and "1%" are 0.01, "none" is no limit. Raises InputError."""
    if text.strip().lower() == "none":
        return None
    try:
        return check_max_growth(float(text.strip().removesuffix("%")) / 100)
    except (ValueError, InputError):
        raise InputError(
            f"{format_option_values('max_growth')}: found {text!r}; expected percent such as 1, or none"
        ) from None
