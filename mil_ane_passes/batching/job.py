"""One package's work, as it is sent to a worker: a few texts go there, a few numbers come back.

The result and its report are written by the worker. Jobs of one process wait for each other, and for other threads that
use the API there (`core.locking`): a Dask worker may have several threads.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..core.errors import AnePassesError, InputError, memory_words
from ..core.host import quiet
from ..core.locking import exclusive
from ..core.spelling import by_command
from ..report.batch import BatchItem
from .asked import Asked, tool
from .fingerprint import fingerprint, settled, size_of, stamps
from .record import KEPT, RECORDS, Record, write_whole

__all__ = ["Job", "OptionsError", "run_job"]

Work = Callable[["Job", BatchItem], dict[str, Any]]
"Does the work of a job, notes in the item what came of it, and returns its report."


class OptionsError(InputError):
    """The options are wrong for whatever package; there is no use in going on."""


@dataclass(frozen=True)
class Job:
    """A package and what to do with it. All paths are absolute, as the worker may be anywhere.

    `folder` is None where nothing is written. `replace` says that what is at `output` may be replaced,
    `command` that a command is answered.
    """

    name: str
    source: str
    output: str | None
    folder: str | None
    replace: bool
    asked: Asked
    command: bool = False


def run_job(job: Job) -> BatchItem:
    """Do the work; what goes wrong with the package is in the item. Raises OptionsError for wrong options only."""
    item = BatchItem(job.name, job.source, job.output)
    with exclusive(), quiet(), by_command(job.command):
        try:
            _check_place(job)
            work = _work(job.asked)
            started = time.perf_counter()
            try:
                _kept(job, item, work)
            finally:
                item.seconds = time.perf_counter() - started
        except OptionsError:
            raise
        except Exception as error:  # whatever it is, it is about this package, and the others go on
            item.status, item.code, item.error = "failed", 2, _words(error)
    return item


def _check_place(job: Job) -> None:
    """Raises InputError when this process is not the same tool, or does not see the same files."""
    here = socket.gethostname()
    if dict(job.asked.tool) != dict(tool()):
        raise InputError(f"the worker on {here} runs another mil-ane-passes or coremltools: found {_short(tool())}, "
                         f"expected {_short(job.asked.tool)}; install the same there")
    if job.folder is not None and not Path(job.folder, RECORDS).is_dir():
        raise InputError(f"the worker on {here} does not see {job.folder}; workers need the same paths: give them on a "
                         "file system that all of them have")


def _short(which: Any) -> str:
    plugins = f" with {', '.join(which['plugins'])}" if which["plugins"] else ""
    return f"{which['version']} ({which['code'][:8]}, coremltools {which['coremltools']}){plugins}"


def _work(asked: Asked) -> Work:
    """The function that does the work, with all it needs imported. Raises OptionsError where it would refuse the
    options."""
    from ..api import lint, rewrite

    how = _options(asked)
    return partial(_rewrite, rewrite, how) if asked.command == "rewrite" else partial(_lint, lint, how)


def _options(asked: Asked) -> dict[str, Any]:
    """The options as the public functions take them. Raises OptionsError where these would refuse them."""
    from ..core.growth import growth
    from ..core.npz import read_arrays
    from ..core.pipeline import selected
    from ..core.selecting import configured, reported
    from ..core.targets import parse_target
    from ..proof.given import Given, parse_ranges

    how = dict(asked.options)
    try:
        parse_target(how["target"])
        if asked.command == "lint":
            reported(how["select"], how["ignore"])
            configured(how["options"])
            return how
        selected(how["preset"], how["passes"], how["options"])
        growth(how["max_growth"])
        how["feeds"] = [read_arrays(path) for path in how["feeds"]] or None
        how["ranges"] = parse_ranges(how["ranges"]) if isinstance(how["ranges"], str) else how["ranges"]
        Given.of(how["feeds"], how["ranges"])
    except InputError as error:
        raise OptionsError(str(error)) from error
    return {name: value for name, value in how.items() if name != "seeds" or value is not None}


def _kept(job: Job, item: BatchItem, work: Work) -> None:
    """Do the work between the two records of it."""
    if job.folder is None or job.output is None:
        item.held = work(job, item)
        return
    record = Record(Path(job.folder), Path(job.output))
    files = fingerprint(job.source, deep=job.asked.is_costly)
    record.start()
    try:
        report = work(job, item)
    except Exception:
        record.give_up()
        raise
    if item.status == "not proved":
        record.give_up(report)
        item.report_file = str(record.report)
        return
    if job.asked.command == "lint":
        item.bytes = size_of(files)
    item.report_file = str(record.report)
    record.finish(report, source=os.path.realpath(job.source), files=settled(files, job.source),
                  asked=job.asked.known_by(), item={name: getattr(item, name) for name in KEPT})


def _rewrite(rewrite: Callable[..., Any], how: dict[str, Any], job: Job, item: BatchItem) -> dict[str, Any]:
    if job.output is not None:
        Path(job.output).parent.mkdir(parents=True, exist_ok=True)
    report = rewrite(job.source, job.output, overwrite=job.replace, **how)
    item.status, item.code = report.status, int(report.status == "not proved")
    item.count = sum(len(trace.fired) for trace in report.traces)
    item.ops_before, item.ops_after = report.ops_before, report.ops_after
    item.left_out_passes = [each.rule for each in report.left_out_passes]
    item.failed_passes = [each.rule for each in report.failed]
    if report.status == "not proved":
        item.error = str(report.verify).partition("\n")[0] if report.blamed is None else (
            f"ane::{report.blamed.rule} breaks the proof {report.blamed}")
    elif job.output is not None and how["dry_run"] is False:
        item.bytes = size_of(stamps(job.output))
    made: dict[str, Any] = report.to_dict()
    return made


def _lint(lint: Callable[..., Any], how: dict[str, Any], job: Job, item: BatchItem) -> dict[str, Any]:
    from ..report.forms import formed

    bar, form = how["fail_under"], how["report"]
    report = lint(job.source, **{name: how[name] for name in ("target", "select", "ignore", "options")})
    under = bar is not None and report.share < bar
    item.status = "findings" if report.warnings else "clean"
    item.code = int(under or (bar is None and bool(report.warnings)))
    item.count, item.ops_before = len(report.warnings), len(report.plan.rows)
    if under:
        item.error = f"{report.share:.2f} % of the ops are predicted on the ANE, under the bar of {bar:g} %"
    if job.output is not None:
        write_whole(Path(job.output), f"{formed(report, form)}\n")
    made: dict[str, Any] = report.to_dict()
    return made


def _words(error: Exception) -> str:
    if isinstance(error, AnePassesError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.strerror or error}: {error.filename or ''}".rstrip(": ")
    if isinstance(error, RecursionError):
        return "the model's blocks are nested too deep for this machine's Python"
    if isinstance(error, MemoryError):
        return memory_words(error)
    return (f"internal error ({type(error).__name__}: {error}); nothing was written; please report it with the package "
            "that leads to it")
