"""Transitive readers of a value, through the ops that only carry or prepare it."""

from __future__ import annotations

from collections.abc import Callable

from coremltools.converters.mil.mil import Operation, Var, types

from ..ir.query import get_consumers

__all__ = ["DATA_MOVEMENT_OPS", "find_transitive_readers", "is_integer_or_bool"]

_MAX_VALUES_FOLLOWED = 64
"Most values that are followed."
DATA_MOVEMENT_OPS = frozenset({
    "cast", "expand_dims", "squeeze", "reshape", "transpose", "slice_by_index", "slice_by_size", "split", "concat",
    "stack", "tile", "identity", "gather",
})
"Ops whose results are elements of their operands."


def is_integer_or_bool(var: Var) -> bool:
    """Return whether `var` is an integer or a bool."""
    return bool(types.is_int(var.dtype) or types.is_bool(var.dtype))


def find_transitive_readers(var: Var, carries: Callable[[Operation], bool] | None = None) -> list[Operation]:
    """Return the ops that read `var` directly or through carriers: an op that `carries` is replaced by its own readers.

    Without `carries`, the ops that move integers or bools carry.
    """
    carries = carries or (
        lambda op: op.op_type in DATA_MOVEMENT_OPS and all(is_integer_or_bool(out) for out in op.outputs)
    )
    found: dict[Operation, None] = {}
    pending, visited = [var], {var}
    while pending and len(visited) <= _MAX_VALUES_FOLLOWED:
        at = pending.pop(0)
        for op in get_consumers(at):
            if not carries(op):
                found[op] = None
                continue
            fresh = [out for out in op.outputs if out not in visited]
            visited.update(fresh)
            pending.extend(fresh)
    return list(found)
