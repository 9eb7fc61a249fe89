"""Tables of text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..core.words import escaped

__all__ = ["aligned"]

Align = Callable[[str, int], str]


def aligned(head: Sequence[str], align: Sequence[Align], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table's lines, each column as wide as its widest cell."""
    lines = [[escaped(cell) for cell in line] for line in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["  ".join(place(cell, width) for place, cell, width in zip(align, line, widths)).rstrip()
            for line in lines]
