"""Rewriting of a model; the result is verified equivalent before anything is written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from coremltools.converters.mil.mil import Program

from ..equivalence.equivalence import VerifyReport
from ..equivalence.faulty_passes import VerificationOutcome, apply_and_verify
from ..equivalence.user_inputs import Feeds, Ranges, UserInputs
from ..ir.printer import diff_program_texts, format_program
from ..ir.query import count_ops
from ..package import CopyAhead, Package, check_destination, save
from ..passes.contract import Rewrite
from ..passes.engine import PassTrace
from ..passes.forecast import Forecaster
from ..passes.max_growth import DEFAULT_MAX_GROWTH
from ..passes.pipeline import Options, Passes, apply_rewrites, select_rewrites
from ..passes.targets import is_applicable, parse_target
from ..report.rewrite import RewriteReport
from ..utils.budget import DEFAULT_MAX_STEPS, share_budget
from ..utils.errors import InputError, LimitReached
from ..utils.locking import synchronized
from ..utils.option_spelling import format_no_verify_option
from .equivalence_check import EquivalenceChecker, RewrittenCopy, require_torch
from .pass_pipeline import DEFAULT_SEEDS, make_measures
from .prediction import make_forecaster, make_guard
from .source import OpenedSource, Progress, copy_source, ignore_progress, open_source

__all__ = ["rewrite"]


@dataclass(frozen=True)
class _RewriteJob:
    """The requested rewrite, without the source and the destination."""

    rules: Sequence[Rewrite]
    target: str
    given: UserInputs
    prove: bool
    seeds: int
    diff: bool
    most_growth: float | None
    strict: bool
    progress: Progress

    def run(
        self, source: OpenedSource, program: Program, rules: Sequence[Rewrite], foresee: Forecaster | None
    ) -> list[PassTrace]:
        """Apply `rules` to `program`, in place; it has the interface of `source`.

        The guard, if any, predicts with `foresee`.
        """
        if self.given and any(rule.measures for rule in rules):
            require_torch("the values are measured by running the model, which")
        measure, draw = make_measures(self.given, source.describe, self.seeds, self.progress)
        return apply_rewrites(rules, program, target=self.target, measure=measure, draw=draw, strict=self.strict,
                              guard=None if foresee is None else make_guard(foresee, self.most_growth))

    def settled(self, before: OpenedSource, foresee: Forecaster) -> VerificationOutcome:
        """Rewrite a copy of `before`, verified if requested, without the passes that break the equivalence check."""

        def apply(rules: Sequence[Rewrite], guard: bool) -> RewrittenCopy:
            twin = copy_source(before)
            return RewrittenCopy(twin, self.run(before, twin.program, rules, foresee if guard else None))

        if not self.prove:
            return VerificationOutcome(self.rules, apply(self.rules, guard=True))
        prover = EquivalenceChecker(
            before, self.given, self.seeds, any(rule.interface for rule in self.rules), self.progress
        )
        try:
            return apply_and_verify(self.rules, apply, prover, self.progress)
        except LimitReached as reached:  # while a rule measured values: its effect is unknown
            reason = f"{reached}; {format_no_verify_option()} writes without an equivalence check"
            return VerificationOutcome(
                self.rules, RewrittenCopy(copy_source(before), []), VerifyReport("not verified", reason=reason)
            )


@synchronized
def rewrite(
    src: Any, dst: Any = None, *, preset: str = "safe", target: str = "all", passes: Passes | None = None,
    options: Options | None = None, feeds: Feeds | None = None, ranges: Ranges | None = None, verify: bool = True,
    overwrite: bool = False, link: bool = False, dry_run: bool = False, diff: bool = False, seeds: int = DEFAULT_SEEDS,
    max_growth: float | None = DEFAULT_MAX_GROWTH, strict: bool = False, max_steps: int | None = DEFAULT_MAX_STEPS,
    max_seconds: float | None = None, progress: Progress = ignore_progress, ahead: CopyAhead | None = None,
) -> RewriteReport:
    """Rewrite a model and verify that the result is equivalent before anything is written.

    `src` is a path to an .mlpackage, an MLModel, a `Package` or a `mil.Program`; none of them is changed, except
    `rewrite(program, dst=program)`, which rewrites in place once verified. `dst` is the path of the new package, or
    None: then the result is only in the report's `package`. `passes`, `options` and `max_growth` as in `pipeline()`,
    `link` as in `save`, `max_steps` and `max_seconds` as in `run`. `feeds` (from input name to array, or several such)
    and `ranges` (input name to (low, high)) describe the inputs: passes that need value ranges use them, and the
    equivalence check runs on them besides its own random feeds (approximate rewrites are judged on them alone).
    `ahead`: copies that were already started.

    Raises InputError for input that cannot be used (nothing is written then). A preset's passes that break the
    equivalence check are left out (the report's `left_out_passes`), and those that fail are rolled back (`failed`).
    This does not apply to passes requested by name: such a pass is reported as `faulty_pass`, or raises RuleError;
    with `strict` every pass that fails raises RuleError. A result that is not verified is not written: the report's
    `status` is "not verified".
    """
    started = time.perf_counter()
    parse_target(target)
    job = _RewriteJob(
        select_rewrites(preset, passes, options),
        target,
        UserInputs.of(feeds, ranges),
        verify and not dry_run,
        seeds,
        diff,
        max_growth,
        strict,
        progress,
    )
    path = _resolve_destination(src, dst)
    report = RewriteReport("", None if path is None or dry_run else str(path), preset, target,
                           passes=[rule.name for rule in job.rules])
    begun = _start_copying_ahead(src, None if dry_run else path, overwrite, link, ahead)
    with begun as ahead, share_budget(max_steps, max_seconds, progress):
        before = open_source(src)
        kept = _rewrite_source(report, job, before)
        if dry_run:
            report.status = "dry run" if report.changed else "unchanged"
        elif report.status != "not verified":
            if isinstance(dst, Program):  # src itself
                job.run(before, src, kept, make_forecaster(target, before.package))
            _write_result(report, src if isinstance(dst, Program) else report.package, path, overwrite, link, ahead)
    report.seconds = time.perf_counter() - started
    return report


def _resolve_destination(src: Any, dst: Any) -> Path | None:
    """Return the path to write to, if any. Raises InputError for a source and a destination that cannot be combined."""
    if isinstance(src, str) and not src.strip():
        raise InputError("no path given; expected the path of an .mlpackage")
    if dst is None or (isinstance(src, Program) and dst is src):
        return None
    if isinstance(dst, Program):
        raise InputError("dst is a program that is not src; expected a path, or src itself to rewrite it in place")
    if isinstance(src, Program):
        raise InputError("a mil.Program cannot be written as a package; convert it with ct.convert(program, "
                         "pass_pipeline=mil_ane_passes.pipeline()), or rewrite it in place with dst=program")
    return Path(fspath(dst))


def _start_copying_ahead(
    src: Any, path: Path | None, overwrite: bool, link: bool, begun: CopyAhead | None
) -> AbstractContextManager[CopyAhead | None]:
    """Start copying files that will be copied in any case, unless copies have `begun`.

    Raises InputError if `path` could not be written at the end.
    """
    if begun is not None:
        return nullcontext(begun)
    source: Any = src
    if not isinstance(src, (str, PathLike)):
        source = src.path if isinstance(src, Package) else getattr(src, "package_path", None)
    if path is None or source is None:
        return nullcontext()
    check_destination(fspath(source), path, overwrite)
    if link:
        return nullcontext()
    return CopyAhead(Path(source), path)


def _rewrite_source(report: RewriteReport, job: _RewriteJob, before: OpenedSource) -> Sequence[Rewrite]:
    """Run the rules on a private copy of the source, verify the result, and fill in the report.

    Returns the rules that were not left out.
    """
    report.source = before.name
    report.outside = [rule.name for rule in job.rules if rule.asked and not is_applicable(rule.targets, job.target)]
    outward = [rule.name for rule in job.rules if rule.interface]
    if outward and before.is_pipeline:
        raise InputError(f"{before.name} is a pipeline, and ane::{outward[0]} changes inputs and outputs, which the "
                         "parts beside it and the pipeline declare, too; change the packages before they are made one")
    report.ops_before = count_ops(before.program)
    if before.package is not None:
        report.left_out = before.package.members.others
        report.weight_bytes_before = report.weight_bytes_after = before.package.weight_bytes
    job.progress("rewriting")
    foresee = make_forecaster(job.target, before.package)
    found = job.settled(before, foresee)
    after = found.made.copy
    report.traces, report.verify = found.made.traces, found.verify
    report.left_out_passes, report.faulty_pass = found.left_out, found.faulty_pass
    if report.changed or report.reverted:
        report.predicted = foresee(before.program), foresee(after.program)
    report.ops_after = count_ops(after.program)
    report.package = after.package if after.package is not None else after.program
    if job.diff and report.changed:
        report.diff = diff_program_texts(*(format_program(each.program, names=True) for each in (before, after)))
    if found.verify is not None and not found.verify.equal:
        report.status = "not verified"
    return found.rules


def _write_result(
    report: RewriteReport, made: Any, path: Path | None, overwrite: bool, link: bool, ahead: CopyAhead | None
) -> None:
    report.package = made
    if path is not None:
        save(report.package, path, overwrite=overwrite, link=link, ahead=ahead)
        report.weight_bytes_after = sum(file.stat().st_size for file in path.rglob("*.bin"))
    report.status = "unchanged" if not report.changed else ("written" if path is not None else "in memory")
