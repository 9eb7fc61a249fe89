"""Findings that settings ignore at single ops: they are removed from a report, but counted and listed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from ..passes.finding import Finding
from ..utils.text_format import escape_text, format_count
from .network import LayerFinding

if TYPE_CHECKING:
    from .lint import LintReport

__all__ = ["Ignored", "PerOpIgnore", "count_ignored", "format_ignored_lines", "ignore_findings"]

_MAX_NAMED = 3
"The most values named in a line of text; the JSON has all."


@dataclass(frozen=True)
class PerOpIgnore:
    """A pattern of names, with `*`, `?` and `[...]`, and the rules that are ignored there.

    It is compared with the name of the value, with `function/name`, or with the name of a layer. `keys` are the rules
    as the user named them, `names` and `codes` what they stand for: names of rules, and codes of rules about layers.
    """

    pattern: str
    keys: tuple[str, ...]
    names: Collection[str]
    codes: Collection[str]

    def matches(self, item: Finding | LayerFinding) -> bool:
        """Return whether it ignores a finding."""
        if isinstance(item, LayerFinding):
            return item.code in self.codes and fnmatchcase(item.layer, self.pattern)
        ours = item.rule.name in self.names or item.problem.name in self.names
        return ours and any(fnmatchcase(name, self.pattern) for name in (item.value, f"{item.function}/{item.value}"))


@dataclass
class Ignored:
    """The findings that one pattern ignores in a report; none if no finding matches it."""

    ignore: PerOpIgnore
    findings: list[Finding] = field(default_factory=list)
    layers: list[LayerFinding] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.findings) + len(self.layers)

    def to_dict(self) -> dict[str, Any]:
        return {"pattern": self.ignore.pattern, "rules": list(self.ignore.keys), "count": self.count,
                "findings": [*(item.to_dict() for item in self.findings), *(item.to_dict() for item in self.layers)]}


def ignore_findings(report: LintReport, ignores: Sequence[PerOpIgnore]) -> None:
    """Move the findings that `ignores` match from `report.findings` to `report.ignored`; the first pattern counts."""
    report.ignored = [Ignored(each) for each in ignores]
    kept: list[Finding] = []
    for item in report.findings:
        place = next((each for each in report.ignored if each.ignore.matches(item)), None)
        (kept if place is None else place.findings).append(item)
    report.findings = kept
    if report.network is not None:
        left: list[LayerFinding] = []
        for layer in report.network.findings:
            place = next((each for each in report.ignored if each.ignore.matches(layer)), None)
            (left if place is None else place.layers).append(layer)
        report.network = replace(report.network, findings=tuple(left))


def count_ignored(report: LintReport) -> int:
    """Count the ignored findings of a report."""
    return sum(each.count for each in report.ignored)


def format_ignored_lines(report: LintReport) -> Iterator[str]:
    """Yield lines of text about what is ignored, with patterns that match nothing."""
    if report.ignored:
        yield f"ignored by per-op-ignores: {format_count(count_ignored(report), 'finding')}"
    for each in report.ignored:
        names = [f"%{item.value}" for item in each.findings] + [f"'{item.layer}'" for item in each.layers]
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        found = f"{', '.join(names[:_MAX_NAMED])}{more}" if names else "no finding"
        yield escape_text(f"  {each.ignore.pattern} ({', '.join(each.ignore.keys)}): {found}")
