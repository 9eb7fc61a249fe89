"""A lint report as SARIF 2.1.0, the format that code hosts and editors read.

A place is a logical location (function and value) in the package; near misses have kind "informational" and level
"none". Fixes in SARIF are changes of text, which do not apply to a package, so the fix is in the message and in a
property.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from .._version import __version__
from ..package.executorch_program import find_read_file
from ..passes.contract import Rule
from ..passes.finding import Finding
from ..passes.registry import fixes_for
from ..utils.pass_description import describe_exactness
from ..utils.text_format import escape_text
from ..utils.upgraded_source import upgrades_to_dict
from .network import LayerFinding

if TYPE_CHECKING:
    from .lint import LintReport

__all__ = ["SarifLog", "build_sarif"]

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
FINGERPRINT_NAME = "milAnePasses/v1"


def build_sarif(report: LintReport) -> dict[str, Any]:
    """Build one run with a result for each finding and near miss."""
    log = SarifLog()
    log.add(report)
    (described,) = log.models
    return log.build({name: value for name, value in described.items() if name != "model"})


class SarifLog:
    """One run over several reports, which are added one by one and not kept."""

    def __init__(self) -> None:
        self.rules: dict[str, dict[str, Any]] = {}
        self.layer_rules: dict[str, dict[str, Any]] = {}
        self.artifacts: list[dict[str, Any]] = []
        self.results: list[dict[str, Any]] = []
        self.models: list[dict[str, Any]] = []

    def add(self, report: LintReport) -> None:
        """Add the results of a report, and the rules that they refer to."""
        place = _build_artifact_location(report.model)
        location = None if place is None else {**place, "index": len(self.artifacts)}
        kinds = ["memoryContents"] if place is None else ["directory"] if os.path.isdir(report.model) else []
        self.artifacts.append({"location": place or {}, "description": {"text": _escape_literal(report.model)},
                               "roles": ["analysisTarget", *kinds]})
        listed = [*report.findings, *report.near_misses]
        for item in listed:
            self.rules.setdefault(item.problem.code, _build_rule(item.problem))
        seen: Counter[Any] = Counter()
        results = [_build_result(item, location, seen) for item in listed]
        if report.baseline is not None:
            new = {id(item) for item in report.baseline.new}
            for item, result in zip(report.findings, results):
                result["baselineState"] = "new" if id(item) in new else "unchanged"
            results += [_build_absent_result(key, location) for key in report.baseline.gone]
        for each in () if report.network is None else report.network.findings:
            self.layer_rules.setdefault(each.code, _build_layer_rule(each))
            results.append(_build_layer_result(each, location, seen))
        results += self._build_ignored_results(report, location, seen)
        self.results += results
        self.models.append({
            "model": report.model, "target": report.target, "predicted": True, "summary": report.summary(),
            "next_step": None if report.next_step is None else report.next_step.to_dict(),
            **({"not_judged": report.not_judged} if report.not_judged else {}),
            **upgrades_to_dict(report.upgraded),
            **({"network": {name: value for name, value in report.network.to_dict().items()
                            if name != "findings"}} if report.network is not None else {})})

    def _build_ignored_results(
        self, report: LintReport, location: dict[str, Any] | None, seen: Counter[Any]
    ) -> list[dict[str, Any]]:
        """Build the results of findings that the settings ignore, as suppressed ones."""
        results = []
        for ignored in report.ignored:
            why = _escape_literal(f"per-op-ignores: {ignored.ignore.pattern}")
            suppressed = {"suppressions": [{"kind": "external", "status": "accepted", "justification": why}]}
            for item in ignored.findings:
                self.rules.setdefault(item.problem.code, _build_rule(item.problem))
                results.append({**_build_result(item, location, seen), **suppressed})
            for each in ignored.layers:
                self.layer_rules.setdefault(each.code, _build_layer_rule(each))
                results.append({**_build_layer_result(each, location, seen), **suppressed})
        return results

    def build(self, properties: Mapping[str, Any], failures: Sequence[str] = ()) -> dict[str, Any]:
        """Build the log; `failures` are messages about what could not be looked at."""
        rules = [*(self.rules[code] for code in sorted(self.rules)), *self.layer_rules.values()]
        where = {rule["id"]: number for number, rule in enumerate(rules)}
        invocation: dict[str, Any] = {"executionSuccessful": not failures}
        if failures:
            invocation["toolExecutionNotifications"] = [
                {"level": "error", "message": {"text": _escape_literal(escape_text(each))}} for each in failures]
        run = {
            "tool": {"driver": {"name": "mil-ane-passes", "version": __version__, "rules": rules}},
            "invocations": [invocation], "artifacts": self.artifacts,
            "results": [_add_rule_index(result, where) for result in self.results],
            "columnKind": "utf16CodeUnits", "properties": dict(properties),
        }
        return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _add_rule_index(result: dict[str, Any], where: Mapping[str, int]) -> dict[str, Any]:
    """Insert the index of the result's rule; rules of results that are gone may not be listed."""
    if result.get("baselineState") == "absent":
        return result
    return {"ruleId": result["ruleId"], "ruleIndex": where[result["ruleId"]], **result}


def _build_rule(rule: type[Rule]) -> dict[str, Any]:
    page = inspect.getdoc(rule) or rule.summary()
    evidence = "\n".join(f"- {source}" for source in rule.evidence)
    return {
        "id": rule.code, "name": rule.__name__,
        "shortDescription": {"text": rule.summary()}, "fullDescription": {"text": rule.slug},
        "help": {"text": f"{page}\n\n{evidence}", "markdown": f"```\n{page}\n```\n\n{evidence}"},
        "defaultConfiguration": {"level": rule.get_severity().sarif_level},
        "properties": {"tags": list(dict.fromkeys((rule.slug, rule.name, rule.stage))), "confidence": rule.confidence,
                       "severity": rule.get_severity().value, "refuses": rule.refuses,
                       "evidence": [source.to_dict() for source in rule.evidence],
                       "passes": [f"ane::{fix.name}" for fix in fixes_for(rule)]},
    }


def _build_layer_rule(item: LayerFinding) -> dict[str, Any]:
    evidence = "\n".join(f"- {source}" for source in item.evidence)
    return {
        "id": item.code, "name": item.slug, "shortDescription": {"text": item.summary},
        "fullDescription": {"text": item.slug},
        "help": {"text": f"{item.summary}\n\n{evidence}", "markdown": f"{item.summary}\n\n{evidence}"},
        "defaultConfiguration": {"level": item.severity.sarif_level},
        "properties": {"tags": [item.slug, "NeuralNetwork"], "confidence": item.confidence,
                       "severity": item.severity.value, "evidence": [source.to_dict() for source in item.evidence]},
    }


def _build_layer_result(
    item: LayerFinding, location: dict[str, Any] | None, seen: Counter[Any]
) -> dict[str, Any]:
    identity = (item.code, item.layer, item.kind)
    seen[identity] += 1
    stays = f" A rewrite within the format does not fix it: {item.not_fixed_because}." if item.not_fixed_because else ""
    place = _build_named_location(location, item.layer, item.layer)
    place["logicalLocations"][0]["kind"] = "module"
    return {
        "ruleId": item.code, "kind": "fail", "level": item.severity.sarif_level,
        "message": {"text": _escape_literal(f"layer '{item.layer}' ({item.kind}): {item.reason}.{stays} (Reported.)")},
        "locations": [place], "partialFingerprints": {FINGERPRINT_NAME: _compute_fingerprint(identity, seen[identity])},
        "properties": {"severity": item.severity.value, "layer": item.layer, "kind": item.kind, "ops": list(item.ops),
                       "fix": None if item.fix is None else dict(item.fix), "confidence": item.confidence},
    }


def _build_result(
    item: Finding, location: dict[str, Any] | None, seen: Counter[Any],
) -> dict[str, Any]:
    identity = (item.near_miss, *item.key)
    seen[identity] += 1
    made: dict[str, Any] = {
        "ruleId": item.problem.code,
        "kind": "informational" if item.near_miss else "fail",
        "level": "none" if item.near_miss else item.severity.sarif_level,
        "message": {"text": _escape_literal(_format_message(item))},
        "locations": [_build_location(item, location)],
        "partialFingerprints": {FINGERPRINT_NAME: _compute_fingerprint(identity, seen[identity])},
        "properties": {"severity": item.severity.value, "op": item.op, "index": item.index,
                       "covers": list(item.covers), "refuses": item.refuses,
                       "sure": item.sure, "confidence": item.rule.confidence, "fix": item.fix,
                       "coreMLMessage": item.message,
                       "origin": item.origin.to_dict() if item.origin else None,
                       **({"evidence": [source.to_dict() for source in item.sources]} if item.sources else {})},
    }
    return made


def _build_absent_result(key: tuple[str, str, str, str], location: dict[str, Any] | None) -> dict[str, Any]:
    code, function, op, value = key
    return {"ruleId": code, "kind": "fail", "level": "note", "baselineState": "absent",
            "message": {"text": _escape_literal(f"no longer found: {op} %{value}")},
            "locations": [_build_named_location(location, f"{function}/{value}", value)]}


def _escape_literal(text: str) -> str:
    """Escape `text` as SARIF requires of literal text.

    Braces are doubled, as placeholders have single ones (3.11.5), and brackets that would end the text of a link are
    escaped (3.11.6). Names come from the model and may contain either.
    """
    return text.replace("{", "{{").replace("}", "}}").replace("](", "\\](")


def _format_message(item: Finding) -> str:
    words = [f"{item.op} %{item.value}: {item.reason}."]
    if item.message:
        words.append(f"Core ML says: {item.message}")
    if item.fix and item.fix["pass"]:
        words.append(f"Fix: --passes {item.fix['pass'].removeprefix('ane::')} "
                     f"({describe_exactness(item.fix['exactness'])}).")
    if item.fix and item.fix["advice"]:
        words.append(str(item.fix["advice"]))
    return " ".join([*words, "(Predicted.)"])


def _build_location(item: Finding, location: dict[str, Any] | None) -> dict[str, Any]:
    made = _build_named_location(location, f"{item.function}/{item.value}", item.value)
    if item.origin and item.origin.module:
        made["logicalLocations"].append({"fullyQualifiedName": item.origin.module, "kind": "module"})
    return made


def _build_named_location(location: dict[str, Any] | None, full: str, name: str) -> dict[str, Any]:
    made: dict[str, Any] = {"logicalLocations": [{"name": name, "fullyQualifiedName": full, "kind": "variable"}]}
    if location:
        made["physicalLocation"] = {"artifactLocation": location}
    return made


def _build_artifact_location(model: str) -> dict[str, Any] | None:
    """Return the package's URI as the user wrote it: relative paths stay relative, so that a code host finds them.

    The URI of a delegate is that of its program.
    """
    path = PurePath(find_read_file(model))
    if not Path(path).exists():
        return None
    return {"uri": path.as_uri() if path.is_absolute() else quote(os.fsencode(path.as_posix()))}


def _compute_fingerprint(identity: tuple[Any, ...], times: int) -> str:
    """Return a hash that depends on rule and place, not on the message; `times` distinguishes several at one place."""
    return hashlib.sha256("\0".join(map(str, (*identity, times))).encode()).hexdigest()[:32]
