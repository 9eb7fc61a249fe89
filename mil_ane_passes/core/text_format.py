"""Numbers and names in sentences, and text that a terminal shows as it is meant."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

__all__ = ["escape_text", "format_count", "format_duration", "format_lines", "format_short_repr", "join_names"]

_UNSAFE_CHARACTERS = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]")
"""Control characters (C0, DEL, C1), ends of lines, marks that reorder text, and halves of surrogate pairs: bytes of a
path that are not UTF-8 are read as such."""


def escape_text(text: object) -> str:
    """`text` on one line, as it is, but for characters that a terminal obeys instead of showing them: `\\n`, `\\x1b`.

    A package names its values, functions and files, and a name may hold a line of its own that looks like one of
    ours. Every report and error passes through here; JSON has escapes of its own and keeps names as they are.
    """
    return _UNSAFE_CHARACTERS.sub(_escape_character, str(text))


def _escape_character(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # how Python holds a byte that it could not decode
        return f"\\x{code - 0xDC00:02x}"
    return found[0].encode("unicode_escape").decode()


def format_lines(lines: Iterable[str]) -> str:
    """A report: each of `lines` escaped, so that none of them can hold a line more."""
    return "\n".join(map(escape_text, lines))


def format_count(count: int, one: str, many: str | None = None) -> str:
    """`1 op`, `7 ops`; `many` where neither s nor es makes it."""
    plural = many or one + ("es" if one.endswith("ch") else "s")
    return f"{count} {one if count == 1 else plural}"


def join_names(names: Iterable[str]) -> str:
    """Names as a sentence has them: "A13, M1 and M4"."""
    *most, last = [*names] or [""]
    return " and ".join([", ".join(most), last]) if most else last


def format_duration(milliseconds: float) -> str:
    """`0.375 ms`, `12.3 ms`, `250 ms`, `less than 0.001 ms`: three digits that count, and no more than the microsecond,
    which no estimate of ours is exact to."""
    if 0 < milliseconds < 0.0005:
        return "less than 0.001 ms"
    if abs(milliseconds) < 0.1:
        return f"{round(milliseconds, 3):g} ms"
    return f"{milliseconds:.3g} ms" if abs(milliseconds) < 100 else f"{milliseconds:.0f} ms"


def format_short_repr(report: object, **facts: Any) -> str:
    """What `repr` says of a report, in one line: whose it is, a few `facts`, and where the rest is."""
    said = ", ".join(f"{name}={value!r}" for name, value in facts.items())
    return f"<{type(report).__name__}: {said}; str() is its text, to_dict() has all>"
