"""Runs of a program on the reference runtime: their plans, their execution and their results."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Function, Program, types

from ..ir.query import get_pipeline_functions, is_opaque
from ..runtime.feeds import read_stored_feeds
from ..runtime.model_description import apply_description
from ..runtime.pipeline import PipelineValues, select_feeds
from ..runtime.quirks.base import Quirk
from ..utils.errors import InputError, NotSupported, suggest_nearest
from .comparison import to_arrays
from .feeds import ShapeChoice, list_shape_choices, make_feeds, make_state

__all__ = [
    "USER_FEEDS_LABEL",
    "Execution",
    "OpCount",
    "Plan",
    "Region",
    "RegionLog",
    "Run",
    "RunDigest",
    "RunProgress",
    "build_plans",
    "check_runnable",
    "copy_state",
    "describe_unusable_feeds",
    "digest_runs",
    "execute_pipeline",
    "execute_plans",
    "execute_run",
    "is_left_out",
    "join_results",
    "note_error",
]

Array = np.ndarray[Any, Any]
USER_FEEDS_LABEL = "given feeds"
_MIN_SECONDS_REPORTED = 5.0
"Least number of remaining seconds for which progress reports an estimate; a shorter wait needs no estimate."


@dataclass(frozen=True)
class Plan:
    """One run to make: function, feeds and states.

    A plan with an `error` is known to fail and is not run. A plan that is not `typed` is run only at float64.
    """

    function: str
    label: str
    feeds: dict[str, Array]
    state: dict[str, Array] = field(default_factory=dict)
    error: str = ""
    typed: bool = True
    asked: bool = False
    "True for user-supplied feeds: an error on them is reported to the user."
    adversarial: str = ""
    "The kind of adversarial feeds; empty for other feeds."


@dataclass
class OpCount:
    """The number of ops of the second program in runs at one precision, without those in nested blocks.

    `shared` ops reused results of the first program. `at_float32` of these were computed at float32 in a run at
    float64, which may have changed their results. `rounded` is the number of other results that are equal in both
    programs and were therefore rounded to float32.
    """

    ops: int = 0
    shared: int = 0
    at_float32: int = 0
    rounded: int = 0

    def add(self, other: OpCount) -> None:
        self.ops += other.ops
        self.shared += other.shared
        self.at_float32 += other.at_float32
        self.rounded += other.rounded


@dataclass
class Region:
    """The end of a region that differs: `value` of the second function corresponds to `before`, but their ops differ.

    The two were compared in `runs` runs at `precision`; in `equal_bits` of these runs they had the same bits.
    `difference` is the largest difference of two finite elements, as a fraction of the largest finite magnitude in
    `before`; None if the shapes differed in all runs.
    """

    function: str
    value: str
    before: str
    precision: str
    runs: int = 0
    equal_bits: int = 0
    difference: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def note(self, one: Any, other: Any, has_equal_bits: bool) -> None:
        """Record the comparison of a value of the first function with that of the second, both as tensors."""
        self.runs += 1
        self.equal_bits += has_equal_bits
        share = 0.0 if has_equal_bits else _find_largest_share(one, other)
        if share is not None:
            self.difference = max(share, self.difference or 0.0)


def _find_largest_share(one: Any, other: Any) -> float | None:
    """Return the largest difference of finite elements as a fraction of the largest finite magnitude in `one`.

    Returns None if the shapes differ.
    """
    if getattr(one, "shape", None) is None or one.shape != getattr(other, "shape", None):
        return None
    one, other = one.double(), other.double()
    known = one.isfinite() & other.isfinite()
    if not bool(known.any()):
        return None
    scale = float(one[known].abs().max())
    gap = float((one - other)[known].abs().max())
    return gap / scale if scale else gap


@dataclass
class RegionLog:
    """The ends of the regions that differ, with the comparisons of all runs."""

    _regions: dict[tuple[str, str, str], Region] = field(default_factory=dict)

    @property
    def regions(self) -> list[Region]:
        return [*self._regions.values()]

    def note(self, function: str, precision: str, values: tuple[Any, Any], tensors: tuple[Any, Any],
             has_equal_bits: bool) -> None:
        """Record the comparison of two `values`, of the first and of the second function, in one run."""
        before, value = (var.name for var in values)
        found = self._regions.setdefault((function, value, precision), Region(function, value, before, precision))
        found.note(*tensors, has_equal_bits)


@dataclass
class Run:
    """A plan and its outputs by precision, or the `error` that ended it.

    The following are set if they were needed:

    - `stepped`: outputs at float16 with each step of recurrent layers rounded.
    - `raised`: outputs with constants raised as rewrites declare.
    - `moved`: the movement of outputs under rewrites' declared changes.
    - `moved_stored`: the same if results are also rounded to the stored dtypes.
    - `rounding`: the outputs computed from ops whose rewrites only round; these are not judged at float16 on extreme
      values.
    - `widened`: the outputs that are fp16 values cast to fp32: their rounding is that of fp16.
    """

    plan: Plan
    results: dict[str, dict[str, Array]] = field(default_factory=dict)
    stepped: dict[str, Array] | None = None
    raised: dict[str, dict[str, Array]] | None = None
    moved: dict[str, Array] | None = None
    moved_stored: dict[str, Array] | None = None
    rounding: frozenset[str] = frozenset()
    ops: dict[str, OpCount] = field(default_factory=dict)
    "If two programs ran side by side: counts of the second program's ops, by precision."
    is_batched: bool = False
    "True if the run was part of a batch, whose kernels may round differently."
    error: str = ""
    widened: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RunDigest:
    """SHA-256 digests of one run: of its feeds and states, and of the outputs of both programs ("" without outputs)."""

    function: str
    feeds: str
    precision: str
    inputs: str
    before: str
    after: str


@dataclass
class Execution:
    """All runs of one program, and the nested blocks that at least one of them entered."""

    runs: list[Run]
    executed_blocks: set[Block] = field(default_factory=set)


def build_plans(
    program: Program, seeds: int, describe: Callable[[str], Any], feeds: Mapping[str, Array] | None = None,
    hides_rows: bool = True,
) -> list[Plan]:
    """Make the runs that cover a program: every function, every shape to test, `seeds` draws spread over the shapes.

    With `feeds` there is one run of the default function; for a pipeline, one run of each part on the results of the
    earlier parts. Without `hides_rows`, sampled masks have a one in each row. Raises InputError for feeds that the
    function's description does not allow.
    """
    if feeds is not None and get_pipeline_functions(program):
        return list(_iterate_pipeline_plans(program, describe, feeds))
    if feeds is not None:
        return [_build_user_plan(program, program.default_function_name, describe, feeds)]
    made: list[Plan] = []
    for name, function in program.functions.items():
        description = describe(name)
        choices: Sequence[ShapeChoice] = list_shape_choices(function, description)
        for number in range(max(seeds, len(choices))):
            choice = choices[number % len(choices)]
            label = f"seed {number}" + (f", {choice.label} shapes" if len(choices) > 1 else "")
            drawn = make_feeds(function, choice, number, description, hides_rows)
            made.append(Plan(name, label, drawn, make_state(function, number)))
    return made


def build_shaped_plan(
    program: Program, name: str, shapes: Sequence[tuple[int, ...]], describe: Callable[[str], Any], label: str
) -> Plan:
    """Make a run of a function with drawn inputs of these shapes, in the order of its inputs."""
    function, description = program.functions[name], describe(name)
    fed = [each for each, var in function.inputs.items() if not types.is_state(var.sym_type)]
    drawn = make_feeds(function, ShapeChoice(label, dict(zip(fed, shapes, strict=True))), 0, description)
    return Plan(name, f"seed 0, {label} shapes", drawn, make_state(function, 0))


def _build_user_plan(program: Program, name: str, describe: Callable[[str], Any], feeds: Mapping[str, Array]) -> Plan:
    description = describe(name)
    laid_out = dict(feeds) if description is None else apply_description(description, feeds)
    laid_out = read_stored_feeds(program.functions[name].inputs, laid_out)
    return Plan(name, USER_FEEDS_LABEL, laid_out, make_state(program.functions[name], 0))


def _iterate_pipeline_plans(
    program: Program, describe: Callable[[str], Any], feeds: Mapping[str, Array]
) -> Iterator[Plan]:
    """Yield the runs of a pipeline's parts; values between parts are computed at float32."""
    from ..runtime import Runtime

    values = PipelineValues(feeds)
    required = {name for part in get_pipeline_functions(program) for name in program.functions[part].inputs}
    for name in set(feeds) - required:
        raise InputError(
            f"feed '{name}': no such input{suggest_nearest(name, required)}; no ML Program of the pipeline reads it"
        )
    for part in get_pipeline_functions(program):
        function = program.functions[part]
        plan = _build_user_plan(program, part, describe, select_feeds(function, values.enter(function)))
        yield plan
        runtime = Runtime(program, function=part, description=describe(part))
        values.add(function, runtime(plan.feeds, dict(plan.state)))


def check_runnable(program: Program, quirks: Sequence[str]) -> None:
    """Raise the errors of `execute_plans` for the program or for a quirk before anything is run."""
    from ..runtime import Runtime

    for function in program.functions:
        Runtime(program, function=function, quirks=quirks)


def execute_plans(
    program: Program, made: Sequence[Plan], precisions: Sequence[str], progress: Callable[[str], None],
    quirks: Sequence[str] = (), finite_constants: bool = False, rounded_steps: bool = False,
    depart: Callable[[str], Quirk | None] = lambda function: None,
) -> Execution:
    """Execute every plan at every precision; the final value of a state counts as an output.

    `quirks` are the names of published faults to imitate. `finite_constants`, `rounded_steps` and the result of
    `depart` for a function are passed to `Runtime`. Raises NotSupported before anything runs if an op is not
    implemented, and InputError for an unknown quirk or for user-supplied feeds that do not fit. Random feeds that
    cannot be run leave an error in their `Run`.
    """
    from ..runtime import Runtime

    found = Execution(make_runs(program, made))
    count = RunProgress(progress, len(made) * len(precisions))
    for function in dict.fromkeys(plan.function for plan in made):
        for precision in precisions:
            runtime = Runtime(program, function=function, precision=precision, quirks=quirks,
                              finite_constants=finite_constants, rounded_steps=rounded_steps,
                              departure=depart(function))
            for run in found.runs:
                if not is_left_out(run, function, precision):
                    count.report(run.plan, precision)
                    execute_run(runtime, run, precision)
            found.executed_blocks |= runtime.executed_blocks
    return found


def make_runs(program: Program, made: Sequence[Plan]) -> list[Run]:
    """Make the runs of `program` that `made` plans, without results."""
    widened = {name: _find_widened_outputs(program.functions[name]) for name in {plan.function for plan in made}}
    return [Run(plan, error=plan.error, widened=widened[plan.function]) for plan in made]


def _find_widened_outputs(function: Function) -> frozenset[str]:
    casts = (var for var in function.outputs if var.op is not None and var.op.op_type == "cast")
    return frozenset(var.name for var in casts if not is_opaque(var.op) and var.dtype == types.fp32 and
                     var.op.x.dtype == types.fp16)


def is_left_out(run: Run, function: str, precision: str) -> bool:
    """Return whether a run is skipped: it is of another function, has failed, or is not made at `precision`."""
    return bool(run.plan.function != function or run.error or not (run.plan.typed or precision == "float64"))


def execute_pipeline(
    package: Any, made: Sequence[Plan], precisions: Sequence[str], progress: Callable[[str], None],
    quirks: Sequence[str] = (),
) -> Execution:
    """Execute every plan on an entire pipeline, at every precision; the result is as that of `execute_plans`."""
    from ..runtime import PipelineRuntime

    found = Execution([Run(plan, error=plan.error) for plan in made])
    for precision in precisions:
        runtime = PipelineRuntime(package, precision=precision, quirks=quirks)
        for number, run in enumerate(found.runs, 1):
            if not run.error:
                progress(f"run {number} of {len(made)}: pipeline, {run.plan.label}, {precision}")
                execute_run(lambda feeds, state: runtime(feeds), run, precision)
    return found


class RunProgress:
    """Reports each run before it is made, with the remaining time estimated from the runs so far."""

    def __init__(self, progress: Callable[[str], None], total: int) -> None:
        self._progress, self._total = progress, total
        self._done, self._started = 0, time.monotonic()

    def report(self, plan: Plan, precision: str) -> None:
        left = self._format_time_left()
        self._done += 1
        self._progress(f"run {self._done} of {self._total}{left}: {plan.function}, {plan.label}, {precision}")

    def _format_time_left(self) -> str:
        """Format the remaining time; "" before the first run, and if only a few seconds are left."""
        spent = time.monotonic() - self._started
        rest = spent / self._done * (self._total - self._done) if self._done else 0.0
        if rest < _MIN_SECONDS_REPORTED:
            return ""
        return f" (about {rest / 60:.0f} min left)" if rest >= 90 else f" (about {rest:.0f} s left)"


def copy_state(plan: Plan) -> dict[str, Array]:
    """Return a copy of the initial states of `plan`, for one run to write to."""
    return {name: value.copy() for name, value in plan.state.items()}


def execute_run(runtime: Any, run: Run, precision: str) -> None:
    """Execute one run at one precision and store its results or its error."""
    state = copy_state(run.plan)
    try:
        outputs = runtime(run.plan.feeds, state)
    except NotSupported:
        raise
    except InputError as error:
        note_error(run, error)
        return
    run.results[precision] = join_results(outputs, state)


def describe_unusable_feeds(reason: str) -> str:
    """Describe that nothing was compared since all sampled feeds failed, one of them for `reason`."""
    return (f"none of the sampled feeds can be run: {reason}; pass valid feeds with --feeds of rewrite or verify "
            f"(feeds= in Python)")


def note_error(run: Run, error: InputError) -> None:
    """Record that a run failed with `error`. Raises the error if the user requested this run."""
    if run.plan.label.startswith(USER_FEEDS_LABEL):
        raise error
    run.error = str(error)


def join_results(outputs: Mapping[str, Any], state: Mapping[str, Array]) -> dict[str, Array]:
    """Return outputs and final values of states in the form of `Run.results`."""
    return to_arrays(outputs) | {f"state {name}": value for name, value in state.items()}


def digest_runs(before: Execution, after: Execution) -> list[RunDigest]:
    """Compute digests of the runs that the first program could make, in order."""
    found = []
    for old, new in zip(before.runs, after.runs):
        inputs = _digest_arrays({**old.plan.feeds, **{f"state {name}": each for name, each in old.plan.state.items()}})
        for precision in () if old.error else old.results:
            outputs = (_digest_arrays(each.results[precision]) if precision in each.results else ""
                       for each in (old, new))
            found.append(RunDigest(old.plan.function, old.plan.label, precision, inputs, *outputs))
    return found


def _digest_arrays(arrays: Mapping[str, Any]) -> str:
    """Compute a digest of names, dtypes, shapes and elements; strings and labels are represented by their repr."""
    digest = hashlib.sha256()
    for name, value in sorted(arrays.items()):
        array = np.asarray(value)
        digest.update(f"{name}\0{array.dtype}\0{array.shape}\0".encode())
        digest.update(repr(array.tolist()).encode() if array.dtype == object else array.tobytes())
    return digest.hexdigest()
