"""Changes made by a rewrite, found by comparing the reports before and after it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

from ...passes.plan import Row
from ..lint import LintReport

__all__ = ["find_changes"]


def find_changes(before: LintReport, after: LintReport) -> dict[str, Any]:
    """Find removed and new ops and findings, and ops that moved between ANE and CPU.

    Removed and new ones are indices into their report; moved ops are pairs of indices. Two ops are the same if they
    have the same function, type and name of the first output. Two findings are the same if they have the same key.
    """
    pairs, gone, new = _match_keys(
        [_build_op_key(row) for row in before.plan.rows], [_build_op_key(row) for row in after.plan.rows]
    )
    moved = [[one, other] for one, other in pairs
             if before.plan.rows[one].backend != after.plan.rows[other].backend]
    _, fixed, found = _match_keys([item.key for item in before.findings], [item.key for item in after.findings])
    return {"gone": gone, "new": new, "moved": moved, "fixed": fixed, "found": found}


def _build_op_key(row: Row) -> tuple[str, str, str]:
    return row.function, row.op.op_type, row.op.outputs[0].name if row.op.outputs else row.op.name


def _match_keys(
    before: Sequence[Hashable], after: Sequence[Hashable],
) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Return pairs of indices with the same key, each index used once, and the unmatched indices of both sides."""
    waiting: dict[Hashable, list[int]] = defaultdict(list)
    for place in reversed(range(len(before))):
        waiting[before[place]].append(place)
    pairs, new = [], []
    for place, key in enumerate(after):
        if waiting[key]:
            pairs.append((waiting[key].pop(), place))
        else:
            new.append(place)
    return pairs, sorted(place for left in waiting.values() for place in left), new
