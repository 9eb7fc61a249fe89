"""The results of a run, optionally op by op, as data, as JSON and as text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .._version import __version__
from ..equivalence.comparison import to_arrays
from ..equivalence.trace import TraceRow
from ..utils.text_format import format_lines, format_short_repr
from .table import format_table

__all__ = ["RunReport", "TraceReport"]


@dataclass
class RunReport:
    """One run of `function` (None: the default one) at `precision`: `outputs` and the final `states`, by name."""

    source: str
    function: str | None
    precision: str
    quirks: tuple[str, ...] = ()
    outputs: dict[str, Any] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON that `run --format json` prints: dtypes and shapes of arrays, not the numbers."""
        return {
            "schema": 1,
            "tool": "mil-ane-passes",
            "version": __version__,
            "command": "run",
            "source": self.source,
            "function": self.function,
            "precision": self.precision,
            "quirks": list(self.quirks),
            "outputs": _describe_arrays(self.outputs),
            "states": _describe_arrays(self.states),
            "first_overflow": None,
            "trace": None,
        }

    def __repr__(self) -> str:
        return format_short_repr(self, source=self.source, function=self.function, precision=self.precision,
                                 outputs=list(self.outputs), states=len(self.states))

    def __str__(self) -> str:
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
            within = "what is beyond its range was given" if beyond else "every value is within its range"
            return [f"no op overflows fp16: {within} ({self.precision})"]
        found = f"{row.overflow} of magnitude 65520 or more" if row.overflow else f"{row.inf} infinite"
        return [f"first to overflow fp16 ({self.precision}): %{row.value} in {' > '.join(row.place)}, {found} of "
                f"{row.elements} elements", f"  {self.first_overflow_mil}"]


def _describe_arrays(arrays: dict[str, Any]) -> dict[str, Any]:
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
