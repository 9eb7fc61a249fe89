"""One rule's page: why, when, how exact, before and after, options, evidence."""

from __future__ import annotations

import argparse

from .output import add_format, show

HELP = "one rule's page"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", metavar="CODE", help="a code (ANE301), a slug or a pass name")
    add_format(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..core.registry import explainable
    from ..report.catalogue import Page

    show(Page(explainable(arguments.code)), arguments.format)
    return 0
