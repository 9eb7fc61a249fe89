"""`lint --fix`: rewrites packages with the passes that fix the findings; what it writes is verified."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._version import make_json_header
from ..package.executorch_program import find_address
from ..utils.errors import InputError
from ..utils.pass_description import describe_pass
from ..utils.text_format import escape_text, format_count, format_lines, quote_word
from .batch_sources import BACKUP_SUFFIX, Source
from .options import flag
from .output import format_error, print_upgrades, show_progress

if TYPE_CHECKING:
    from ..passes.severity import Severity
    from ..report.lint import LintReport
    from .lint import LintOptions, LintSettings
    from .rewrite import RewriteReport

__all__ = ["FixOptions", "FixOutcome", "check_fix_options", "fix_sources"]

_SCHEMA = 1


@dataclass(frozen=True)
class FixOptions:
    """The options of `lint` that change packages."""

    fix: bool = field(default=False, metadata=flag())
    """apply the passes that fix the findings, as `rewrite` does; the verified result is written to -o OUT.mlpackage, or
    in place with --in-place; exit codes are those of `rewrite`"""
    in_place: bool = field(default=False, metadata=flag())
    "with --fix: replace each IN; the original is kept as IN.bak"


def check_fix_options(arguments: argparse.Namespace, sources: Sequence[Source]) -> None:
    """Raise InputError for options that contradict each other, or that `--fix` has no use for."""
    if not arguments.fix:
        raise InputError("--in-place has no effect without --fix; expected both")
    for source in sources:
        if find_address(source.path) is not None:
            raise InputError(f"{source.path}: is an ExecuTorch program, but --fix writes packages only; use the "
                             "command that `lint` prints: mil-ane-passes rewrite IN.pte -o OUT.pte --passes ...")
    if bool(arguments.in_place) == (arguments.output is not None):
        raise InputError("--fix: expected one of -o OUT.mlpackage and --in-place")
    if arguments.output is not None and len(sources) > 1:
        raise InputError(f"--fix: -o names one output for {len(sources)} packages; expected --in-place, or one package")
    if arguments.format not in ("text", "json"):
        raise InputError(f"--fix: found --format {arguments.format}; expected text or json")
    for name in ("statistics", "after", "measured", "sizes", "fail_under"):
        if getattr(arguments, name):
            raise InputError(f"--fix: found --{name.replace('_', '-')}, which applies to reports without --fix; "
                             f"remove one of them")


@dataclass
class FixOutcome:
    """The outcome of one package: the passes, those that are left to the user, and the report of the rewrite.

    `status` is that of the rewrite; "unchanged", too, where no pass fixes a finding, and "failed" with an `error`.
    """

    source: str
    status: str = "failed"
    passes: list[str] = field(default_factory=list)
    left: list[dict[str, Any]] = field(default_factory=list)
    output: str | None = None
    backup: str | None = None
    error: str = ""
    rewrite: RewriteReport | None = None

    @property
    def code(self) -> int:
        return 2 if self.status == "failed" else int(self.status == "not verified")

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.source, "status": self.status, "passes": self.passes, "left": self.left,
                "output": self.output, "backup": self.backup, "error": self.error or None,
                "rewrite": None if self.rewrite is None else self.rewrite.to_dict()}

    def __str__(self) -> str:
        lines = [f"{self.source}: no pass fixes a finding"] if not self.passes and not self.error else []
        lines += str(self.rewrite).split("\n") if self.rewrite is not None else []
        lines += [f"not applied: {each['pass']} ({describe_pass(each['exactness'], 'named')}: rewrite --passes "
                  f"{quote_word(each['pass'].removeprefix('ane::'))})" for each in self.left]
        return format_lines([*lines, *([f"the original is kept as {self.backup}"] if self.backup else [])])


def fix_sources(arguments: argparse.Namespace, sources: Sequence[Source], settings: LintSettings) -> int:
    """Fix each source, whatever the errors of others; returns the exit code, the worst of all."""
    from .lint import prepare_lint

    with settings.name_file():
        linter = prepare_lint(None, **{name: value for name, value in settings.keywords.items() if name != "src"})
    outcomes = []
    for source in sources:
        outcome = FixOutcome(source.path)
        try:
            if source.error:
                raise InputError(source.error)
            _check_place(source.path, arguments)
            report = linter.lint(source.path, several=len(sources) > 1)
            print_upgrades(report)
            _fix_package(outcome, report, linter.options, settings.gates.counted, arguments)
        except Exception as error:
            outcome.status, outcome.error = "failed", format_error(error)
        if outcome.error:
            named = outcome.error if source.path in outcome.error else f"{source.path}: {outcome.error}"
            print(f"mil-ane-passes: {escape_text(named)}", file=sys.stderr)
        elif arguments.format == "text":
            print(str(outcome) + "\n" * (len(sources) > 1))
        outcomes.append(outcome)
    _print_end(outcomes, linter.options.target, arguments.format)
    return max(outcome.code for outcome in outcomes)


def _print_end(outcomes: Sequence[FixOutcome], target: str, form: str) -> None:
    """Print the JSON, or the line of summary of several packages."""
    if form == "json":
        print(json.dumps({**make_json_header("lint --fix", _SCHEMA),
                          "target": target, "packages": [each.to_dict() for each in outcomes]}, indent=2,
                         allow_nan=False))
    elif len(outcomes) > 1:
        counts = {status: sum(each.status == status for each in outcomes) for status in
                  ("written", "unchanged", "not verified", "failed")}
        words = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        print(f"{format_count(len(outcomes), 'package')}: {words}")


def _check_place(path: str, arguments: argparse.Namespace) -> None:
    """Raise InputError if the result could not be written, before anything takes long.

    The backup of an earlier run may be there: if nothing is left to fix, none is made.
    """
    from ..package import check_backup, check_destination

    if arguments.in_place:
        check_backup(*_list_places(path), may_exist=True)
    else:
        check_destination(path, arguments.output, overwrite=True)
        if os.path.lexists(arguments.output):  # lint has no option to replace it
            raise InputError(f"{arguments.output}: exists already; expected a path that does not exist")


def _list_places(path: str) -> tuple[Path, Path]:
    return Path(os.path.abspath(path)), Path(os.path.abspath(_name_backup(path)))


def _name_backup(path: str) -> str:
    return path.rstrip("/") + BACKUP_SUFFIX


def _fix_package(
    outcome: FixOutcome, report: LintReport, options: LintOptions, least: Severity, arguments: argparse.Namespace
) -> None:
    """Rewrite the package of `report` with the passes of presets that fix a finding of severity `least` or worse."""
    from ..package import check_backup, replace_source
    from ..passes.finding import Finding, collect_fixes
    from .rewrite import rewrite

    fixes = collect_fixes(item for item in report.failing_findings(least) if isinstance(item, Finding))
    outcome.passes = [fix["pass"] for fix in fixes if fix["preset"] != "named"]
    outcome.left = [fix for fix in fixes if fix["preset"] == "named"]
    names = {each.removeprefix("ane::").partition("{")[0] for each in outcome.passes}
    if arguments.in_place and not outcome.passes:
        outcome.status = "unchanged"
        return
    if arguments.in_place:
        check_backup(*_list_places(outcome.source))
    with show_progress() as progress:
        outcome.rewrite = made = rewrite(
            outcome.source, arguments.output, passes=outcome.passes, target=options.target, named=False,
            options={name: values for name, values in (options.options or {}).items() if name in names},
            progress=progress)
    if arguments.in_place and made.changed and made.status != "not verified":
        outcome.backup = _name_backup(outcome.source)
        replace_source(made.package, outcome.backup)
        made.status, made.output = "written", outcome.source
    elif arguments.in_place and not made.changed:
        made.status = "unchanged"
    outcome.status, outcome.output = made.status, None if made.status == "not verified" else made.output
