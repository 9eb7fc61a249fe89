"""Calibration: finds values of a model that exceed fp16 on the user's own feeds, and the rewrites that fix them.

Most numeric faults are silent: the ANE returns a wrong number. Which faults occur depends on the values, so use your
own inputs. `calibrate` runs the model and reports the headroom of each value in fp16 (65504 divided by the largest
magnitude). It also bounds every partial sum, because the ANE's accumulator overflows at 32768, and tries each
applicable rewrite on a copy. `--feeds` may be repeated. `--ranges 'image=0:1'` gives the interval of inputs for which
you have no sample, both ends included. Without feeds and ranges, random feeds are used.

`rewrite` accepts both options, too: `bounded_accumulation` scales values that `calibrate` reports as too large,
`fp16_compute` keeps values that exceed fp16 in fp32, and the equivalence check runs on these feeds in addition to its
own random ones. Approximate rewrites are judged on the user's feeds only.

`--passes fp16_compute` converts an fp32 package to fp16. The weights take half the space, and inputs and outputs are
unchanged. The report lists the values that were kept in fp32, the reasons, and the largest error on the feeds (seeded
random feeds if there are none). `--passes fp16_io` makes inputs and outputs fp16 as well. It runs only on request,
because it changes the interface.

`finite_mask` replaces the infinities of additive masks by -1e4, as Apple's own models do. The weight of a masked
element is 0 before and after. Only a row that is entirely masked changes: from NaN to the softmax of its scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coremltools.converters.mil.mil import Program, Var

from ..ir.clone import clone_program
from ..ir.value_ranges import Measure, Range
from ..passes.contract import Rewrite, Rule
from ..passes.engine import apply_rewrite, find_matches
from ..passes.rule_class import RuleFailure
from ..utils.errors import RuleError
from .execution import Plan, copy_state
from .trace import MIN_FP16_OVERFLOW, TraceCollector, TraceRow
from .value_matching import FunctionValues

__all__ = ["Calibration", "CalibrationRow", "calibrate_program"]

Progress = Callable[[str], None]
PlanMaker = Callable[[Program], Sequence[Plan]]

MIN_SUM_OVERFLOW = 32768.0
"Smallest magnitude of a partial sum of a convolution or matrix product that is infinite on M2 Pro, M4, M5 and M6."


@dataclass
class CalibrationRow:
    """One value over all runs: its `TraceRow`, and for results of sums `partial`, the bound on the partial sums.

    `codes` are the rules that match at this op. `fixed_by` are the rewrites after which the value and its partial sums
    are within fp16.
    """

    trace: TraceRow
    partial: float | None = None
    codes: list[str] = field(default_factory=list)
    fixed_by: list[str] = field(default_factory=list)

    @property
    def function(self) -> str:
        return self.trace.place[0]

    @property
    def headroom(self) -> float:
        """65504 divided by the largest magnitude: below 1, the value overflows.

        It is infinite for a value of zeros, and for integers and bools.
        """
        if not self.trace.type.startswith("fp"):
            return math.inf
        ends = [abs(end) for end in (self.trace.minimum, self.trace.maximum) if end is not None]
        largest = math.inf if self.trace.inf else max(ends, default=0.0)
        return 65504.0 / largest if largest else math.inf

    @property
    def beyond(self) -> str:
        """The kind of overflow: "overflow" for the value itself, "sums" for partial sums, or an empty string."""
        if self.trace.overflow or self.trace.inf:
            return "overflow"
        return "sums" if self.partial is not None and self.partial >= MIN_SUM_OVERFLOW else ""

    def to_dict(self) -> dict[str, Any]:
        numbers = {"headroom": self.headroom, "partial": self.partial}
        return self.trace.to_dict() | {name: number if number is None or math.isfinite(number) else None
                                       for name, number in numbers.items()} | {
            "beyond": self.beyond or None, "codes": self.codes, "cured_by": self.fixed_by}


@dataclass
class Calibration:
    """The result of `calibrate_program`.

    `rows` are in the order of computation, `runs` is the number of runs, `fires` the number of matches of each rule,
    and `first` the first op beyond fp16 as MIL.
    """

    rows: list[CalibrationRow]
    runs: int
    fires: dict[str, int] = field(default_factory=dict)
    first: str = ""
    failed: list[RuleFailure] = field(default_factory=list)
    "The rules that failed with an error on the program; their findings are missing."


def calibrate_program(
    program: Program, make: PlanMaker, rules: Iterable[type[Rule]], *, target: str = "all",
    progress: Progress = lambda text: None,
) -> Calibration:
    """Run `program` on the plans that `make` returns for it, and try each matching rule of `rules` on a clone."""
    from ..ir.printer import format_op
    from .range_measurement import measure_ranges

    ranges = measure_ranges(program, make(program), progress)
    collector = _collect_rows(program, ranges.runs)
    rows = {var: CalibrationRow(row, _get_partial(ranges, var)) for var, row in collector.rows.items()}
    found = Calibration(
        list(rows.values()), len(ranges.runs), first=format_op(collector.first) if collector.first else ""
    )
    by_name = {(row.function, row.trace.value): row for row in found.rows}

    def measure_program(clone: Program) -> Mapping[Var, Range]:
        return ranges if clone is program else measure_ranges(clone, make(clone), progress)

    def try_rule(rule: type[Rule]) -> None:
        configured = rule.configured()
        hits = find_matches(configured, program, target=target, measure=measure_program).fired
        for hit in hits:
            row = by_name.get((hit.function, hit.value))
            if row is not None and rule.code not in row.codes:
                row.codes.append(rule.code)
        if hits:
            found.fires[rule.name] = len(hits)
        if hits and isinstance(configured, Rewrite) and any(row.beyond for row in found.rows):
            progress(f"trying ane::{rule.name}")
            _credit_rule(found.rows, rule.name, _find_beyond_after(configured, program, make, target, measure_program))

    for rule in rules:
        try:
            try_rule(rule)
        except RuleError as error:  # recorded, so that the other rules are tried
            if error.failure is None:
                raise
            found.failed.append(error.failure)
    return found


def _find_beyond_after(
    rule: Rewrite, program: Program, make: PlanMaker, target: str, measure: Measure
) -> dict[tuple[str, str], bool]:
    """Apply `rule` to a clone of the program and return for each value (function, name) whether it is beyond fp16."""
    from .range_measurement import measure_ranges

    after = clone_program(program)
    apply_rewrite(rule, after, target=target, measure=measure)
    ranges = measure_ranges(after, make(after))
    collector = _collect_rows(after, ranges.runs)
    rows = [CalibrationRow(row, _get_partial(ranges, var)) for var, row in collector.rows.items()]
    return {(row.function, row.trace.value): bool(row.beyond) for row in rows}


def _credit_rule(rows: Iterable[CalibrationRow], rule: str, beyond: Mapping[tuple[str, str], bool]) -> None:
    for row in rows:
        if row.beyond and not beyond.get((row.function, row.trace.value), False):
            row.fixed_by.append(rule)


def _collect_rows(program: Program, made: Iterable[Plan]) -> TraceCollector:
    from ..runtime import Runtime

    collector = TraceCollector(MIN_FP16_OVERFLOW)
    for plan in made:
        runtime = Runtime(program, function=plan.function, precision="float32", observer=collector)
        collector.start(FunctionValues(plan.function, program.functions[plan.function]), {**plan.feeds, **plan.state})
        runtime(plan.feeds, copy_state(plan))
    return collector


def _get_partial(ranges: Mapping[Var, Range], var: Var) -> float | None:
    return ranges[var].partial if var in ranges else None
