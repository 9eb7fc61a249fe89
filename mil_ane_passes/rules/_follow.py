"""Where a value goes: its readers, through the ops that only carry or prepare it."""

from __future__ import annotations

from collections.abc import Callable

from coremltools.converters.mil.mil import Operation, Var, types

from ..core.query import consumers

__all__ = ["is_whole", "readers"]

_MOST = 64
"How many ops are followed at most."
_CARRY = frozenset({
    "cast", "expand_dims", "squeeze", "reshape", "transpose", "slice_by_index", "slice_by_size", "split", "concat",
    "stack", "tile", "identity", "gather",
})


def is_whole(var: Var) -> bool:
    """Whether `var` holds integers or truth values."""
    return bool(types.is_int(var.dtype) or types.is_bool(var.dtype))


def readers(var: Var, carries: Callable[[Operation], bool] | None = None) -> list[Operation]:
    """The ops that read `var`, itself or carried: of an op that `carries` the readers are followed, not itself.

    Without `carries`, what moves integers from one place to another carries.
    """
    carries = carries or (lambda op: op.op_type in _CARRY and all(is_whole(out) for out in op.outputs))
    found: dict[Operation, None] = {}
    pending, visited = [var], {var}
    while pending and len(visited) <= _MOST:
        at = pending.pop(0)
        for op in consumers(at):
            if not carries(op):
                found[op] = None
                continue
            fresh = [out for out in op.outputs if out not in visited]
            visited.update(fresh)
            pending.extend(fresh)
    return list(found)
