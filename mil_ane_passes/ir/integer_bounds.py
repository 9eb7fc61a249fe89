"""Static bounds on integers: indices, counters and sizes, from the ops that compute them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from .loop_steps import find_counter_bounds
from .query import is_const, is_opaque, is_symbolic

__all__ = ["IntegerBounds", "can_hold_integers", "find_integer_bounds", "follow_integers"]

IntegerBounds = tuple[int, int]
_DTYPE_BOUNDS: dict[Any, IntegerBounds] = {
    types.int8: (-128, 127), types.uint8: (0, 255), types.int16: (-32768, 32767), types.uint16: (0, 65535),
    types.int32: (-2 ** 31, 2 ** 31 - 1), types.bool: (0, 1),
}
_MOVING_OPS = (
    "cast", "identity", "reshape", "expand_dims", "squeeze", "transpose", "tile", "reverse", "split", "gather",
    "gather_nd", "gather_along_axis", "slice_by_index", "slice_by_size", "reduce_max", "reduce_min",
)
"Ops whose results are among the values of x."
_BoundsReader = Callable[[Operation, Var, "list[int]"], "IntegerBounds | None"]
_MAX_VALUES_VISITED = 64
"Maximum number of values to visit for one range."


def can_hold_integers(kind: Any, bounds: IntegerBounds | None) -> bool:
    """Return whether a type can represent all integers within the bounds of `find_integer_bounds`."""
    own = _DTYPE_BOUNDS.get(kind)
    return own is not None and bounds is not None and own[0] <= bounds[0] and bounds[1] <= own[1]


def find_integer_bounds(var: Var) -> IntegerBounds | None:
    """Return the smallest and the largest integer that `var` can be; None where it may be another number."""
    return _find_bounds(var, [_MAX_VALUES_VISITED])


def follow_integers(var: Var) -> Var:
    """Follow `var` to the first Var of a chain of ops that move or select its elements, or cast them."""
    while var.op is not None and var.op.op_type in _MOVING_OPS and not is_opaque(var.op):
        var = var.op.x
    return var


def _find_bounds(var: Var, left: list[int]) -> IntegerBounds | None:
    own = _DTYPE_BOUNDS.get(var.dtype)
    left[0] -= 1
    if var.op is None:
        return find_counter_bounds(var) or own
    if own is None or left[0] < 0:
        return own
    if is_const(var):
        values = np.asarray(var.val)
        return (int(values.min()), int(values.max())) if values.size else own
    read = _READERS.get(var.op.op_type)
    found = read(var.op, var, left) if read is not None else None
    # Values out of range wrap around: then only the bounds of the dtype are known.
    return found if can_hold_integers(var.dtype, found) else own


def _make_union_reader(*names: str) -> _BoundsReader:
    def read_union(op: Operation, var: Var, left: list[int]) -> IntegerBounds | None:
        found = []
        for name in names:
            bound = op.inputs[name]
            found += [_find_bounds(each, left) for each in (bound if isinstance(bound, (list, tuple)) else [bound])]
        known = [each for each in found if each is not None]
        return (min(low for low, _ in known), max(high for _, high in known)) if len(known) == len(found) else None

    return read_union


def _bound_axis_index(op: Operation, var: Var, left: list[int]) -> IntegerBounds:
    """Return the bounds of an index along an axis."""
    sizes = [_DTYPE_BOUNDS[types.int32][1] if is_symbolic(size) else int(size) - 1 for size in op.x.shape]
    return 0, max(sizes, default=0)


def _bound_cumsum(op: Operation, var: Var, left: list[int]) -> IntegerBounds | None:
    bounds, size = _find_bounds(op.x, left), op.x.shape[int(op.axis.val)]
    if bounds is None or is_symbolic(size):
        return None
    return min(0, bounds[0]) * int(size), max(0, bounds[1]) * int(size)


def _make_binary_reader(
    combine: Callable[[IntegerBounds, IntegerBounds], IntegerBounds | None],
) -> _BoundsReader:
    def read_binary(op: Operation, var: Var, left: list[int]) -> IntegerBounds | None:
        x, y = _find_bounds(op.x, left), _find_bounds(op.y, left)
        return combine(x, y) if x is not None and y is not None else None

    return read_binary


def _multiply_bounds(x: IntegerBounds, y: IntegerBounds) -> IntegerBounds:
    ends = [one * other for one in x for other in y]
    return min(ends), max(ends)


def _bound_remainder(x: IntegerBounds, y: IntegerBounds) -> IntegerBounds | None:
    """Return the bounds of x mod y for x >= 0 and y > 0; for other operands runtimes differ."""
    return (0, min(x[1], y[1] - 1)) if x[0] >= 0 and y[0] > 0 else None


def _bound_quotient(x: IntegerBounds, y: IntegerBounds) -> IntegerBounds | None:
    return (0, x[1]) if x[0] >= 0 and y[0] > 0 else None


_READERS: dict[str, _BoundsReader] = {
    **dict.fromkeys(_MOVING_OPS, _make_union_reader("x")),
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
