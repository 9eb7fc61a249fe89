"""Rewrite or lint many packages: in the order given, and what goes wrong with one does not stop the rest.

Run again, it does what is not done yet. Exit code 2: some could not be run; 1: some are not verified, or have findings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

from ..passes.max_growth import parse_max_growth
from ..utils.errors import InputError
from ..utils.settings import parse_percent
from ..utils.text_format import escape_text
from . import cmd_lint, cmd_rewrite
from .input_options import read_limits
from .output import add_format_option, format_example, print_report, show_progress
from .stop_signals import Stopped

HELP = "rewrite or lint many packages, on many cores or machines; run again, it does the rest"
EXAMPLE = "batch rewrite models -o rewritten --jobs 4"


def add(parser: argparse.ArgumentParser) -> None:
    each = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    rewrite = each.add_parser("rewrite", help=cmd_rewrite.HELP, description=cmd_rewrite.__doc__,
                              epilog=format_example("batch rewrite models -o rewritten"))
    _add_sources(rewrite, "DIR/NAME.mlpackage")
    cmd_rewrite.add_rewrite_options(rewrite)
    rewrite.add_argument("--dry-run", action="store_true", help="say what would be done; verify and write nothing")
    rewrite.set_defaults(run=run, each=_batch_rewrite)
    lint = each.add_parser("lint", help=cmd_lint.HELP, description=cmd_lint.__doc__,
                           epilog=format_example("batch lint models -o reports --report html"))
    _add_sources(lint, "DIR/NAME.txt")
    cmd_lint.add_lint_options(lint)
    lint.add_argument("--report", choices=cmd_lint.FORMATS, default="text", help="which form the reports in DIR have")
    lint.set_defaults(run=run, each=_batch_lint)


def _add_sources(parser: argparse.ArgumentParser, result: str) -> None:
    parser.add_argument("sources", metavar="SRC", nargs="+", help="packages, folders with packages in them, or "
                                                                  "patterns; never changed")
    parser.add_argument("-o", "--output", metavar="DIR", help=f"where the results go, as {result}; packages found in a "
                                                              "folder keep their path below it")
    parser.add_argument("--jobs", metavar="N", type=_non_negative_int, default=1,
                        help="so many processes (default: 1), which share the cores; each takes half a GB of memory "
                             "and what its equivalence check needs; 0: this process does it all")
    parser.add_argument("--dask", metavar="ADDRESS", help="run on this Dask cluster, e.g. tcp://10.0.0.1:8786; its "
                                                          "workers must see the same paths")
    parser.add_argument("--again", action="store_true", help="do also what an earlier run has done")
    parser.add_argument("--overwrite", action="store_true", help="replace also what no batch has written")
    add_format_option(parser)


def _non_negative_int(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is less than 0")
    return number


def run(arguments: argparse.Namespace) -> int:
    from ..batching import BatchInterrupted

    try:
        with show_progress() as progress, _open_executor(arguments) as chosen:
            report = arguments.each(arguments, {"progress": progress, **chosen})
    except BatchInterrupted as stopped:
        print_report(stopped.report, arguments.format)
        print(
            f"mil-ane-passes: interrupted: {escape_text(stopped)}; run the same again to do the rest", file=sys.stderr
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
    from ..batching.cluster import connect_to_dask

    def say(text: str) -> None:
        print(f"mil-ane-passes: {escape_text(text)}", file=sys.stderr)

    with connect_to_dask(arguments.dask, say=say) as executor:
        yield {"executor": executor}


def _batch_rewrite(arguments: argparse.Namespace, how: dict[str, Any]) -> Any:
    if arguments.output is None and not arguments.dry_run:
        raise InputError("no folder for the results; expected -o DIR, or --dry-run")
    return _run_batch(
        "rewrite",
        arguments,
        how,
        preset=arguments.preset,
        target=arguments.target,
        passes=arguments.passes,
        verify=arguments.verify,
        link=arguments.link,
        dry_run=arguments.dry_run,
        feeds=arguments.feeds,
        ranges=arguments.ranges,
        max_growth=parse_max_growth(arguments.max_growth),
        strict=arguments.strict,
        **read_limits(arguments),
    )


def _batch_lint(arguments: argparse.Namespace, how: dict[str, Any]) -> Any:
    if arguments.output is None:
        raise InputError("no folder for the reports; expected -o DIR")
    settings = cmd_lint.read_lint_settings(arguments)
    if settings.baseline is not None:
        raise InputError(f"{settings.file}: sets a baseline, which is of one model; lint that one by itself, or use "
                         "--no-config")
    bar = settings.fail_under if arguments.fail_under is None else parse_percent(arguments.fail_under, "--fail-under")
    with cmd_lint.name_settings_file(arguments, settings):
        return _run_batch("lint", arguments, how, **cmd_lint.collect_lint_options(arguments, settings), fail_under=bar,
                          report=arguments.report)


def _run_batch(command: str, arguments: argparse.Namespace, how: dict[str, Any], **options: Any) -> Any:
    from ..batching import batch

    return batch(command, arguments.sources, arguments.output, again=arguments.again, overwrite=arguments.overwrite,
                 **how, **options)
