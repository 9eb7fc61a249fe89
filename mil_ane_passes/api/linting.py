"""What leaves the ANE, why, and what fixes it."""

from __future__ import annotations

from typing import Any

from ..core.registry import all_rules
from ..core.targets import parse_target
from ..report.lint import LintReport
from ..residency import predict
from .source import opened

__all__ = ["lint"]


def lint(src: Any, *, target: str = "all") -> LintReport:
    """Which ops of `src` leave the ANE of `target`, by which rule, on whose evidence, and what mends it.

    Raises InputError for a source that cannot be read and for an unknown target.
    """
    parse_target(target)
    source = opened(src)
    plan, found = predict(source.program, [rule() for rule in all_rules().values()], target=target,
                          package=source.package)
    return LintReport.of(source.name, target, plan, found)
