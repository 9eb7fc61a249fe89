"""The report as the page reads it: columns instead of records, and each text once."""

from __future__ import annotations

import math
import re
from typing import Any

from coremltools.converters.mil.mil import Operation, Var

from ..._version import __version__
from ...core.plan import Plan, Row
from ...core.printer import op_text, type_text
from ...core.query import flat_inputs
from ...core.scopes import origin
from ...residency.accepted import accepted
from ..lint import LintReport
from ..lint_finding import LintFinding
from .changes import changes
from .told import told

__all__ = ["payload", "shown"]

_HALVES = re.compile("[\ud800-\udfff]")
_LONGEST = 4000
"Characters of one text: names of foreign packages have no bound of their own."


def payload(report: LintReport, after: LintReport | None = None) -> dict[str, Any]:
    """All that the page shows; `changes` is there with `after` only."""
    texts = _Texts()
    return {
        "schema": 1, "tool": "mil-ane-passes", "version": __version__,
        "target": report.target,
        "chips": [chip.upper() for generation in report.plan.generations for chip in generation.chips],
        "reports": [_report(one, texts) for one in (report, after) if one is not None],
        "changes": changes(report, after) if after is not None else None,
        "texts": texts.found,
    }


class _Texts:
    """Each text once; elsewhere stands its number."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._places: dict[str, int] = {}

    def __call__(self, text: object) -> int:
        short = shown(str(text))
        if short not in self._places:
            self._places[short] = len(self.found)
            self.found.append(short)
        return self._places[short]


def shown(text: str) -> str:
    """`text` as a page can hold it: not without end, and without halves of characters, which no encoding takes."""
    cut = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} characters)"
    return _HALVES.sub("\ufffd", cut)


def _report(report: LintReport, texts: _Texts) -> dict[str, Any]:
    plan = report.plan
    rows = {row.op: place for place, row in enumerate(plan.rows)}
    rules: dict[str, dict[str, Any]] = {}
    firsts = {name: first for name, first, _ in _spans(plan)}
    fresh = {id(item) for item in report.baseline.new} if report.baseline is not None else set()
    findings = [{**_finding(item, firsts, rules, texts), "fresh": int(id(item) in fresh)}
                for item in [*report.findings, *report.near_misses]]
    return {
        "model": shown(report.model),
        "summary": {key: _number(value) for key, value in report.summary().items()},
        "functions": [_function(report, name, first, count) for name, first, count in _spans(plan)],
        "ops": _columns(plan, rows, texts),
        "accepted": _accepted(plan),
        "rules": list(rules.values()),
        "measured": told(report),
        "findings": findings,
        "buffers": [[texts(item.function), texts(item.value), texts("×".join(map(str, item.shape)) or "scalar"),
                     item.dense, item.rows, item.padded] for item in report.buffers],
    }


def _spans(plan: Plan) -> list[tuple[str, int, int]]:
    """(function, its first row, how many rows); functions without ops have none."""
    counts = dict.fromkeys(plan.program.functions, 0)
    for row in plan.rows:
        counts[row.function] = counts.get(row.function, 0) + 1
    spans, first = [], 0
    for name, count in counts.items():
        spans.append((name, first, count))
        first += count
    return spans


def _function(report: LintReport, name: str, first: int, count: int) -> dict[str, Any]:
    function = report.plan.program.functions[name]
    segments = [[first + one.first, first + one.last, int(one.backend == "ane"), _number(one.milliseconds)]
                for one in report.plan.segments if one.function == name]
    return {
        "name": shown(name), "first": first, "count": count, "segments": segments,
        "inputs": [shown(f"{key}: {type_text(var)}") for key, var in function.inputs.items()],
        "outputs": [shown(f"{var.name}: {type_text(var)}") for var in function.outputs],
    }


_ANSWERS = {"no": 0, "unknown": 1, "yes": 2}
_ENGINES = {"ane": 0, "bnns": 1, "classic_cpu": 2}


def _columns(plan: Plan, rows: dict[Operation, int], texts: _Texts) -> dict[str, list[Any]]:
    """One list per property, one entry per op."""
    columns: dict[str, list[Any]] = {}
    for row in plan.rows:
        for key, value in _cells(row, rows, texts).items():
            columns.setdefault(key, []).append(value)
    return columns


def _cells(row: Row, rows: dict[Operation, int], texts: _Texts) -> dict[str, Any]:
    first = row.op.outputs[0] if row.op.outputs else None
    came = origin(row.op)
    return {
        "index": row.index, "depth": row.depth, "ane": _ANSWERS[row.ane], "on_ane": int(row.backend == "ane"),
        "engine": _ENGINES[row.engine], "guess": int(row.cost.guess),
        "est_ane": _number(row.cost.ane), "est_bnns": _number(row.cost.bnns), "est_classic": _number(row.cost.classic),
        "type": texts(row.op.op_type), "output": texts(first.name if first is not None else row.op.name),
        "kind": texts(type_text(first) if first is not None else ""), "reason": texts(row.reason),
        "origin": texts(came) if came is not None else -1, "mil": shown(op_text(row.op)),
        "reads": _reads(row.op, rows), "inside": _inside(row.op, rows),
    }


def _reads(op: Operation, rows: dict[Operation, int]) -> list[int]:
    """The rows of the ops whose results `op` reads."""
    makers: dict[Operation, None] = dict.fromkeys(var.op for var in flat_inputs(op) if isinstance(var, Var) and var.op)
    return [rows[maker] for maker in makers if maker in rows]


def _inside(op: Operation, rows: dict[Operation, int]) -> int:
    """The row of the op whose block holds `op`; -1 at the top of a function."""
    outer = getattr(op.enclosing_block, "outer_op", None)
    return rows.get(outer, -1) if outer is not None else -1


def _accepted(plan: Plan) -> list[dict[str, Any]]:
    """Who saw the ANE take an op, each source once, with the types of op it speaks of."""
    found: dict[Any, list[str]] = {}
    for kind in sorted({row.op.op_type for row in plan.rows}):
        for generation in plan.generations:
            source = accepted(kind, generation)
            if source is not None and kind not in found.setdefault(source, []):
                found[source].append(kind)
    return [{"source": source.to_dict(), "types": kinds} for source, kinds in found.items()]


def _finding(
    item: LintFinding, firsts: dict[str, int], rules: dict[str, dict[str, Any]], texts: _Texts,
) -> dict[str, Any]:
    rules.setdefault(item.rule.name, _rule(item))
    first = firsts.get(item.function, 0)
    return {
        "rule": list(rules).index(item.rule.name), "function": texts(item.function), "type": texts(item.op),
        "value": texts(item.value), "row": None if item.index is None else first + item.index,
        "covers": [first + index for index in item.covers], "reason": texts(item.reason),
        "near": int(item.near_miss), "refuses": int(item.refuses), "sure": int(item.sure),
        "note": int(item.level == "note"), "message": texts(item.message) if item.message else -1,
        "origin": texts(item.origin) if item.origin is not None else -1,
    }


def _rule(item: LintFinding) -> dict[str, Any]:
    """What all findings of one rule share."""
    rule = item.rule
    return {
        "code": rule.code, "slug": rule.slug, "name": rule.name, "summary": rule.summary(),
        "confidence": rule.confidence, "fix": item.fix, "evidence": [source.to_dict() for source in rule.evidence],
    }


def _number(value: Any) -> Any:
    """Six digits are plenty; what is no finite number is null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
