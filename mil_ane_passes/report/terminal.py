"""Colors and line breaks of reports on a terminal; what is piped or written to a file has neither."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from ..passes.severity import Severity

__all__ = ["COLOR_CHOICES", "TerminalStyle", "choose_style"]

COLOR_CHOICES = ("auto", "always", "never")
_MIN_WIDTH = 40
"Narrower terminals are treated as this wide: below, nearly every word would have a line of its own."
_LABELS = {each.label: each for each in Severity} | {each.value: each for each in Severity}
_HEADING = re.compile(
    rf"^(?P<head>[A-Z]+\d+ [a-z0-9-]+)  (?P<before>possibly )?(?P<label>{'|'.join(_LABELS)})(?=:)")
"The first line of a group of findings."
_CONCISE = re.compile(rf"(?<=: )(?P<head>[A-Z]+\d+ [a-z0-9-]+) (?P<label>{'|'.join(_LABELS)})(?=: )")
"The middle of a line of `--format concise`."
_COMMAND = re.compile(r"^\s*(fix: |or: |next: )?mil[-_]ane[-_]passes[ .]")
"Lines with a command to copy, which stay in one line."
_BOLD = "1"


@dataclass(frozen=True)
class TerminalStyle:
    """The style of printed text: with `color` or not, in lines of at most `width` characters (None: not wrapped)."""

    color: bool = False
    width: int | None = None

    def apply(self, text: str) -> str:
        """Return `text`, whose lines have no control characters yet, in this style."""
        if not self.color and self.width is None:
            return text
        return "\n".join(self._color_line(line) for each in text.split("\n") for line in self._wrap_line(each))

    def _wrap_line(self, line: str) -> list[str]:
        """Break a line between words; what follows is indented below it. Commands and aligned tables stay."""
        if self.width is None or len(line) <= self.width or _COMMAND.match(line):
            return [line]
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        return textwrap.wrap(line, self.width, subsequent_indent=indent, break_long_words=False,
                             break_on_hyphens=False, replace_whitespace=False, drop_whitespace=True)

    def _color_line(self, line: str) -> str:
        if not self.color:
            return line
        found = _HEADING.match(line) or _CONCISE.search(line)
        if found is None:
            return line
        label = _format_colored(found["label"], _LABELS[found["label"]].color)
        before = line[: found.start("head")] + _format_colored(found["head"], _BOLD)
        return before + line[found.end("head"): found.start("label")] + label + line[found.end("label"):]


def _format_colored(text: str, parameters: str) -> str:
    return f"\x1b[{parameters}m{text}\x1b[0m"


def choose_style(color: str, environment: Mapping[str, str] = os.environ) -> TerminalStyle:
    """Choose the style of stdout: colors and line breaks on a terminal.

    NO_COLOR that is not empty, and TERM=dumb, turn colors off unless `color` is "always".
    """
    terminal = sys.stdout.isatty()
    plain = bool(environment.get("NO_COLOR")) or environment.get("TERM") == "dumb"
    colored = color == "always" or (color == "auto" and terminal and not plain)
    return TerminalStyle(colored, max(_MIN_WIDTH, shutil.get_terminal_size().columns) if terminal else None)
