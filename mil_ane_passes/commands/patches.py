"""List the patches of coremltools' torch frontend: what each fixes, whether it is needed here, and why."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..utils.text_format import format_lines
from .options import add_format_option
from .output import print_report

if TYPE_CHECKING:
    from ..torch_frontend.registry import PatchStatus

__all__ = ["PatchPage", "Patches"]

HELP = "list the patches of the torch frontend"
EXAMPLE = "patches"
NOT_NEEDED = "the installed coremltools is right"


def add(parser: argparse.ArgumentParser) -> None:
    add_format_option(parser)
    parser.set_defaults(run=run, uses_frontend=lambda arguments: True)


def run(arguments: argparse.Namespace) -> int:
    from ..torch_frontend.registry import collect_patch_statuses

    print_report(Patches(collect_patch_statuses()), arguments.format)
    return 0


@dataclass(frozen=True)
class Patches:
    """All patches, by name, and whether the installed coremltools needs them."""

    statuses: Sequence[PatchStatus]

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, "command": "patches", "patches": [
            {"code": each.patch.code, "name": each.patch.name, "title": each.patch.title,
             "severity": each.patch.severity.value,
             "needed": each.reason is not None, "why": each.reason, "upstream": list(each.patch.upstream)}
            for each in self.statuses]}

    def __str__(self) -> str:
        width = max((len(each.patch.name) for each in self.statuses), default=0)
        indent = max((len(each.patch.code) for each in self.statuses), default=0) + width + 12
        lines: list[str] = []
        for each in self.statuses:
            patch, needed = each.patch, "needed" if each.reason else "off   "
            lines.append(f"{patch.code}  {patch.name:<{width}}  {needed}  {patch.title}")
            lines.append(f"{'':<{indent}}{each.reason or NOT_NEEDED}")
        return format_lines(lines)


@dataclass(frozen=True)
class PatchPage:
    """The page of one patch: what goes wrong without it, what it does, what it changes, where it was reported."""

    status: PatchStatus

    def to_dict(self) -> dict[str, Any]:
        patch = self.status.patch
        return {"schema": 1, "command": "explain", "code": patch.code, "patch": patch.name, "title": patch.title,
                "severity": patch.severity.value, "needed": self.status.reason is not None, "why": self.status.reason,
                "text": patch.text,
                "ops": sorted(patch.ops), "replaces": self._replaced(), "upstream": list(patch.upstream)}

    def __str__(self) -> str:
        patch, reason = self.status.patch, self.status.reason
        lines = [f"{patch.code} {patch.name}", f"patch of the torch frontend; without it: {patch.title}",
                 f"severity: {patch.severity.label}",
                 f"needed here: {reason}" if reason else f"off here: {NOT_NEEDED}", "", patch.text]
        lines += ["", f"converts: {', '.join(sorted(patch.ops))}"] if patch.ops else []
        lines += ["", "replaces", *(f"    {each}" for each in self._replaced())] if patch.replacements else []
        return "\n".join([*lines, "", "reported in", *(f"    {each}" for each in patch.upstream)])

    def _replaced(self) -> list[str]:
        return [f"{each.module}.{each.attribute}" for each in self.status.patch.replacements]
