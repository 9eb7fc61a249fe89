"""Remove the wrapping of negative indices if none can be negative."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.loop_steps import find_counter_bounds
from ...ir.query import is_const, is_symbolic
from ...passes.contract import Exactness, Example, Hit, Miss, Rewrite, Vendor
from ...passes.evidence import cite_m4_study
from ...passes.examples import make_example, make_weight

__all__ = ["find_integer_bounds"]

_IntegerBounds = tuple[int, int]
_DTYPE_BOUNDS: dict[Any, _IntegerBounds] = {
    types.int8: (-128, 127), types.uint8: (0, 255), types.int16: (-32768, 32767), types.uint16: (0, 65535),
    types.int32: (-2 ** 31, 2 ** 31 - 1), types.bool: (0, 1),
}
_MOVING_OPS = (
    "cast", "identity", "reshape", "expand_dims", "squeeze", "transpose", "tile", "reverse", "split", "gather",
    "gather_nd", "gather_along_axis", "slice_by_index", "slice_by_size", "reduce_max", "reduce_min",
)
"Ops whose results are among the values of x."
_BoundsReader = Callable[[Operation, Var, "list[int]"], "_IntegerBounds | None"]
_MAX_VALUES_VISITED = 64
"Maximum number of values to visit for one range."


class PlainIndices(Rewrite):
    """Remove the wrapping of negative indices if the ops that compute them exclude negative values.

    why     coremltools adds n to negative indices of gather: greater_equal, add and select on int32, which are
            unsupported on the ANE, with casts. Results of topk, argmax or a count of bools are never negative.
    when    select(i >= c, i, ...) where each i is at least c, because of its dtype (uint16), constants, or the ops that
            compute it: topk, argmax, argsort, shape, cumsum, sums and products, data movement of their results, and
            integer loop counters that increase from a constant to a constant. Also a cast to a wider integer type and
            back, or to a third one, which becomes one cast. Ids from an input may be negative; see `ane::index_by_mod`.
    exact   bitwise: the same integers.
    cost    lower: the preparation ops are removed.

    before
        %0: fp16[4, 2], %1: uint16[4, 2] = topk(x=%x, k=2, axis=1, output_indices_dtype=uint16)
        %2: int32[4, 2] = cast(x=%1, dtype=int32)
        %3: bool[4, 2] = greater_equal(x=%2, y=0)
        %4: int32[4, 2] = add(x=%2, y=8)
        %5: int32[4, 2] = select(cond=%3, a=%2, b=%4)
        %6: uint16[4, 2] = cast(x=%5, dtype=uint16)
        %y: fp16[4, 2, 3] = gather(x=<fp16[8, 3]>, indices=%6)
    after
        %0: fp16[4, 2], %1: uint16[4, 2] = topk(x=%x, k=2, axis=1, output_indices_dtype=uint16)
        %y: fp16[4, 2, 3] = gather(x=<fp16[8, 3]>, indices=%1)
    """

    code, slug = "ANE271", "needless-index-preparation"
    stage = "structure"
    exactness = Exactness.BITWISE
    preset = "full"
    confidence = "high"
    roots = ("select", "cast")
    evidence = (
        cite_m4_study("cast, greater_equal, add and select on int32 are unsupported; indices of topk in uint16 "
                      "are accepted", rows=True),
        Vendor("since iOS17 negative indices have to be converted by select(index >= 0, index, index + max_index)",
               source="https://apple.github.io/coremltools/source/coremltools.converters.mil.mil.ops.defs.html"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if op.op_type == "cast":
            return _match_cast(op)
        condition = op.cond.op
        if condition is None or condition.op_type != "greater_equal" or condition.x is not op.a \
                or not types.is_int(op.a.dtype):
            return Miss(op, "does not wrap indices", near=False)
        if list(op.a.shape) != list(op.outputs[0].shape):
            return Miss(op, "its result is larger than the indices")
        least, most = find_integer_bounds(op.a), find_integer_bounds(condition.y)
        if least is None or most is None or least[0] < most[1]:
            return Miss(op, "its indices may be negative")
        return Hit(op, note=f"the indices are at least {least[0]}", plain=op.a, kind="")

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        plain: Var = mb.cast(x=hit.plain, dtype=hit.kind) if hit.kind else hit.plain
        return plain

    def examples(self) -> Iterable[Example]:
        yield make_example("topk", _build_topk_lookup, x=(4, 8))
        yield make_example("argmax", lambda x: _build_wrapped_lookup(Builder.reduce_argmax(x=x, axis=1)), x=(4, 8))
        yield make_example("count", lambda x: _build_wrapped_lookup(Builder.cumsum(
            x=_build_casts(x, "bool", "int32"), axis=0, exclusive=True)), opset=ct.target.iOS15, x=(4, 8))
        yield make_example("wide and back", lambda i: Builder.cast(
            x=Builder.reverse(x=_build_casts(i, "int32", "int16"), axes=[0]), dtype="fp16", name="y"),
            dtype=types.int16, i=(3,))
        yield make_example("wide and on", lambda i: _build_casts(i, "int32", "uint16", name="y"),
                           dtype=types.int16, i=(3,))
        narrow = partial(make_example, reason="int16 may not represent its source", dtype=types.int32, i=(3,))
        yield narrow("narrow and on", lambda i: _build_casts(i, "int16", "uint16", name="y"))
        yield narrow("narrow and back", lambda i: _build_casts(i, "int16", "int32", name="y"))
        yield make_example("ids", lambda i: _build_wrapped_lookup(i), reason="its indices may be negative",
                           dtype=types.int32, i=(4,))
        yield make_example("numbers", lambda x: Builder.select(
            cond=Builder.greater_equal(x=x, y=np.float16(0)), a=x, b=np.float16(0), name="y"),
            reason="does not wrap indices", x=(4,))


def _match_cast(op: Operation) -> Hit | Miss:
    """Match the second of two casts of integers where the first preserves every value."""
    inner = op.x.op
    if inner is None or inner.op_type != "cast" or not all(
            types.is_int(var.dtype) for var in (inner.x, op.x, op.outputs[0])):
        return Miss(op, "is not a second cast of integers", near=False)
    between, result = (types.builtin_to_string(var.dtype) for var in (op.x, op.outputs[0]))
    if not _can_hold_bounds(op.x.dtype, find_integer_bounds(inner.x)):
        return Miss(op, f"{between} may not represent its source")
    if inner.x.dtype == op.outputs[0].dtype:
        return Hit(op, note=f"to {between} and back", plain=inner.x, kind="")
    return Hit(op, note=f"through {between} to {result}", plain=inner.x, kind=result)


def _can_hold_bounds(kind: Any, bounds: _IntegerBounds | None) -> bool:
    """Return whether a type can represent all integers within the bounds of `find_integer_bounds`."""
    own = _DTYPE_BOUNDS.get(kind)
    return own is not None and bounds is not None and own[0] <= bounds[0] and bounds[1] <= own[1]


def find_integer_bounds(var: Var) -> _IntegerBounds | None:
    """Return the smallest and the largest integer that `var` can be; None where it may be another number."""
    return _find_bounds(var, [_MAX_VALUES_VISITED])


def _find_bounds(var: Var, left: list[int]) -> _IntegerBounds | None:
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
    return found if _can_hold_bounds(var.dtype, found) else own


def _make_union_reader(*names: str) -> _BoundsReader:
    def read_union(op: Operation, var: Var, left: list[int]) -> _IntegerBounds | None:
        found = []
        for name in names:
            bound = op.inputs[name]
            found += [_find_bounds(each, left) for each in (bound if isinstance(bound, (list, tuple)) else [bound])]
        known = [each for each in found if each is not None]
        return (min(low for low, _ in known), max(high for _, high in known)) if len(known) == len(found) else None

    return read_union


def _bound_axis_index(op: Operation, var: Var, left: list[int]) -> _IntegerBounds:
    """Return the bounds of an index along an axis."""
    sizes = [_DTYPE_BOUNDS[types.int32][1] if is_symbolic(size) else int(size) - 1 for size in op.x.shape]
    return 0, max(sizes, default=0)


def _bound_cumsum(op: Operation, var: Var, left: list[int]) -> _IntegerBounds | None:
    bounds, size = _find_bounds(op.x, left), op.x.shape[int(op.axis.val)]
    if bounds is None or is_symbolic(size):
        return None
    return min(0, bounds[0]) * int(size), max(0, bounds[1]) * int(size)


def _make_binary_reader(
    combine: Callable[[_IntegerBounds, _IntegerBounds], _IntegerBounds | None],
) -> _BoundsReader:
    def read_binary(op: Operation, var: Var, left: list[int]) -> _IntegerBounds | None:
        x, y = _find_bounds(op.x, left), _find_bounds(op.y, left)
        return combine(x, y) if x is not None and y is not None else None

    return read_binary


def _multiply_bounds(x: _IntegerBounds, y: _IntegerBounds) -> _IntegerBounds:
    ends = [one * other for one in x for other in y]
    return min(ends), max(ends)


def _bound_remainder(x: _IntegerBounds, y: _IntegerBounds) -> _IntegerBounds | None:
    """Return the bounds of x mod y for x >= 0 and y > 0; for other operands runtimes differ."""
    return (0, min(x[1], y[1] - 1)) if x[0] >= 0 and y[0] > 0 else None


def _bound_quotient(x: _IntegerBounds, y: _IntegerBounds) -> _IntegerBounds | None:
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


def _build_topk_lookup(x: Var) -> Var:
    wide = Builder.cast(x=Builder.topk(x=x, k=2, axis=1, output_indices_dtype="uint16")[1], dtype="int32")
    return _build_wrapped_lookup(wide, narrow="uint16")


def _build_wrapped_lookup(indices: Var, narrow: str = "") -> Var:
    """Build a lookup in eight rows, whose indices are wrapped and cast to `narrow`."""
    is_valid = Builder.greater_equal(x=indices, y=np.int32(0))
    wrapped = Builder.select(cond=is_valid, a=indices, b=Builder.add(x=indices, y=np.int32(8)))
    if narrow:
        wrapped = Builder.cast(x=wrapped, dtype=narrow)
    result: Var = Builder.gather(x=make_weight(8, 3), indices=wrapped, axis=0, name="y")
    return result


def _build_casts(x: Var, between: str, to: str, **name: str) -> Var:
    """Cast `x` to `between` and then to `to`."""
    result: Var = Builder.cast(x=Builder.cast(x=x, dtype=between), dtype=to, **name)
    return result
