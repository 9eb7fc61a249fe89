"""Values built from rows: a split for rows read one by one, a concat or stack for rows read together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from coremltools.converters.mil.mil import Var

from ...ir.builder import RewriteBuilder
from ._stored_rows import Row

__all__ = ["RowValueBuilder", "count_single_reads"]


class RowValueBuilder:
    """A builder of the values that readers need.

    `single` are the rows read one by one: a source of several is split. `instead` maps replaced values to their
    replacements.
    """

    def __init__(self, mb: RewriteBuilder, single: Iterable[tuple[int, Row]], instead: Mapping[Var, Var]) -> None:
        self._mb, self._replacements = mb, instead
        self._single_read_counts = count_single_reads(single)
        self._memo: dict[Any, Var] = {}

    def bare(self, row: Row, axis: int) -> Var:
        """Return `row` without the axis."""
        def make() -> Var:
            held = (
                self._find_replacement(row.source)
                if row.bare
                else self._mb.squeeze(x=self._kept(row, axis), axes=[axis])
            )
            return self._cast(row, held)

        return self._made(("bare", row, axis), make)

    def kept(self, row: Row, axis: int) -> Var:
        """Return `row` with an extent of 1 at the axis."""
        return self._made(("kept", row, axis), lambda: self._cast(row, self._kept(row, axis)))

    def join_rows(self, rows: Sequence[Row], axis: int) -> Var:
        """Join all of `rows` in order along the axis."""
        if len(rows) > 1 and all(row.bare for row in rows):
            return self._mb.stack(values=[self.bare(row, axis) for row in rows], axis=axis)
        runs = ([row for _, row in run] for _, run in groupby(enumerate(rows), _make_run_key))
        pieces = [piece for run in runs for piece in self._piece(run, axis)]
        return pieces[0] if len(pieces) == 1 else self._mb.concat(values=pieces, axis=axis)

    def _piece(self, rows: Sequence[Row], axis: int) -> list[Var]:
        first = rows[0]
        if first.place is None or len(rows) == 1:
            return [self.kept(row, axis) for row in rows]
        if len(rows) == first.source.shape[axis]:
            return [self._cast(first, self._find_replacement(first.source))]
        return [self._cast(first, self._slice_rows(first.source, first.place, len(rows), axis))]

    def _kept(self, row: Row, axis: int) -> Var:
        if row.bare:
            return self._mb.expand_dims(x=self._find_replacement(row.source), axes=[axis])
        if row.place is None:
            return self._find_replacement(row.source)
        if self._single_read_counts[row.source, axis] < 2:
            return self._slice_rows(row.source, row.place, 1, axis)
        return self._parts(row.source, axis)[row.place]

    def _parts(self, source: Var, axis: int) -> list[Var]:
        def split() -> Any:
            now = self._find_replacement(source)
            with self._mb.at(self._mb.find_insertion_point(now), source.name):
                return list(self._mb.split(x=now, num_splits=int(source.shape[axis]), axis=axis))

        parts: list[Var] = self._mb.once(("rows", source, axis), split)
        return parts

    def _slice_rows(self, source: Var, begin: int, count: int, axis: int) -> Var:
        free = [each != axis for each in range(source.rank)]
        first, last = ([0 if masked else place for masked in free] for place in (begin, begin + count))
        made: Var = self._mb.slice_by_index(
            x=self._find_replacement(source), begin=first, end=last, begin_mask=free, end_mask=free
        )
        return made

    def _cast(self, row: Row, var: Var) -> Var:
        for dtype in row.casts:
            var = self._mb.cast(x=var, dtype=dtype)
        return var

    def _made(self, key: Any, make: Any) -> Var:
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]

    def _find_replacement(self, var: Var) -> Var:
        return self._replacements.get(var, var)


def count_single_reads(single: Iterable[tuple[int, Row]]) -> Counter[tuple[Var, int]]:
    """Count the rows of each value that are read one by one along each axis."""
    return Counter((row.source, axis) for axis, row in dict.fromkeys(single) if row.place is not None)


def _make_run_key(numbered: tuple[int, Row]) -> Any:
    """Return a key that is equal for rows that follow one another in their source."""
    number, row = numbered
    return (None, number) if row.place is None else (row.source, row.casts, row.place - number)
