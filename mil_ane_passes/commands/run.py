"""Execute a package with the reference runtime, on any machine; inputs and outputs are .npz files."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from .._version import make_json_header
from ..package.manifest import check_model_path
from ..package.output_file import check_output_file
from ..passes.coremltools_setup import silence_coremltools
from ..report.table import format_table
from ..utils.budget import DEFAULT_MAX_STEPS, share_budget
from ..utils.errors import InputError
from ..utils.npz import Array, read_arrays
from ..utils.text_format import format_lines, format_short_repr
from ..utils.upgraded_source import UpgradedSource, upgrades_to_dict
from .options import (
    MAX_MEMORY,
    MAX_SECONDS,
    MAX_STEPS,
    Progress,
    add_format_option,
    add_options,
    argument,
    command,
    flag,
    ignore_progress,
    read_options,
)
from .output import print_report, show_progress, write_arrays

if TYPE_CHECKING:
    from ..equivalence.trace import TraceRow
    from .sources import OpenedSource

__all__ = ["RunOptions", "RunReport", "TraceReport", "add_quirk_list", "run", "trace"]

HELP = "execute a package on any machine"
EXAMPLE = "run in.mlpackage --feeds feeds.npz -o out.npz"

_LIST_MARK = "\0quirks"
"Marks the place of the list of quirks, at the end of the epilog."


@dataclass(frozen=True)
class RunOptions:
    """The options of `run` and `trace`."""

    src: Any = field(metadata=argument("IN", check=check_model_path))
    "the .mlpackage or .mlmodel to run"
    feeds: Mapping[str, Array] = field(
        metadata=flag(metavar="F.npz", required=True, parse=lambda path: read_arrays(path) or {}))
    "inputs by name; images: uint8 (height, width, 3), or (1, channels, height, width) with values from 0 to 255"
    _: KW_ONLY
    precision: str = field(default="float32", metadata=flag(choices=("float64", "float32", "float16")))
    "float16 rounds each value to its declared dtype (default: float32)"
    function: str | None = field(default=None, metadata=flag())
    "the function to run (default: the package's default function)"
    state: dict[str, Array] | None = field(
        default=None, metadata=flag(metavar="S.npz", parse=lambda path: read_arrays(path, "state", "state") or {}))
    "initial values of states by name (default: zeros)"
    max_seconds: float | None = field(default=None, metadata=MAX_SECONDS)
    max_steps: int | None = field(default=DEFAULT_MAX_STEPS, metadata=MAX_STEPS)
    max_memory: str | float | None = field(default=None, metadata=MAX_MEMORY)
    quirks: Sequence[str] = field(default=(), metadata=flag("--quirk", metavar="NAME", action="append"))
    "a published hardware fault to imitate in this run (listed below); repeatable"
    progress: Progress = ignore_progress


def add(parser: argparse.ArgumentParser) -> None:
    add_options(parser, RunOptions)
    parser.add_argument("-o", "--output", metavar="OUT.npz",
                        help="output file, replaced if it exists; optional with --trace")
    parser.add_argument("--state-out", metavar="OUT.npz", help="output file for the final values of states")
    parser.add_argument("--trace", action="store_true",
                        help="print one line per op: range, NaN, infinities, fp16 overflows, and the first overflow")
    add_quirk_list(parser)
    add_format_option(parser)
    parser.set_defaults(run=_run_command)


def add_quirk_list(parser: argparse.ArgumentParser) -> None:
    """Add the list of quirks to the end of the help."""
    parser.formatter_class = _QuirkHelpFormatter
    parser.epilog = f"{parser.epilog or ''}{_LIST_MARK}"


class _QuirkHelpFormatter(argparse.HelpFormatter):
    """Help formatter that inserts the list when help is printed: building it imports coremltools."""

    def add_text(self, text: str | None) -> None:
        words, listed, _ = (text or "").partition(_LIST_MARK)
        super().add_text(words or None)
        if not listed:
            return
        with silence_coremltools():
            from ..runtime.quirks import describe_quirks

        self.start_section("quirks (models of published faults; they verify nothing about a given chip)")
        for quirk in describe_quirks():
            self._add_item(_format_quirk_entry, [quirk.name, quirk.summary, self._width])
        self.end_section()


def _format_quirk_entry(name: str, summary: str, width: int) -> str:
    """Format a name with the description of the fault below it."""
    return f"  {name}\n{textwrap.indent(textwrap.fill(summary, width - 4), ' ' * 4)}\n"


def _run_command(arguments: argparse.Namespace) -> int:
    if arguments.output is None and not arguments.trace:
        raise InputError("no output given; expected -o OUT.npz, or --trace")
    # The final states may overwrite the file of the initial ones, so that the next run continues from there.
    inputs = {arguments.output: [arguments.src, arguments.feeds, arguments.state],
              arguments.state_out: [arguments.src, arguments.feeds]}
    targets = [None if path is None else check_output_file(path, inputs[path], "an .npz file")
               for path in (arguments.output, arguments.state_out)]
    if None not in targets and len({os.path.realpath(target) for target in targets if target}) == 1:
        raise InputError(f"outputs and final states would both be written to '{targets[0]}'; expected two files")
    report = _execute_package(arguments)
    if targets[1] is not None and not report.states:
        raise InputError("--state-out: the function has no states; remove this option")
    from ..equivalence.comparison import to_arrays

    for target, arrays in zip(targets, (report.outputs, report.states)):
        if target is not None:
            write_arrays(target, to_arrays(arrays))
    print_report(report, arguments.format)
    return 0


def _execute_package(arguments: argparse.Namespace) -> RunReport:
    keywords = {"state": {}, **read_options(arguments, RunOptions)}
    with show_progress() as progress:
        if arguments.trace:
            return trace(**keywords, progress=progress)
        model, outputs = _run_source(**keywords, progress=progress)
    options = RunOptions(**keywords)
    return RunReport(options.src, options.function, options.precision, tuple(options.quirks), outputs,
                     options.state or {}, model.upgraded)


@command(RunOptions)
def run(options: RunOptions) -> dict[str, Array]:
    """Execute a model on the reference runtime, on any machine; returns the outputs by name.

    All parts of a pipeline are run, one after the other, unless `function` names one (`PART/FUNCTION`). An MLModel of
    several functions is run in the one for which it was made (`function_name`). `state`
    contains the states by name and is updated in place; an empty dict receives all of them. `quirks` names published
    faults to imitate. `max_steps` limits the loop steps of one run, `max_seconds` the total time, `max_memory` (bytes,
    or a text such as "8GB") the memory that it may use, in place of the machine's; None means no limit.
    Raises InputError for feeds with wrong names, shapes or dtypes and for an unknown quirk, NotSupported for an op the
    runtime lacks, and LimitReached (a NotSupported) if a run exceeds a limit on steps, time or memory. A NeuralNetwork
    is run as the ML Program that `upgrade` makes of it.
    """
    return _open_and_run(options)[1]


def _open_and_run(options: RunOptions) -> tuple[OpenedSource, dict[str, Array]]:
    """Return the opened source and its outputs."""
    from ..runtime import PipelineRuntime, Runtime
    from .sources import open_source

    model = open_source(options.src)
    options.progress("running")
    with share_budget(options.max_steps, options.max_seconds, options.progress, options.max_memory):
        runtime: Any
        function = options.function or model.chosen_function
        if function is None and model.package is not None and model.package.is_pipeline:
            runtime = PipelineRuntime(model.package, precision=options.precision, quirks=options.quirks)
        else:
            runtime = Runtime(
                model.program, function=function, precision=options.precision, quirks=options.quirks,
                description=model.describe(function or model.program.default_function_name))
        outputs = dict(runtime(options.feeds, options.state))
    model.check_unchanged()
    return model, outputs


_run_source = command(RunOptions)(_open_and_run)


@command(RunOptions)
def trace(options: RunOptions) -> TraceReport:
    """Execute as `run` does and report on each op's results: range, NaN, infinities, values lost in fp16.

    At float32 and float64 this finds where fp16 would overflow, at float16 where it does: see `TraceReport`. For a
    pipeline, `function` names the part to execute.
    """
    from ..equivalence.trace import trace_function
    from .sources import open_source

    model = open_source(options.src)
    function = options.function or model.chosen_function
    if function is None and model.is_pipeline:
        raise InputError(f"{model.name} is a pipeline; choose one function to trace: "
                         f"{', '.join(model.program.functions)}")
    options.progress("running")
    with share_budget(options.max_steps, options.max_seconds, options.progress, options.max_memory):
        found = trace_function(
            model.program, options.feeds, function=function, precision=options.precision, state=options.state,
            quirks=options.quirks, description=model.describe(function or model.program.default_function_name))
    model.check_unchanged()
    return TraceReport(model.name, found.function, options.precision, tuple(options.quirks), found.outputs,
                       dict(options.state or {}), model.upgraded, found.rows, found.first)


@dataclass
class RunReport:
    """One run of `function` (None: the default one) at `precision`: `outputs` and the final `states`, by name.

    `upgraded` describes the source where it is a NeuralNetwork.
    """

    source: str
    function: str | None
    precision: str
    quirks: tuple[str, ...] = ()
    outputs: dict[str, Any] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)
    upgraded: tuple[UpgradedSource, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON that `run --format json` prints: dtypes and shapes of arrays, not the numbers."""
        return {
            **make_json_header("run"),
            "source": self.source,
            "function": self.function,
            "precision": self.precision,
            "quirks": list(self.quirks),
            "outputs": _describe_arrays(self.outputs),
            "states": _describe_arrays(self.states),
            "first_overflow": None,
            "trace": None,
            **upgrades_to_dict(self.upgraded),
        }

    def __repr__(self) -> str:
        return format_short_repr(self, source=self.source, function=self.function, precision=self.precision,
                                 outputs=list(self.outputs), states=len(self.states))

    def __str__(self) -> str:
        from ..equivalence.comparison import to_arrays

        return format_lines(f"{name}: {value.dtype}{list(value.shape)}"
                            for name, value in to_arrays(self.outputs).items())


@dataclass(repr=False)
class TraceReport(RunReport):
    """A run op by op: `rows` has one entry for each value, in the order in which they were first computed.

    `first` is the first row whose value is beyond fp16 although its operands are not, `first_overflow_mil` its op.
    """

    rows: list[TraceRow] = field(default_factory=list)
    first_overflow_mil: str = ""

    @property
    def first(self) -> TraceRow | None:
        return next((row for row in self.rows if row.starts), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON that `run --trace --format json` prints."""
        return super().to_dict() | {"first_overflow": self.first.value if self.first else None,
                                    "trace": [row.to_dict() for row in self.rows]}

    def __str__(self) -> str:
        return format_lines(
            [*format_table(_TABLE_HEAD, _ALIGNMENTS, map(_format_cells, self.rows)), *self._format_verdict()]
        )

    def _format_verdict(self) -> list[str]:
        row = self.first
        if row is None:
            beyond = any(row.inf or row.overflow for row in self.rows)
            within = "overflows are in inputs or constants only" if beyond else "every value is within its range"
            return [f"no op overflows fp16: {within} ({self.precision})"]
        found = f"{row.overflow} of magnitude 65520 or more" if row.overflow else f"{row.inf} infinite"
        return [f"first to overflow fp16 ({self.precision}): %{row.value} in {' > '.join(row.place)}, {found} of "
                f"{row.elements} elements", f"  {self.first_overflow_mil}"]


def _describe_arrays(arrays: dict[str, Any]) -> dict[str, Any]:
    from ..equivalence.comparison import to_arrays

    return {name: {"dtype": str(value.dtype), "shape": list(value.shape)} for name, value in to_arrays(arrays).items()}


_TABLE_HEAD = ("  value", "op", "type", "min", "max", "nan", "inf", "overflow", "underflow")
_ALIGNMENTS = (str.ljust, str.ljust, str.ljust, *(str.rjust,) * 6)


def _format_cells(row: TraceRow) -> tuple[str, ...]:
    """Format one line: nested values indented, `x3` for a value computed three times, counts of zero left blank."""
    times = f" x{row.runs}" if row.runs > 1 else ""
    name = f"{'> ' if row.starts else '  '}{'  ' * (len(row.place) - 1)}%{row.value}{times}"
    ends = ("" if end is None else f"{end:.4g}" for end in (row.minimum, row.maximum))
    counts = (str(count) if count else "" for count in (row.nan, row.inf, row.overflow, row.underflow))
    return (name, row.op_type, row.type, *ends, *counts)
