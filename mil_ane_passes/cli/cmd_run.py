"""Execute a package with the reference runtime, on any machine; arrays in, arrays out."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..utils.errors import InputError
from .arrays import read_arrays, write_arrays
from .input_options import add_limit_options, read_limits
from .output import add_format_option, check_output_file, print_report, show_progress
from .quirk_option import add_quirk_option

if TYPE_CHECKING:
    from ..report.trace import RunReport

HELP = "execute a package on any machine"
EXAMPLE = "run in.mlpackage --feeds feeds.npz -o out.npz"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN", help="the .mlpackage to run")
    parser.add_argument("--feeds", metavar="F.npz", required=True, help="inputs by name")
    parser.add_argument("-o", "--output", metavar="OUT.npz",
                        help="where the outputs go; replaced if it exists; may be left out with --trace")
    parser.add_argument("--precision", choices=("float64", "float32", "float16"), default="float32",
                        help="float16 rounds each value to its declared dtype; default float32")
    parser.add_argument("--function", help="the function to run (default: the package's default function)")
    parser.add_argument("--state", metavar="S.npz", help="what the states hold at the start, by name (default: zeros)")
    parser.add_argument("--state-out", metavar="OUT.npz", help="where goes what is left in the states")
    parser.add_argument("--trace", action="store_true",
                        help="a line for each op: range, NaN, infinities, what fp16 cannot hold, and where that starts")
    add_limit_options(parser)
    add_quirk_option(parser, "in this run")
    add_format_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..equivalence.comparison import to_arrays

    if arguments.output is None and not arguments.trace:
        raise InputError("no output; expected -o OUT.npz, or --trace")
    # The final states may overwrite the file of the initial ones, so that the next run continues from there.
    inputs = {arguments.output: [arguments.feeds, arguments.state], arguments.state_out: [arguments.feeds]}
    targets = [None if path is None else check_output_file(path, inputs[path], "an .npz file")
               for path in (arguments.output, arguments.state_out)]
    if targets[0] is not None and targets[0] == targets[1]:
        raise InputError(f"outputs and states would both be written to '{targets[0]}'; expected two files")
    report = _execute_package(arguments)
    if targets[1] is not None and not report.states:
        raise InputError("--state-out: the function has no states, so there is nothing to write; leave it out")
    for target, arrays in zip(targets, (report.outputs, report.states)):
        if target is not None:
            write_arrays(target, to_arrays(arrays))
    print_report(report, arguments.format)
    return 0


def _execute_package(arguments: argparse.Namespace) -> RunReport:
    from .. import api
    from ..report.trace import RunReport

    feeds, state = read_arrays(arguments.feeds) or {}, read_arrays(arguments.state, "state", "state") or {}
    how: dict[str, Any] = {"function": arguments.function, "precision": arguments.precision, "state": state,
                           "quirks": arguments.quirks, **read_limits(arguments)}
    with show_progress() as progress:
        if arguments.trace:
            return api.trace(arguments.input, feeds, progress=progress, **how)
        outputs = api.run(arguments.input, feeds, progress=progress, **how)
    return RunReport(arguments.input, arguments.function, arguments.precision, tuple(arguments.quirks), outputs, state)
