"""What leaves the ANE, why, and what fixes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

from ..core.collector import collector_off
from ..core.selecting import configured, reported
from ..core.targets import parse_target
from ..report.baseline import read_baseline
from ..report.lint import LintReport
from ..report.mending import cures, mended
from ..residency import predict
from ..residency.agreement import agreement, believe
from ..residency.measured import Measured, Measurement, best_match, read_measurements
from ..residency.measured_otherwise import MeasuredOtherwise, contradictions
from .source import opened

__all__ = ["lint"]

Names = Iterable[str] | str


def lint(
    src: Any, *, target: str = "all", select: Names | None = None, ignore: Names | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None, after: Any = None,
    baseline: str | PathLike[str] | None = None, measured: Measured | None = None,
) -> LintReport:
    """Which ops of `src` leave the ANE of `target`, by which rule, on whose evidence, and what mends it.

    `select` and `ignore` say which rules are reported (codes, beginnings of codes such as ANE3, slugs or names;
    `ignore` wins). A rule that refuses ops counts in the prediction all the same: what is not mentioned does not get
    an op onto the ANE. `options` sets options of rules, by name. `after` is a second source that is looked at in the
    same way, `baseline` the JSON of an earlier report. `measured` is what Core ML said on a Mac (the result.json of
    `measure.py`, a dumped compute plan, or its data): it answers where it contradicts the prediction and its chip is
    the target, and stands beside the predicted places and costs. Raises InputError for what cannot be read and for
    unknown names.
    """
    with collector_off():
        return _lint(src, target, (select, ignore), options, after, baseline, measured)


def _lint(
    src: Any, target: str, chosen: tuple[Names | None, Names | None], options: Any, after: Any, baseline: Any,
    measured: Any,
) -> LintReport:
    parse_target(target)
    names, rules = reported(*chosen), configured(options)
    known = None if baseline is None else read_baseline(baseline)
    helping = cures(rule for name, rule in rules.items() if name in names)
    asked = [rule for name, rule in rules.items() if name in names or name in helping or rule.refuses]

    def looked_at(each: Any, plans: Sequence[Measurement]) -> LintReport:
        source = opened(each)
        # What changes the interface is not for the parts of a pipeline, which have neighbours.
        fitting = [rule for rule in asked if not (source.is_pipeline and getattr(rule, "interface", False))]
        plan, found = predict(source.program, fitting, target=target, package=source.package)
        told = agreement(plan, best_match(plan, plans, source.name)) if plans else None
        if told is not None:
            found += contradictions(told)
            believe(plan, told)
        report = LintReport.of(source.name, target, plan, mended(found, names), {*names, MeasuredOtherwise.name})
        report.measured = told
        report.left_out = {} if source.package is None else source.package.members.others
        return report

    plans = [] if measured is None else read_measurements(measured)
    report = looked_at(src, plans)
    rest = [each for each in plans if report.measured is not None and each is not report.measured.match.measurement]
    report.after = None if after is None else looked_at(after, rest)
    report.baseline = None if known is None else known.compare(report.findings)
    return report
