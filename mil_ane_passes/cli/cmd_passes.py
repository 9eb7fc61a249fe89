"""List every rule and pass: code, name, preset, exactness, what it does."""

from __future__ import annotations

import argparse

from .output import add_format_option, print_report

HELP = "list the passes"
EXAMPLE = "passes"


def add(parser: argparse.ArgumentParser) -> None:
    add_format_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..report.catalogue import Catalogue

    print_report(Catalogue(), arguments.format)
    return 0
