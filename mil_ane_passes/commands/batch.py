"""Rewrite or lint many packages, in the given order; an error in one package does not stop the others.

A second run resumes: it skips completed packages. Exit code 2: some packages could not be processed; 1: some are not
verified, or have findings.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ..package.destination import check_destination, find_enclosing_package
from ..package.manifest import read_layout
from ..utils.errors import InputError
from ..utils.option_spelling import choose_spelling, is_command
from ..utils.text_format import add_article, escape_text
from . import lint, rewrite
from .batch_executors import InProcessExecutor, JobRunner, WorkerPool
from .batch_jobs import Job, Request
from .batch_records import RECORDED_FIELDS, RECORDS_FOLDER, Record
from .batch_report import BatchItem, BatchReport
from .batch_sources import Paths, Source, find_programs, find_sources
from .lint_gates import GateOptions
from .options import add_format_option, add_options, read_options
from .output import format_example, print_report, show_progress
from .settings import SettingsFileOptions
from .signals import Stopped

__all__ = ["BatchInterrupted", "batch"]

HELP = "rewrite or lint many packages, on several cores or machines; a second run resumes"
EXAMPLE = "batch rewrite models -o rewritten --jobs 4"


class BatchInterrupted(KeyboardInterrupt):
    """The user stopped the batch; `report` has the results until then."""

    def __init__(self, report: BatchReport) -> None:
        super().__init__(f"{sum(item.status != 'not run' for item in report.items)} of {len(report.items)} done")
        self.report = report


def add(parser: argparse.ArgumentParser) -> None:
    each = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    one = each.add_parser("rewrite", help=rewrite.HELP, description=rewrite.__doc__,
                          epilog=format_example("batch rewrite models -o rewritten"))
    _add_sources(one, "DIR/NAME.mlpackage")
    add_options(one, rewrite.RewriteOptions, batch=True)
    one.set_defaults(run=run, each=_batch_rewrite)
    one = each.add_parser("lint", help=lint.HELP, description=lint.__doc__,
                          epilog=format_example("batch lint models -o reports --report html"))
    _add_sources(one, "DIR/NAME.txt")
    add_options(one, lint.LintOptions, batch=True)
    add_options(one, GateOptions)
    add_options(one, SettingsFileOptions)
    one.add_argument("--report", choices=lint.FORMATS, default="text", help="format of the reports in DIR")
    one.set_defaults(run=run, each=_batch_lint)


def _add_sources(parser: argparse.ArgumentParser, result: str) -> None:
    parser.add_argument("sources", metavar="SRC", nargs="+", help="packages, folders that contain packages, or glob "
                                                                  "patterns; never modified")
    parser.add_argument("-o", "--output", metavar="DIR", help=f"output folder for the results, as {result}; packages "
                                                              f"found in a "
                                                              "folder keep their path below it")
    parser.add_argument("--jobs", metavar="N", type=_non_negative_int, default=1,
                        help="number of worker processes (default: 1); they share the cores, and each needs 0.5 GB of "
                             "memory plus that of its equivalence check; 0: run in this process")
    parser.add_argument("--dask", metavar="ADDRESS", help="run on the Dask cluster at this address, e.g. "
                                                          "tcp://10.0.0.1:8786; its workers must see the same paths")
    parser.add_argument("--again", action="store_true", help="process all packages again, also those that an earlier "
                                                             "run completed")
    parser.add_argument("--overwrite", action="store_true", help="replace existing files that no batch has written")
    add_format_option(parser)


def _non_negative_int(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is less than 0")
    return number


def run(arguments: argparse.Namespace) -> int:
    try:
        with show_progress() as progress, _open_executor(arguments) as chosen:
            report = arguments.each(arguments, {"progress": progress, **chosen})
    except BatchInterrupted as stopped:
        print_report(stopped.report, arguments.format)
        print(
            f"mil-ane-passes: interrupted: {escape_text(stopped)}; run the same command again to "
            f"resume", file=sys.stderr
        )
        signalled = stopped.__cause__
        return (signalled if isinstance(signalled, Stopped) else Stopped()).code
    print_report(report, arguments.format)
    return int(report.exit_code)


@contextmanager
def _open_executor(arguments: argparse.Namespace) -> Iterator[dict[str, Executor | int]]:
    """Yield the arguments of `batch` that select its executor."""
    if arguments.dask is None:
        yield {"jobs": arguments.jobs}
        return
    from .batch_executors import connect_to_dask

    def print_message(text: str) -> None:
        print(f"mil-ane-passes: {escape_text(text)}", file=sys.stderr)

    with connect_to_dask(arguments.dask, say=print_message) as executor:
        yield {"executor": executor}


def _batch_rewrite(arguments: argparse.Namespace, how: dict[str, Any]) -> Any:
    if arguments.output is None and not arguments.dry_run:
        raise InputError("no output folder; expected -o DIR, or --dry-run")
    keywords = read_options(arguments, rewrite.RewriteOptions, batch=True, unparsed=("feeds", "ranges"))
    return _run_batch("rewrite", arguments, how, **keywords)


def _batch_lint(arguments: argparse.Namespace, how: dict[str, Any]) -> Any:
    if arguments.output is None:
        raise InputError("no output folder for the reports; expected -o DIR")
    settings = lint.read_lint_settings(arguments)
    if "baseline" in settings.keywords:
        raise InputError(f"{settings.file}: sets a baseline, which applies to one model only; lint that model "
                         f"separately, or use --no-config")
    with settings.name_file():
        return _run_batch("lint", arguments, how, **settings.keywords, fail_under=settings.gates.fail_under,
                          fail_on=settings.gates.fail_on, report=arguments.report)


def _run_batch(command: str, arguments: argparse.Namespace, how: dict[str, Any], **options: Any) -> Any:
    return batch(command, arguments.sources, arguments.output, again=arguments.again, overwrite=arguments.overwrite,
                 **how, **options)


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
    files) or of `lint` (target, select, ignore, options; fail_under in percent, fail_on).

    A result whose package and options are those of an earlier run is kept ("up to date") unless `again`. Other results
    of an earlier run are replaced; any other file at the same path only if `overwrite`. Raises InputError when nothing
    can be done at all, and `BatchInterrupted` (a KeyboardInterrupt) with the report so far.
    """
    started = time.perf_counter()
    request = Request.of(command, options)
    target = _resolve_target(folder, request)
    found = find_sources(sources, target)
    if target is not None:
        _prepare_folder(target, found, request)
    report = BatchReport(command, None if folder is None else os.fspath(folder),
                         skipped=find_programs(sources, target))
    try:
        work = _plan_jobs(report, found, lambda source: _plan_job(source, request, target, again, overwrite), progress)
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


def _resolve_target(folder: Any, request: Request) -> Path | None:
    """Return the folder of the results; None if nothing is written."""
    if not request.writes:
        return None
    if folder is not None and not isinstance(folder, (str, os.PathLike)):
        raise InputError(f"folder: found {add_article(type(folder).__name__)}; expected the path of an output folder")
    if folder is None or not os.fspath(folder).strip():
        raise InputError("no output folder given; expected one (it is created if it does not exist)")
    target = Path(os.path.abspath(folder))
    if os.path.lexists(target) and not target.is_dir():
        raise InputError(f"{target}: is a file; expected an output folder")
    return target


def _prepare_folder(target: Path, found: Iterable[Source], request: Request) -> None:
    """Make the folder for the results. Raises InputError if a result would be written into a package that is read."""
    packages = {os.path.realpath(source.path): source.path for source in found if not source.error}
    for source in found:
        place = Path(os.path.realpath(target / f"{source.name}{request.suffix}"))
        for path in map(str, (place, *place.parents)):
            if path in packages:
                raise InputError(f"{target}: the result of {source.path} would replace the package {packages[path]} or "
                                 "lie in it, but sources are never modified; expected another output folder")
    if (around := find_enclosing_package(target / "any")) is not None:
        raise InputError(f"{target}: is inside the package {around}; expected a path outside of packages")
    try:
        (target / RECORDS_FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{target}: the output folder cannot be created or written to ({error.strerror})") from error


def _choose_executor(jobs: int, executor: Executor | None, work: int) -> AbstractContextManager[Executor]:
    if executor is not None:
        if jobs:
            raise InputError("both jobs and an executor are given; expected only one of them: an executor defines its "
                             "own workers")
        if not callable(getattr(executor, "submit", None)):
            raise InputError(f"executor: found {add_article(type(executor).__name__)}; expected an executor of "
                             "concurrent.futures, or jobs= for a number of processes")
        return nullcontext(executor)
    if not isinstance(jobs, int) or jobs < 0:
        raise InputError(f"jobs: found {jobs!r}; expected a non-negative integer (0: run in this process)")
    return WorkerPool(min(jobs, work)) if jobs and work else InProcessExecutor()


def _plan_job(
    source: Source, request: Request, folder: Path | None, again: bool, overwrite: bool
) -> tuple[BatchItem, Job | None]:
    """Make the item of a package, and its job if there is work to do. Errors are recorded in the item."""
    output = None if folder is None else folder / f"{source.name}{request.suffix}"
    item = BatchItem(source.name, source.path, None if output is None else str(output))
    path = os.path.abspath(source.path)
    try:
        if source.error:
            raise InputError(source.error)
        if not source.path.endswith(".mlmodel"):
            read_layout(source.path)
        if folder is None or output is None:
            return item, Job(source.name, path, None, None, False, request, is_command())
        record = Record(folder, output)
        if not again and _is_up_to_date(record, path, request):
            _restore_item(item, record)
            return item, None
        _check_output_replaceable(record, path, request, overwrite)
        return item, Job(source.name, path, str(output), str(folder), os.path.lexists(output), request,
                         is_command())
    except InputError as error:
        item.error = str(error)
    except OSError as error:
        item.error = f"{error.strerror or error}: {error.filename or source.path}"
    item.status = "failed"
    return item, None


def _is_up_to_date(record: Record, source: str, request: Request) -> bool:
    return (record.state == "done" and record.data.get("asked") == request.make_comparison_key()
            and record.is_untouched() and record.report.is_file() and record.is_made_from(source))


def _restore_item(item: BatchItem, record: Record) -> None:
    item.status, item.report_file = "up to date", str(record.report)
    for name in RECORDED_FIELDS:
        setattr(item, name, record.data["item"][name])


def _check_output_replaceable(record: Record, source: str, request: Request, overwrite: bool) -> None:
    """Raise InputError if the existing file at the result's path must not be replaced."""
    output = record.output
    if request.command == "rewrite" and output.parent.is_dir():
        check_destination(source, output, overwrite=True)
    if overwrite or not os.path.lexists(output):
        return
    remedy = f"{choose_spelling('--overwrite', 'overwrite=True')} replaces it, or choose another output folder"
    if record.state == "none":
        raise InputError(f"{output}: exists already and was not written by a batch; {remedy}")
    if not record.is_untouched():
        raise InputError(f"{output}: was modified after a batch wrote it; {remedy}")
    made_of = record.source
    if made_of and made_of != os.path.realpath(source) and not record.is_made_from(source):
        raise InputError(f"{output}: holds the result of another package, {made_of}; {remedy}")
