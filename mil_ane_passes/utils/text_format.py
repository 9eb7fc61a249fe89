"""Formatting of numbers and names in messages, and escaping of text for terminals."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["add_article", "escape_text", "format_count", "format_duration", "format_latency_range", "format_lines",
           "format_command_path", "format_markdown_code", "format_python_string", "format_short_repr",
           "format_swift_string", "join_names", "join_words", "quote_word"]

_UNSAFE_CHARACTERS = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]")
"""Control characters (C0, DEL, C1), ends of lines, marks that reorder text, tag characters, which nothing shows, and
halves of surrogate pairs: Python decodes bytes of a path that are not UTF-8 to such halves."""

_VOWEL_SOUND = re.compile(r"(?!uint|una|uni|one)[aeiou]|[AEIO]|fp\d|lstm|rnn|l\d|nd|ML|LSTM|RNN")
"""Starts of nouns that are spoken with a vowel first: vowels, but not "uint", "unique" or "one", and abbreviations that
are read letter by letter, such as "lstm"."""


def escape_text(text: object) -> str:
    """Format `text` on one line, with escapes for characters that a terminal would interpret: `\\n`, `\\x1b`.

    A package names its values, functions and files, and a name may contain a line of its own that looks like one of
    ours. Every report and error passes through here; JSON has escapes of its own and keeps names as they are.
    """
    return _UNSAFE_CHARACTERS.sub(_escape_character, str(text))


def _escape_character(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # Python's code for a byte that it could not decode
        return f"\\x{code - 0xDC00:02x}"
    return found[0].encode("unicode_escape").decode()


def format_command_path(path: str) -> str:
    """Format a path as a word of a command to paste, before it is quoted: one that begins with a dash is no option."""
    return f"./{path}" if path.startswith("-") else path


def quote_word(word: str) -> str:
    """Quote a word of a command for a POSIX shell.

    A word with characters that `escape_text` would change is quoted as `$'\\x0a'`, which bash and zsh read.
    """
    if not _UNSAFE_CHARACTERS.search(word):
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + _UNSAFE_CHARACTERS.sub(lambda found: "".join(
        f"\\x{byte:02x}" for byte in found[0].encode("utf-8", _choose_encoding_errors(found[0]))), escaped) + "'"


def _choose_encoding_errors(character: str) -> str:
    """Return how a character is encoded: a byte of a path that Python could not decode, or another half of a pair."""
    return "surrogateescape" if 0xDC80 <= ord(character) <= 0xDCFF else "surrogatepass"


def join_words(words: Iterable[str]) -> str:
    """Join the words of a command, each quoted."""
    return " ".join(map(quote_word, words))


def format_lines(lines: Iterable[str]) -> str:
    """Join the lines of a report. Each one is escaped, so that it cannot contain a further line."""
    return "\n".join(map(escape_text, lines))


def format_markdown_code(text: str, *, in_table: bool = False) -> str:
    """Format `text` as code in a line of Markdown: none of it is markup. In a table, a bar would end the cell."""
    escaped = escape_text(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", escaped)), default=0))
    pad = " " if escaped[:1] in ("`", " ", "") or escaped[-1:] in ("`", " ") else ""
    made = f"{fence}{pad}{escaped}{pad}{fence}"
    return made.replace("|", "\\|") if in_table else made


def format_python_string(text: str) -> str:
    """Format `text` as a Python string literal of one line, in double quotes."""
    return _format_literal(text, lambda code: f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


def format_swift_string(text: str) -> str:
    """Format `text` as a Swift string literal of one line. A backslash is doubled, so that no expression is
    interpolated."""
    return _format_literal(text, lambda code: f"\\u{{{code:x}}}")


def _format_literal(text: str, escape: Callable[[int], str]) -> str:
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{_UNSAFE_CHARACTERS.sub(lambda found: escape(ord(found[0])), quoted)}"'


def format_count(count: int, one: str, many: str | None = None) -> str:
    """Format a count: `1 op`, `7 ops`. `many` is the plural where neither s nor es makes it."""
    plural = many or one + ("es" if one.endswith("ch") else "s")
    return f"{count} {one if count == 1 else plural}"


def add_article(noun: str) -> str:
    """Format a noun of a program or of Python with its indefinite article: `an add`, `a tanh`, `an lstm`, `a uint8`."""
    return f"{'an' if _VOWEL_SOUND.match(noun) else 'a'} {noun}"


def join_names(names: Iterable[str]) -> str:
    """Join names as in a sentence: "A13, M1 and M4"."""
    *most, last = [*names] or [""]
    return " and ".join([", ".join(most), last]) if most else last


def format_duration(milliseconds: float) -> str:
    """Format a duration: `0.375 ms`, `12.3 ms`, `250 ms`, `less than 0.001 ms`.

    It has three significant digits and no digits below the microsecond, because no estimate of ours is more exact.
    """
    if 0 < milliseconds < 0.0005:
        return "less than 0.001 ms"
    if abs(milliseconds) < 0.1:
        return f"{round(milliseconds, 3):g} ms"
    return f"{milliseconds:.3g} ms" if abs(milliseconds) < 100 else f"{milliseconds:.0f} ms"


def format_latency_range(low_us: float, high_us: float) -> str:
    """Format a range of microseconds in milliseconds: `0.011 to 0.072 ms`."""
    low, high = (format_duration(each / 1e3) for each in (low_us, high_us))
    return f"{low.removesuffix(' ms')} to {high}"


def format_short_repr(report: object, **facts: Any) -> str:
    """Format the `repr` of a report in one line: its class, a few `facts`, and how to get the rest."""
    said = ", ".join(f"{name}={value!r}" for name, value in facts.items())
    return f"<{type(report).__name__}: {said}; str() is its text, to_dict() has all>"
