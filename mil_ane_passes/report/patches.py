"""The table of the torch frontend's patches, generated from the patches themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Patches", "patches_table"]


class _Patch(Protocol):
    """What is told of a patch."""

    name: str
    title: str

    @property
    def upstream(self) -> tuple[str, ...]: ...


class _Finding(Protocol):
    """A patch and why the installed coremltools needs it; `reason` is None where it does not."""

    @property
    def patch(self) -> _Patch: ...

    @property
    def reason(self) -> str | None: ...


@dataclass(frozen=True)
class Patches:
    """Every patch, by name, and whether the installed coremltools needs it."""

    findings: Sequence[_Finding]

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, "command": "patches", "patches": [
            {"name": each.patch.name, "title": each.patch.title, "needed": each.reason is not None,
             "why": each.reason, "upstream": list(each.patch.upstream)} for each in self.findings]}

    def __str__(self) -> str:
        width = max((len(each.patch.name) for each in self.findings), default=0)
        lines: list[str] = []
        for each in self.findings:
            lines.append(f"{each.patch.name:<{width}}  {'needed' if each.reason else 'off   '}  {each.patch.title}")
            lines.append(f"{'':<{width}}          {each.reason or 'the installed coremltools is right'}")
        return "\n".join(lines)


def patches_table(patches: Iterable[_Patch]) -> str:
    """The README's table of patches."""
    rows = [(f"`{each.name}`", each.title.replace("|", "\\|"), _links(each.upstream)) for each in patches]
    lines = [" | ".join(row) for row in [("patch", "without it", "reported in"), *rows]]
    return "\n".join(f"| {line} |" for line in lines).replace("\n", "\n|---|---|---|\n", 1)


def _links(upstream: Iterable[str]) -> str:
    return ", ".join(_link(each) for each in upstream)


def _link(source: str) -> str:
    """`https://github.com/OWNER/NAME/issues/1` as a short link; words stay words."""
    address, _, words = source.partition(" ")
    parts = address.removeprefix("https://github.com/").split("/")
    if not address.startswith("https://github.com/") or parts[2:3] not in (["issues"], ["pull"]):
        return source
    return f"[{parts[1]}#{parts[3]}]({address}){' ' + words if words else ''}"
