"""Select a band of matrices with a constant mask."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_const, is_symbolic
from ...passes.contract import Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_ane_compiler, cite_m4_study
from ...passes.examples import make_example, make_op_example
from ...rules.unsupported_ops import MasksAtRunTime
from ._generated_constants import (
    MAX_EXACT_INTEGER,
    AxisSize,
    build_shared_const,
    cut_const_to_length,
    describe_size_excess,
    extract_axis_line,
)


class ConstantBandPart(Rewrite):
    """Replace band_part, which is unsupported on the ANE, by a select with a constant mask.

    why     band_part is unsupported, so the causal mask of a transformer leaves the ANE. select is accepted.
    when    fp16, fp32 and bool; the last two axes have static size, the others any. If the band is the entire matrix,
            the op is removed. With `longest` (up to 2048) also floating-point matrices of dynamic size: row and column
            indices are constants, sliced to size as by `ane::constant_range`, and compared. Results for more rows or
            columns than `longest` are wrong.
    exact   bitwise: select copies the element or takes 0, so that an infinity or NaN outside the band is 0, as before.
    cost    a mask of one byte per element of a matrix, shared by all equal bands, up to `max_bytes`; for dynamic sizes
            `longest` numbers per dynamic axis, slices and a concat, a difference, and a comparison and a select for
            each bound.

    before
        %y: fp16[1, 8, 16] = band_part(x=%x, upper=0)
    after
        %y: fp16[1, 8, 16] = select(cond=<bool[8, 16]>, a=%x, b=0.0)
    """

    fixes = (MasksAtRunTime,)
    stage = "decompose"
    exactness = Exactness.BITWISE
    preset = "full"
    roots = ("band_part",)
    evidence = (
        cite_m4_study("band_part is unsupported; select is accepted"),
        cite_ane_compiler("band_part is unsupported on all generations, select everywhere"),
    )

    longest: int = 0
    "Maximum number of rows or columns of a matrix of dynamic size, up to 2048; 0 skips such matrices."
    max_bytes: int = 4 << 20
    "Maximum bytes of one mask."

    def match(self, op: Operation) -> Hit | Miss:
        if types.is_int(op.x.dtype):
            return Miss(op, "a band of integers, which is unsupported on the ANE, too")
        lower, upper = (int(get_const_value(op.inputs[side])) for side in ("lower", "upper"))
        if lower < 0 and upper < 0:
            return Hit(op, note="the band is the entire matrix", band=None)
        rows, columns = op.x.shape[-2:]
        if is_symbolic(rows) or is_symbolic(columns):
            return self._match_flexible(op, lower, upper)
        if int(rows) * int(columns) > self.max_bytes:
            return Miss(op, describe_size_excess(int(rows) * int(columns), self.max_bytes))
        return Hit(op, note=f"{lower} below and {upper} above the diagonal of {rows} x {columns}",
                   band=(int(rows), int(columns), lower, upper), flexible=False)

    def _match_flexible(self, op: Operation, lower: int, upper: int) -> Hit | Miss:
        """Match a matrix of dynamic size: the indices of its rows and columns are cut to its size from constants."""
        if self.longest < 1:
            return Miss(op, "the size of the matrix is symbolic; longest=N slices constants of N elements to it")
        known = [int(extent) for extent in op.x.shape[-2:] if not is_symbolic(extent)]
        if max(self.longest, lower, upper, *known) > MAX_EXACT_INTEGER:
            return Miss(
                op, f"indices or bounds above {MAX_EXACT_INTEGER}, where fp16 does not represent all integers"
            )
        if not types.is_float(op.x.dtype):
            return Miss(op, "a band of bools of dynamic size")
        return Hit(op, note=f"{lower} below and {upper} above the diagonal, up to {self.longest} elements",
                   band=(self.longest, self.longest, lower, upper), flexible=True,
                   largest_size=self.longest)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        x = hit.op.x
        if hit.band is None:
            unchanged: Var = mb.identity(x=x)
            return unchanged
        if hit.flexible:
            return self._select_by_comparison(mb, x, *hit.band[2:])
        if is_const(x):
            *_, lower, upper = hit.band
            return mb.weight(x, f"band_{lower}_{upper}", lambda: np.where(_make_band_mask(*hit.band), x.val, 0))
        mask = build_shared_const(mb, ("band", *hit.band), lambda: _make_band_mask(*hit.band))
        result: Var = mb.select(cond=mask, a=x, b=types.nptype_from_builtin(x.dtype)(0))
        return result

    def _select_by_comparison(self, mb: RewriteBuilder, x: Var, lower: int, upper: int) -> Var:
        """Select the elements whose row and column index, compared as numbers, are no further apart than the bounds."""
        number = types.nptype_from_builtin(x.dtype)  # numpy 1 makes float64 of number(0) + lower
        distance = mb.sub(x=self._build_indices(mb, x, x.rank - 2), y=self._build_indices(mb, x, x.rank - 1))
        if lower >= 0:
            x = mb.select(cond=mb.less_equal(x=distance, y=number(lower)), a=x, b=number(0))
        if upper >= 0:
            x = mb.select(cond=mb.greater_equal(x=distance, y=number(-upper)), a=x, b=number(0))
        return x

    def _build_indices(self, mb: RewriteBuilder, x: Var, axis: int) -> Var:
        """Return 0, 1, 2, ... along one of the two last axes of x."""
        dtype, symbolic = types.nptype_from_builtin(x.dtype), is_symbolic(x.shape[axis])
        count = self.longest if symbolic else int(x.shape[axis])
        matrix_axis = axis - x.rank + 2
        shape = (1, count) if matrix_axis else (count, 1)
        indices = build_shared_const(
            mb, ("places", *shape, dtype.__name__), lambda: np.arange(count, dtype=dtype).reshape(shape)
        )
        if not symbolic:
            return indices
        return cut_const_to_length(mb, indices, extract_axis_line(mb, AxisSize(x, axis), 2, matrix_axis), matrix_axis)

    def examples(self) -> Iterable[Example]:
        yield make_op_example("causal", "band_part", (1, 8, 16), {"lower": -1, "upper": 0})
        yield make_op_example("above", "band_part", (4, 6), {"lower": 0, "upper": -1})
        yield make_op_example("a band", "band_part", (2, 2, 5, 3), {"lower": 1, "upper": 2})
        yield make_op_example("all of it", "band_part", (3, 3))
        yield make_example("of truth", _build_bool_band, x=(4, 4))
        yield make_op_example("any number of matrices", "band_part", (None, 3, 4), {"upper": 0})
        yield make_op_example("integers", "band_part", (3, 3), {"upper": 0}, dtype=types.int32,
                              reason="a band of integers, which is unsupported on the ANE, too")
        yield make_op_example("any size up to", "band_part", (None, None), {"lower": 1, "upper": 0},
                              options={"longest": 16})
        yield make_op_example("any size", "band_part", (None, 4), {"upper": 0}, reason=(
            "the size of the matrix is symbolic; longest=N slices constants of N elements to it"))
        yield make_op_example("large", "band_part", (64, 64), {"upper": 0}, options={"max_bytes": 4000},
                              reason="the constant is 4096 bytes, above max_bytes=4000")


def _make_band_mask(rows: int, columns: int, lower: int, upper: int) -> np.ndarray[Any, Any]:
    """Make the mask of i - j <= `lower` and j - i <= `upper`; a negative bound does not apply."""
    below = np.arange(rows)[:, None] - np.arange(columns)
    inside: np.ndarray[Any, Any] = ((lower < 0) | (below <= lower)) & ((upper < 0) | (-below <= upper))
    return inside


def _build_bool_band(x: Var) -> Any:
    band = Builder.band_part(x=Builder.greater(x=x, y=np.float16(0)), lower=0, upper=1)
    return Builder.cast(x=band, dtype="fp16", name="y")
