"""Text tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..utils.text_format import escape_text

__all__ = ["format_table", "join_sides"]

Align = Callable[[str, int], str]


def join_sides(values: Iterable[object]) -> str:
    """Format the value of one model, or of two models as `before -> after` where they differ."""
    first, *other = map(str, values)
    return first if not other or first == other[0] else f"{first} -> {other[0]}"


def format_table(head: Sequence[str], align: Sequence[Align], rows: Iterable[Sequence[str]]) -> list[str]:
    """Format a table's lines, each column as wide as its widest cell."""
    lines = [[escape_text(cell) for cell in line] for line in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["  ".join(place(cell, width) for place, cell, width in zip(align, line, widths)).rstrip()
            for line in lines]
