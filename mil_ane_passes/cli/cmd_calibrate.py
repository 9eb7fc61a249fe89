"""Run a package on your own feeds and print, per op, range, room in fp16, first overflow, and what cures it."""

from __future__ import annotations

import argparse

from .given import add_given, add_limits, given, limits
from .output import add_format, at_least_one, progress_line, show

HELP = "where fp16 overflows on your feeds, and what cures it"
EXAMPLE = "calibrate in.mlpackage --feeds feeds.npz --worst 10"
_SHOWN = 30


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN", help="the .mlpackage to run")
    add_given(parser)
    add_limits(parser)
    parser.add_argument("--target", default="all", help="chip or device to look at (default: all)")
    parser.add_argument("--worst", type=at_least_one, metavar="N", default=_SHOWN,
                        help="how many values are shown: those with the least room, in the program's order (default: "
                             f"{_SHOWN}); JSON has all")
    add_format(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..api import calibrate

    with progress_line() as progress:
        report = calibrate(arguments.input, **given(arguments), target=arguments.target, worst=arguments.worst,
                           progress=progress, **limits(arguments))
    show(report, arguments.format)
    return 0
