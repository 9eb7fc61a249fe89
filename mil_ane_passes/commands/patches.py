"""List the patches of coremltools' torch frontend: what each fixes, whether it is needed here, and why."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..utils.text_format import format_lines
from .options import add_format_option
from .output import print_report

__all__ = ["PatchPage", "Patches"]

HELP = "list the patches of the torch frontend"
EXAMPLE = "patches"
NOT_NEEDED = "the installed coremltools is right"


def add(parser: argparse.ArgumentParser) -> None:
    add_format_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..torch_frontend.registry import collect_patch_statuses

    print_report(Patches(collect_patch_statuses()), arguments.format)
    return 0


class _Patch(Protocol):
    """The fields of a patch that are printed."""

    code: str
    name: str
    title: str
    text: str

    @property
    def ops(self) -> Mapping[str, Any]: ...

    @property
    def replacements(self) -> Sequence[Any]: ...

    @property
    def upstream(self) -> tuple[str, ...]: ...


class _Finding(Protocol):
    """A patch and the reason why the installed coremltools needs it; `reason` is None if it does not."""

    @property
    def patch(self) -> _Patch: ...

    @property
    def reason(self) -> str | None: ...


@dataclass(frozen=True)
class Patches:
    """All patches, by name, and whether the installed coremltools needs them."""

    findings: Sequence[_Finding]

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, "command": "patches", "patches": [
            {"code": each.patch.code, "name": each.patch.name, "title": each.patch.title,
             "needed": each.reason is not None, "why": each.reason, "upstream": list(each.patch.upstream)}
            for each in self.findings]}

    def __str__(self) -> str:
        width = max((len(each.patch.name) for each in self.findings), default=0)
        indent = max((len(each.patch.code) for each in self.findings), default=0) + width + 12
        lines: list[str] = []
        for each in self.findings:
            patch, needed = each.patch, "needed" if each.reason else "off   "
            lines.append(f"{patch.code}  {patch.name:<{width}}  {needed}  {patch.title}")
            lines.append(f"{'':<{indent}}{each.reason or NOT_NEEDED}")
        return format_lines(lines)


@dataclass(frozen=True)
class PatchPage:
    """The page of one patch: what goes wrong without it, what it does, what it changes, where it was reported."""

    finding: _Finding

    def to_dict(self) -> dict[str, Any]:
        patch = self.finding.patch
        return {"schema": 1, "command": "explain", "code": patch.code, "patch": patch.name, "title": patch.title,
                "needed": self.finding.reason is not None, "why": self.finding.reason, "text": patch.text,
                "ops": sorted(patch.ops), "replaces": self._replaced(), "upstream": list(patch.upstream)}

    def __str__(self) -> str:
        patch, reason = self.finding.patch, self.finding.reason
        lines = [f"{patch.code} {patch.name}", f"patch of the torch frontend; without it: {patch.title}",
                 f"needed here: {reason}" if reason else f"off here: {NOT_NEEDED}", "", patch.text]
        lines += ["", f"converts: {', '.join(sorted(patch.ops))}"] if patch.ops else []
        lines += ["", "replaces", *(f"    {each}" for each in self._replaced())] if patch.replacements else []
        return "\n".join([*lines, "", "reported in", *(f"    {each}" for each in patch.upstream)])

    def _replaced(self) -> list[str]:
        return [f"{each.module}.{each.attribute}" for each in self.finding.patch.replacements]
