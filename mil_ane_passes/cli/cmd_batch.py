"""Rewrite or lint many packages: in the order given, and what goes wrong with one does not stop the rest.

Run again, it does what is not done yet. Exit code 2: some could not be run; 1: some are not proved, or have findings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

from ..core.errors import InputError
from ..core.growth import parse_growth
from ..core.settings import percent
from ..core.words import escaped
from . import cmd_lint, cmd_rewrite
from .given import limits
from .output import add_format, example, progress_line, show
from .stopping import Stopped

HELP = "rewrite or lint many packages, on many cores or machines; run again, it does the rest"
EXAMPLE = "batch rewrite models -o rewritten --jobs 4"


def add(parser: argparse.ArgumentParser) -> None:
    each = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    rewrite = each.add_parser("rewrite", help=cmd_rewrite.HELP, description=cmd_rewrite.__doc__,
                              epilog=example("batch rewrite models -o rewritten"))
    _add_sources(rewrite, "DIR/NAME.mlpackage")
    cmd_rewrite.add_choices(rewrite)
    rewrite.add_argument("--dry-run", action="store_true", help="say what would be done; prove and write nothing")
    rewrite.set_defaults(run=run, each=_rewrite)
    lint = each.add_parser("lint", help=cmd_lint.HELP, description=cmd_lint.__doc__,
                           epilog=example("batch lint models -o reports --report html"))
    _add_sources(lint, "DIR/NAME.txt")
    cmd_lint.add_choices(lint)
    lint.add_argument("--report", choices=cmd_lint.FORMATS, default="text", help="which form the reports in DIR have")
    lint.set_defaults(run=run, each=_lint)


def _add_sources(parser: argparse.ArgumentParser, result: str) -> None:
    parser.add_argument("sources", metavar="SRC", nargs="+", help="packages, folders with packages in them, or "
                                                                  "patterns; never changed")
    parser.add_argument("-o", "--output", metavar="DIR", help=f"where the results go, as {result}; packages found in a "
                                                              "folder keep their path below it")
    parser.add_argument("--jobs", metavar="N", type=_count, default=1,
                        help="so many processes (default: 1), which share the cores; each takes half a GB of memory "
                             "and what its proof needs; 0: this process does it all")
    parser.add_argument("--dask", metavar="ADDRESS", help="run on this Dask cluster, e.g. tcp://10.0.0.1:8786; its "
                                                          "workers must see the same paths")
    parser.add_argument("--again", action="store_true", help="do also what an earlier run has done")
    parser.add_argument("--overwrite", action="store_true", help="replace also what no batch has written")
    add_format(parser)


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is less than 0")
    return number


def run(arguments: argparse.Namespace) -> int:
    from ..batching import BatchInterrupted

    try:
        with progress_line() as progress, _executor(arguments) as chosen:
            report = arguments.each(arguments, {"progress": progress, **chosen})
    except BatchInterrupted as stopped:
        show(stopped.report, arguments.format)
        print(f"mil-ane-passes: interrupted: {escaped(stopped)}; run the same again to do the rest", file=sys.stderr)
        signalled = stopped.__cause__
        return (signalled if isinstance(signalled, Stopped) else Stopped()).code
    show(report, arguments.format)
    return int(report.exit_code)


@contextmanager
def _executor(arguments: argparse.Namespace) -> Iterator[dict[str, Executor | int]]:
    """What does the work, as `batch` takes it."""
    if arguments.dask is None:
        yield {"jobs": arguments.jobs}
        return
    from ..batching.cluster import dask_executor

    def say(text: str) -> None:
        print(f"mil-ane-passes: {escaped(text)}", file=sys.stderr)

    with dask_executor(arguments.dask, say=say) as executor:
        yield {"executor": executor}


def _rewrite(arguments: argparse.Namespace, how: dict[str, Any]) -> Any:
    if arguments.output is None and not arguments.dry_run:
        raise InputError("no folder for the results; expected -o DIR, or --dry-run")
    return _batch("rewrite", arguments, how, preset=arguments.preset, target=arguments.target, passes=arguments.passes,
                  verify=arguments.verify, link=arguments.link, dry_run=arguments.dry_run, feeds=arguments.feeds,
                  ranges=arguments.ranges, max_growth=parse_growth(arguments.max_growth), strict=arguments.strict,
                  **limits(arguments))


def _lint(arguments: argparse.Namespace, how: dict[str, Any]) -> Any:
    if arguments.output is None:
        raise InputError("no folder for the reports; expected -o DIR")
    settings = cmd_lint.settings_of(arguments)
    if settings.baseline is not None:
        raise InputError(f"{settings.file}: sets a baseline, which is of one model; lint that one by itself, or use "
                         "--no-config")
    bar = settings.fail_under if arguments.fail_under is None else percent(arguments.fail_under, "--fail-under")
    with cmd_lint.blamed(arguments, settings):
        return _batch("lint", arguments, how, **cmd_lint.choices(arguments, settings), fail_under=bar,
                      report=arguments.report)


def _batch(command: str, arguments: argparse.Namespace, how: dict[str, Any], **options: Any) -> Any:
    from ..batching import batch

    return batch(command, arguments.sources, arguments.output, again=arguments.again, overwrite=arguments.overwrite,
                 **how, **options)
