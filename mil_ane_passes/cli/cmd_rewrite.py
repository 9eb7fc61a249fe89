"""Rewrite an .mlpackage, verify the result equal, and write it whole or not at all."""

from __future__ import annotations

import argparse

from ..passes.max_growth import parse_max_growth
from .copy_ahead import add_link_option, start_copying
from .input_options import add_input_options, add_limit_options, read_inputs, read_limits
from .output import add_format_option, print_report, show_progress

HELP = "rewrite a package and verify the result before writing it"
EXAMPLE = "rewrite in.mlpackage -o out.mlpackage"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN", help="the .mlpackage to read; never changed")
    parser.add_argument("-o", "--output", metavar="OUT", help="the .mlpackage to write")
    add_rewrite_options(parser)
    parser.add_argument("--dry-run", action="store_true", help="say what would be done; verify and write nothing")
    parser.add_argument("--diff", action="store_true", help="show the MIL before and after")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    add_format_option(parser)
    parser.set_defaults(run=run)


def add_rewrite_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the rewrites, for any package."""
    parser.add_argument("--preset", default="safe", help="safe (default) or full")
    parser.add_argument("--passes", metavar="LIST", help="exactly these, e.g. 'safe,split_conv_transpose_bias' or "
                                                         "'lift_conv_transpose_1d{axis=2}'")
    parser.add_argument("--target", default="all", help="chip or device to rewrite for (default: all)")
    parser.add_argument("--verify", action=argparse.BooleanOptionalAction, default=True,
                        help="verify before writing (default), or do not")
    parser.add_argument("--max-growth", metavar="PCT", default="1",
                        help="undo what a preset brings for place and speed where the predicted cost grows by more "
                             "(default: 1%%), or none: undo nothing")
    parser.add_argument("--strict", action="store_true",
                        help="stop where a pass fails, instead of rolling it back and going on without it")
    add_link_option(parser)
    add_input_options(parser)
    add_limit_options(parser)


def run(arguments: argparse.Namespace) -> int:
    begun = start_copying(arguments.input, arguments.output, arguments.overwrite, arguments.dry_run,
                          link=arguments.link)
    with begun as ahead, show_progress() as progress:
        from ..api import rewrite  # now, while the large files are copied: this imports coremltools

        report = rewrite(
            arguments.input, arguments.output, preset=arguments.preset, target=arguments.target,
            passes=arguments.passes, verify=arguments.verify, overwrite=arguments.overwrite,
            max_growth=parse_max_growth(arguments.max_growth), strict=arguments.strict, link=arguments.link,
            dry_run=arguments.dry_run, diff=arguments.diff, **read_inputs(arguments), **read_limits(arguments),
            progress=progress, ahead=ahead)
    print_report(report, arguments.format)
    return 1 if report.status == "not verified" else 0
