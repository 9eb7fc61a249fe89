"""Say which ops leave the ANE, why, on whose evidence, and what fixes it; nothing runs, all of it is predicted.

Exit code 0: clean; 1: findings. With --fail-under or --baseline these are the gates instead, and findings alone fail
nothing. What the gates look at is IN. Defaults of the options may stand in setup.cfg or pyproject.toml.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.errors import InputError
from ..utils.settings import Settings, parse_percent, read_settings
from ..utils.text_format import escape_text, format_count, format_lines
from .output import check_output_file, write_text_file

if TYPE_CHECKING:
    from ..report.lint import LintReport

HELP = "which ops leave the ANE, why, and what fixes it"
EXAMPLE = "lint in.mlpackage --target m4"
FORMATS = ("text", "json", "sarif", "html")
_SHARED_OPTIONS = ("select", "ignore", "target", "baseline")
"Keys that both the command line and a settings file may set; errors about one begin with its name."


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN", help="the .mlpackage to look at")
    parser.add_argument("--format", choices=FORMATS, default="text", help="text for people (default)")
    parser.add_argument("-o", "--output", metavar="FILE", help="where the report goes; replaced if it exists")
    parser.add_argument("--all", action="store_true", help="in the text, all places of each finding")
    add_lint_options(parser)
    parser.add_argument("--baseline", metavar="FILE", help="gate: no findings but those in this JSON report")
    parser.add_argument("--measured", metavar="RESULT.json",
                        help="what Core ML said on a Mac: the result.json of measure.py (see mac-script), or a dumped "
                             "compute plan")
    parser.add_argument("--after", metavar="B.mlpackage", help="a second package to set beside IN")
    parser.set_defaults(run=run, keeps_all=True)


def add_lint_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select what is checked and reported, for any package."""
    parser.add_argument("--target", help="chip or device to look at (default: all)")
    parser.add_argument("--select", metavar="RULES", help="report these only: codes, beginnings of codes, slugs or "
                                                          "names, e.g. 'ANE3,int-inputs'")
    parser.add_argument("--ignore", metavar="RULES", help="do not report these; in the prediction they still count")
    parser.add_argument("--fail-under", metavar="PCT", help="gate: percent of ops predicted on the ANE")
    parser.add_argument("--config", metavar="FILE", help="the setup.cfg or pyproject.toml to read (default: the "
                                                         "nearest one that speaks of us, from here upwards)")
    parser.add_argument("--no-config", action="store_true", help="read no such file")


def run(arguments: argparse.Namespace) -> int:
    if not arguments.input.strip():
        raise InputError("no path given; expected the path of an .mlpackage")
    settings = read_lint_settings(arguments)
    bar = settings.fail_under if arguments.fail_under is None else parse_percent(arguments.fail_under, "--fail-under")
    target = None if arguments.output is None else check_output_file(
        arguments.output, [get_option_or_setting("baseline", arguments, settings), arguments.measured, settings.file])
    report = _make_report(arguments, settings)
    if arguments.format == "html" and target is None and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")  # the encoding that the page declares
    from ..report.formats import format_report

    _show_report(report, format_report(report, arguments.format, everything=arguments.all), target)
    failed = list(_iterate_failed_gates(report, bar))
    for words in failed:
        print(f"mil-ane-passes: {escape_text(words)}", file=sys.stderr)
    gated = bar is not None or report.baseline is not None
    return 1 if failed or (report.warnings and not gated) else 0


def read_lint_settings(arguments: argparse.Namespace) -> Settings:
    if arguments.no_config and arguments.config is not None:
        raise InputError("--config and --no-config contradict each other; give one of them")
    return Settings() if arguments.no_config else read_settings(arguments.config)


def collect_lint_options(arguments: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """Collect the options of `add_lint_options` for the public function.

    The settings supply those that are not on the command line.
    """
    said = {name: get_option_or_setting(name, arguments, settings) for name in ("target", "select", "ignore")}
    return {**said, "target": "all" if said["target"] is None else said["target"], "options": settings.options}


def get_option_or_setting(name: str, arguments: argparse.Namespace, settings: Settings) -> Any:
    given = getattr(arguments, name)
    return given if given is not None else getattr(settings, name)


@contextmanager
def name_settings_file(arguments: argparse.Namespace, settings: Settings) -> Iterator[None]:
    """Prefix errors about values of the settings file with the name of that file."""
    try:
        yield
    except InputError as error:
        word = str(error).split(" ")[0].rstrip(":")
        theirs = word.startswith(("ane::", "options")) or (
            word in _SHARED_OPTIONS and getattr(arguments, word, None) is None
        )
        if theirs and settings.file is not None:
            raise InputError(f"{settings.file}: {error}") from error
        raise


def _make_report(arguments: argparse.Namespace, settings: Settings) -> LintReport:
    from ..api import lint

    with name_settings_file(arguments, settings):
        return lint(arguments.input, **collect_lint_options(arguments, settings), after=arguments.after,
                    baseline=get_option_or_setting("baseline", arguments, settings), measured=arguments.measured)


def _show_report(report: LintReport, made: str, target: Path | None) -> None:
    if target is None:
        print(made)
        return
    from ..report.lint_text import format_headline

    write_text_file(target, f"{made}\n")
    print(format_lines([format_headline(report), f"written to {target}"]))


def _iterate_failed_gates(report: LintReport, bar: float | None) -> Iterator[str]:
    """Yield a message for each gate that failed."""
    if bar is not None and report.share < bar:
        yield (f"--fail-under: {report.on_ane} of {len(report.plan.rows)} ops ({report.share:.2f} %) are predicted on "
               f"the ANE, under the bar of {bar:g} %")
    if report.baseline is not None:
        new = sum(item.level != "note" for item in report.baseline.new)
        if new:
            yield f"--baseline: {format_count(new, 'finding')} that {report.baseline.file} does not have"
