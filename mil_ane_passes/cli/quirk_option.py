"""The option `--quirk`, and the list of them that help ends with."""

from __future__ import annotations

import argparse
import textwrap

from ..core.coremltools_setup import silence_coremltools

__all__ = ["add_quirk_option"]

_LIST_MARK = "\0quirks"
"Behind what the help ends with: the list comes there."


def add_quirk_option(parser: argparse.ArgumentParser, where: str) -> None:
    """`--quirk NAME`, any number of times; `where` completes "a published fault to imitate"."""
    parser.add_argument("--quirk", metavar="NAME", action="append", default=[], dest="quirks",
                        help=f"a published fault to imitate {where}; may be given more than once; see below")
    parser.formatter_class = _QuirkHelpFormatter
    parser.epilog = f"{parser.epilog or ''}{_LIST_MARK}"


class _QuirkHelpFormatter(argparse.HelpFormatter):
    """Puts the list in when help is shown: it is not there before coremltools is imported."""

    def add_text(self, text: str | None) -> None:
        words, listed, _ = (text or "").partition(_LIST_MARK)
        super().add_text(words or None)
        if not listed:
            return
        with silence_coremltools():
            from ..api import list_fault_models

        self.start_section("quirks (they model published faults and verify nothing about a given chip)")
        for quirk in list_fault_models():
            self._add_item(_format_quirk_entry, [quirk.name, quirk.summary, self._width])
        self.end_section()


def _format_quirk_entry(name: str, summary: str, width: int) -> str:
    """A name, and below it what is wrong."""
    return f"  {name}\n{textwrap.indent(textwrap.fill(summary, width - 4), ' ' * 4)}\n"
