"""Sizes in bytes, as options give them."""

from __future__ import annotations

import math
import re

from .errors import InputError
from .option_spelling import format_option_values

__all__ = ["parse_byte_size"]

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SIZE_FORM = re.compile(r"([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmg]i?b|b)?", re.IGNORECASE)


def parse_byte_size(text: str | float, option: str) -> int:
    """Return the bytes of a size such as "1.4GB" (10^9 bytes), "700 MiB" or 2e9. Raises InputError for other texts."""
    found = _SIZE_FORM.fullmatch(str(text).strip())
    size = float(found[1]) * _UNITS[(found[2] or "").lower()] if found else math.nan
    if not math.isfinite(size) or size < 1:
        raise InputError(f"{format_option_values(option, str(text))}: expected a size such as 1.4GB, 700MB or a number "
                         "of bytes")
    return int(size)
