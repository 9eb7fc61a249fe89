"""Rewrite a model and prove the result equal before anything is written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from coremltools.converters.mil.mil import Program

from ..core.budget import MOST_STEPS, spending
from ..core.contract import Rewrite
from ..core.engine import PassTrace
from ..core.errors import InputError, LimitReached
from ..core.forecast import Foresee
from ..core.growth import MOST_GROWTH
from ..core.locking import synchronized
from ..core.pipeline import Options, Passes, run_all, selected
from ..core.printer import program_diff, program_text
from ..core.query import op_count
from ..core.spelling import without_proof
from ..core.targets import applies, parse_target
from ..package import CopyAhead, Package, check_destination, save
from ..proof.blame import Settled, settle
from ..proof.given import Feeds, Given, Ranges
from ..proof.prove import VerifyReport
from ..report.rewrite import RewriteReport
from .passes import DRAWS, measures
from .predicting import foreseeing, guard_of
from .proving import Made, Prover, need_torch
from .source import Opened, Progress, copied, opened, quiet

__all__ = ["rewrite"]


@dataclass(frozen=True)
class _Job:
    """What is asked for, beside the source and where the result goes."""

    rules: Sequence[Rewrite]
    target: str
    given: Given
    prove: bool
    seeds: int
    diff: bool
    most_growth: float | None
    strict: bool
    progress: Progress

    def run(
        self, source: Opened, program: Program, rules: Sequence[Rewrite], foresee: Foresee | None
    ) -> list[PassTrace]:
        """Apply `rules` to `program`, in place; it has the interface of `source`. A guard goes by `foresee`."""
        if self.given and any(rule.measures for rule in rules):
            need_torch("the values are measured by running the model, which")
        measure, draw = measures(self.given, source.describe, self.seeds, self.progress)
        return run_all(rules, program, target=self.target, measure=measure, draw=draw, strict=self.strict,
                       guard=None if foresee is None else guard_of(foresee, self.most_growth))

    def settled(self, before: Opened, foresee: Foresee) -> Settled:
        """A rewritten copy of `before`, proved if that is asked for, without what breaks the proof."""

        def apply(rules: Sequence[Rewrite], guard: bool) -> Made:
            twin = copied(before)
            return Made(twin, self.run(before, twin.program, rules, foresee if guard else None))

        if not self.prove:
            return Settled(self.rules, apply(self.rules, guard=True))
        prover = Prover(before, self.given, self.seeds, any(rule.interface for rule in self.rules), self.progress)
        try:
            return settle(self.rules, apply, prover, self.progress)
        except LimitReached as reached:  # while a rule measured values: what it would have done is not known
            reason = f"{reached}; {without_proof()} writes without a proof"
            return Settled(self.rules, Made(copied(before), []), VerifyReport("not proved", reason=reason))


@synchronized
def rewrite(
    src: Any, dst: Any = None, *, preset: str = "safe", target: str = "all", passes: Passes | None = None,
    options: Options | None = None, feeds: Feeds | None = None, ranges: Ranges | None = None, verify: bool = True,
    overwrite: bool = False, link: bool = False, dry_run: bool = False, diff: bool = False, seeds: int = DRAWS,
    max_growth: float | None = MOST_GROWTH, strict: bool = False, max_steps: int | None = MOST_STEPS,
    max_seconds: float | None = None, progress: Progress = quiet, ahead: CopyAhead | None = None,
) -> RewriteReport:
    """Rewrite a model and prove the result equal before anything is written.

    `src` is a path to an .mlpackage, an MLModel, a `Package` or a `mil.Program`; none of them is changed, except
    `rewrite(program, dst=program)`, which rewrites in place once proved. `dst` is the path of the new package, or
    None: then the result is in the report's `package` only. `passes`, `options` and `max_growth` as in `pipeline()`,
    `link` as in `save`, `max_steps` and `max_seconds` as in `run`. `feeds` (from input name to array, or several such)
    and `ranges` (input name to (low, high)) say what the inputs hold: passes that decide by values see those, and the
    proof runs on them besides its own draws (what approximates is held to them). `ahead`: copies begun.

    Raises InputError for anything that cannot be used (nothing is written then). A preset's passes that break the proof
    are left out (the report's `left_out_passes`), and those that fail are rolled back (`failed`). Not so what is asked
    for by name: it is `blamed`, or raises RuleError; so does any that fails with `strict`. A result that is not proved
    is not written: the report's `status` says "not proved".
    """
    started = time.perf_counter()
    parse_target(target)
    job = _Job(selected(preset, passes, options), target, Given.of(feeds, ranges), verify and not dry_run, seeds, diff,
               max_growth, strict, progress)
    path = _written_to(src, dst)
    report = RewriteReport("", None if path is None or dry_run else str(path), preset, target,
                           passes=[rule.name for rule in job.rules])
    begun = _copying_ahead(src, None if dry_run else path, overwrite, link, ahead)
    with begun as ahead, spending(max_steps, max_seconds, progress):
        before = opened(src)
        kept = _rewrite(report, job, before)
        if dry_run:
            report.status = "dry run" if report.changed else "unchanged"
        elif report.status != "not proved":
            if isinstance(dst, Program):  # src itself
                job.run(before, src, kept, foreseeing(target, before.package))
            _deliver(report, src if isinstance(dst, Program) else report.package, path, overwrite, link, ahead)
    report.seconds = time.perf_counter() - started
    return report


def _written_to(src: Any, dst: Any) -> Path | None:
    """The path to write to, if any. Raises InputError for a source and a destination that do not go together."""
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


def _copying_ahead(
    src: Any, path: Path | None, overwrite: bool, link: bool, begun: CopyAhead | None
) -> AbstractContextManager[CopyAhead | None]:
    """Start copying what will be copied anyway, unless that has `begun`. Raises InputError when `path` could not be
    written in the end."""
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


def _rewrite(report: RewriteReport, job: _Job, before: Opened) -> Sequence[Rewrite]:
    """Run the rules on a private copy of the source and prove the result; fills in the report.

    Returns the rules that were not left out.
    """
    report.source = before.name
    report.outside = [rule.name for rule in job.rules if rule.asked and not applies(rule.targets, job.target)]
    outward = [rule.name for rule in job.rules if rule.interface]
    if outward and before.is_pipeline:
        raise InputError(f"{before.name} is a pipeline, and ane::{outward[0]} changes inputs and outputs, which the "
                         "parts beside it and the pipeline declare, too; change the packages before they are made one")
    report.ops_before = op_count(before.program)
    if before.package is not None:
        report.left_out = before.package.members.others
        report.weight_bytes_before = report.weight_bytes_after = before.package.weight_bytes
    job.progress("rewriting")
    foresee = foreseeing(job.target, before.package)
    found = job.settled(before, foresee)
    after = found.made.copy
    report.traces, report.verify = found.made.traces, found.verify
    report.left_out_passes, report.blamed = found.left_out, found.blamed
    if report.changed or report.reverted:
        report.predicted = foresee(before.program), foresee(after.program)
    report.ops_after = op_count(after.program)
    report.package = after.package if after.package is not None else after.program
    if job.diff and report.changed:
        report.diff = program_diff(*(program_text(each.program, names=True) for each in (before, after)))
    if found.verify is not None and not found.verify.equal:
        report.status = "not proved"
    return found.rules


def _deliver(
    report: RewriteReport, made: Any, path: Path | None, overwrite: bool, link: bool, ahead: CopyAhead | None
) -> None:
    report.package = made
    if path is not None:
        save(report.package, path, overwrite=overwrite, link=link, ahead=ahead)
        report.weight_bytes_after = sum(file.stat().st_size for file in path.rglob("*.bin"))
    report.status = "unchanged" if not report.changed else ("written" if path is not None else "in memory")
