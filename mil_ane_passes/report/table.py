"""Text tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..utils.text_format import escape_text

__all__ = ["format_table"]

Align = Callable[[str, int], str]


def format_table(head: Sequence[str], align: Sequence[Align], rows: Iterable[Sequence[str]]) -> list[str]:
    """Format a table's lines, each column as wide as its widest cell."""
    lines = [[escape_text(cell) for cell in line] for line in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["  ".join(place(cell, width) for place, cell, width in zip(align, line, widths)).rstrip()
            for line in lines]
