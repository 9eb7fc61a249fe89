"""What leaves the ANE, why, and what fixes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

from ..core.selecting import configured, reported
from ..core.targets import parse_target
from ..report.baseline import read_baseline
from ..report.lint import LintReport
from ..residency import predict
from .source import opened

__all__ = ["lint"]

Names = Iterable[str] | str


def lint(
    src: Any, *, target: str = "all", select: Names | None = None, ignore: Names | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None, after: Any = None,
    baseline: str | PathLike[str] | None = None,
) -> LintReport:
    """Which ops of `src` leave the ANE of `target`, by which rule, on whose evidence, and what mends it.

    `select` and `ignore` say which rules are reported (codes, beginnings of codes such as ANE3, slugs or names;
    `ignore` wins). A rule that refuses ops counts in the prediction all the same: what is not mentioned does not get
    an op onto the ANE. `options` sets options of rules, by name. `after` is a second source that is looked at in the
    same way, `baseline` the JSON of an earlier report. Raises InputError for what cannot be read and for unknown
    names.
    """
    parse_target(target)
    names, rules = reported(select, ignore), configured(options)
    known = None if baseline is None else read_baseline(baseline)
    asked = [rule for name, rule in rules.items() if name in names or rule.refuses]

    def looked_at(each: Any) -> LintReport:
        source = opened(each)
        plan, found = predict(source.program, asked, target=target, package=source.package)
        return LintReport.of(source.name, target, plan, found, names)

    report = looked_at(src)
    report.after = None if after is None else looked_at(after)
    report.baseline = None if known is None else known.compare(report.findings)
    return report
