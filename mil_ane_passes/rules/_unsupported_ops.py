"""Base of rules about op types, and helpers for findings that are sure only where the op was measured."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar, Literal

from coremltools.converters.mil.mil import Operation

from ..ane.op_support import M4, OpSupport, find_problem_rows
from ..passes.contract import Hit, Miss, Rule
from ..passes.targets import ALL_TARGETS, Gate, Generation, format_generations

__all__ = ["UnsupportedOps", "format_chips", "is_any_admitted", "make_unsupported_hit", "select_admitted"]


class UnsupportedOps(Rule):
    """A rule that reports ops by the rows of `ane/op_support.py` that have its code.

    Subclasses state code, slug, page and examples; op types, advice and evidence are those of the rows. They may add to
    the reason and name split points, which need more than the row.
    """

    refuses = True
    confidence: ClassVar[Literal["high", "medium", "low"]] = "high"
    _rows: ClassVar[dict[str, OpSupport]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        rows = find_problem_rows(cls.code)
        cls._rows, cls.roots = {row.op: row for row in rows}, tuple(row.op for row in rows)
        for problem in (row.problem for row in rows if row.problem is not None):
            cls.advice, cls.evidence = problem.advice, problem.evidence

    def describe_form(self, row: OpSupport, op: Operation) -> str:
        """Return the `{detail}` of the reason."""
        return "" if row.detail is None else row.detail(op)

    def find_splits(self, op: Operation) -> Sequence[Sequence[str]]:
        """Return split points that put `op` in a package of its own; see `Hit.split_at`."""
        return ()

    def match(self, op: Operation) -> Hit | Miss:
        row, looked_at = self._rows[op.op_type], tuple(self.generations)
        excluded = "" if row.excludes is None else row.excludes(op)
        if excluded:
            return Miss(op, excluded, near=False)
        detail = self.describe_form(row, op)
        unsupported = select_admitted(row.unsupported, looked_at)
        if unsupported:
            note = row.note.format(op=op.op_type, detail=detail, where=format_generations(unsupported))
            message = row.find_message(op) if is_any_admitted(M4, looked_at) else None
            return Hit(op, note=note, message=message, split_at=self.find_splits(op))
        disputed = select_admitted(row.disputed, looked_at)
        if disputed:
            note = row.disputed_note.format(op=op.op_type, detail=detail, where=format_chips(disputed))
            return Hit(op, note=note, sure=False)
        if row.supported:
            return Miss(op, f"{op.op_type} is accepted on {row.supported[0].chip}", near=False)
        note = row.note.format(op=op.op_type, detail=detail, where="")
        note += f": unsupported elsewhere, not measured on {format_chips(looked_at)}"
        return Hit(op, note=note, sure=False, split_at=self.find_splits(op))


def make_unsupported_hit(
    rule: Rule, op: Operation, note: str, *, seen: Gate = ALL_TARGETS, message: str | None = None,
    covers: Sequence[Operation] = (), split_at: Sequence[Sequence[str]] = (),
) -> Hit:
    """Make a hit for `op`: unsupported on the ANE of the generations `seen`, and not measured on the others.

    `message` is Core ML's own, as it was measured on an M4; `split_at` as in `Hit`.
    """
    looked_at = tuple(rule.generations)
    if is_any_admitted(seen, looked_at):
        return Hit(op, note=note, message=message if is_any_admitted(M4, looked_at) else None, covers=covers,
                   split_at=split_at)
    return Hit(
        op,
        note=f"{note}: unsupported elsewhere, not measured on {format_chips(looked_at)}",
        sure=False,
        covers=covers,
        split_at=split_at,
    )


@functools.cache
def is_any_admitted(gate: Gate, generations: tuple[Generation, ...]) -> bool:
    """Return whether `gate` includes at least one of `generations`."""
    return any(gate.includes(generation) for generation in generations)


@functools.cache
def select_admitted(gates: tuple[Gate, ...], generations: tuple[Generation, ...]) -> tuple[Generation, ...]:
    """Return those of `generations` that one of `gates` includes."""
    return tuple(each for each in generations if any(gate.includes(each) for gate in gates))


@functools.cache
def format_chips(generations: tuple[Generation, ...]) -> str:
    """Format the generations, each by its last chip."""
    return ", ".join(generation.chips[-1].upper() for generation in generations)
