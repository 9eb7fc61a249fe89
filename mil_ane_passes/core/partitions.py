"""What of a plan lies on the CPU between stretches on the ANE, and why: who is unsupported there, and who is dragged
along.

Weights that are only unpacked (`constexpr_*`) go where their readers go and are no part of an partition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from coremltools.converters.mil.mil import Var

from .plan import ANE_OUTPUT_MS, ENTER_ANE_MS, TRANSITION_MS, Plan, Row

__all__ = ["CpuPartition", "StrandedOps", "find_cpu_partitions", "find_stranded_ops", "iterate_rows_by_function"]


@dataclass(frozen=True)
class CpuPartition:
    """Rows of one function, in order and without a gap, that are predicted on the CPU. `first`, `last`: whether it
    stands at the function's start, at its end."""

    rows: tuple[Row, ...]
    first: bool
    last: bool

    @property
    def refused(self) -> list[Row]:
        """The cause: ops unsupported on the ANE, or is not known to. What is nested in one is no cause itself."""
        return [row for row in self.rows if not row.takes and not row.depth]

    @property
    def stranded(self) -> list[Row]:
        """Ops supported on the ANE and that are predicted on the CPU all the same: leaving it costs less."""
        return [row for row in self.rows if row.takes]

    @property
    def milliseconds(self) -> float:
        return sum(row.cost.of(row.engine) for row in self.rows)

    @property
    def inner(self) -> bool:
        """Whether the ANE is left for it and entered again."""
        return not self.first and not self.last


@dataclass(frozen=True)
class StrandedOps:
    """Neighbours supported on the ANE and that are predicted on the CPU: what the ANE would save on them, what it costs
    to get there and back."""

    rows: tuple[Row, ...]
    saved_ms: float
    needs: float


def iterate_rows_by_function(plan: Plan) -> Iterator[tuple[str, list[Row]]]:
    """(function name, its rows in order), weights left out; functions without rows are no part."""
    for name, rows in groupby(plan.rows, key=lambda row: row.function):
        placed = [row for row in rows if not row.op.op_type.startswith("constexpr_")]
        if placed:
            yield name, placed


def find_cpu_partitions(rows: list[Row]) -> list[CpuPartition]:
    """Those of one function, given its rows in order."""
    found, at = [], 0
    for backend, run in groupby(rows, key=lambda row: row.backend):
        members = tuple(run)
        if backend == "cpu":
            found.append(CpuPartition(members, at == 0, at + len(members) == len(rows)))
        at += len(members)
    return found


def find_stranded_ops(rows: list[Row], outputs: frozenset[Var] = frozenset()) -> list[StrandedOps]:
    """The stretches of one function, given its rows in order and its outputs."""
    found, at = [], 0
    for (backend, takes), run in groupby(rows, key=lambda row: (row.backend, row.takes)):
        members = tuple(run)
        end = at + len(members)
        if backend == "cpu" and takes:
            beside = [other.backend for other in (*rows[at - 1:at], *rows[end:end + 1])]
            changes = beside.count("cpu") - beside.count("ane")
            entries = 1 - beside.count("ane")  # beside one segment it only grows, between two it joins them
            made = sum(var in outputs for row in members for var in row.op.outputs)
            needs = changes * TRANSITION_MS + entries * ENTER_ANE_MS + made * ANE_OUTPUT_MS
            saves = sum(row.cost.of(row.engine) - row.cost.of("ane") for row in members)
            found.append(StrandedOps(members, saves, needs))
        at = end
    return found
