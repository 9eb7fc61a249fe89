"""The option `--quirk`, and the list of quirks at the end of a command's help."""

from __future__ import annotations

import argparse
import textwrap

from ..passes.coremltools_setup import silence_coremltools

__all__ = ["add_quirk_option"]

_LIST_MARK = "\0quirks"
"Marks the place of the list, at the end of the epilog."


def add_quirk_option(parser: argparse.ArgumentParser, where: str) -> None:
    """Add `--quirk NAME`, which may be repeated; `where` completes "a published fault to imitate"."""
    parser.add_argument("--quirk", metavar="NAME", action="append", default=[], dest="quirks",
                        help=f"a published fault to imitate {where}; may be given more than once; see below")
    parser.formatter_class = _QuirkHelpFormatter
    parser.epilog = f"{parser.epilog or ''}{_LIST_MARK}"


class _QuirkHelpFormatter(argparse.HelpFormatter):
    """Help formatter that inserts the list when help is printed: building it imports coremltools."""

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
    """Format a name with the description of the fault below it."""
    return f"  {name}\n{textwrap.indent(textwrap.fill(summary, width - 4), ' ' * 4)}\n"
