"""Are two packages equal, and if not, which op is the first that differs? Runs both on the same feeds."""

from __future__ import annotations

import argparse

from .arrays import read_arrays
from .output import add_format, at_least_one, progress_line, show
from .quirks import add_quirk

HELP = "are two packages equal"
EXAMPLE = "verify in.mlpackage out.mlpackage"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A", help="an .mlpackage")
    parser.add_argument("after", metavar="B", help="the .mlpackage to compare with it")
    parser.add_argument("--feeds", metavar="F.npz", help="inputs by name; default: seeded draws")
    parser.add_argument("--function", metavar="F",
                        help="compare this function alone (default: all; with --feeds the default function)")
    parser.add_argument("--precision", choices=("float64", "float32", "float16"), default="float64",
                        help="float64 asks whether the algebra is the same; float16 rounds each value to its dtype")
    parser.add_argument("--exactness", choices=("bitwise", "rounding"), default="rounding", help="how to judge")
    parser.add_argument("--seeds", type=at_least_one, default=3, help="seeded draws per function (default 3)")
    parser.add_argument("--mends", action="store_true",
                        help="what is NaN or infinite in A may be finite in B; judged with A's infinite constants read "
                             "as large finite numbers")
    parser.add_argument("--widths", action="store_true",
                        help="inputs and outputs may be fp32 in one and fp16 in the other, as after ane::fp16_io")
    add_quirk(parser, "in B only: A with itself shows whether the fault hits it, A with a rewrite whether "
                      "that cures it")
    add_format(parser)
    parser.set_defaults(run=run, proves=True)


def run(arguments: argparse.Namespace) -> int:
    from ..api import verify

    with progress_line() as progress:
        report = verify(
            arguments.before, arguments.after, feeds=read_arrays(arguments.feeds), precision=arguments.precision,
            function=arguments.function, exactness=arguments.exactness, seeds=arguments.seeds, quirks=arguments.quirks,
            mends=arguments.mends, widths=arguments.widths, progress=progress)
    show(report, arguments.format)
    return 0 if report.equal else 1
