"""The report as JSON data of the page: columns instead of records, and each text stored once."""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from typing import Any

from coremltools.converters.mil.mil import Operation, Var, types

from ..._version import __version__
from ...ane.op_support import find_evidence
from ...ir.printer import format_op, format_type
from ...ir.query import get_flat_inputs
from ...ir.scopes import find_origin
from ...package.storage import survey_storage
from ...passes.finding import Finding
from ...passes.plan import Plan, Row
from ...passes.severity import Severity
from ...utils.pass_description import describe_pass
from ...utils.text_format import format_count, format_duration, join_names
from ..fix_commands import format_rewrite_command, format_split_command
from ..ignored import count_ignored
from ..lint import LintReport
from ..lint_groups import find_costliest
from ..lint_text import describe_duplicates, format_latency
from ..network import iterate_network_lines
from ..next_step import NextStep
from .attributes import AttributeTable
from .changes import find_changes
from .measurement import encode_measurement

__all__ = ["build_payload", "describe_cause", "sanitize_text"]

_SURROGATES = re.compile("[\ud800-\udfff]")
_MAX_TEXT_LENGTH = 4000
"Most characters of one text: names in a package may have any length, and would make the page slow."
_MAX_KINDS = 3
"Most kinds of ops that the sentence about the cause lists, so that it stays readable; the others are counted."
_INT32, _FP32 = "int32 op", "fp32 op"
_FP32_CODE = "ANE502"
"The code of the rule about ops that compute in fp32."


def build_payload(report: LintReport, after: LintReport | None = None) -> dict[str, Any]:
    """Build the page's data; `changes` is None without `after`."""
    texts = _TextTable()
    return {
        "schema": 1, "tool": "mil-ane-passes", "version": __version__,
        "target": report.target,
        "severities": [{"title": each.label.capitalize(), "fails": each.fails} for each in Severity],
        "chips": [chip.upper() for generation in report.plan.generations for chip in generation.chips],
        "reports": [_encode_report(one, texts) for one in (report, after) if one is not None],
        "changes": find_changes(report, after) if after is not None else None,
        "texts": texts.found,
    }


class _TextTable:
    """A table that stores each text once; other data refer to a text by index."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._places: dict[str, int] = {}

    def __call__(self, text: object) -> int:
        short = sanitize_text(str(text))
        if short not in self._places:
            self._places[short] = len(self.found)
            self.found.append(short)
        return self._places[short]


class _FixTable:
    """A table that stores each fix once, with its commands as in the text report; findings refer to a fix by index."""

    def __init__(self, report: LintReport) -> None:
        self.found: list[dict[str, Any]] = []
        self._report = report
        self._places: dict[str, int] = {}

    def __call__(self, item: Finding) -> int:
        """Return the index of the fix of `item`; -1 if it has none, or is a near miss."""
        fix = None if item.near_miss else item.fix
        if fix is None and not item.split_at:
            return -1
        made = {"pass": None, "exactness": None, "preset": None, "advice": None, **(fix or {})}
        commands = [format_rewrite_command(self._report, [made["pass"]])] if made["pass"] else []
        cut = format_split_command(self._report, item) if item.split_at else None
        commands += [] if cut is None else [cut]
        entry: dict[str, Any] = {name: None if value is None else sanitize_text(value) for name, value in made.items()}
        entry["how"] = describe_pass(made["exactness"], made["preset"]) if made["pass"] else None
        entry["commands"] = [sanitize_text(each) for each in commands]
        key = repr(entry)
        if key not in self._places:
            self._places[key] = len(self.found)
            self.found.append(entry)
        return self._places[key]


def _encode_step(step: NextStep | None) -> dict[str, Any] | None:
    """Encode the next step: texts, and the predicted changes as (name, before, after, gain).

    The gain is 1 for an improvement, -1 for the opposite, and 0 for no change.
    """
    if step is None:
        return None
    pairs: list[list[Any]] = []
    if step.found is not None:
        one, other = step.found.before, step.found.after
        pairs = [["ops on the ANE", *(f"{each.on_ane or 0:,} of {each.ops:,}" for each in (one, other)),
                  _compare_numbers(one.share, other.share)],
                 ["unsupported ops", f"{one.unsupported:,}", f"{other.unsupported:,}",
                  _compare_numbers(other.unsupported, one.unsupported)]]
        possibly = one.possibly_unsupported, other.possibly_unsupported
        if possibly[0] != possibly[1]:
            pairs.append(["possibly unsupported", *(f"{each:,}" for each in possibly),
                          _compare_numbers(*possibly[::-1])])
        if one.latency_us is not None and other.latency_us is not None:
            times = [format_duration(each / 1e3) for each in (one.latency_us, other.latency_us)]
            gain = 0 if times[0] == times[1] else _compare_numbers(other.latency_us, one.latency_us)
            pairs.append(["latency", *times, gain])
    return {"command": sanitize_text(step.command), "words": sanitize_text(step.words),
            "note": sanitize_text(step.note), "pairs": pairs}


def _compare_numbers(less: float, more: float) -> int:
    return (more > less) - (more < less)


def sanitize_text(text: str) -> str:
    """Return `text` with its length limited and its surrogates, which cannot be encoded, replaced."""
    cut = text if len(text) <= _MAX_TEXT_LENGTH else f"{text[:_MAX_TEXT_LENGTH]}… ({len(text)} characters)"
    return _SURROGATES.sub("\ufffd", cut)


def describe_cause(plan: Plan) -> str:
    """Describe the unsupported ops and the number of ops that they keep on the CPU; "" without unsupported ops."""
    kinds = Counter(_name_kind(row) for row in plan.rows if row.ane == "no")
    if not kinds:
        return ""
    cpu, count = sum(row.backend != "ane" for row in plan.rows), sum(kinds.values())
    named = [f"{times:,} {kind}{'s' * (kind in (_INT32, _FP32) and times > 1)}"
             for kind, times in kinds.most_common(_MAX_KINDS)]
    if rest := count - sum(times for _, times in kinds.most_common(_MAX_KINDS)):
        named.append(format_count(rest, "other"))
    if cpu == count:
        return f"Unsupported: {join_names(named)}."
    total = f"all {cpu:,} ops" if cpu == len(plan.rows) else format_count(cpu, "op")
    what = "is unsupported and keeps" if count == 1 else "are unsupported and keep"
    return f"{join_names(named)} {what} {total} on the CPU."


def _name_kind(row: Row) -> str:
    """Return the type of an unsupported op; if its dtype is the cause, return "int32 op" or "fp32 op" instead."""
    if _FP32_CODE in row.codes:
        return _FP32
    dtypes = {var.dtype for var in row.op.outputs if types.is_tensor(var.sym_type)}
    return _INT32 if dtypes == {types.int32} else row.op.op_type


def _encode_report(report: LintReport, texts: _TextTable) -> dict[str, Any]:
    plan = report.plan
    rows = {row.op: place for place, row in enumerate(plan.rows)}
    rules: dict[str, dict[str, Any]] = {}
    fixes, attributes = _FixTable(report), AttributeTable(texts)
    firsts = {name: first for name, first, _ in _find_function_spans(plan)}
    fresh = {id(item) for item in report.baseline.new} if report.baseline is not None else set()
    listed = [*report.findings, *report.near_misses]
    findings = [{**_encode_finding(item, firsts, rules, texts), "fix": fixes(item), "fresh": int(id(item) in fresh)}
                for item in listed]
    costliest = find_costliest(report.findings, plan)
    return {
        "model": sanitize_text(report.model),
        "summary": {key: _round_number(value) for key, value in report.summary().items()},
        "support": str(plan.support),
        "cause": sanitize_text(describe_cause(plan)),
        "step": _encode_step(report.next_step),
        "costliest": next((place for place, item in enumerate(listed) if item is costliest), -1),
        "fixes": fixes.found,
        "ignored": count_ignored(report),
        "latency": sanitize_text(format_latency(report.latency)) if report.latency is not None else "",
        "network": _encode_network(report),
        "functions": [
            _encode_function(report, name, first, count) for name, first, count in _find_function_spans(plan)
        ],
        "ops": {**_build_columns(plan, rows, texts, attributes), **_build_latency_columns(report, texts)},
        "weights": attributes.weights,
        "accepted": _collect_supporting_evidence(plan),
        "rules": list(rules.values()),
        "measured": encode_measurement(report),
        "findings": findings,
        "buffers": [
            [
                texts(item.function),
                texts(item.value),
                texts("×".join(map(str, item.shape)) or "scalar"),
                item.dense,
                item.rows,
                item.padded,
            ]
            for item in report.buffers
        ],
        "storage": _encode_storage(report, texts),
    }


def _encode_storage(report: LintReport, texts: _TextTable) -> dict[str, Any]:
    """Encode the weights and their totals; duplicates only where the report has searched them."""
    storage = report.storage or survey_storage(report.plan.program)
    return {
        "stored": storage.stored, "dense": storage.dense, "peak": report.peak_bytes,
        "formats": [[sanitize_text(each.format), each.count, each.stored] for each in storage.formats],
        "duplicates": "" if storage.duplicates is None else f"Duplicates: {describe_duplicates(storage)}.",
        "weights": [[texts(each.function), texts(each.value), texts("×".join(map(str, each.shape)) or "scalar"),
                     texts(each.format), each.stored, each.dense, texts(each.reader)] for each in storage.weights],
    }


def _encode_network(report: LintReport) -> list[str] | None:
    """Return the lines about a NeuralNetwork's layers; None for an ML Program."""
    if report.network is None:
        return None
    made = [*map(str, report.upgraded), *iterate_network_lines(report.network, report.model, report.target)]
    return [sanitize_text(line.strip()) for line in made]


def _find_function_spans(plan: Plan) -> list[tuple[str, int, int]]:
    """List (function, index of its first row, number of rows); functions without ops have 0 rows."""
    counts = dict.fromkeys(plan.program.functions, 0)
    for row in plan.rows:
        counts[row.function] = counts.get(row.function, 0) + 1
    spans, first = [], 0
    for name, count in counts.items():
        spans.append((name, first, count))
        first += count
    return spans


def _encode_function(report: LintReport, name: str, first: int, count: int) -> dict[str, Any]:
    function = report.plan.program.functions[name]
    segments = [[first + one.first, first + one.last, int(one.backend == "ane"), _round_number(one.milliseconds)]
                for one in report.plan.segments if one.function == name]
    return {
        "name": sanitize_text(name), "first": first, "count": count, "segments": segments,
        "inputs": [sanitize_text(f"{key}: {format_type(var)}") for key, var in function.inputs.items()],
        "outputs": [sanitize_text(f"{var.name}: {format_type(var)}") for var in function.outputs],
    }


_SUPPORT_CODES = {"no": 0, "unknown": 1, "yes": 2}
_ENGINE_CODES = {"ane": 0, "bnns": 1, "classic_cpu": 2}


def _build_columns(
    plan: Plan, rows: dict[Operation, int], texts: _TextTable, attributes: AttributeTable,
) -> dict[str, list[Any]]:
    """Build one list per property, with one entry per op."""
    columns: dict[str, list[Any]] = {}
    for row in plan.rows:
        for key, value in {**_encode_row(row, rows, texts), **attributes.encode(row.op)}.items():
            columns.setdefault(key, []).append(value)
    return columns


def _build_latency_columns(report: LintReport, texts: _TextTable) -> dict[str, list[Any]]:
    """Build the columns of the estimated run time in microseconds and its term; null and -1 for an op without one."""
    known = {(op.function, op.index): op for op in report.latency.ops} if report.latency is not None else {}
    found = [known.get((row.function, row.index)) for row in report.plan.rows]
    return {
        "latency_us": [None if op is None else _round_number(op.latency_us) for op in found],
        "latency_term": [-1 if op is None else texts(op.term + ", extrapolated" * op.extrapolated) for op in found],
    }


def _encode_row(row: Row, rows: dict[Operation, int], texts: _TextTable) -> dict[str, Any]:
    first = row.op.outputs[0] if row.op.outputs else None
    came = find_origin(row.op)
    return {
        "index": row.index,
        "depth": row.depth,
        "ane": _SUPPORT_CODES[row.ane],
        "on_ane": int(row.backend == "ane"),
        "engine": _ENGINE_CODES[row.engine],
        "guess": int(row.cost.guess),
        "est_ane": _round_number(row.cost.ane),
        "est_bnns": _round_number(row.cost.bnns),
        "est_classic": _round_number(row.cost.classic),
        "type": texts(row.op.op_type),
        "output": texts(first.name if first is not None else row.op.name),
        "kind": texts(format_type(first) if first is not None else ""),
        "reason": texts(row.reason),
        "origin": texts(came) if came is not None else -1,
        "blocker": texts(_name_kind(row)) if row.ane == "no" else -1,
        "mil": sanitize_text(format_op(row.op)),
        "reads": _find_input_rows(row.op, rows),
        "inside": _find_enclosing_row(row.op, rows),
    }


def _find_input_rows(op: Operation, rows: dict[Operation, int]) -> list[int]:
    """Return the row indices of the ops that produce the inputs of `op`."""
    makers: dict[Operation, None] = dict.fromkeys(
        var.op for var in get_flat_inputs(op) if isinstance(var, Var) and var.op
    )
    return [rows[maker] for maker in makers if maker in rows]


def _find_enclosing_row(op: Operation, rows: dict[Operation, int]) -> int:
    """Return the row index of the op whose block contains `op`; -1 in the outermost block of a function."""
    outer = getattr(op.enclosing_block, "outer_op", None)
    return rows.get(outer, -1) if outer is not None else -1


def _collect_supporting_evidence(plan: Plan) -> list[dict[str, Any]]:
    """Collect the sources for support on the ANE, each once, with the op types that the source covers."""
    found: dict[Any, list[str]] = {}
    for kind in sorted({row.op.op_type for row in plan.rows}):
        for generation in plan.generations:
            source = find_evidence(kind, generation)
            if source is not None and kind not in found.setdefault(source, []):
                found[source].append(kind)
    return [{"source": source.to_dict(), "types": kinds} for source, kinds in found.items()]


def _encode_finding(
    item: Finding, firsts: dict[str, int], rules: dict[str, dict[str, Any]], texts: _TextTable,
) -> dict[str, Any]:
    rules.setdefault(item.rule.name, _encode_rule(item))
    first = firsts.get(item.function, 0)
    return {
        "rule": list(rules).index(item.rule.name), "function": texts(item.function), "type": texts(item.op),
        "value": texts(item.value), "row": None if item.index is None else first + item.index,
        "covers": [first + index for index in item.covers], "reason": texts(item.reason),
        "near": int(item.near_miss), "refuses": int(item.refuses), "sure": int(item.sure),
        "severity": item.severity.rank, "message": texts(item.message) if item.message else -1,
        "origin": texts(item.origin) if item.origin is not None else -1,
        **({"evidence": [source.to_dict() for source in item.sources]} if item.sources else {}),
    }


def _encode_rule(item: Finding) -> dict[str, Any]:
    """Encode the properties that all findings of one rule share."""
    rule = item.rule
    return {
        "code": rule.code, "slug": rule.slug, "name": rule.name, "summary": rule.summary(),
        "page": inspect.getdoc(rule) or rule.summary(),
        "confidence": rule.confidence, "evidence": [source.to_dict() for source in rule.evidence],
    }


def _round_number(value: Any) -> Any:
    """Round a float to six significant digits; infinity and NaN become None."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
