"""Trace of the values of one run, op by op, with the first op that overflows fp16."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Program, Var

from ..ir.printer import format_op, format_type
from ..ir.query import get_flat_inputs
from .coverage import BlockPath
from .value_matching import FunctionValues, is_constant

__all__ = ["MIN_FP16_OVERFLOW", "Trace", "TraceCollector", "TraceRow", "trace_function"]

Array = np.ndarray[Any, Any]

MIN_FP16_OVERFLOW = 65520.0
"Smallest magnitude that rounds to infinity in fp16: the largest finite number, 65504, plus half a step."
_MAX_FP16_UNDERFLOW = 2.0**-25
"Largest magnitude that rounds to zero in fp16: half of the smallest nonzero number, 2**-24."


@dataclass
class TraceRow:
    """Statistics of one output of an op over its `runs` executions (more than one in a loop).

    `minimum` and `maximum` are those of the finite elements (None without finite elements). The other fields count
    elements over all executions. In a float32 or float64 run, `overflow` counts finite elements that would be infinite
    as fp16 (magnitude of 65520 or more), and `underflow` nonzero elements that would be zero. In a float16 run both are
    0, because overflowed elements are infinite. `starts` marks a value that is beyond fp16 (infinite, or `overflow`)
    although its operands are not.
    """

    value: str
    op_type: str
    type: str
    place: BlockPath
    shape: tuple[int, ...] = ()
    runs: int = 0
    elements: int = 0
    minimum: float | None = None
    maximum: float | None = None
    nan: int = 0
    inf: int = 0
    overflow: int = 0
    underflow: int = 0
    starts: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value, "op_type": self.op_type, "type": self.type, "place": " > ".join(self.place),
                "shape": list(self.shape), "runs": self.runs, "elements": self.elements, "min": self.minimum,
                "max": self.maximum, "nan": self.nan, "inf": self.inf, "overflow": self.overflow,
                "underflow": self.underflow, "starts": self.starts}


@dataclass
class Trace:
    """A run's outputs, a row for each value in the order of first computation, and the first op beyond fp16.

    `first` is that op as MIL, or "".
    """

    function: str
    rows: list[TraceRow] = field(default_factory=list)
    outputs: dict[str, Any] = field(default_factory=dict)
    first: str = ""


def trace_function(
    program: Program, feeds: Mapping[str, Any], *, function: str | None = None, precision: str = "float32",
    state: dict[str, Array] | None = None, quirks: Sequence[str] = (), description: Any = None,
) -> Trace:
    """Run one function of `program` and record statistics of every op's results. Raises the errors of `Runtime`.

    `description` is the function's, as for `Runtime`.
    """
    from ..runtime import Runtime
    from ..runtime.feeds import read_stored_feeds
    from ..runtime.model_description import apply_description

    collector = TraceCollector(math.inf if precision == "float16" else MIN_FP16_OVERFLOW)
    runtime = Runtime(program, function=function, precision=precision, quirks=quirks, observer=collector)
    if description is not None:
        feeds = apply_description(description, feeds)
    feeds = read_stored_feeds(program.functions[runtime.function].inputs, feeds)
    collector.start(FunctionValues(runtime.function, program.functions[runtime.function]), {**feeds, **(state or {})})
    outputs = runtime(feeds, state)
    first = format_op(collector.first) if collector.first is not None else ""
    return Trace(runtime.function, list(collector.rows.values()), outputs, first)


class TraceCollector:
    """An observer of one or several runs; numbers of magnitude `limit` or more are beyond fp16."""

    def __init__(self, limit: float) -> None:
        self.rows: dict[Var, TraceRow] = {}
        self.first: Operation | None = None
        self._limit = np.float64(limit)  # numpy would round a Python number to fp16 in a comparison with an fp16 array
        self._beyond: dict[Var, bool] = {}

    def start(self, values: FunctionValues, given: Mapping[str, Any]) -> None:
        self._values = values
        self._beyond = {var: self._is_beyond(given.get(name)) for name, var in values.function.inputs.items()}

    def __call__(self, op: Operation, var: Var, value: Any) -> None:
        row = self.rows.get(var)
        if row is None:
            row = self.rows[var] = TraceRow(var.name, op.op_type, format_type(var), self._values.place(op))
        row.runs += 1
        if not hasattr(value, "numpy"):  # a list or a string
            return
        beyond = self._record_result(row, value.numpy())
        if beyond and not any(
            self._is_operand_beyond(each) for operand in _list_operands(op) for each in self._values.sources(operand)
        ):
            row.starts = True
            self.first = self.first or op
        self._beyond[var] = beyond  # set last: in a loop the op may have read its own previous result

    def _is_operand_beyond(self, var: Var) -> bool:
        """Return whether an operand is beyond fp16.

        A constant is read for this, so call it only if the op overflows.
        """
        if var not in self._beyond:
            self._beyond[var] = is_constant(var) and self._is_beyond(var.val)
        return self._beyond[var]

    def _is_beyond(self, value: Any) -> bool:
        array = np.asarray(value)
        return array.dtype.kind == "f" and bool(np.any(np.abs(array) >= self._limit))

    def _record_result(self, row: TraceRow, array: Array) -> bool:
        """Add one result to its row; return whether it is beyond fp16."""
        row.shape = tuple(array.shape)
        row.elements += array.size
        if array.dtype.kind != "f":
            _extend_range(row, array)
            return False
        finite = array[np.isfinite(array)]
        nan = int(np.count_nonzero(np.isnan(array)))
        inf, size = array.size - finite.size - nan, np.abs(finite)
        over = int(np.count_nonzero(size >= self._limit))
        row.nan, row.inf, row.overflow = row.nan + nan, row.inf + inf, row.overflow + over
        if math.isfinite(self._limit):
            row.underflow += int(np.count_nonzero((size <= _MAX_FP16_UNDERFLOW) & (size > 0)))
        _extend_range(row, finite)
        return bool(inf or over)


def _list_operands(op: Operation) -> list[Var]:
    return [*get_flat_inputs(op), *(out for block in op.blocks for out in block.outputs)]


def _extend_range(row: TraceRow, array: Array) -> None:
    if array.size:
        low, high = float(array.min()), float(array.max())
        row.minimum = low if row.minimum is None else min(row.minimum, low)
        row.maximum = high if row.maximum is None else max(row.maximum, high)
