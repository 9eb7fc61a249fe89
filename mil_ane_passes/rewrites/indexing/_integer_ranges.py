"""Ranges of integer values, inferred from the ops that compute them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ...ir.query import is_const, is_symbolic

__all__ = ["IntegerBounds", "can_hold_bounds", "find_integer_bounds"]

IntegerBounds = tuple[int, int]
_DTYPE_BOUNDS: dict[Any, IntegerBounds] = {
    types.int8: (-128, 127), types.uint8: (0, 255), types.int16: (-32768, 32767), types.uint16: (0, 65535),
    types.int32: (-2 ** 31, 2 ** 31 - 1), types.bool: (0, 1),
}
_MAX_VALUES_VISITED = 64
"Most values that are visited for one range."


def can_hold_bounds(kind: Any, bounds: IntegerBounds | None) -> bool:
    """Return whether a type can represent all integers within the bounds of `find_integer_bounds`."""
    own = _DTYPE_BOUNDS.get(kind)
    return own is not None and bounds is not None and own[0] <= bounds[0] and bounds[1] <= own[1]


def find_integer_bounds(var: Var) -> IntegerBounds | None:
    """Return the smallest and the largest integer that `var` can be; None where it is not an integer."""
    return _find_bounds(var, [_MAX_VALUES_VISITED])


def _find_bounds(var: Var, left: list[int]) -> IntegerBounds | None:
    own = _DTYPE_BOUNDS.get(var.dtype)
    left[0] -= 1
    if own is None or left[0] < 0 or var.op is None:
        return own
    if is_const(var):
        values = np.asarray(var.val)
        return (int(values.min()), int(values.max())) if values.size else own
    reading = _READERS.get(var.op.op_type)
    found = reading(var.op, var, left) if reading is not None else None
    # What does not fit wraps around: then only the bounds of the type are known.
    return found if can_hold_bounds(var.dtype, found) else own


def _make_union_reader(*names: str) -> Callable[[Operation, Var, list[int]], IntegerBounds | None]:
    def read(op: Operation, var: Var, left: list[int]) -> IntegerBounds | None:
        found = []
        for name in names:
            given = op.inputs[name]
            found += [_find_bounds(each, left) for each in (given if isinstance(given, (list, tuple)) else [given])]
        known = [each for each in found if each is not None]
        return (min(low for low, _ in known), max(high for _, high in known)) if len(known) == len(found) else None

    return read


def _make_binary_reader(
    combine: Callable[[IntegerBounds, IntegerBounds], IntegerBounds | None],
) -> Callable[[Operation, Var, list[int]], IntegerBounds | None]:
    def read(op: Operation, var: Var, left: list[int]) -> IntegerBounds | None:
        x, y = _find_bounds(op.x, left), _find_bounds(op.y, left)
        return combine(x, y) if x is not None and y is not None else None

    return read


def _multiply_bounds(x: IntegerBounds, y: IntegerBounds) -> IntegerBounds:
    ends = [one * other for one in x for other in y]
    return min(ends), max(ends)


def _bound_remainder(x: IntegerBounds, y: IntegerBounds) -> IntegerBounds | None:
    """Return the bounds of x mod y for x >= 0 and y > 0; for other operands runtimes differ."""
    return (0, min(x[1], y[1] - 1)) if x[0] >= 0 and y[0] > 0 else None


def _bound_quotient(x: IntegerBounds, y: IntegerBounds) -> IntegerBounds | None:
    return (0, x[1]) if x[0] >= 0 and y[0] > 0 else None


def _bound_axis_index(op: Operation, var: Var, left: list[int]) -> IntegerBounds:
    """Return the bounds of an index along an axis."""
    sizes = [_DTYPE_BOUNDS[types.int32][1] if is_symbolic(size) else int(size) - 1 for size in op.x.shape]
    return 0, max(sizes, default=0)


def _bound_cumsum(op: Operation, var: Var, left: list[int]) -> IntegerBounds | None:
    given, size = _find_bounds(op.x, left), op.x.shape[int(op.axis.val)]
    if given is None or is_symbolic(size):
        return None
    return min(0, given[0]) * int(size), max(0, given[1]) * int(size)


_READERS: dict[str, Callable[[Operation, Var, list[int]], IntegerBounds | None]] = {
    **dict.fromkeys(
        (
            "cast",
            "identity",
            "reshape",
            "expand_dims",
            "squeeze",
            "transpose",
            "tile",
            "reverse",
            "split",
            "gather",
            "gather_nd",
            "gather_along_axis",
            "slice_by_index",
            "slice_by_size",
            "reduce_max",
            "reduce_min",
        ),
        _make_union_reader("x"),
    ),
    **dict.fromkeys(("concat", "stack"), _make_union_reader("values")),
    **dict.fromkeys(("reduce_argmax", "reduce_argmin", "argsort", "non_zero", "topk"), _bound_axis_index),
    "select": _make_union_reader("a", "b"),
    "shape": lambda op, var, left: (0, _DTYPE_BOUNDS[types.int32][1]),
    "cumsum": _bound_cumsum,
    "add": _make_binary_reader(lambda x, y: (x[0] + y[0], x[1] + y[1])),
    "sub": _make_binary_reader(lambda x, y: (x[0] - y[1], x[1] - y[0])),
    "mul": _make_binary_reader(_multiply_bounds),
    "mod": _make_binary_reader(_bound_remainder),
    "floor_div": _make_binary_reader(_bound_quotient),
    "minimum": _make_binary_reader(lambda x, y: (min(x[0], y[0]), min(x[1], y[1]))),
    "maximum": _make_binary_reader(lambda x, y: (max(x[0], y[0]), max(x[1], y[1]))),
}
