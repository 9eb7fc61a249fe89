"""Execution of a model on any machine, and tracing of its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..equivalence.trace import trace_function
from ..report.trace import TraceReport
from ..utils.budget import DEFAULT_MAX_STEPS, share_budget
from ..utils.errors import InputError
from ..utils.locking import synchronized
from .source import Array, Progress, ignore_progress, open_source

if TYPE_CHECKING:
    from ..runtime.quirks import QuirkDescription

__all__ = ["list_fault_models", "run", "trace"]


@synchronized
def run(
    src: Any, feeds: Mapping[str, Array], *, function: str | None = None, precision: str = "float32",
    state: dict[str, Array] | None = None, quirks: Sequence[str] = (),
    max_steps: int | None = DEFAULT_MAX_STEPS, max_seconds: float | None = None, progress: Progress = ignore_progress,
) -> dict[str, Array]:
    """Execute a model on the reference runtime, on any machine; returns the outputs by name.

    All parts of a pipeline are run, one after the other, unless `function` names one (`PART/FUNCTION`). `state`
    contains the states by name and is updated in place; an empty dict receives all of them. `quirks` names published
    faults to imitate. `max_steps` limits the loop steps of one run, `max_seconds` the total time; None means no limit.
    Raises InputError for feeds with wrong names, shapes or dtypes and for an unknown quirk, NotSupported for an op the
    runtime lacks, and LimitReached (a NotSupported) if a run exceeds a limit on steps, time or memory.
    """
    from ..runtime import PipelineRuntime, Runtime

    model = open_source(src)
    progress("running")
    with share_budget(max_steps, max_seconds, progress):
        if function is None and model.package is not None and model.package.is_pipeline:
            return PipelineRuntime(model.package, precision=precision, quirks=quirks)(feeds, state)
        runtime = Runtime(model.program, function=function, precision=precision, quirks=quirks,
                          description=model.describe(function or model.program.default_function_name))
        return dict(runtime(feeds, state))


@synchronized
def list_fault_models() -> list[QuirkDescription]:
    """Return name, one-sentence summary and sources of every published fault that `quirks` may name."""
    from ..runtime.quirks import describe_quirks

    return describe_quirks()


@synchronized
def trace(
    src: Any, feeds: Mapping[str, Array], *, function: str | None = None, precision: str = "float32",
    state: dict[str, Array] | None = None, quirks: Sequence[str] = (),
    max_steps: int | None = DEFAULT_MAX_STEPS, max_seconds: float | None = None, progress: Progress = ignore_progress,
) -> TraceReport:
    """Execute as `run` does and report on each op's results: range, NaN, infinities, values lost in fp16.

    At float32 and float64 this finds where fp16 would overflow, at float16 where it does: see `TraceReport`. For a
    pipeline, `function` names the part to execute.
    """
    model = open_source(src)
    if function is None and model.is_pipeline:
        raise InputError(f"{model.name} is a pipeline; name the function of it to trace: "
                         f"{', '.join(model.program.functions)}")
    progress("running")
    with share_budget(max_steps, max_seconds, progress):
        found = trace_function(model.program, feeds, function=function, precision=precision, state=state, quirks=quirks,
                               description=model.describe(function or model.program.default_function_name))
    return TraceReport(model.name, found.function, precision, tuple(quirks), found.outputs, dict(state or {}),
                       found.rows, found.first)
