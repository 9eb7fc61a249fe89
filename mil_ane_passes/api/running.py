"""Execute a model on any machine, and look at its values on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..proof.trace import traced
from ..report.trace import TraceReport
from .source import Array, opened

if TYPE_CHECKING:
    from ..runtime.quirks import Described

__all__ = ["fault_models", "run", "trace"]


def run(
    src: Any, feeds: Mapping[str, Array], *, function: str | None = None, precision: str = "float32",
    state: dict[str, Array] | None = None, quirks: Sequence[str] = (),
) -> dict[str, Array]:
    """Execute a model on the reference runtime, on any machine; returns the outputs by name.

    `state` holds the states by name and is updated in place; given an empty dict, all are left in it. `quirks` names
    published faults to imitate. Raises InputError for feeds with wrong names, shapes or dtypes and for an unknown
    quirk, NotSupported for an op the runtime lacks.
    """
    from ..runtime import Runtime

    model = opened(src)
    runtime = Runtime(model.program, function=function, precision=precision, quirks=quirks,
                      description=model.describe(function or model.program.default_function_name))
    return dict(runtime(feeds, state))


def fault_models() -> list[Described]:
    """Name, one-sentence summary and sources of every published fault that `quirks` may name."""
    from ..runtime.quirks import described

    return described()


def trace(
    src: Any, feeds: Mapping[str, Array], *, function: str | None = None, precision: str = "float32",
    state: dict[str, Array] | None = None, quirks: Sequence[str] = (),
) -> TraceReport:
    """Execute as `run` does and say of each op what its results look like: range, NaN, infinities, what fp16 loses.

    At float32 and float64 this shows where fp16 would overflow, at float16 where it does: see `TraceReport`.
    """
    model = opened(src)
    found = traced(model.program, feeds, function=function, precision=precision, state=state, quirks=quirks,
                   description=model.describe(function or model.program.default_function_name))
    return TraceReport(model.name, found.function, precision, tuple(quirks), found.outputs, dict(state or {}),
                       found.rows, found.first)
