"""List the patches of coremltools' torch frontend: what each one fixes, and whether the installed coremltools needs
it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .._version import make_json_header
from ..passes.severity import Severity
from ..utils.text_format import format_lines
from .options import add_format_option
from .output import print_report
from .pages import Facts, load_patch_pages

__all__ = ["PatchPage", "Patches"]

HELP = "list the patches of the torch frontend"
EXAMPLE = "patches"
NOT_NEEDED = "the installed coremltools is correct"


def add(parser: argparse.ArgumentParser) -> None:
    add_format_option(parser)
    parser.set_defaults(run=run, uses_frontend=lambda arguments: True)


def run(arguments: argparse.Namespace) -> int:
    print_report(Patches(load_patch_pages()), arguments.format)
    return 0


@dataclass(frozen=True)
class Patches:
    """All patches, by name, and whether the installed coremltools needs them."""

    pages: Sequence[Facts]

    def to_dict(self) -> dict[str, Any]:
        return {**make_json_header("patches"), "patches": [
            {"code": each["code"], "name": each["patch"], "title": each["title"], "severity": each["severity"],
             "needed": each["needed"], "why": each["why"], "upstream": each["upstream"]} for each in self.pages]}

    def __str__(self) -> str:
        width = max((len(each["patch"]) for each in self.pages), default=0)
        indent = max((len(each["code"]) for each in self.pages), default=0) + width + 12
        lines: list[str] = []
        for each in self.pages:
            needed = "needed" if each["why"] else "off   "
            lines.append(f"{each['code']}  {each['patch']:<{width}}  {needed}  {each['title']}")
            lines.append(f"{'':<{indent}}{each['why'] or NOT_NEEDED}")
        return format_lines(lines)


@dataclass(frozen=True)
class PatchPage:
    """The page of one patch: the fault, the fix, the replaced functions, and upstream reports."""

    facts: Facts

    def to_dict(self) -> dict[str, Any]:
        return {**make_json_header("explain"), **self.facts}

    def __str__(self) -> str:
        facts, reason = self.facts, self.facts["why"]
        lines = [f"{facts['code']} {facts['patch']}", f"patch of the torch frontend; without it: {facts['title']}",
                 f"severity: {Severity(facts['severity']).label}",
                 f"needed here: {reason}" if reason else f"off here: {NOT_NEEDED}", "", facts["text"]]
        lines += ["", f"converts: {', '.join(facts['ops'])}"] if facts["ops"] else []
        lines += ["", "replaces", *(f"    {each}" for each in facts["replaces"])] if facts["replaces"] else []
        return "\n".join([*lines, "", "reported in", *(f"    {each}" for each in facts["upstream"])])
