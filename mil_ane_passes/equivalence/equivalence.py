"""Equivalence checks: two programs are run on the same feeds and their outputs are judged.

This is the only module that depends on both the runtime and the rewrites.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Function, Program, Var, types

from .._version import make_json_header
from ..ir.printer import format_dtype
from ..ir.query import get_pipeline_functions, is_const, iterate_nested_ops, iterate_ops
from ..passes.contract import Exactness
from ..runtime.quirks.base import Quirk
from ..utils.errors import InputError, LimitReached, NotSupported
from ..utils.mapped_files import iterate_rows
from ..utils.option_spelling import choose_spelling, format_option
from ..utils.text_format import escape_text, format_count, format_lines, format_short_repr
from ..utils.upgraded_source import UpgradedSource, upgrades_to_dict
from .adversarial_feeds import SPECIAL, Domain, build_adversarial_plans, describe_samples
from .comparison import EVERY_OUTPUT, Accuracy, OutputDifference, Strictness, compare_outputs, fill_undefined
from .coverage import Unknown, find_outputs_without_numbers, find_unentered_blocks, select_differing
from .difference import FirstDifference
from .difference_search import find_first_difference
from .execution import (
    USER_FEEDS_LABEL,
    Execution,
    OpCount,
    Plan,
    Region,
    RegionLog,
    Run,
    RunDigest,
    build_plans,
    check_runnable,
    describe_unusable_feeds,
    digest_runs,
    execute_pipeline,
    execute_plans,
)
from .feeds import get_symbol_sizes
from .float_threshold_feeds import build_float_threshold_plans
from .interface_widths import find_interface_widths, holds_floats, round_feeds, round_results
from .lookup_feeds import build_table_row_plans
from .propagate import NOT_JUDGED, RAISED, made_of_nan, made_of_roundings, make_departures, measure_moves
from .threshold_feeds import build_threshold_plans

__all__ = ["Case", "VerifyReport", "compare_pipelines", "compare_programs", "compare_with_pipeline", "judge_executions",
           "measure_pipeline_noise"]

Array = np.ndarray[Any, Any]
Progress = Callable[[str], None]

RECURRENT_OPS = ("rnn", "gru", "lstm")
"Recurrent ops; at float16, the values between their steps stay float32."
WIDTHS_NOTE = (
    "inputs or outputs have different float widths: both programs ran on feeds rounded to the narrower type, and "
    "results were compared in that type"
)
FINITE_CONSTANTS_NOTE = (
    "results that were NaN or infinite are compared with the same program in which constants that fp16 cannot hold are "
    "read as large finite numbers"
)
_PIPELINE = "pipeline"
"What a run of an entire pipeline has as the name of its function."

_MAX_REPR_REASON = 120
"Most characters of a reason in a repr, which should fit in a line or two; a reason may list any number of names."


@dataclass
class Case:
    """One compared run: function, feeds, precision, and the difference of each output."""

    function: str
    feeds: str
    precision: str
    outputs: list[OutputDifference]

    @property
    def failed(self) -> list[OutputDifference]:
        return [output for output in self.outputs if not output.passed]

    @property
    def passed(self) -> bool:
        return not self.failed

    def to_dict(self) -> dict[str, Any]:
        return {"function": self.function, "feeds": self.feeds, "precision": self.precision,
                "outputs": [output.to_dict() for output in self.outputs]}


@dataclass
class VerifyReport:
    """The result of an equivalence check.

    `status` is "equal", "different" or "not verified" (for the reason in `reason`).
    """

    status: str
    exactness: Exactness = Exactness.BITWISE
    cases: list[Case] = field(default_factory=list)
    reason: str = ""
    notes: list[str] = field(default_factory=list)
    "Parts that were not compared, with the reasons."
    advice: list[str] = field(default_factory=list)
    "How to judge a difference that may be intended, and the command for it; right below the verdict."
    noise: dict[str, float] = field(default_factory=dict)
    """By precision, the lowest signal-to-noise ratio of an output in dB, on the runs that limits on the error judge.
    Empty if these runs agree within rounding, or differ by more than noise: in integers, shapes or infinities."""
    first: FirstDifference | None = None
    "The first difference of two programs, in the first run whose outputs differ; None when it cannot be determined."
    quirks: tuple[str, ...] = ()
    "The published faults that were imitated in the second program."
    accuracy: Accuracy | None = None
    "The limits by which the outputs were judged, if the user set any."
    sampled: tuple[str, ...] = ()
    "Descriptions of the feeds of the compared runs, one entry for each kind; empty for user-supplied feeds."
    tolerance: float | None = None
    "The tolerance for a callable's outputs, as a fraction of each output's largest value; None between programs."
    upgraded: tuple[UpgradedSource, ...] = ()
    "The NeuralNetworks among the compared models, which were read as ML Programs."
    runs: list[RunDigest] = field(default_factory=list)
    "Digests of all runs, if they were requested."
    regions: list[Region] = field(default_factory=list)
    "The comparisons at the ends of regions that differ, if digests were requested."
    ops: dict[str, OpCount] = field(default_factory=dict)
    "For two programs that ran side by side, by precision: counts of how the second program's ops were computed."
    failed_plan: Plan | None = None
    "The feeds of the first run whose outputs differ."
    repeated: str = ""
    "For a check that repeats a recorded one: a description of the equal results."
    departed: str = ""
    "For a check that repeats a recorded one: a description of the first different result; empty if all are equal."

    @property
    def equal(self) -> bool:
        return self.status == "equal"

    @property
    def equal_bits(self) -> bool:
        return self.equal and all(output.equal_bits for case in self.cases for output in case.outputs)

    def leave_open(self, reason: str, unknown: Iterable[Unknown]) -> None:
        """Change the status to "not verified" if there is a `reason`, or an output that is `unknown` throughout.

        Outputs that are unknown in part are added to the notes.
        """
        unknown = list(unknown)
        reason = reason or next((str(each) for each in unknown if each.throughout), "")
        self.notes += [str(each) for each in unknown if not each.throughout]
        if self.equal and reason:
            self.status, self.reason = "not verified", reason

    def to_dict(self) -> dict[str, Any]:
        return {**make_json_header("verify"),
                "status": self.status, "exactness": self.exactness.value, "equal_bits": self.equal_bits,
                "tolerance": self.tolerance, "accuracy": self.accuracy.limits() if self.accuracy else None,
                "quirks": list(self.quirks), "reason": self.reason, "notes": self.notes, "advice": self.advice,
                "sampled": list(self.sampled),
                "first_difference": self.first.to_dict() if self.first else None,
                "ops": {precision: asdict(count) for precision, count in self.ops.items()},
                "cases": [case.to_dict() for case in self.cases], **upgrades_to_dict(self.upgraded),
                **({"repeated": self.repeated, "departed": self.departed} if self.repeated or self.departed else {})}

    def __repr__(self) -> str:
        return format_short_repr(
            self,
            status=self.status,
            exactness=self.exactness.value,
            runs=len(self.cases),
            failed=sum(bool(case.failed) for case in self.cases),
            reason=self.reason[:_MAX_REPR_REASON],
        )

    def __str__(self) -> str:
        again = [f"repeated: {self.repeated}"] * bool(self.repeated)
        again += [f"not repeated: {self.departed}"] * bool(self.departed)
        return "\n".join([self._format_verdict(), *map(escape_text, again)])

    def _format_verdict(self) -> str:
        if self.status == "not verified":
            return escape_text(f"not verified: {self.reason}")
        precisions = ", ".join(dict.fromkeys(case.precision for case in self.cases))
        runs = f"{format_count(len(self.cases), 'run')} at {precisions}"
        faults = f", with {', '.join(self.quirks)} in the second" if self.quirks else ""
        kinds = ", ".join(each.partition(":")[0] for each in self.sampled)
        notes = [*[f"  sampled: {kinds}"] * bool(kinds), *self._list_op_counts(),
                 *(f"  {note}" for note in self.notes)]
        if self.equal:
            same = self.equal_bits and self.tolerance is None
            how = "bit for bit" if same else self._describe_criterion()
            return format_lines([f"equal in {runs}, {how}{faults}", *self._list_worst(), *notes])
        lines = [f"different, {self._describe_criterion()} ({runs}){faults}", *(f"  {each}" for each in self.advice)]
        for case in self.cases:
            lines += [f"  {case.function}, {case.feeds}, {case.precision}: {output}" for output in case.failed]
        return format_lines([*lines, *notes, *(str(self.first).split("\n") if self.first else [])])

    def _list_op_counts(self) -> list[str]:
        """Format the number of ops of the float64 runs that were computed at float32, and why this needs no action."""
        found = self.ops.get("float64", OpCount())
        share = f"{found.at_float32} of {format_count(found.ops, 'op')}"
        return [f"  float64: {share} read the same values in both models; they ran once for both, at float32 to save "
                "time, which does not affect the comparison"] * bool(found.at_float32)

    def _list_worst(self) -> list[str]:
        """List for each output the run in which it differs most, if limits on the error were set."""
        found: dict[str, OutputDifference] = {}
        for output in (output for case in self.cases for output in case.outputs if output.snr is not None):
            known = found.setdefault(output.output, output)
            if (output.snr or 0.0) < (known.snr or 0.0):
                found[output.output] = output
        return [f"  {output}" for output in found.values()]

    def _describe_criterion(self) -> str:
        if self.accuracy is not None:
            return f"within {self.accuracy}" if self.equal else f"judged by {self.accuracy}"
        if self.tolerance is None:
            return f"judged as {self.exactness.value}"
        return f"judged within {self.tolerance:g} of the output's scale"


def judge_executions(before: Execution, after: Execution, promised: Exactness | Strictness) -> VerifyReport:
    """Compare runs of the same plans. The typed run is judged against the float64 run of the program before.

    A plan that the program before cannot run is omitted: its shapes are outside the model's domain. If only the program
    after cannot run a plan, the two are different.
    """
    report = VerifyReport("equal", promised.exactness if isinstance(promised, Strictness) else promised)
    for old, new in zip(before.runs, after.runs):
        if old.error:
            if old.plan.adversarial:
                continue
            report.notes.append(f"{old.plan.function}, {old.plan.label}: not compared, as the program before cannot be "
                                f"run ({old.error})")
            continue
        report.cases += _build_cases(old, new, promised)
    if not all(case.passed for case in report.cases):
        report.status = "different"
    elif not report.cases:
        report.status, report.reason = "not verified", describe_unusable_feeds(report.notes[0])
    sampled = [run.plan for run in before.runs if not run.error and not run.plan.label.startswith(USER_FEEDS_LABEL)]
    report.sampled = tuple(describe_samples(sampled))
    return report


def _build_cases(old: Run, new: Run, promised: Exactness | Strictness) -> list[Case]:
    """Return the differences of one run at each precision."""
    made = []
    for precision in old.results:
        if precision in new.results:
            found = _compare_run(old, new, precision, promised)
        else:
            reason = f"the program after cannot be run: {new.error}"
            found = [OutputDifference(EVERY_OUTPUT, False, False, reason=reason)]
        made.append(Case(old.plan.function, old.plan.label, precision, found))
    return made


def _compare_run(old: Run, new: Run, precision: str, promised: Exactness | Strictness) -> list[OutputDifference]:
    """Return the differences of one run at one precision from the program before.

    If the program before was also run with constants raised as rewrites declare, equality with that run suffices.
    """
    typed = precision == "float16"
    moved = old.moved_stored if typed and old.moved_stored is not None else old.moved
    found: list[list[OutputDifference]] = []
    for runs in filter(None, (old.results, old.raised)):
        truth = runs.get("float64") if precision != "float64" else None
        found.append(compare_outputs(
            runs[precision], new.results[precision], promised, truth, old.plan.adversarial == SPECIAL,
            old.stepped if typed and runs is old.results else None, moved, old.widened if typed else ()))
        if typed and old.rounding:
            found[-1] = [each if each.passed or each.output not in old.rounding
                         else replace(each, passed=True, reason=NOT_JUDGED) for each in found[-1]]
        if all(output.passed for output in found[-1]):
            return found[-1]
    return found[0]


def compare_programs(
    before: Program, after: Program, *, seeds: int = 3, precisions: Sequence[str] = ("float64",),
    exactness: Exactness | Strictness = Exactness.ROUNDING, feeds: Mapping[str, Array] | None = None,
    describe: Callable[[str], Any] = lambda name: None, progress: Progress = lambda text: None,
    quirks: Sequence[str] = (), mapping: Mapping[str, str] | None = None, further: Sequence[Plan] = (),
    widths: bool = False, only: Plan | None = None, locate: bool = True,
    ranges: Mapping[str, tuple[float, float]] | None = None, digests: bool = False,
) -> VerifyReport:
    """Compare two programs on the same feeds. Raises InputError when their interfaces differ.

    - `quirks`: names of published faults to imitate in `after`.
    - `mapping`: names of values replaced by rewrites (before -> after); helps to find the first difference.
    - `further`: additional runs. In functions with such runs, rewrites that approximate are judged on these at all
      precisions, and on random draws only at float64.
    - `widths`: the float widths of `after`'s interface may differ. Feeds are then rounded to the narrower type, and
      outputs of `before` to the dtypes of `after`.
    - `only`: the only run to make; other runs, which depend on constants of both programs, are not chosen.
    - `ranges`: the user's intervals of inputs.
    - `feeds`: the user's feeds. Without them, adversarial feeds are run, too: at all precisions for BITWISE, else at
      float64.
    - `digests`: add digests of all `runs` to the report.

    The result is "not verified" if nothing could be run, or if no run entered a nested block in which the two differ.
    """
    _check_same_interface(before, after, widths)
    check_runnable(after, quirks)
    across = find_interface_widths(before, after)
    promised = exactness if isinstance(exactness, Strictness) else Strictness(exactness)
    if only is not None:
        made = [round_feeds(only, across)]
    else:
        drawn = build_plans(before, seeds, describe, feeds) if feeds is not None else _add_adversarial_plans(
            build_plans(before, seeds, describe), before, describe, promised, {plan.function for plan in further},
            ranges)
        if feeds is None and promised.accuracy is None and promised.exactness is not Exactness.APPROXIMATE:
            drawn += build_table_row_plans(before, after, describe, ranges)
            drawn += build_threshold_plans(before, after, describe, ranges)
            drawn += build_float_threshold_plans(before, after, describe, Domain(*promised.within, ranges))
        made = [round_feeds(plan, across) for plan in (*further, *drawn)]
    regions = RegionLog() if digests else None
    old, new = _execute_both(before, after, made, precisions, progress, quirks, mapping or {}, promised, regions)
    lost = round_results(old, across)
    runs = digest_runs(old, new) if digests else []
    made = [replace(run.plan, error=run.error) for run in old.runs]
    _excuse_sums_of_infinities(before, after, old, new, promised, quirks)
    report = _judge_with_adjustments(before, old, new, promised, precisions)
    report.quirks, report.runs, report.ops = tuple(quirks), runs, _count_ops(new)
    declares = promised.moves or promised.changes or promised.exactness is Exactness.APPROXIMATE
    if promised.accuracy is None and (declares or report.status == "different"):
        report.noise = _measure_noise([*zip(old.runs, new.runs)][len(further):], precisions)
    failed = {(case.function, case.feeds) for case in report.cases if case.failed}
    report.failed_plan = next((plan for plan in made if (plan.function, plan.label) in failed), None)
    report.regions = regions.regions if regions is not None else []
    report.notes += [WIDTHS_NOTE] * bool(across)
    report.notes += _describe_extreme_feeds(report, made, promised)
    if report.equal:
        unknown = select_differing(before, after, find_outputs_without_numbers(before, old.runs))
        report.leave_open(lost or _explain_unentered(before, after, old, new), unknown)
    if report.status == "different" and locate and report.accuracy is None:  # with `accuracy`, all ops may differ
        progress("searching for the first difference")
        _locate_first_difference(report, made, lambda plan, case: find_first_difference(
            before, after, plan, case.precision, exactness, case.failed, quirks=quirks, mapping=mapping))
    return report


def _execute_both(
    before: Program, after: Program, plans: Sequence[Plan], precisions: Sequence[str], progress: Progress,
    quirks: Sequence[str], mapping: Mapping[str, str], promised: Strictness, regions: RegionLog | None,
) -> tuple[Execution, Execution]:
    """Execute plans on both programs, with `quirks` in the second; a plan that the first cannot run is skipped.

    In runs at float64, ops that the two share upstream of any difference are computed at float32, which halves the
    time. A run that does not pass is repeated entirely at float64: the two may agree only to float32 precision, and the
    run is compared with further runs of `before` at float64. A run that does not pass in a batch is repeated alone.
    """
    from .lockstep import execute_in_lockstep

    if not quirks:
        old, new = execute_in_lockstep(before, after, plans, precisions, progress, mapping, regions, lowers=True,
                                       batches=True)
        pairs = [*zip(old.runs, new.runs)]

        def repeat(chosen: Sequence[tuple[Run, Run]], precisions: Sequence[str], batches: bool) -> None:
            again = execute_in_lockstep(before, after, [run.plan for run, _ in chosen], precisions, progress, mapping,
                                        batches=batches)
            for pair, repeated in zip(chosen, zip(*(found.runs for found in again))):
                for run, other in zip(pair, repeated):
                    run.results.update(other.results)
                    run.ops.update(other.ops)

        repeat([pair for pair in pairs if not _is_settled(*pair, promised)], ("float64",), batches=True)
        failed = [pair for pair in pairs if pair[0].is_batched and not _passes(*pair, promised)]
        repeat(failed, precisions, batches=False)
        return old, new
    old = execute_plans(before, plans, precisions, lambda text: progress(f"before, {text}"))
    runnable = [replace(run.plan, error=run.error) for run in old.runs]
    return old, execute_plans(after, runnable, precisions, lambda text: progress(f"after, {text}"), quirks)


def _is_settled(old: Run, new: Run, promised: Strictness) -> bool:
    """Return whether a run need not be repeated at float64: it passes, or was made entirely at float64.

    At float32, different float64 results may have equal bits. If BITWISE is not required, equal bits are therefore
    reported only for a run at float64.
    """
    count = new.ops.get("float64")
    if old.error or new.error or count is None or not (count.at_float32 or count.rounded):
        return True
    if promised.fixes_nonfinite and _has_undefined(old):
        return False
    outputs = [output for case in _build_cases(old, new, promised) for output in case.outputs]
    is_telling = promised.exactness is Exactness.BITWISE or count.shared == count.ops
    return all(output.passed for output in outputs) and (
        is_telling or not all(output.equal_bits for output in outputs))


def _passes(old: Run, new: Run, promised: Strictness) -> bool:
    """Return whether all outputs of a run are equal as promised, or it ended with an error."""
    return bool(old.error or new.error) or all(
        output.passed for case in _build_cases(old, new, promised) for output in case.outputs)


def _measure_noise(pairs: Iterable[tuple[Run, Run]], precisions: Sequence[str]) -> dict[str, float]:
    """Measure by precision the lowest signal-to-noise ratio of an output in dB, of runs on feeds that are not extreme.

    These are the runs that limits on the error judge. Empty if they agree within rounding at float64 without what
    rewrites declare, and if limits reject them whatever the ratio is.
    """
    runs = [(old, new) for old, new in pairs if not (old.error or new.error or old.plan.adversarial)]
    rounding = Strictness(Exactness.ROUNDING, keeps_nonfinite=False)
    if all(output.passed for old, new in runs if "float64" in old.results
           for output in compare_outputs(old.results["float64"], new.results["float64"], rounding)):
        return {}
    measured = Strictness(Exactness.ROUNDING, accuracy=Accuracy())
    lowest: dict[str, float] = {}
    for precision in precisions:
        found = [output for old, new in runs if precision in old.results
                 for output in compare_outputs(old.results[precision], new.results[precision], measured)]
        if not all(output.passed for output in found):
            return {}
        lowest[precision] = min((output.snr for output in found if output.snr is not None), default=math.inf)
    return lowest


def _has_undefined(run: Run) -> bool:
    """Return whether an output of a run has an element that is NaN or infinite."""
    return any(value.dtype.kind == "f" and not np.all(np.isfinite(value))
               for outputs in run.results.values() for value in outputs.values())


def _count_ops(found: Execution) -> dict[str, OpCount]:
    """Sum the counts of all runs by precision."""
    total: dict[str, OpCount] = {}
    for precision, count in (each for run in found.runs for each in run.ops.items()):
        total.setdefault(precision, OpCount()).add(count)
    return total


def _describe_extreme_feeds(report: VerifyReport, plans: Sequence[Plan], promised: Strictness) -> Iterator[str]:
    """Yield notes on the limits of extreme feeds, and on a difference that occurs on extreme feeds only.

    A rewrite may declare the inputs for which it holds. A later comparison of the two files does not know this
    declaration, so both reports must state the feeds that they judged.
    """
    low, high = promised.within
    extreme = {(plan.function, plan.label): plan.adversarial for plan in plans if plan.adversarial}
    if extreme and (low > 0 or high < math.inf):
        least = f"from {low:g} " if low > 0 else ""
        yield f"extreme feeds were limited to inputs {least}up to {high:g}, for which the rewrites hold"
    failing = {(case.function, case.feeds) for case in report.cases if not case.passed}
    if failing and failing <= set(extreme):
        kinds = ", ".join(dict.fromkeys(str(extreme[each]) for each in sorted(failing)))
        yield (f"the difference occurs on extreme feeds only ({kinds}), which may exceed the range of fp16; "
               f"{format_option('feeds')} compares on your own values")


def _explain_unentered(before: Program, after: Program, old: Execution, new: Execution) -> str:
    """Return the reason for "not verified" if no run entered a block in which the programs differ; "" otherwise."""
    unseen = find_unentered_blocks(before, after, old.executed_blocks, new.executed_blocks)
    if not unseen:
        return ""
    advice = f"; {format_option('feeds')} compares on values that enter it" if " > " in unseen[0] else ""
    return f"no run entered {unseen[0]}, in which the programs differ{advice}"


def _judge_with_adjustments(
    before: Program, old: Execution, new: Execution, promised: Strictness, precisions: Sequence[str]
) -> VerifyReport:
    """Judge as `judge_executions`, after adjustments to the runs of `before`.

    If rewrites fix undefined elements, those of `before` are filled in. If rewrites unrolled recurrent layers, those of
    `before` are run again with rounded steps.
    """
    defined = promised.fixes_nonfinite and _define_nonfinite(before, old, new, precisions)
    report = judge_executions(old, new, promised)
    if report.status == "different" and _rerun_with_rounded_steps(before, old, report):
        report = judge_executions(old, new, promised)
    if report.status == "different" and (promised.changes or promised.fixes_nonfinite):
        report = _judged_with_changes(before, old, new, promised, precisions)
    report.notes += [FINITE_CONSTANTS_NOTE] * (defined and FINITE_CONSTANTS_NOTE not in report.notes)
    report.accuracy = promised.accuracy
    return report


def _excuse_sums_of_infinities(
    before: Program, after: Program, old: Execution, new: Execution, promised: Strictness, quirks: Sequence[str]
) -> None:
    """Accept numbers in place of NaN in runs on NaN and infinities that pass if the infinities are NaN, too.

    Infinities of both signs sum to NaN in one order and to an infinity in another, which a relu turns into a number.
    """
    if promised.keeps_nonfinite or promised.accuracy is not None:
        return
    for run, other in zip(old.runs, new.runs):
        if run.plan.adversarial != SPECIAL or run.error or other.error or all(
                case.passed for case in _build_cases(run, other, promised)):
            continue
        plan = replace(run.plan, feeds={name: _replace_infinities(value) for name, value in run.plan.feeds.items()})
        precisions = tuple(run.results)
        once = execute_plans(before, [plan], precisions, lambda text: None).runs[0]
        again = execute_plans(after, [plan], precisions, lambda text: None, quirks).runs[0]
        if once.error or again.error or not all(case.passed for case in _build_cases(once, again, promised)):
            continue
        run.results = {precision: {name: _take_over_finite(value, other.results[precision].get(name))
                                   for name, value in outputs.items()} for precision, outputs in run.results.items()}


def _replace_infinities(value: Any) -> Any:
    return np.where(np.isinf(value), np.nan, value).astype(value.dtype) if value.dtype.kind == "f" else value


def _take_over_finite(old: Any, new: Any) -> Any:
    """Return `old` with its NaN elements replaced by those of `new`, if these are finite."""
    if new is None or old.dtype.kind != "f" or old.shape != new.shape:
        return old
    return np.where(np.isnan(old) & np.isfinite(new), new, old).astype(old.dtype)


def _judged_with_changes(
    before: Program, old: Execution, new: Execution, promised: Strictness, precisions: Sequence[str]
) -> VerifyReport:
    """Judge as `judge_executions`, with rewrites' declared changes of single ops propagated through downstream ops.

    For each run that differs, `before` is run again with these changes. If a run still differs, the remaining runs are
    not repeated.
    """
    notes: list[str] = []

    def find_failures(run: Run, other: Run) -> list[OutputDifference]:
        return [] if run.error else [each for case in _build_cases(run, other, promised) for each in case.failed]

    for run, other in filter(lambda pair: find_failures(*pair), zip(old.runs, new.runs)):
        if run.plan.adversarial:
            run.rounding = made_of_roundings(before, run, promised.changes)
        if (promised.fixes_nonfinite and find_failures(run, other)
                and _define_made_of_nan(before, run, other, precisions)):
            notes.append(FINITE_CONSTANTS_NOTE)
        if find_failures(run, other) and _raise_constants(before, run, other, promised, precisions):
            notes.append(RAISED)
        if find_failures(run, other):
            notes += measure_moves(before, run, promised.changes, functools.partial(find_failures, run, other))
        if find_failures(run, other):
            break
    report = judge_executions(old, new, promised)
    report.notes += dict.fromkeys(notes)
    return report


def _raise_constants(
    program: Program, run: Run, new: Run, promised: Strictness, precisions: Sequence[str]
) -> bool:
    """Run `program` again with constants raised as declared; return whether any are."""
    if not any(change.raises for change in promised.changes):
        return False
    depart = make_departures(program, promised.changes)
    again = execute_plans(program, [run.plan], precisions, lambda text: None, depart=depart)
    if promised.fixes_nonfinite:
        _define_nonfinite(program, again, Execution([new]), precisions, depart)
    run.raised = None if again.runs[0].error else again.runs[0].results
    return True


def _add_adversarial_plans(
    drawn: list[Plan], program: Program, describe: Callable[[str], Any], promised: Strictness, given: Collection[str],
    ranges: Mapping[str, tuple[float, float]] | None,
) -> list[Plan]:
    """Return normal draws and adversarial feeds within the domain that the rewrites declare.

    Rewrites that approximate are judged on normal draws only. In the functions `given`, which have further runs, the
    normal draws are run only at float64.
    """
    if promised.exactness is Exactness.APPROXIMATE:
        drawn = [replace(plan, typed=plan.function not in given) for plan in drawn]
    elif promised.accuracy is None:  # models that are expected to differ are judged on normal draws only
        domain = Domain(*promised.within, ranges, promised.largest_size)
        # Rounding is judged relative to the largest output, which these feeds increase, so it is not judged on typed
        # runs. A fix needs typed runs: they show which values the program before leaves undefined.
        typed = promised.exactness is Exactness.BITWISE or promised.fixes_nonfinite
        drawn = [*drawn, *build_adversarial_plans(program, describe, domain, typed=typed)]

    def is_allowed(plan: Plan) -> bool:  # within the sizes that options of rewrites allow; a package declares ranges
        shapes = {name: value.shape for name, value in plan.feeds.items()}
        sizes = get_symbol_sizes(program.functions[plan.function], shapes).values()
        return describe(plan.function) is not None or all(
            promised.smallest_size <= size <= promised.largest_size for size in sizes)

    return [plan for plan in drawn if is_allowed(plan)] or drawn


def _locate_first_difference(
    report: VerifyReport, made: Sequence[Plan], look: Callable[[Plan, Case], FirstDifference | None]
) -> None:
    """Search for the first difference in the first run that differs."""
    case = next(case for case in report.cases if not case.passed)
    plan = next(plan for plan in made if (plan.function, plan.label) == (case.function, case.feeds))
    try:
        report.first = look(plan, case)
    except (OSError, LimitReached) as error:  # no space for temporary files, or no time left; the verdict stays valid
        report.notes.append(f"the first difference could not be found: {error}")


def _rerun_with_rounded_steps(program: Program, found: Execution, report: VerifyReport) -> bool:
    """Repeat the runs that differ at float16 with every step of the recurrent layers of `program` rounded to fp16.

    Unrolled layers round each step, but a layer that is a single op computes in float32 inside. Returns whether any run
    was repeated.
    """
    failed = {(case.function, case.feeds) for case in report.cases if not case.passed and case.precision == "float16"}
    runs = [run for run in found.runs if (run.plan.function, run.plan.label) in failed]
    if not runs or not any(op.op_type in RECURRENT_OPS for _, op in iterate_ops(program)):
        return False
    again = execute_plans(program, [run.plan for run in runs], ("float16",), lambda text: None, rounded_steps=True)
    for run, stepped in zip(runs, again.runs):
        run.stepped = stepped.results.get("float16")
    return True


def _define_nonfinite(
    program: Program, found: Execution, after: Execution, precisions: Sequence[str],
    depart: Callable[[str], Quirk | None] = lambda function: None,
) -> bool:
    """Fill in elements that are undefined in `found` and finite in `after`, from runs with huge constants made finite.

    A mask of minus infinity stands for the limit of ever larger masks, and 0 * inf in it for 0. A mask that becomes
    infinite only in fp16 is treated in the same way. Without huge constants, nothing is run: such runs would be those
    of `found`. Returns whether any element was undefined and could be filled in.
    """
    has_huge_constants = functools.cache(lambda name: _has_huge_constants(program.functions[name]))
    undefined = [(run, new) for run, new in zip(found.runs, after.runs)
                 if not run.error and _has_undefined(run) and has_huge_constants(run.plan.function)]
    if not undefined:
        return False
    limits = execute_plans(
        program, [run.plan for run, _ in undefined], precisions, lambda text: None, finite_constants=True, depart=depart
    )
    for (run, new), limit in zip(undefined, limits.runs):
        if not limit.error:
            run.results = fill_undefined(run.results, limit.results, new.results)
    return True


def _has_huge_constants(function: Function) -> bool:
    """Return whether `finite_constants` changes a constant of `function`."""
    from ..runtime.numeric import HUGE

    constants = (var.val for op in iterate_nested_ops(function) for var in op.outputs if is_const(var))
    arrays = (np.atleast_1d(value) for value in constants if np.asarray(value).dtype.kind == "f")
    return any(bool(np.any(np.abs(rows) >= HUGE)) for array in arrays for rows in iterate_rows(array))


def _define_made_of_nan(program: Program, run: Run, new: Run, precisions: Sequence[str]) -> bool:
    """Fill in outputs of `run` that are computed from NaN without being NaN, such as integers.

    Returns whether there are any.
    """
    names = made_of_nan(program, run) if _has_huge_constants(program.functions[run.plan.function]) else frozenset()
    limits = execute_plans(program, [run.plan] if names else [], precisions, lambda text: None, finite_constants=True)
    for limit in limits.runs:
        if not limit.error:
            run.results = fill_undefined(run.results, limit.results, new.results, names)
    return bool(names)


def compare_with_pipeline(
    program: Program, pipeline: Any, *, program_first: bool, seeds: int, precisions: Sequence[str],
    exactness: Exactness | Strictness, feeds: Mapping[str, Array] | None = None,
    describe: Callable[[str], Any] = lambda name: None, quirks: Sequence[str] = (),
    progress: Progress = lambda text: None,
) -> VerifyReport:
    """Compare the default function of a program with an entire pipeline (a loaded `Package`), such as the result of
    coremltools' `bisect_model`.

    Raises InputError if the pipeline has other inputs or outputs, or the program has states.
    """
    name = program.default_function_name
    function = program.functions[name]
    ends = [[each.name for each in section] for section in (pipeline.spec.description.input,
                                                            pipeline.spec.description.output)]
    own = [list(function.inputs), [var.name for var in function.outputs]]
    if list(map(sorted, ends)) != list(map(sorted, own)):
        raise InputError(f"the pipeline has the inputs {', '.join(ends[0])} and the outputs {', '.join(ends[1])}; "
                         f"expected {', '.join(own[0])} and {', '.join(own[1])}, as the other model has")
    made = [plan for plan in build_plans(program, seeds, describe, feeds) if plan.function == name]
    alone = execute_plans(program, made, precisions, lambda text: progress(f"model, {text}"),
                          () if program_first else quirks)
    entire = execute_pipeline(pipeline, made, precisions, lambda text: progress(f"pipeline, {text}"),
                              quirks if program_first else ())
    sides = (alone, entire) if program_first else (entire, alone)
    report = _judge_entire(sides, exactness, precisions, quirks)
    report.leave_open("", find_outputs_without_numbers(program, alone.runs))
    report.notes += [f"function '{other}' was not compared: a pipeline stands for one, '{name}'"
                     for other in program.functions if other != name]
    return report


def compare_pipelines(
    before: Any, after: Any, *, seeds: int, precisions: Sequence[str], exactness: Exactness | Strictness,
    feeds: Mapping[str, Array] | None = None, widths: bool = False, quirks: Sequence[str] = (),
    progress: Progress = lambda text: None,
) -> VerifyReport:
    """Compare the outputs of two entire pipelines (loaded `Package`s) of the same parts.

    Limits on the error need this: an error that a part makes within them grows in the parts after it. Raises InputError
    for parts with other inputs or outputs (with `widths`, floats of any width are the same), and NotSupported for a
    pipeline that cannot run entirely, such as one with states.
    """
    _check_same_interface(before.program, after.program, widths)
    made = _build_pipeline_plans(before, seeds, feeds)
    first = execute_pipeline(before, made, precisions, lambda text: progress(f"first model, {text}"))
    second = execute_pipeline(after, made, precisions, lambda text: progress(f"second model, {text}"), quirks)
    report = _judge_entire((first, second), exactness, precisions, quirks)
    report.leave_open("", find_outputs_without_numbers(before.program, first.runs))
    return report


def measure_pipeline_noise(before: Any, after: Any, **settings: Any) -> dict[str, float]:
    """Measure by precision the lowest signal-to-noise ratio of the outputs of two entire pipelines, in dB.

    Empty if they agree within rounding, or cannot run entirely. `settings` are those of `compare_pipelines`.
    """
    try:
        return compare_pipelines(before, after, exactness=Exactness.ROUNDING, **settings).noise
    except NotSupported:
        return {}


def _build_pipeline_plans(package: Any, seeds: int, feeds: Mapping[str, Array] | None) -> list[Plan]:
    """Make the runs of an entire pipeline: each input is drawn as that of the first part that reads it."""
    if feeds is not None:
        return [Plan(_PIPELINE, USER_FEEDS_LABEL, dict(feeds), {})]
    drawn: dict[str, list[Plan]] = {}
    for plan in build_plans(package.program, seeds, package.description):
        drawn.setdefault(plan.function, []).append(plan)
    parts = [drawn[name] for name in get_pipeline_functions(package.program)]
    inputs = {feature.name for feature in package.spec.description.input}
    longest = max(parts, key=len)
    made = [Plan(_PIPELINE, plan.label, {}, {}) for plan in longest]
    for number, plan in enumerate(made):
        for part in reversed(parts):
            read = part[number % len(part)].feeds
            plan.feeds.update({name: value for name, value in read.items() if name in inputs})
    return made


def _judge_entire(
    sides: tuple[Execution, Execution], exactness: Exactness | Strictness, precisions: Sequence[str],
    quirks: Sequence[str],
) -> VerifyReport:
    """Judge the runs of two models of which at least one is an entire pipeline."""
    report = judge_executions(*sides, exactness)
    if report.status == "different":
        report.noise = _measure_noise(zip(*(each.runs for each in sides)), precisions)
    report.quirks = tuple(quirks)
    report.accuracy = exactness.accuracy if isinstance(exactness, Strictness) else None
    return report


def _check_same_interface(before: Program, after: Program, widths: bool = False) -> None:
    """Raise InputError if names of functions, or names, order or dtypes of their inputs and outputs differ.

    The order of functions does not matter, because a model file has them in a protobuf map. With `widths`, all float
    dtypes are considered equal.
    """
    if not before.functions:
        raise InputError("the program has no function; expected at least one")
    first, second = (_format_interfaces(program, widths) for program in (before, after))
    if first != second:
        on_request = (f", or {choose_spelling('--widths', 'widths=True')}, which compares floats of different widths"
                      if _format_interfaces(before, True) == _format_interfaces(after, True) else "")
        raise InputError(f"the two programs have different inputs or outputs: the first {first}, the second {second}; "
                         f"expected the same names and dtypes in the same order{on_request}")


def _format_interfaces(program: Program, widths: bool) -> str:
    """Format the functions of a program with their inputs and outputs, as `_format_interface` does."""
    return ", ".join(f"{name}({_format_interface(function.inputs.values(), widths)}) -> "
                     f"({_format_interface(function.outputs, widths)})"
                     for name, function in sorted(program.functions.items()))


def _format_interface(ends: Collection[Var], widths: bool) -> str:
    """Format inputs or outputs by name and dtype; sizes are omitted, because the runs compare them."""
    return ", ".join(f"'{var.name}'{_format_dtype(var, widths)}" for var in ends)


def _format_dtype(var: Var, widths: bool) -> str:
    if types.is_list(var.sym_type) or types.is_dict(var.sym_type):
        return ""
    return ": a float" if widths and holds_floats(var) else f": {format_dtype(var.dtype)}"
