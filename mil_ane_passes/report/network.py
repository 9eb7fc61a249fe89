"""The report of `lint` on a NeuralNetwork: its layers, and forecasts for rewriting it in its format, and upgraded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..passes.evidence import Evidence
from ..passes.forecast import Forecast
from ..passes.severity import Severity
from ..utils.pass_description import describe_pass
from ..utils.text_format import escape_text, format_command_path, format_count, join_words

__all__ = ["LayerFinding", "NetworkLint", "iterate_network_lines"]

_MAX_LISTED = 8
"The most layers listed for one reason, unless all are requested."


@dataclass(frozen=True)
class LayerFinding:
    """A layer that is reported to run elsewhere than on the ANE.

    `ops` are the indices of the ops that the upgrade makes of it, `fix` the rewrite of layers that replaces it, with
    its exactness and preset, and `not_fixed_because` the reason where none does.
    """

    code: str
    slug: str
    summary: str
    confidence: str
    evidence: tuple[Evidence, ...]
    layer: str
    kind: str
    reason: str
    ops: tuple[int, ...] = ()
    advice: str = ""
    fix: Mapping[str, str] | None = None
    not_fixed_because: str = ""
    severity: Severity = Severity.UNSUPPORTED

    def to_dict(self) -> dict[str, Any]:
        return {
            "code": self.code, "slug": self.slug, "summary": self.summary, "severity": self.severity.value,
            "layer": self.layer, "kind": self.kind, "reason": self.reason, "ops": list(self.ops),
            "confidence": self.confidence,
            "fix": None if self.fix is None else dict(self.fix), "advice": self.advice or None,
            "not_fixed_because": self.not_fixed_because or None,
            "evidence": [source.to_dict() for source in self.evidence],
        }


@dataclass(frozen=True)
class NetworkLint:
    """The layers of a network with a problem, and what two ways of rewriting it would reach.

    `before` and `after` forecast the upgraded program as it is and rewritten with the preset full, for the target.
    `off_ane` counts the layers with a problem, `left_off_ane` those after a rewrite within the format.
    """

    layers: int
    findings: tuple[LayerFinding, ...]
    before: Forecast
    after: Forecast
    off_ane: int
    left_off_ane: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "layers": self.layers, "off_ane": self.off_ane, "findings": [each.to_dict() for each in self.findings],
            "upgrade_and_rewrite": {
                "before": _forecast_to_dict(self.before), "after": _forecast_to_dict(self.after)},
            "rewrite_in_format": {"off_ane": {"before": self.off_ane, "after": self.left_off_ane}},
        }


def _forecast_to_dict(found: Forecast) -> dict[str, Any]:
    return {"ops": found.ops, "on_ane": found.on_ane, "share": round(100 * found.share, 2),
            "unsupported": found.unsupported}


def iterate_network_lines(found: NetworkLint, model: str, target: str, *, everything: bool = False) -> Iterator[str]:
    """Yield the lines of text: a head, the findings by code, and what both ways of rewriting would reach."""
    head = f"as a NeuralNetwork: {found.off_ane} of {format_count(found.layers, 'layer')} reported off the ANE"
    yield head + (":" if found.findings else "")
    groups: dict[str, list[LayerFinding]] = {}
    for each in found.findings:
        groups.setdefault(each.code, []).append(each)
    for code, listed in groups.items():
        first = listed[0]
        yield f"{code} {first.slug}  {format_count(len(listed), 'layer')}: {first.summary}"
        yield from _format_by(listed, lambda each: each.reason, everything)
        fixed = dict.fromkeys(f"{each.fix['pass']} ({describe_pass(each.fix['exactness'], each.fix['preset'])})"
                              for each in listed if each.fix is not None)
        yield from (f"  fix within the format: {name}" for name in fixed)
        yield from _format_by([each for each in listed if each.not_fixed_because],
                              lambda each: f"stays: {each.not_fixed_because}", everything)
        yield from (f"  {advice}" for advice in dict.fromkeys(each.advice for each in listed) if advice)
        yield f"  confidence {first.confidence}; {first.evidence[0]}"
    yield from _iterate_outlook(found, model, target)


def _iterate_outlook(found: NetworkLint, model: str, target: str) -> Iterator[str]:
    chosen = [] if target == "all" else ["--target", target]
    for_target = "every target" if target == "all" else target
    yield (f"upgrade and rewrite --preset full: {100 * found.before.share:.1f} -> "
           f"{100 * found.after.share:.1f} % of ops predicted on the ANE of {for_target}, unsupported ops "
           f"{found.before.unsupported} -> {found.after.unsupported}"
           + _format_command(model, "OUT.mlpackage", chosen))
    yield (f"rewrite within the format --preset full: layers reported off the ANE {found.off_ane} -> "
           f"{found.left_off_ane}" + _format_command(model, "OUT.mlmodel", []))


def _format_command(model: str, output: str, more: list[str]) -> str:
    if not os.path.exists(model):
        return ""
    path = format_command_path(model)
    return f": {join_words(['mil-ane-passes', 'rewrite', path, '-o', output, '--preset', 'full', *more])}"


def _format_by(listed: Iterable[LayerFinding], describe: Any, everything: bool) -> Iterator[str]:
    """Yield a line for each description, with the layers that share it."""
    groups: dict[str, list[str]] = {}
    for each in listed:
        groups.setdefault(describe(each), []).append(f"'{escape_text(each.layer)}' ({each.kind})")
    for text, names in groups.items():
        shown = names if everything else names[:_MAX_LISTED]
        more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
        yield f"  {', '.join(shown)}{more}: {text}"
