"""Numbers and names in sentences."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["counted", "in_words"]


def counted(count: int, one: str, many: str | None = None) -> str:
    """`1 op`, `7 ops`; `many` where neither s nor es makes it."""
    plural = many or one + ("es" if one.endswith("ch") else "s")
    return f"{count} {one if count == 1 else plural}"


def in_words(names: Iterable[str]) -> str:
    """Names as a sentence has them: "A13, M1 and M4"."""
    *most, last = [*names] or [""]
    return " and ".join([", ".join(most), last]) if most else last
