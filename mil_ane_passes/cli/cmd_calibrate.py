"""Run a package on your own feeds and print, per op, range, room in fp16, first overflow, and what fixes it."""

from __future__ import annotations

import argparse

from .input_options import add_input_options, add_limit_options, read_inputs, read_limits
from .output import add_format_option, positive_int, print_report, show_progress

HELP = "where fp16 overflows on your feeds, and what fixes it"
EXAMPLE = "calibrate in.mlpackage --feeds feeds.npz --worst 10"
_DEFAULT_WORST = 30


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN", help="the .mlpackage to run")
    add_input_options(parser)
    add_limit_options(parser)
    parser.add_argument("--target", default="all", help="chip or device to look at (default: all)")
    parser.add_argument("--worst", type=positive_int, metavar="N", default=_DEFAULT_WORST,
                        help="how many values are shown: those with the least room, in the program's order (default: "
                             f"{_DEFAULT_WORST}); JSON has all")
    add_format_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..api import calibrate

    with show_progress() as progress:
        report = calibrate(arguments.input, **read_inputs(arguments), target=arguments.target, worst=arguments.worst,
                           progress=progress, **read_limits(arguments))
    print_report(report, arguments.format)
    return 0
