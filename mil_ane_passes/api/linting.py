"""Lint: reports the ops that leave the ANE, why, and what fixes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

from ..ane import predict_plan
from ..ane.agreement import apply_measurement, compare_with_measurement
from ..ane.compute_plan import Measurement, MeasurementSource, find_best_match, read_measurements
from ..ane.fixes import attach_fixes, names_of_fixes
from ..ane.measured_otherwise import MeasuredOtherwise, iterate_contradictions
from ..ane.prediction import update_unmeasured
from ..passes.rule_selection import configure_rules, select_rule_names
from ..passes.targets import parse_target
from ..report.baseline import read_baseline
from ..report.lint import LintReport
from ..report.lint_finding import LintFinding
from ..transforms.contract import apply_edits
from ..transforms.sources import open_document
from ..transforms.split_at import SplitAt
from ..utils.errors import InputError
from ..utils.garbage_collection import pause_garbage_collection
from ..utils.locking import synchronized
from .source import OpenedSource, open_source

__all__ = ["lint"]

Names = Iterable[str] | str
Cuts = tuple[tuple[str, ...], ...]
_MAX_TRIED_CUTS = 16
"""Cuts tried for one report: each writes the program again, so the limit bounds the time for many findings."""


@synchronized
def lint(
    src: Any, *, target: str = "all", select: Names | None = None, ignore: Names | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None, after: Any = None,
    baseline: str | PathLike[str] | None = None, measured: MeasurementSource | None = None,
) -> LintReport:
    """Find the ops of `src` that leave the ANE of `target`, with the rule, its evidence, and the fix of each.

    `select` and `ignore` choose the reported rules (codes, beginnings of codes such as ANE3, slugs or names; `ignore`
    wins). A rule that finds unsupported ops always counts in the prediction: hiding a finding does not get an op onto
    the ANE. `options` sets options of rules, by name. `after` is a second source that is checked in the same way,
    `baseline` the JSON of an earlier report. `measured` is Core ML's answer on a Mac (the result.json of `measure.py`,
    a dumped compute plan, or its data): it overrides the prediction where both differ and its chip is the target, and
    is reported beside the predicted backends and costs. Raises InputError for input that cannot be read and for
    unknown names.
    """
    with pause_garbage_collection():
        return _lint_sources(src, target, (select, ignore), options, after, baseline, measured)


def _lint_sources(
    src: Any, target: str, chosen: tuple[Names | None, Names | None], options: Any, after: Any, baseline: Any,
    measured: Any,
) -> LintReport:
    parse_target(target)
    names, rules = select_rule_names(*chosen), configure_rules(options)
    known = None if baseline is None else read_baseline(baseline)
    helping = names_of_fixes(rule for name, rule in rules.items() if name in names)
    asked = [rule for name, rule in rules.items() if name in names or name in helping or rule.refuses]

    def looked_at(each: Any, plans: Sequence[Measurement]) -> LintReport:
        source = open_source(each)
        # What changes the interface is not for the parts of a pipeline, which have neighbours.
        fitting = [rule for rule in asked if not (source.is_pipeline and getattr(rule, "interface", False))]
        plan, found = predict_plan(source.program, fitting, target=target, package=source.package)
        told = compare_with_measurement(plan, find_best_match(plan, plans, source.name)) if plans else None
        if told is not None:
            apply_measurement(plan, told)
            found = [*update_unmeasured(plan, found), *iterate_contradictions(told)]
        report = LintReport.of(source.name, target, plan, attach_fixes(found, names), {*names, MeasuredOtherwise.name})
        report.measured = told
        report.findings = _keep_possible_cuts(report.findings, source)
        report.left_out = {} if source.package is None else source.package.members.others
        return report

    plans = [] if measured is None else read_measurements(measured)
    report = looked_at(src, plans)
    rest = [each for each in plans if report.measured is not None and each is not report.measured.match.measurement]
    report.after = None if after is None else looked_at(after, rest)
    report.baseline = None if known is None else known.compare(report.findings)
    return report


def _keep_possible_cuts(findings: list[LintFinding], source: OpenedSource) -> list[LintFinding]:
    """Remove from `findings` the cuts that `edit --split-at` cannot make in the source; each cut is tried.

    If one rule found several ops of a function, such as lookups, each of which one cut separates, a single cut for all
    of them is tried first.
    """
    groups: dict[tuple[type, str], list[LintFinding]] = defaultdict(list)
    for item in findings:
        if item.split_at:
            groups[item.rule, item.function].append(item)
    possible: dict[int, Cuts] = {}
    tries = iter(range(_MAX_TRIED_CUTS))
    for (_, function), items in groups.items():
        joined: Cuts = (tuple(dict.fromkeys(name for item in items for cut in item.split_at for name in cut)),)
        together = all(len(item.split_at) == 1 for item in items) and len(items) > 1
        if together and next(tries, None) is not None and _can_cut(source, function, joined):
            possible |= dict.fromkeys(map(id, items), joined)
            continue
        possible |= {id(item): item.split_at for item in items
                     if next(tries, None) is not None and _can_cut(source, function, item.split_at)}
    return [replace(item, split_at=possible.get(id(item), ())) if item.split_at else item for item in findings]


def _can_cut(source: OpenedSource, function: str, cuts: Cuts) -> bool:
    """Return whether `edit` can make these cuts, each in the first part of the one before."""
    if source.package is None:
        return False
    several = len(source.program.functions) > 1
    try:
        document = open_document(source.package)
        for values in cuts:
            document = apply_edits(document, [SplitAt(values, function if several else None)])[0]
    except InputError:
        return False
    return True
