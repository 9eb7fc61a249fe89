"""The steps of `rewrite`: plan, apply, verify, and write; each returns data.

A pass of a preset that breaks the equivalence check is left out, and the rest is verified again; one that was
requested by name is only reported.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coremltools.converters.mil.mil import Program

from ..ane.wrong_numbers import find_wrong_numbers
from ..equivalence.comparison import Strictness
from ..equivalence.equivalence import WIDTHS_NOTE, VerifyReport, compare_programs, measure_pipeline_noise
from ..equivalence.execution import Plan
from ..equivalence.user_inputs import UserInputs
from ..ir.printer import diff_program_texts, format_program
from ..ir.query import count_ops
from ..package import CopyAhead, Package, check_destination, load, save
from ..package.model import NOT_SAVED
from ..passes.contract import Exactness, Rewrite
from ..passes.engine import PassTrace
from ..passes.forecast import Forecaster
from ..passes.pipeline import apply_rewrites, select_rewrites, treat_as_preset
from ..passes.targets import is_applicable, parse_target
from ..utils.errors import InputError, LimitReached, NotSupported
from ..utils.option_spelling import format_no_verify_option
from ..utils.text_format import add_article, format_count
from .pipeline import make_forecaster, make_guard, make_measures
from .sources import OpenedSource, copy_source
from .verify import VerifyOptions, choose_snr_limit, format_limited_command

if TYPE_CHECKING:
    from .rewrite import RewriteOptions, RewriteReport

__all__ = [
    "CHECK_PRECISIONS",
    "MAX_PASSES_LEFT_OUT",
    "FaultyPass",
    "Outcome",
    "RewritePlan",
    "RewrittenCopy",
    "apply_and_verify",
    "check_source",
    "combine_promises",
    "fill_report",
    "map_replaced_values",
    "plan_rewrite",
    "resolve_destination",
    "start_copying_ahead",
    "write_result",
]

CHECK_PRECISIONS = ("float64", "float16")
"""Precisions at which `rewrite` verifies: float64 checks the algebra, float16 the rounding to stored dtypes."""
MAX_PASSES_LEFT_OUT = 8
"The most passes that are left out, each at the cost of a few short equivalence checks and a full one."


@dataclass(frozen=True)
class RewritePlan:
    """The checked options: the rules to apply, in order, and the user's inputs. `verify`: check the result."""

    options: RewriteOptions
    rules: Sequence[Rewrite]
    inputs: UserInputs

    @property
    def verify(self) -> bool:
        return self.options.verify and not self.options.dry_run


@dataclass(frozen=True)
class RewrittenCopy:
    """A rewritten copy of the source, and the trace of each rule."""

    copy: OpenedSource
    traces: list[PassTrace]

    @property
    def changed(self) -> bool:
        return any(trace.fired for trace in self.traces)


@dataclass(frozen=True)
class FaultyPass:
    """A pass that breaks the equivalence check: the program is verified equivalent before it, and no longer after it.

    `places` is the number of matches at which it fired; `verify` is the equivalence check that failed.
    """

    rule: str
    places: int
    verify: VerifyReport

    @property
    def reason(self) -> str:
        """The failure, in one line."""
        case = next((case for case in self.verify.cases if case.failed), None)
        if case is None:
            return self.verify.reason
        return f"{case.function}, {case.feeds}, {case.precision}: {case.failed[0]}"

    @property
    def verdict(self) -> str:
        """The result of the check as a verb phrase: it found a difference, or did not reach what the pass changed."""
        return ("is not covered by" if self.verify.status == "not verified" else "breaks") + " the equivalence check"

    @property
    def where(self) -> str:
        """The first op that differs, if it is known."""
        first = self.verify.first
        return f"; the first op that differs: {first.after.op_type} %{first.after.value}" if first else ""

    def to_dict(self) -> dict[str, Any]:
        first = self.verify.first
        return {"pass": self.rule, "places": self.places, "reason": self.reason,
                "first_difference": first.to_dict() if first else None}

    def __str__(self) -> str:
        return f"at {format_count(self.places, 'place')}: {self.reason}{self.where}"


@dataclass
class Outcome:
    """The rules that are left, their result and its equivalence check (None if nothing fired or none was requested).

    `left_out` are the passes that break the equivalence check; `faulty_pass` is one that must not be left out, as it
    was requested by name.
    """

    rules: Sequence[Rewrite]
    after: RewrittenCopy
    verify: VerifyReport | None = None
    left_out: list[FaultyPass] = field(default_factory=list)
    faulty_pass: FaultyPass | None = None


def plan_rewrite(options: RewriteOptions) -> RewritePlan:
    """Check the options, before anything is read."""
    parse_target(options.target)
    rules = select_rewrites(options.preset, options.passes, options.options)
    if not options.named:
        treat_as_preset(rules)
    return RewritePlan(options, rules, UserInputs.of(options.feeds, options.ranges))


def resolve_destination(src: Any, dst: Any) -> Path | None:
    """Return the path to write to, if any. Raises InputError for a source and a destination that cannot be combined."""
    if isinstance(src, str) and not src.strip():
        raise InputError("no path given; expected the path of an .mlpackage")
    if dst is None or (isinstance(src, Program) and dst is src):
        return None
    if isinstance(dst, Program):
        raise InputError("dst is a program other than src; expected a path, or src itself to rewrite it in place")
    if isinstance(src, Program):
        raise InputError("a mil.Program cannot be written as a package; convert it with ct.convert(program, "
                         "pass_pipeline=mil_ane_passes.pipeline()), or rewrite it in place with dst=program")
    if not isinstance(dst, (str, PathLike)):
        raise InputError(f"dst: found {add_article(type(dst).__name__)}; expected a path, or the program that is src, "
                         "to rewrite it in place")
    return Path(dst)


def start_copying_ahead(options: RewriteOptions, path: Path | None) -> AbstractContextManager[CopyAhead | None]:
    """Start copying files that will be copied in any case, unless the caller has started that.

    Raises InputError if `path` could not be written at the end.
    """
    if options.ahead is not None:
        return nullcontext(options.ahead)
    source = options.src
    if not isinstance(source, (str, PathLike)):
        source = source.path if isinstance(source, Package) else getattr(source, "package_path", None)
    if path is None or source is None:
        return nullcontext()
    check_destination(fspath(source), path, options.overwrite)
    return nullcontext() if options.link else CopyAhead(Path(source), path)


def check_source(plan: RewritePlan, before: OpenedSource) -> None:
    """Raise InputError if a pass changes inputs or outputs that something around the model declares, too."""
    outward = [rule.name for rule in plan.rules if rule.interface]
    if outward and before.package is not None and before.package.is_delegate:
        raise InputError(f"{before.name} is a delegate, but ane::{outward[0]} changes inputs and outputs that the "
                         f"enclosing ExecuTorch program declares as well; change the model before lowering")
    if outward and before.is_pipeline:
        raise InputError(f"{before.name} is a pipeline, but ane::{outward[0]} changes inputs and outputs that the "
                         f"pipeline and its other parts declare as well; change the packages before they are joined")


def apply_and_verify(plan: RewritePlan, before: OpenedSource) -> Outcome:
    """Apply the rules and verify the result; leave out passes that break the equivalence check, and verify again.

    If the program cannot be verified even unchanged, no pass is blamed; the reason is in the check.
    """
    found = Outcome(list(plan.rules), RewrittenCopy(before, []))
    try:
        while True:
            found.after = _apply_to_copy(plan, before, found.rules, guarded=True)
            if not plan.verify or not found.after.changed:
                return found
            found.verify = _verify(plan, before, found.after)
            if (found.verify.equal or _is_unverifiable(plan, before, found.verify)
                    or len(found.left_out) == MAX_PASSES_LEFT_OUT):
                return found
            culprit, faulty = _find_faulty_pass(plan, before, found.rules, found.after, found.verify)
            if culprit.asked:
                found.faulty_pass = faulty
                return found
            plan.options.progress(f"ane::{culprit.name} {faulty.verdict}; continuing without it")
            found.rules, found.verify = [rule for rule in found.rules if rule is not culprit], None
            found.left_out.append(faulty)
    except LimitReached as reached:  # while a rule measured values: its effect is unknown
        if not plan.verify:
            raise
        reason = f"{reached}; {format_no_verify_option()} writes without an equivalence check"
        return Outcome(plan.rules, RewrittenCopy(copy_source(before), []), VerifyReport("not verified", reason=reason))


def _apply_to_copy(plan: RewritePlan, before: OpenedSource, rules: Sequence[Rewrite], guarded: bool) -> RewrittenCopy:
    """Apply `rules` to a copy of the source."""
    clone = copy_source(before)
    return RewrittenCopy(clone, _apply_in_place(plan, before, clone.program, rules, guarded))


def _apply_in_place(
    plan: RewritePlan, before: OpenedSource, program: Program, rules: Sequence[Rewrite], guarded: bool = True
) -> list[PassTrace]:
    """Apply `rules` to `program`, which has the interface of `before`; the guard reverts what it does not allow."""
    options = plan.options
    if plan.inputs and any(rule.measures for rule in rules):
        _require_torch("the pass runs the model to measure values, which")
    measure, draw = make_measures(plan.inputs, before.describe, options.seeds, options.progress)
    guard = make_guard(_make_forecaster(plan, before), options.max_growth) if guarded else None
    return apply_rewrites(rules, program, target=options.target, measure=measure, draw=draw, strict=options.strict,
                          guard=guard)


def _make_forecaster(plan: RewritePlan, before: OpenedSource) -> Forecaster:
    return make_forecaster(plan.options.target, before.package)


def _verify(
    plan: RewritePlan, before: OpenedSource, made: RewrittenCopy, *, like: RewrittenCopy | None = None,
    only: Plan | None = None, locate: bool = True,
) -> VerifyReport:
    """Check that `made` is equivalent within the guarantees of its passes (or of those of `like`).

    `only` and `locate` as for `compare_programs`: the only run, and no search for the first difference.
    """
    promised = combine_promises((like or made).traces)
    _require_torch("the equivalence check", f", or {format_no_verify_option()} to write without an equivalence check")
    try:
        return compare_programs(
            before.program, made.copy.program, seeds=plan.options.seeds, precisions=CHECK_PRECISIONS,
            exactness=promised, describe=before.describe, progress=plan.options.progress,
            mapping=map_replaced_values(made.traces),
            further=plan.inputs.plans(before.program, before.describe),
            widths=any(rule.interface for rule in plan.rules), only=only, locate=locate, ranges=plan.inputs.ranges)
    except NotSupported as lacking:
        reason = f"{lacking}; {format_no_verify_option()} writes without an equivalence check"
        return VerifyReport("not verified", promised.exactness, reason=reason)


def _is_unverifiable(plan: RewritePlan, before: OpenedSource, verify: VerifyReport) -> bool:
    """Return whether the program before cannot be verified equivalent to itself; if so, write that into `verify`."""
    if verify.status == "different":  # both ran
        return False
    unchanged = _verify(plan, before, RewrittenCopy(copy_source(before), []))
    if unchanged.equal:
        return False
    verify.reason = f"the unmodified model already fails the equivalence check with itself: {unchanged.reason}"
    return True


def _find_faulty_pass(
    plan: RewritePlan, before: OpenedSource, rules: Sequence[Rewrite], made: RewrittenCopy, verify: VerifyReport,
) -> tuple[Rewrite, FaultyPass]:
    """Find the first rule with which the equivalence check fails, by bisection, in the first failed run if one
    failed."""
    traces = {trace.rule: trace for trace in made.traces if trace.fired}
    fired = [rule for rule in rules if rule.name in traces]
    only = verify.failed_plan
    good, bad = 0, len(fired)  # the first `good` rules are verified, the first `bad` are not
    while bad - good > 1:
        plan.options.progress(f"not verified: searching for the faulty one of {bad - good} passes")
        middle = (good + bad) // 2
        trial = _apply_to_copy(plan, before, fired[:middle], guarded=False)
        checked = _verify(plan, before, trial, like=made, only=only, locate=False)
        if checked.equal or (only and checked.status != "different"):  # one run need not enter every block
            good = middle
        else:
            bad = middle
    if bad < len(fired):
        trial = _apply_to_copy(plan, before, fired[:bad], guarded=False)
        verify = _verify(plan, before, trial, like=made, only=only)
    culprit = fired[bad - 1]
    return culprit, FaultyPass(culprit.name, len(traces[culprit.name].fired), verify)


def fill_report(report: RewriteReport, plan: RewritePlan, before: OpenedSource, outcome: Outcome) -> None:
    """Fill in the report of a rewrite whose result is not written yet."""
    options, after = plan.options, outcome.after.copy
    report.source, report.upgraded = before.name, before.upgraded
    report.outside = [rule.name for rule in plan.rules
                      if rule.asked and not is_applicable(rule.targets, options.target)]
    report.ops_before, report.ops_after = count_ops(before.program), count_ops(after.program)
    if before.package is not None:
        report.left_out = before.package.members.others
        report.weight_bytes_before = report.weight_bytes_after = before.package.weight_bytes
    report.traces, report.verify = outcome.after.traces, outcome.verify
    report.left_out_passes, report.faulty_pass = outcome.left_out, outcome.faulty_pass
    if report.changed or report.reverted:
        forecast = _make_forecaster(plan, before)
        report.predicted = forecast(before.program), forecast(after.program)
    report.wrong_numbers = find_wrong_numbers(after.program, options.target, keeps_interface=before.keeps_interface)
    report.package = after.package if after.package is not None else after.program
    if options.diff and report.changed:
        report.diff = diff_program_texts(*(format_program(each.program, names=True) for each in (before, after)))
    if outcome.verify is not None and not outcome.verify.equal:
        report.status = "not verified"


def write_result(
    report: RewriteReport, plan: RewritePlan, before: OpenedSource, outcome: Outcome, path: Path | None,
    ahead: CopyAhead | None,
) -> None:
    """Write the result to `path`, if there is one, or rewrite the source in place if it is the destination."""
    options = plan.options
    if isinstance(options.dst, Program):  # the source itself
        _apply_in_place(plan, before, options.dst, outcome.rules)
        report.package = options.dst
    if path is not None:
        save(report.package, path, overwrite=options.overwrite, link=options.link, ahead=ahead,
             read_back=options.verify)
        report.weight_bytes_after = sum(file.stat().st_size for file in path.rglob("*.bin"))
        report.verify_command = _find_verify_command(report, options, path)
    if isinstance(report.package, Package) and report.changed and not before.keeps_interface and not before.upgraded:
        report.package.name = NOT_SAVED if path is None else fspath(path)
    report.status = "unchanged" if not report.changed else ("written" if path is not None else "in memory")


def _find_verify_command(report: RewriteReport, options: RewriteOptions, path: Path) -> str | None:
    """Find the command with which `verify` accepts the result; None if it does so without a limit, or with none."""
    if report.verify is None or not report.verify.equal or not os.path.exists(report.source):
        return None
    noise = {name: lowest for name, lowest in report.verify.noise.items() if name == "float64"}
    if noise and isinstance(report.package, Package) and report.package.is_pipeline:  # of which parts were compared
        noise = measure_pipeline_noise(load(report.source), load(path), seeds=options.seeds, precisions=tuple(noise),
                                       widths=True)
    limit = choose_snr_limit(noise)
    if limit is None:
        return None
    return format_limited_command(VerifyOptions(
        report.source, path, seeds=options.seeds, widths=WIDTHS_NOTE in report.verify.notes,
        max_steps=options.max_steps, max_seconds=options.max_seconds, max_memory=options.max_memory), limit)


def _require_torch(who: str, otherwise: str = "") -> None:
    if importlib.util.find_spec("torch") is None:
        raise InputError(f"{who} runs on PyTorch, which is not installed: pip install 'mil-ane-passes[verify]'"
                         f"{otherwise}")


def map_replaced_values(traces: Sequence[PassTrace]) -> dict[str, str]:
    """Map each removed value to the value that replaces it after all passes."""
    found: dict[str, str] = {}
    for trace in reversed(traces):  # last first: a replacement may itself have been replaced
        for gone, other in reversed(trace.replaced.items()):
            found[gone] = found.get(other, other)
    return found


def combine_promises(traces: Sequence[PassTrace]) -> Strictness:
    """Combine the guarantees of all rewrites that fired."""
    fired = [trace for trace in traces if trace.strength is not None]
    weakest = max((trace.strength for trace in fired if trace.strength), key=list(Exactness).index,
                  default=Exactness.BITWISE)
    return Strictness(
        weakest, any(trace.fixes_nonfinite for trace in fired), sum(trace.moves for trace in fired),
        ulps=sum(trace.ulps for trace in fired), keeps_nonfinite=all(trace.keeps_nonfinite for trace in fired),
        changes=tuple(change for trace in fired for change in trace.changes),
        smallest_size=max((trace.smallest_size for trace in fired), default=1),
        largest_size=min((trace.largest_size for trace in fired), default=math.inf),
        within=(max((trace.within[0] for trace in fired), default=0.0),
                min((trace.within[1] for trace in fired), default=math.inf)))
