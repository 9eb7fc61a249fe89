"""Compare the prediction with a compute plan of Core ML from a Mac: support, partition and cost of each op.

PLAN is the result.json that measure.py writes (see mac-script), or a dumped compute plan: {"program": {"functions":
{NAME: [{"operator", "outputs", "supported", "preferred", "cost"}, ...]}}}. Exit code 0: all agree; 1: they differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._version import make_json_header
from ..package.manifest import check_model_path
from ..report.table import format_table
from ..utils.errors import InputError
from ..utils.json_file import MEASUREMENT_FORM, expect_json_file
from ..utils.option_spelling import choose_spelling, format_option
from ..utils.text_format import format_count, format_lines, format_short_repr
from ..utils.upgraded_source import UpgradedSource, upgrades_to_dict
from .options import add_format_option, add_options, argument, command, flag, read_options
from .output import print_report

if TYPE_CHECKING:
    from ..ane.agreement import Agreement, Disagreement
    from ..ane.compute_plan import Measurement, MeasurementSource

__all__ = ["CalibratePlanOptions", "CalibratePlanReport", "PlanComparison", "calibrate_plan"]

HELP = "compare the prediction with a compute plan from a Mac"
EXAMPLE = "calibrate-plan folder/result.json"
_MAX_DISAGREEMENTS_LISTED = 20
"The most disagreements of one kind that the text lists."


@dataclass(frozen=True)
class CalibratePlanOptions:
    """The options of `calibrate_plan`."""

    measured: MeasurementSource = field(metadata=argument("PLAN", check=expect_json_file("measured", MEASUREMENT_FORM)))
    "result.json, or a dumped compute plan"
    _: KW_ONLY
    model: Any = field(default=None, metadata=flag(metavar="IN.mlpackage", check=check_model_path))
    "the measured package (default: the packages next to PLAN)"
    target: str | None = field(default=None, metadata=flag())
    "chip to predict for (default: the chip of the measurement)"


def add(parser: argparse.ArgumentParser) -> None:
    add_options(parser, CalibratePlanOptions)
    add_format_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    report = calibrate_plan(**read_options(arguments, CalibratePlanOptions))
    print_report(report, arguments.format)
    return 0 if report.agrees else 1


@command(CalibratePlanOptions)
def calibrate_plan(options: CalibratePlanOptions) -> CalibratePlanReport:
    """Compare the prediction with `measured`: a result.json of `measure.py`, a dumped compute plan, or its data.

    `model` is the measured model; without it the packages next to a result.json are used. `target` is the target of
    the prediction, by default the chip of the measurement. Raises InputError for input that cannot be read or does not
    match.
    """
    from ..ane import predict_plan
    from ..ane.agreement import compare_with_measurement
    from ..ane.compute_plan import find_best_match, read_measurements
    from ..passes.rule_selection import configure_rules
    from ..passes.targets import parse_target
    from .sources import open_source

    read = read_measurements(options.measured)
    report = CalibratePlanReport()
    predicted_for = options.target or _choose_target(read[0], report)
    parse_target(predicted_for)
    for source, plans in [(options.model, read)] if options.model is not None else _find_packages_beside(read):
        source = open_source(source)
        plan, _ = predict_plan(source.program, configure_rules(None).values(), target=predicted_for,
                               package=source.package)
        agreement = compare_with_measurement(plan, find_best_match(plan, plans, source.name))
        report.upgraded += source.upgraded
        report.compared.append(PlanComparison(source.name, predicted_for, agreement))
    return report


def _find_packages_beside(read: list[Measurement]) -> list[tuple[Any, list[Measurement]]]:
    """Find the packages next to the file, each with its own measurement."""
    found = [(path, [each]) for each in read if each.path is not None
             and (path := Path(each.file).parent / Path(each.path).name).is_dir()]
    if not found:
        raise InputError(f"no package found next to {read[0].file}; give the measured package, "
                         f"{choose_spelling('--model IN.mlpackage', 'model=')}")
    return [(str(path), plans) for path, plans in found]


def _choose_target(measurement: Measurement, report: CalibratePlanReport) -> str:
    generation = measurement.generation
    if generation is None:
        report.notes.append(f"the measurement's chip ({measurement.chip or 'not stated'}) is not a known target, so "
                            f"the prediction is for all targets; choose one with {format_option('target')}")
        return "all"
    return str(measurement.chip)


@dataclass(frozen=True)
class PlanComparison:
    """One model, the target it was predicted for, and the agreement of the prediction with the measurement."""

    model: str
    target: str
    found: Agreement


@dataclass
class CalibratePlanReport:
    """The comparisons of all packages that were measured and could be read."""

    compared: list[PlanComparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    upgraded: tuple[UpgradedSource, ...] = ()
    "The NeuralNetworks among the packages."

    @property
    def agrees(self) -> bool:
        return all(each.found.agrees for each in self.compared)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON that `calibrate-plan --format json` prints."""
        from ..ane.agreement import compute_cost_factors
        from ..report.agreement import agreement_to_dict, disagreement_to_dict

        return {
            **make_json_header("calibrate-plan"),
            "agrees": self.agrees, "notes": self.notes,
            "packages": [{"model": each.model, "target": each.target, **agreement_to_dict(each.found),
                          "factors": compute_cost_factors(each.found.shares), "disagreements": [
                              disagreement_to_dict(one) for one in [*each.found.support, *each.found.backend]]}
                         for each in self.compared], **upgrades_to_dict(self.upgraded),
        }

    def __repr__(self) -> str:
        return format_short_repr(self, packages=[each.model for each in self.compared], agrees=self.agrees,
                                 notes=len(self.notes))

    def __str__(self) -> str:
        made = [line for each in self.compared for line in _iterate_lines(each)]
        return format_lines([*made, *[f"note: {note}" for note in self.notes]])


def _iterate_lines(each: PlanComparison) -> Iterator[str]:
    from ..ane.agreement import compute_cost_factors
    from ..report.agreement import find_contradictions, iterate_agreement_lines

    found = each.found
    yield f"{each.model}, predicted for {each.target}"
    yield from iterate_agreement_lines(found)
    kinds = [(f"  {kind}", *(str(count) for count in counts.values())) for kind, counts in found.kinds().items()]
    if kinds:
        yield from format_table(("  kind", "ops", "agree", "differ", "unknown"), (str.ljust, *(str.rjust,) * 4), kinds)
    scaled = [
        (
            f"  {one['op']}",
            one["backend"],
            str(one["ops"]),
            *(f"{one[name]:.3g}" for name in ("factor", "lowest", "highest")),
        )
        for one in compute_cost_factors(found.shares)
    ]
    if scaled:
        yield "predicted and measured share of the cost:"
        yield from format_table(("  kind", "on", "ops", "median", "lowest", "highest"),
                                (str.ljust, str.ljust, *(str.rjust,) * 4), scaled)
    if found.support:
        yield "ANE support differs from the prediction:"
        yield from _iterate_disagreement_lines(found.support)
    if found.backend and not found.is_tie:
        yield "the compute unit differs from the prediction:"
        yield from _iterate_disagreement_lines(found.backend)
    wrong = find_contradictions(found)
    if wrong:
        yield "contradicted there: " + ", ".join(
            f"{one['code'] or 'that ' + one['op'] + ' was seen'} ({format_count(one['ops'], 'op')}, measured "
            f"{one['measured']})" for one in wrong)
    for name, missing in (("only here", [f"%{row.op.outputs[0].name if row.op.outputs else row.op.name} "
                                         f"({row.op.op_type})" for row in found.match.ours]),
                          ("only measured", [f"%{op.outputs[0] if op.outputs else '?'} ({op.kind})"
                                             for op in found.match.theirs])):
        if missing:
            listed = ", ".join(missing[:_MAX_DISAGREEMENTS_LISTED])
            yield f"{name}, so not compared: {listed}{_format_remainder(len(missing))}"


def _iterate_disagreement_lines(listed: list[Disagreement]) -> Iterator[str]:
    from ..report.agreement import disagreement_to_dict

    for each in listed[:_MAX_DISAGREEMENTS_LISTED]:
        data = disagreement_to_dict(each)
        codes = f" {', '.join(data['codes'])}:" if data["codes"] else ""
        why = f";{codes} {data['reason']}" if data["reason"] and each.what == "support" else ""
        yield (f"  {data['function']} {data['index']} %{data['output']} ({data['op']}): predicted {data['predicted']}, "
               f"measured {data['measured']}{why}")
    if len(listed) > _MAX_DISAGREEMENTS_LISTED:
        yield f"  {_format_remainder(len(listed)).strip()}"


def _format_remainder(count: int) -> str:
    return f" and {count - _MAX_DISAGREEMENTS_LISTED} more" if count > _MAX_DISAGREEMENTS_LISTED else ""
