"""List every rule and pass: code, name, preset, exactness, what it does."""

from __future__ import annotations

import argparse

from .output import add_format, show

HELP = "list the passes"
EXAMPLE = "passes"


def add(parser: argparse.ArgumentParser) -> None:
    add_format(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..report.catalogue import Catalogue

    show(Catalogue(), arguments.format)
    return 0
