"""CPU partitions between ANE partitions: the unsupported ops that cause them and the supported ops stranded with them.

Weights that are only unpacked (`constexpr_*`) run where their users run and are not part of a partition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from coremltools.converters.mil.mil import Var

from ..passes.plan import ANE_OUTPUT_MS, ENTER_ANE_MS, TRANSITION_MS, Plan, Row

__all__ = ["TOO_SMALL", "CpuPartition", "StrandedOps", "find_cpu_partitions", "find_stranded_ops",
           "iterate_rows_by_function"]

TOO_SMALL = "all ops are supported, the model is too small for the ANE"
"The reason why a model without unsupported ops is predicted on the CPU."


@dataclass(frozen=True)
class CpuPartition:
    """Consecutive rows of one function that are predicted on the CPU.

    `first`, `last`: whether the partition is at the start or at the end of the function.
    """

    rows: tuple[Row, ...]
    first: bool
    last: bool

    @property
    def refused(self) -> list[Row]:
        """The cause: ops unsupported on the ANE or not known to be supported. Ops nested in one are not listed."""
        return [row for row in self.rows if not row.takes and not row.depth]

    @property
    def stranded(self) -> list[Row]:
        """Ops supported on the ANE but predicted on the CPU, because moving them to the ANE costs more."""
        return [row for row in self.rows if row.takes]

    @property
    def milliseconds(self) -> float:
        return sum(row.cost.of(row.engine) for row in self.rows)

    @property
    def inner(self) -> bool:
        """True if the partition is between ANE partitions: the ANE is left and entered again."""
        return not self.first and not self.last


@dataclass(frozen=True)
class StrandedOps:
    """Consecutive ops supported on the ANE but predicted on the CPU: the time the ANE would save on them (`saved_ms`),
    and the cost of the transitions there and back (`needs`)."""

    rows: tuple[Row, ...]
    saved_ms: float
    needs: float


def iterate_rows_by_function(plan: Plan) -> Iterator[tuple[str, list[Row]]]:
    """Yield (function name, its rows in order) without weights; functions without rows are skipped."""
    for name, rows in groupby(plan.rows, key=lambda row: row.function):
        placed = [row for row in rows if not row.op.op_type.startswith("constexpr_")]
        if placed:
            yield name, placed


def find_cpu_partitions(rows: list[Row]) -> list[CpuPartition]:
    """Find the CPU partitions of one function from its rows in order."""
    found, at = [], 0
    for backend, run in groupby(rows, key=lambda row: row.backend):
        members = tuple(run)
        if backend == "cpu":
            found.append(CpuPartition(members, at == 0, at + len(members) == len(rows)))
        at += len(members)
    return found


def find_stranded_ops(rows: list[Row], outputs: frozenset[Var] = frozenset()) -> list[StrandedOps]:
    """Find the groups of stranded ops of one function from its rows in order and its outputs."""
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
