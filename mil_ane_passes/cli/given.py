"""The options that say what the inputs of a model hold."""

from __future__ import annotations

import argparse
from typing import Any

from .arrays import read_arrays

__all__ = ["add_given", "given"]


def add_given(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--feeds", metavar="F.npz", action="append", default=[],
                        help="inputs by name; may be given several times")
    parser.add_argument("--ranges", metavar="LIST", help="what inputs may hold, e.g. 'image=0:1,ids=0:30000'")


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The feeds and ranges of the command line, for the public functions."""
    from ..proof.given import parse_ranges

    return {"feeds": [read_arrays(path) for path in arguments.feeds], "ranges": parse_ranges(arguments.ranges)}
