"""Run a package on your feeds and report the value range and fp16 headroom of each op, the first overflow, and its
fix."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from .._version import make_json_header
from ..package.manifest import check_model_path
from ..report.table import format_table
from ..utils.budget import DEFAULT_MAX_STEPS, share_budget
from ..utils.errors import InputError
from ..utils.option_spelling import format_option
from ..utils.text_format import format_count, format_lines, format_short_repr
from ..utils.upgraded_source import UpgradedSource, upgrades_to_dict
from .options import (
    DEFAULT_SEEDS,
    FEEDS,
    MAX_MEMORY,
    MAX_SECONDS,
    MAX_STEPS,
    RANGES,
    Progress,
    add_format_option,
    add_options,
    argument,
    command,
    flag,
    ignore_progress,
    positive_int,
    read_options,
)
from .output import print_report, show_progress

if TYPE_CHECKING:
    from coremltools.converters.mil.mil import Program

    from ..equivalence.calibration import Calibration, CalibrationRow
    from ..equivalence.user_inputs import Feeds, Ranges
    from ..passes.contract import Rule

__all__ = ["CalibrateOptions", "CalibrateReport", "calibrate"]

HELP = "find fp16 overflows on your feeds, and their fixes"
EXAMPLE = "calibrate in.mlpackage --feeds feeds.npz --worst 10"
_DEFAULT_WORST = 30


@dataclass(frozen=True)
class CalibrateOptions:
    """The options of `calibrate`."""

    src: Any = field(metadata=argument("IN", check=check_model_path))
    "the .mlpackage or .mlmodel to run"
    _: KW_ONLY
    feeds: Feeds | None = field(default=None, metadata=FEEDS)
    ranges: Ranges | None = field(default=None, metadata=RANGES)
    max_seconds: float | None = field(default=None, metadata=MAX_SECONDS)
    max_steps: int | None = field(default=DEFAULT_MAX_STEPS, metadata=MAX_STEPS)
    max_memory: str | float | None = field(default=None, metadata=MAX_MEMORY)
    target: str = field(default="all", metadata=flag())
    "chip or device to check for (default: all)"
    worst: int | None = field(default=None, metadata=flag(type=positive_int, metavar="N"))
    """number of values to show: those with the least headroom, in program order (default: 30); JSON has all"""
    progress: Progress = ignore_progress


def add(parser: argparse.ArgumentParser) -> None:
    add_options(parser, CalibrateOptions)
    add_format_option(parser)
    parser.set_defaults(run=run, worst=_DEFAULT_WORST)


def run(arguments: argparse.Namespace) -> int:
    with show_progress() as progress:
        report = calibrate(**read_options(arguments, CalibrateOptions), progress=progress)
    print_report(report, arguments.format)
    return 0


@command(CalibrateOptions)
def calibrate(options: CalibrateOptions) -> CalibrateReport:
    """Run a model at float32 and report which values exceed fp16, and which rewrites fix them.

    The model runs on `feeds` (a mapping from input name to array, or several) or within `ranges` (input name to (low,
    high), both included). Without both it runs on the random feeds of the equivalence check, which are normal numbers
    and valid indices; the report then has `sampled` set. The report has for each value its range, its fp16 headroom,
    the bound on its partial sums, the rules that match, and the rewrites that fix an overflow: each matching rule is
    tried on a copy.

    Raises InputError if feeds or ranges do not fit, NotSupported for an op the runtime lacks, and LimitReached if
    runs take more than `max_steps` loop steps each or `max_seconds` together (None: no limit).
    """
    from ..equivalence.calibration import calibrate_program
    from ..equivalence.execution import build_plans
    from ..equivalence.user_inputs import UserInputs
    from ..passes.registry import get_all_rules
    from ..passes.targets import parse_target
    from .sources import open_source, select_function

    parse_target(options.target)
    inputs = UserInputs.of(options.feeds, options.ranges)
    model = open_source(options.src)
    model = select_function(model, model.chosen_function)

    def make_plans(program: Program) -> Any:
        return inputs.plans(program, model.describe) if inputs else build_plans(program, DEFAULT_SEEDS, model.describe)

    rules = [rule for rule in get_all_rules().values() if _is_numerics_rule(rule)]
    try:
        with share_budget(options.max_steps, options.max_seconds, options.progress, options.max_memory):
            found = calibrate_program(model.program, make_plans, rules, target=options.target,
                                      progress=options.progress)
    except InputError as error:
        if not inputs.ranges or str(error).startswith("ranges:"):  # a wrong name, not a value at an end
            raise
        raise InputError(f"{error}; {format_option('ranges')} includes both ends") from error
    model.check_unchanged()
    ran = {row.function for row in found.rows}
    left_out = [name for name, function in model.program.functions.items()
                if name not in ran and any(op.op_type != "const" for op in function.operations)]
    return CalibrateReport(model.name, options.target, found.runs, found, options.worst, sampled=not inputs,
                           upgraded=model.upgraded, not_run=tuple(left_out))


def _is_numerics_rule(rule: type[Rule]) -> bool:
    """Return whether a rule is about numerics: 3xx.

    Rules that change the interface or all types are not fixes of a value.
    """
    from ..passes.contract import ProgramRewrite, Rewrite

    return rule.code.startswith("ANE3") and not (
        issubclass(rule, Rewrite) and (rule.interface or issubclass(rule, ProgramRewrite)))


@dataclass
class CalibrateReport:
    """Ranges and fp16 headroom for each value of `source` over `runs` runs.

    The text lists the `worst` values with the least headroom. `sampled`: neither feeds nor ranges were supplied, so the
    runs are on random feeds.
    """

    source: str
    target: str
    runs: int
    found: Calibration
    worst: int | None = None
    sampled: bool = False
    upgraded: tuple[UpgradedSource, ...] = ()
    "The source, where it is a NeuralNetwork."
    not_run: tuple[str, ...] = ()
    "Functions that were not run: feeds are for the default function, ranges for those with an input of these names."

    @property
    def first(self) -> CalibrationRow | None:
        """The first value that is beyond fp16 although its operands are not."""
        return next((row for row in self.found.rows if row.trace.starts), None)

    @property
    def beyond(self) -> list[CalibrationRow]:
        """The values that do not fit fp16: the value itself, or the partial sums it is computed from."""
        return [row for row in self.found.rows if row.beyond]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON that `calibrate --format json` prints; headroom is null for integers and for all zeros."""
        from ..passes.registry import get_all_rules

        rules = get_all_rules()
        return {
            **make_json_header("calibrate"),
            "source": self.source, "target": self.target, "runs": self.runs,
            "sampled": self.sampled,
            "first_overflow": self.first.trace.value if self.first else None,
            "rules": [{"rule": name, "pass": _find_pass_name(rules[name]), "code": rules[name].code,
                       "slug": rules[name].slug, "places": places}
                      for name, places in self.found.fires.items()],
            "ops": [row.to_dict() for row in self.found.rows],
            **({"functions_not_run": list(self.not_run)} if self.not_run else {}),
            **({"failed_rules": [each.to_dict() for each in self.found.failed]} if self.found.failed else {}),
            **upgrades_to_dict(self.upgraded),
        }

    def __repr__(self) -> str:
        return format_short_repr(
            self,
            source=self.source,
            target=self.target,
            runs=self.runs,
            values=len(self.found.rows),
            beyond_fp16=len(self.beyond),
        )

    def __str__(self) -> str:
        rows = self.found.rows
        most = len(rows) if self.worst is None else self.worst
        kept = sorted(
            range(len(rows)), key=lambda place: (not rows[place].trace.starts, _compute_headroom(rows[place]))
        )[:most]
        shown = format_table(
            _TABLE_HEAD,
            _ALIGNMENTS,
            [_format_cells(rows[place], self._has_several_functions) for place in sorted(kept)],
        )
        if len(rows) > most:
            shown.append(
                f"  and {len(rows) - most} more values with more headroom ({format_option('worst')} N shows more)"
            )
        origin = (
            [
                f"on random feeds, because neither {format_option('feeds')} nor {format_option('ranges')} were given: "
                f"your inputs may produce larger values"
            ]
            if self.sampled
            else []
        )
        left_out = [f"not run: function{'s' * (len(self.not_run) > 1)} {', '.join(map(repr, self.not_run))}; "
                    f"{format_option('feeds')} are for the default function, {format_option('ranges')} for each with "
                    f"an input of that name"] if self.not_run else []
        return format_lines([*shown, *origin, *self._format_verdict(), *left_out])

    @property
    def _has_several_functions(self) -> bool:
        return len({row.function for row in self.found.rows}) > 1

    def _format_verdict(self) -> list[str]:
        lines, several = [], self._has_several_functions
        if self.first is not None:
            lines += [f"first to overflow fp16: %{self.first.trace.value} in {' > '.join(self.first.trace.place)}",
                      f"  {self.found.first}"]
        for row in self.beyond[:self.worst]:
            what = ("overflows fp16" if row.beyond == "overflow" else
                    f"has partial sums up to {row.partial:.4g}, above 32768")
            fixes = ", ".join(f"ane::{name}" for name in row.fixed_by) or "no single rewrite"
            lines.append(f"{_format_value_name(row, several)} {what}; fixed by {fixes}")
        if self.worst is not None and len(self.beyond) > self.worst:
            lines.append(f"and {len(self.beyond) - self.worst} more values overflow fp16")
        if (nan := self._describe_first_nan()) is not None:
            lines.append(nan)
        if not lines:
            lines = [f"all values fit fp16 in {format_count(self.runs, 'run')}"]
        lines += [f"{each.code} {each.slug} failed {each}" for each in self.found.failed]
        from ..passes.registry import get_all_rules

        rules = get_all_rules()
        return lines + [
            f"{rules[name].code} {rules[name].slug}: {format_count(places, 'match', 'matches')}"
            f"{_describe_fix(rules[name])}"
            for name, places in self.found.fires.items()
        ]

    def _describe_first_nan(self) -> str | None:
        """Describe the first value that holds NaN, if one does."""
        trace = next((row.trace for row in self.found.rows if row.trace.nan), None)
        if trace is None:
            return None
        return (f"first NaN: %{trace.value} in {' > '.join(trace.place)}, {trace.nan} of "
                f"{format_count(trace.elements, 'element')}; NaN is left out of min, max and headroom")


def _find_pass_name(rule: type[Rule]) -> str | None:
    from ..passes.finding import find_fix

    fix = find_fix(rule)
    return None if fix is None else fix.name


def _describe_fix(rule: type[Rule]) -> str:
    """Return the pass that fixes the findings of `rule`, for a line of text; empty if no rewrite does."""
    name = _find_pass_name(rule)
    return "" if name is None else f" (ane::{name})"


def _compute_headroom(row: CalibrationRow) -> float:
    sums = 32768.0 / row.partial if row.partial else math.inf
    return min(row.headroom, sums)


_TABLE_HEAD = ("  value", "op", "type", "min", "max", "headroom", "sums up to", "overflow", "underflow", "rules")
_ALIGNMENTS = (str.ljust, str.ljust, str.ljust, *(str.rjust,) * 6, str.ljust)


def _format_value_name(row: CalibrationRow, several: bool) -> str:
    """Return the value of a row, with its function where there are several."""
    return f"{row.function}:%{row.trace.value}" if several else f"%{row.trace.value}"


def _format_cells(row: CalibrationRow, several: bool) -> Sequence[str]:
    trace = row.trace
    name = f"{'> ' if trace.starts else '  '}{'  ' * (len(trace.place) - 1)}{_format_value_name(row, several)}"
    ends = ("" if end is None else f"{end:.4g}" for end in (trace.minimum, trace.maximum))
    room = "" if math.isinf(row.headroom) else f"{row.headroom:.3g}x"
    sums = "" if row.partial is None else f"{row.partial:.4g}"
    counts = (str(count) if count else "" for count in (trace.overflow + trace.inf, trace.underflow))
    return (name, trace.op_type, trace.type, *ends, room, sums, *counts, ", ".join(row.codes))
