"""Write a folder that somebody with a Mac runs: packages, feeds, expected outputs, a script. One file comes back.

The script compares CPU_ONLY with ALL and CPU_AND_NE, times predictions and reads Core ML's compute plan. It was never
run on a Mac by its authors.
"""

from __future__ import annotations

import argparse

from .arrays import read_arrays
from .output import add_format_option, positive_int, print_report, show_progress

HELP = "write what somebody with a Mac runs to measure a package"
EXAMPLE = "mac-script folder in.mlpackage --preset safe"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="the folder to write; free, or empty")
    parser.add_argument("input", metavar="IN", help="the .mlpackage to measure")
    parser.add_argument("after", metavar="AFTER", nargs="?", help="a second package, measured beside it")
    parser.add_argument("--preset", help="measure IN rewritten beside it: safe or full")
    parser.add_argument("--passes", metavar="LIST", help="measure IN rewritten by exactly these passes beside it")
    parser.add_argument("--target", default="all", help="chip to rewrite for (default: all)")
    parser.add_argument("--feeds", metavar="F.npz", action="append", default=[],
                        help="inputs by name; may be given several times; default: seeded draws")
    parser.add_argument("--seeds", type=positive_int, default=3, metavar="N", help="how many draws (default 3)")
    add_format_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..api.mac_measurement import write_mac_script

    feeds = [read_arrays(path) for path in arguments.feeds]
    with show_progress() as progress:
        report = write_mac_script(
            arguments.input, arguments.folder, after=arguments.after, preset=arguments.preset, passes=arguments.passes,
            target=arguments.target, feeds=feeds or None, seeds=arguments.seeds, progress=progress)
    print_report(report, arguments.format)
    return 0
