"""Say which ops leave the ANE, why, on whose evidence, and what mends it; nothing runs, all of it is predicted."""

from __future__ import annotations

import argparse

from .output import add_format, show

HELP = "which ops leave the ANE, why, and what mends it"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN", help="the .mlpackage to look at")
    parser.add_argument("--target", default="all", help="chip or device to look at (default: all)")
    add_format(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..api import lint

    report = lint(arguments.input, target=arguments.target)
    show(report, arguments.format)
    return 1 if report.warnings else 0
