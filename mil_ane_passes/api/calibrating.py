"""Where a model leaves fp16 on the user's own feeds, and what cures it."""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.mil import Program

from ..core.contract import ProgramRewrite, Rewrite, Rule
from ..core.errors import InputError
from ..core.registry import all_rules
from ..core.targets import parse_target
from ..proof.calibrate import calibrated
from ..proof.given import Given
from ..report.calibrate import CalibrateReport
from .source import Progress, opened, quiet

__all__ = ["calibrate"]


def calibrate(
    src: Any, *, feeds: Any = None, ranges: Any = None, target: str = "all", worst: int | None = None,
    progress: Progress = quiet,
) -> CalibrateReport:
    """Run a model on `feeds` (a mapping from input name to array, or several) or within `ranges` (input name to
    (low, high)), at float32, and say of each value its range, the room it leaves in fp16, the bound on its partial
    sums, what finds fault with it, and which rewrites cure what does not fit: each rule that fires is tried on a copy.

    Raises InputError without feeds and ranges or where they do not fit, NotSupported for an op the runtime lacks.
    """
    parse_target(target)
    given = Given.of(feeds, ranges)
    if not given:
        raise InputError("nothing to run on; expected feeds (--feeds F.npz) or ranges (--ranges 'NAME=LOW:HIGH')")
    model = opened(src)

    def make(program: Program) -> Any:
        return given.plans(program, model.describe)

    rules = [rule for rule in all_rules().values() if _about_values(rule)]
    found = calibrated(model.program, make, rules, target=target, progress=progress)
    return CalibrateReport(model.name, target, found.runs, found, worst)


def _about_values(rule: type[Rule]) -> bool:
    """Rules of numbers: 3xx. Those that change the interface or all types are no cure of a value."""
    return rule.code.startswith("ANE3") and not (
        issubclass(rule, Rewrite) and (rule.interface or issubclass(rule, ProgramRewrite)))
