"""Between which numbers an integer value lies, as far as the ops that make it say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ..core.query import is_const, is_symbolic

__all__ = ["Bounds", "bounds", "holds"]

Bounds = tuple[int, int]
_KINDS: dict[Any, Bounds] = {
    types.int8: (-128, 127), types.uint8: (0, 255), types.int16: (-32768, 32767), types.uint16: (0, 65535),
    types.int32: (-2 ** 31, 2 ** 31 - 1), types.bool: (0, 1),
}
_MOST = 64
"The values that are looked at for one answer."


def holds(kind: Any, bounds: Bounds | None) -> bool:
    """Whether a type has all numbers within `bounds`."""
    own = _KINDS.get(kind)
    return own is not None and bounds is not None and own[0] <= bounds[0] and bounds[1] <= own[1]


def bounds(var: Var) -> Bounds | None:
    """The smallest and the largest number that `var` can hold; None for what is no integer."""
    return _of(var, [_MOST])


def _of(var: Var, left: list[int]) -> Bounds | None:
    own = _KINDS.get(var.dtype)
    left[0] -= 1
    if own is None or left[0] < 0 or var.op is None:
        return own
    if is_const(var):
        values = np.asarray(var.val)
        return (int(values.min()), int(values.max())) if values.size else own
    reading = _READINGS.get(var.op.op_type)
    found = reading(var.op, var, left) if reading is not None else None
    # What does not fit wraps around: then nothing more is known than the type says.
    return found if holds(var.dtype, found) else own


def _moved(*names: str) -> Callable[[Operation, Var, list[int]], Bounds | None]:
    def read(op: Operation, var: Var, left: list[int]) -> Bounds | None:
        found = []
        for name in names:
            given = op.inputs[name]
            found += [_of(each, left) for each in (given if isinstance(given, (list, tuple)) else [given])]
        known = [each for each in found if each is not None]
        return (min(low for low, _ in known), max(high for _, high in known)) if len(known) == len(found) else None

    return read


def _both(combine: Callable[[Bounds, Bounds], Bounds | None]) -> Callable[[Operation, Var, list[int]], Bounds | None]:
    def read(op: Operation, var: Var, left: list[int]) -> Bounds | None:
        x, y = _of(op.x, left), _of(op.y, left)
        return combine(x, y) if x is not None and y is not None else None

    return read


def _product(x: Bounds, y: Bounds) -> Bounds:
    ends = [one * other for one in x for other in y]
    return min(ends), max(ends)


def _remainder(x: Bounds, y: Bounds) -> Bounds | None:
    """Of numbers that are not negative: of others runtimes differ."""
    return (0, min(x[1], y[1] - 1)) if x[0] >= 0 and y[0] > 0 else None


def _quotient(x: Bounds, y: Bounds) -> Bounds | None:
    return (0, x[1]) if x[0] >= 0 and y[0] > 0 else None


def _place(op: Operation, var: Var, left: list[int]) -> Bounds:
    """A place along an axis."""
    sizes = [_KINDS[types.int32][1] if is_symbolic(size) else int(size) - 1 for size in op.x.shape]
    return 0, max(sizes, default=0)


def _sums(op: Operation, var: Var, left: list[int]) -> Bounds | None:
    given, size = _of(op.x, left), op.x.shape[int(op.axis.val)]
    if given is None or is_symbolic(size):
        return None
    return min(0, given[0]) * int(size), max(0, given[1]) * int(size)


_READINGS: dict[str, Callable[[Operation, Var, list[int]], Bounds | None]] = {
    **dict.fromkeys(("cast", "identity", "reshape", "expand_dims", "squeeze", "transpose", "tile", "reverse", "split",
                     "gather", "gather_nd", "gather_along_axis", "slice_by_index", "slice_by_size", "reduce_max",
                     "reduce_min"), _moved("x")),
    **dict.fromkeys(("concat", "stack"), _moved("values")),
    **dict.fromkeys(("reduce_argmax", "reduce_argmin", "argsort", "non_zero", "topk"), _place),
    "select": _moved("a", "b"), "shape": lambda op, var, left: (0, _KINDS[types.int32][1]), "cumsum": _sums,
    "add": _both(lambda x, y: (x[0] + y[0], x[1] + y[1])), "sub": _both(lambda x, y: (x[0] - y[1], x[1] - y[0])),
    "mul": _both(_product), "mod": _both(_remainder), "floor_div": _both(_quotient),
    "minimum": _both(lambda x, y: (min(x[0], y[0]), min(x[1], y[1]))),
    "maximum": _both(lambda x, y: (max(x[0], y[0]), max(x[1], y[1]))),
}
