"""Jobs: the work on one package, sent to a worker as a few texts; a few numbers come back.

The result and its report are written by the worker. Jobs of one process wait for each other, and for other threads
that use the API there (`utils.locking`): a Dask worker may have several threads.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from .._version import __version__
from ..passes.coremltools_setup import silence_coremltools
from ..utils.errors import InputError, suggest_nearest
from ..utils.locking import exclusive
from ..utils.option_spelling import use_command_spelling
from .batch_records import (
    RECORDED_FIELDS,
    RECORDS_FOLDER,
    Record,
    collect_stamps,
    sum_file_sizes,
    take_fingerprint,
    update_link_stamps,
    write_text_atomically,
)
from .batch_report import BatchItem
from .lint import LintOptions
from .lint_gates import Gates
from .options import get_batch_options
from .output import format_error
from .rewrite import RewriteOptions

__all__ = ["COMMANDS", "REPORT_SUFFIXES", "Job", "OptionsError", "Request", "describe_tool", "run_job"]


REPORT_SUFFIXES = {"text": ".txt", "json": ".json", "sarif": ".sarif", "html": ".html"}
"The forms of a lint report, and their file suffixes."
COMMANDS: Mapping[str, Mapping[str, Any]] = {
    "rewrite": get_batch_options(RewriteOptions),
    "lint": {**get_batch_options(LintOptions), "fail_under": None, "fail_on": None, "report": "text"},
}
"The options of each command, with their defaults."


@dataclass(frozen=True)
class Request:
    """A command and all its options as plain data, the digests of the files of `feeds`, and the `tool` that runs it."""

    command: str
    options: Mapping[str, Any]
    digests: tuple[str, ...]
    tool: Mapping[str, Any]

    @classmethod
    def of(cls, command: str, given: Mapping[str, Any]) -> Request:
        """Make a request.

        Raises InputError for an unknown command or option, and for options that are not plain data.
        """
        if command not in COMMANDS:
            raise InputError(f"batch: no command '{command}'; expected {' or '.join(COMMANDS)}"
                             f"{suggest_nearest(command, COMMANDS)}")
        known = COMMANDS[command]
        for name in given:
            if name not in known:
                raise InputError(f"batch: {command} has no option '{name}' here; expected {', '.join(known)}"
                                 f"{suggest_nearest(name, known)}")
        options = {**known, **given}
        if "feeds" in options:
            options["feeds"] = _resolve_feed_paths(options["feeds"])
        if options.get("report", "text") not in REPORT_SUFFIXES:
            raise InputError(f"report: found {options['report']!r}; expected {', '.join(REPORT_SUFFIXES)}")
        try:
            plain = json.loads(json.dumps(options, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise InputError(f"batch: options are stored as JSON and sent to other processes ({error}); expected "
                             f"strings, numbers, lists and mappings") from error
        return cls(command, plain, tuple(map(_hash_file, plain.get("feeds", ()))), describe_tool())

    @property
    def suffix(self) -> str:
        """The suffix of the result names."""
        return ".mlpackage" if self.command == "rewrite" else REPORT_SUFFIXES[self.options["report"]]

    @property
    def writes(self) -> bool:
        return not self.options.get("dry_run")

    @property
    def is_costly(self) -> bool:
        """True if repeating the work costs more than reading the package once."""
        return bool(self.options.get("verify"))

    def make_comparison_key(self) -> dict[str, Any]:
        """Make the key by which requests are compared: equal keys mean equal results. Files count by content."""
        plain = {name: value for name, value in self.options.items() if name != "feeds"}
        return {"command": self.command, "options": plain, "feeds": list(self.digests), "tool": dict(self.tool)}


@functools.cache
def describe_tool() -> Mapping[str, Any]:
    """Describe this tool: its version and code, the installed plugins, and the version of coremltools."""
    digest = hashlib.sha256()
    home = Path(__file__).parent.parent
    for path in sorted(home.rglob("*.py")):
        digest.update(path.relative_to(home).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    plugins = sorted(f"{point.value} of {point.dist.name} {point.dist.version}" if point.dist else point.value
                     for point in entry_points(group="mil_ane_passes.rules"))
    try:
        host = version("coremltools")
    except PackageNotFoundError:
        host = "none"
    return {"version": __version__, "code": digest.hexdigest(), "coremltools": host, "plugins": plugins}


def _resolve_feed_paths(feeds: Any) -> list[str]:
    """Return the absolute paths of the files of feeds."""
    listed = [] if feeds is None else [feeds] if isinstance(feeds, (str, os.PathLike)) else feeds
    if isinstance(listed, Mapping) or not all(isinstance(each, (str, os.PathLike)) for each in listed):
        raise InputError("feeds: found arrays; expected paths of .npz files, which batch passes to its workers")
    return [os.path.abspath(each) for each in listed]


def _hash_file(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"feeds: '{path}' cannot be read ({error.strerror}); expected an .npz file with one array "
                         f"per input") from error


Work = Callable[["Job", BatchItem], dict[str, Any]]
"Does the work of a job, records the outcome in the item, and returns the report."


class OptionsError(InputError):
    """The options are wrong for every package, so the batch stops."""


@dataclass(frozen=True)
class Job:
    """A package and the work on it. All paths are absolute, as the worker may run anywhere.

    `folder` is None if nothing is written. `replace` allows replacing an existing `output`. `command` selects the
    command line spelling of options in messages.
    """

    name: str
    source: str
    output: str | None
    folder: str | None
    replace: bool
    request: Request
    command: bool = False


def run_job(job: Job) -> BatchItem:
    """Run a job. Errors of the package are recorded in the item; OptionsError is raised only for wrong options."""
    item = BatchItem(job.name, job.source, job.output)
    with exclusive(), silence_coremltools(), use_command_spelling(job.command):
        try:
            _check_worker(job)
            work = _make_work(job.request)
            started = time.perf_counter()
            try:
                _run_recorded(job, item, work)
            finally:
                item.seconds = time.perf_counter() - started
        except OptionsError:
            raise
        except Exception as error:  # any error is this package's; the others continue
            item.status, item.code, item.error = "failed", 2, format_error(error)
    return item


def _check_worker(job: Job) -> None:
    """Raise InputError if this process is not the same tool, or does not see the same files."""
    here = socket.gethostname()
    if dict(job.request.tool) != dict(describe_tool()):
        raise InputError(
            f"the worker on {here} runs another mil-ane-passes or coremltools: found {_format_tool(describe_tool())}, "
            f"expected {_format_tool(job.request.tool)}; install the same versions there"
        )
    if job.folder is not None and not Path(job.folder, RECORDS_FOLDER).is_dir():
        raise InputError(f"the worker on {here} does not see {job.folder}; workers need the same paths: use a shared "
                         f"file system")


def _format_tool(which: Any) -> str:
    plugins = f" with {', '.join(which['plugins'])}" if which["plugins"] else ""
    return f"{which['version']} ({which['code'][:8]}, coremltools {which['coremltools']}){plugins}"


def _make_work(request: Request) -> Work:
    """Make the function that does the work, with its imports done.

    Raises OptionsError for options that it would reject.
    """
    from .lint import lint
    from .rewrite import rewrite

    how = _prepare_options(request)
    if request.command == "rewrite":
        return partial(_rewrite_package, rewrite, how)
    return partial(_lint_package, lint, how)


def _prepare_options(request: Request) -> dict[str, Any]:
    """Convert the options to those of the public functions. Raises OptionsError for options that these would reject."""
    from ..equivalence.user_inputs import UserInputs, parse_ranges
    from ..passes.max_growth import check_max_growth
    from ..passes.pipeline import select_rewrites
    from ..passes.targets import parse_target
    from ..utils.npz import read_arrays
    from .lint import prepare_lint

    how = dict(request.options)
    try:
        if request.command == "lint":
            prepare_lint(None, **{name: how[name] for name in get_batch_options(LintOptions)})
            Gates(how["fail_under"], how["fail_on"])
            return how
        parse_target(how["target"])
        select_rewrites(how["preset"], how["passes"], how["options"])
        check_max_growth(how["max_growth"])
        how["feeds"] = [read_arrays(path) for path in how["feeds"]] or None
        how["ranges"] = parse_ranges(how["ranges"]) if isinstance(how["ranges"], str) else how["ranges"]
        UserInputs.of(how["feeds"], how["ranges"])
    except InputError as error:
        raise OptionsError(str(error), option=error.option) from error
    return how


def _run_recorded(job: Job, item: BatchItem, work: Work) -> None:
    """Run the work between its two records."""
    if job.folder is None or job.output is None:
        item.held = work(job, item)
        return
    record = Record(Path(job.folder), Path(job.output))
    files = take_fingerprint(job.source, deep=job.request.is_costly)
    record.start()
    try:
        report = work(job, item)
    except Exception:
        record.mark_failed()
        raise
    if item.status == "not verified":
        record.mark_failed(report)
        item.report_file = str(record.report)
        return
    if job.request.command == "lint":
        item.bytes = sum_file_sizes(files)
    item.report_file = str(record.report)
    record.finish(report, source=os.path.realpath(job.source), files=update_link_stamps(files, job.source),
                  asked=job.request.make_comparison_key(), item={name: getattr(item, name) for name in RECORDED_FIELDS})


def _rewrite_package(rewrite: Callable[..., Any], how: dict[str, Any], job: Job, item: BatchItem) -> dict[str, Any]:
    if job.output is not None:
        Path(job.output).parent.mkdir(parents=True, exist_ok=True)
    report = rewrite(job.source, job.output, overwrite=job.replace, **how)
    item.status, item.code = report.status, int(report.status == "not verified")
    item.count = sum(len(trace.fired) for trace in report.traces)
    item.ops_before, item.ops_after = report.ops_before, report.ops_after
    item.left_out_passes = [each.rule for each in report.left_out_passes]
    item.failed_passes = [each.rule for each in report.failed]
    item.upgraded = bool(report.upgraded)
    if report.status == "not verified":
        item.error = str(report.verify).partition("\n")[0] if report.faulty_pass is None else (
            f"ane::{report.faulty_pass.rule} {report.faulty_pass.verdict} {report.faulty_pass}")
    elif job.output is not None and how["dry_run"] is False:
        item.bytes = sum_file_sizes(collect_stamps(job.output))
    made: dict[str, Any] = report.to_dict()
    return made


def _lint_package(lint: Callable[..., Any], how: dict[str, Any], job: Job, item: BatchItem) -> dict[str, Any]:
    from ..report.formats import format_report

    gates, form = Gates(how["fail_under"], how["fail_on"]), how["report"]
    report = lint(job.source, **{name: how[name] for name in get_batch_options(LintOptions)})
    counted = report.failing_findings(gates.counted)
    item.status = "findings" if counted else "below limit" if gates.is_under(report) else "clean"
    item.code, item.count, item.ops_before = int(gates.fails(report)), len(counted), len(report.plan.rows)
    item.upgraded = bool(report.upgraded)
    if gates.is_under(report):
        item.error = (f"{report.share:.2f} % of the ops are predicted on the ANE, below the limit of "
                      f"{gates.fail_under:g} %")
    if job.output is not None:
        write_text_atomically(Path(job.output), f"{format_report(report, form)}\n")
    made: dict[str, Any] = report.to_dict()
    return made
