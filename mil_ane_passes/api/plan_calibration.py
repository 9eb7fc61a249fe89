"""Comparison of our prediction with Core ML's compute plan on a user's machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..ane import predict_plan
from ..ane.agreement import compare_with_measurement
from ..ane.compute_plan import Measurement, MeasurementSource, find_best_match, read_measurements
from ..passes.rule_selection import configure_rules
from ..passes.targets import parse_target
from ..report.calibrate_plan import CalibratePlanReport, PlanComparison
from ..utils.errors import InputError
from ..utils.locking import synchronized
from ..utils.option_spelling import choose_spelling, format_option
from .source import open_source

__all__ = ["calibrate_plan"]


@synchronized
def calibrate_plan(measured: MeasurementSource, *, model: Any = None, target: str | None = None) -> CalibratePlanReport:
    """Compare the prediction with `measured`: a result.json of `measure.py`, a dumped compute plan, or its data.

    `model` is the measured model; without it the packages next to a result.json are used. `target` is the target of
    the prediction, by default the chip of the measurement. Raises InputError for input that cannot be read or does not
    match.
    """
    read = read_measurements(measured)
    report = CalibratePlanReport()
    wanted = target or _choose_target(read[0], report)
    parse_target(wanted)
    for source, plans in [(model, read)] if model is not None else _find_packages_beside(read):
        source = open_source(source)
        plan, _ = predict_plan(source.program, configure_rules(None).values(), target=wanted, package=source.package)
        report.compared.append(
            PlanComparison(
                source.name, wanted, compare_with_measurement(plan, find_best_match(plan, plans, source.name))
            )
        )
    return report


def _find_packages_beside(read: list[Measurement]) -> list[tuple[Any, list[Measurement]]]:
    """Find the packages next to the file, each with its own measurement."""
    found = [(path, [each]) for each in read if each.path is not None
             and (path := Path(each.file).parent / Path(each.path).name).is_dir()]
    if not found:
        raise InputError(f"no package lies beside {read[0].file}; give the one that was measured, "
                         f"{choose_spelling('--model IN.mlpackage', 'model=')}")
    return [(str(path), plans) for path, plans in found]


def _choose_target(measurement: Measurement, report: CalibratePlanReport) -> str:
    generation = measurement.generation
    if generation is None:
        report.notes.append(f"the measurement's chip ({measurement.chip or 'not stated'}) is no known target, so the "
                            f"prediction is for all; {format_option('target')} says which one is meant")
        return "all"
    return str(measurement.chip)
