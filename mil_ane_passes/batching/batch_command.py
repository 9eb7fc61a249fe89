"""The function `batch`, which runs a command over many packages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from ..package.destination import find_enclosing_package
from ..report.batch import BatchItem, BatchReport
from ..utils.errors import InputError
from .job import Job
from .job_planning import plan_job
from .job_runner import JobRunner
from .record import RECORDS_FOLDER
from .request import Request
from .sources import Paths, Source, find_sources
from .workers import InProcessExecutor, WorkerPool

__all__ = ["BatchInterrupted", "batch"]



class BatchInterrupted(KeyboardInterrupt):
    """The user stopped the batch; `report` has the results until then."""

    def __init__(self, report: BatchReport) -> None:
        super().__init__(f"{sum(item.status != 'not run' for item in report.items)} of {len(report.items)} done")
        self.report = report


def batch(
    command: str, sources: Paths, folder: str | os.PathLike[str] | None, *, jobs: int = 0,
    executor: Executor | None = None, again: bool = False, overwrite: bool = False,
    progress: Callable[[str], None] = lambda text: None, **options: Any,
) -> BatchReport:
    """Run `command`, "rewrite" or "lint", on each of many packages; an error in one does not stop the rest.

    `sources` are packages, folders that are searched for packages, and patterns. The results are named
    `folder`/NAME.mlpackage and `folder`/NAME.txt (of lint; `report` selects the form: "text", "json", "sarif",
    "html"); packages found in a folder keep their path below it. `jobs`: 0 works in this process, N in N processes of
    this machine (each takes half a GB and what its equivalence check needs; a script needs
    `if __name__ == "__main__":`). `executor`: any `concurrent.futures.Executor` instead, whose workers have the same
    paths and packages; threads of one process take turns. `options` are those of `rewrite` (preset, target, passes,
    options, ranges, verify, seeds, link, dry_run, max_growth, strict, max_steps, max_seconds; feeds as paths of .npz
    files) or of `lint` (target, select, ignore, options; fail_under in percent).

    A result whose package and options are those of an earlier run is kept ("up to date") unless `again`. Other results
    of an earlier run are replaced; any other file at the same path only if `overwrite`. Raises InputError when nothing
    can be done at all, and `BatchInterrupted` (a KeyboardInterrupt) with the report so far.
    """
    started = time.perf_counter()
    asked = Request.of(command, options)
    target = _resolve_target(folder, asked)
    found = find_sources(sources, target)
    if target is not None:
        _prepare_folder(target, found, asked)
    report = BatchReport(command, None if folder is None else os.fspath(folder))
    try:
        work = _plan_jobs(report, found, lambda source: plan_job(source, asked, target, again, overwrite), progress)
        with _choose_executor(jobs, executor, len(work)) as chosen:
            JobRunner(chosen, report, work, progress).go()
    except KeyboardInterrupt as stopped:
        raise BatchInterrupted(report) from stopped
    finally:
        report.seconds = time.perf_counter() - started
    return report


def _plan_jobs(
    report: BatchReport, found: Sequence[Source], planned: Callable[[Source], tuple[BatchItem, Job | None]],
    progress: Callable[[str], None],
) -> dict[int, Job]:
    """Add an item for each source to the report. Returns the jobs by the number of their item, where one is needed."""
    work: dict[int, Job] = {}
    report.items = [BatchItem(source.name, source.path, None) for source in found]
    for number, source in enumerate(found):
        progress(f"looking at {source.name}")
        report.items[number], job = planned(source)
        if job is not None:
            work[number] = job
    return work


def _resolve_target(folder: Any, asked: Request) -> Path | None:
    """Return the folder of the results; None if nothing is written."""
    if not asked.writes:
        return None
    if folder is None or not os.fspath(folder).strip():
        raise InputError("no folder for the results given; expected one, which is made if it is not there")
    target = Path(os.path.abspath(folder))
    if os.path.lexists(target) and not target.is_dir():
        raise InputError(f"{target}: is a file; expected a folder for the results")
    return target


def _prepare_folder(target: Path, found: Iterable[Source], asked: Request) -> None:
    """Make the folder for the results. Raises InputError if a result would be written into a package that is read."""
    packages = {os.path.realpath(source.path): source.path for source in found if not source.error}
    for source in found:
        place = Path(os.path.realpath(target / f"{source.name}{asked.suffix}"))
        for path in map(str, (place, *place.parents)):
            if path in packages:
                raise InputError(f"{target}: the result of {source.path} would replace the package {packages[path]} or "
                                 "lie in it, but sources are never changed; expected another folder for the results")
    if (around := find_enclosing_package(target / "any")) is not None:
        raise InputError(f"{target}: lies in the package {around}; expected a place outside of packages")
    try:
        (target / RECORDS_FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{target}: the folder for the results cannot be made ({error.strerror})") from error


def _choose_executor(jobs: int, executor: Executor | None, work: int) -> AbstractContextManager[Executor]:
    if executor is not None:
        if jobs:
            raise InputError("both jobs and an executor are given; expected one of them: an executor has its workers")
        return nullcontext(executor)
    if not isinstance(jobs, int) or jobs < 0:
        raise InputError(f"jobs: found {jobs!r}; expected a whole number, 0 to work in this process")
    return WorkerPool(min(jobs, work)) if jobs and work else InProcessExecutor()
