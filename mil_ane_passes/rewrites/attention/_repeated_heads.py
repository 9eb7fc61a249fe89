"""Match values that repeat each head of another value several times in a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from coremltools.converters.mil.mil import Operation, Var

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, get_consumers, is_opaque, is_symbolic

__all__ = [
    "RepeatedHeads", "build_heads", "build_second_operand", "find_other_reader", "match_repeated_heads",
]

_MAX_DEPTH = 8
"Maximum number of ops of a repetition; repeat_interleave becomes five, and a transpose."


class RepeatedHeads(NamedTuple):
    """A value whose slice i along `axis` is slice i // `times` of `base`.

    `base` is squeezed along axis `squeezed` (if any) and then transposed by `perm` to the order of the value.
    """

    base: Var
    squeezed: int | None
    perm: tuple[int, ...]
    axis: int
    times: int


class _Broadcast(NamedTuple):
    """A value that repeats `base`, squeezed along axis `squeezed` and transposed by `perm`, along a new axis."""

    base: Var
    squeezed: int | None
    perm: tuple[int, ...]
    axis: int
    times: int


def match_repeated_heads(var: Var, depth: int = _MAX_DEPTH) -> RepeatedHeads | None:
    """Match tile, concat, gather and repeat_interleave in the forms in which coremltools converts them."""
    op = var.op
    if op is None or not depth or is_opaque(op):
        return None
    if op.op_type == "transpose":
        inner = match_repeated_heads(op.x, depth - 1)
        perm = _read_perm(op)
        return inner and inner._replace(perm=tuple(inner.perm[at] for at in perm), axis=perm.index(inner.axis))
    if op.op_type == "gather":
        return _match_gather(op)
    if op.op_type == "concat":
        return _match_concat(op)
    return _match_merged_axes(op, depth) if op.op_type == "reshape" else None


def _read_perm(op: Operation) -> list[int]:
    return [int(at) % op.x.rank for at in op.perm.val]


def _match_gather(op: Operation) -> RepeatedHeads | None:
    """Match a gather at 0, 0, 1, 1, ..."""
    if op.indices.val is None or op.indices.rank != 1 or get_const_value(op.inputs.get("batch_dims"), 0):
        return None
    axis = int(get_const_value(op.inputs.get("axis"), 0)) % op.x.rank
    heads = op.x.shape[axis]
    if is_symbolic(heads) or op.indices.shape[0] % int(heads) or op.indices.shape[0] == heads:
        return None
    times = op.indices.shape[0] // int(heads)
    if not np.array_equal(np.asarray(op.indices.val) % int(heads), np.repeat(np.arange(int(heads)), times)):
        return None
    return _make_plain(op.x, axis, times)


def _make_plain(x: Var, axis: int, times: int) -> RepeatedHeads:
    return RepeatedHeads(x, None, tuple(range(x.rank)), axis, times)


def _match_concat(op: Operation) -> RepeatedHeads | None:
    """Match an interleaving concat of a value with itself, and one of single heads."""
    values, axis = list(op.values), get_const_value(op.axis)
    if axis is None or len(values) < 2:
        return None
    at = int(axis) % values[0].rank
    if all(value is values[0] for value in values):
        interleaved = get_const_value(op.inputs.get("interleave"), False)
        return _make_plain(values[0], at, len(values)) if interleaved else None
    heads = list(dict.fromkeys(values))
    times = len(values) // len(heads)
    if times < 2 or values != [head for head in heads for _ in range(times)]:
        return None
    base = _find_sliced_value(heads, at)
    return None if base is None else _make_plain(base, at, times)


def _find_sliced_value(heads: Sequence[Var], axis: int) -> Var | None:
    """Return the value of which `heads` are all slices of one element along `axis`, in order."""
    base: Var | None = None if heads[0].op is None else heads[0].op.inputs.get("x")
    if base is None or base.shape[axis] != len(heads):
        return None
    for number, head in enumerate(heads):
        op = head.op
        if op is None or op.inputs.get("x") is not base or head.rank != base.rank:
            return None
        if any(one != other for at, (one, other) in enumerate(zip(head.shape, base.shape, strict=True)) if at != axis):
            return None
        if op.op_type == "split":
            known = int(op.axis.val) % base.rank == axis and len(op.outputs) == len(heads)
            if not known or op.outputs[number] is not head:
                return None
        elif op.op_type not in ("slice_by_index", "slice_by_size") or head.shape[axis] != 1 or op.begin.val is None:
            return None
        elif _read_begin(op, axis) != number:
            return None
    return base


def _read_begin(op: Operation, axis: int) -> int:
    mask = get_const_value(op.inputs.get("begin_mask"))
    return 0 if mask is not None and mask[axis] else int(op.begin.val[axis]) % int(op.x.shape[axis])


def _match_merged_axes(op: Operation, depth: int) -> RepeatedHeads | None:
    """Match a reshape that merges an axis with the one after it, along which the value is repeated."""
    found = _match_broadcast(op.x, depth - 1)
    if found is None or not found.axis:
        return None
    before, after = list(op.x.shape), list(op.outputs[0].shape)
    merged = [*before[:found.axis - 1], before[found.axis - 1] * before[found.axis], *before[found.axis + 1:]]
    return RepeatedHeads(*found._replace(axis=found.axis - 1)) if merged == after else None


def _match_broadcast(var: Var, depth: int) -> _Broadcast | None:
    """Match a value that is repeated along an axis of its own."""
    op = var.op
    if op is None or not depth or is_opaque(op):
        return None
    if op.op_type == "transpose":
        inner = _match_broadcast(op.x, depth - 1)
        if inner is None:
            return None
        perm = _read_perm(op)
        rest = [at - (at > inner.axis) for at in perm if at != inner.axis]
        return inner._replace(perm=tuple(inner.perm[at] for at in rest), axis=perm.index(inner.axis))
    if op.op_type == "stack" and all(value is op.values[0] for value in op.values) and op.axis.val is not None:
        at = int(op.axis.val) % var.rank
        return _Broadcast(op.values[0], None, tuple(range(var.rank - 1)), at, len(op.values))
    tiled = _match_tile(op)
    if tiled is not None:
        x, at, times = tiled
        return _make_squeezed(x, at, times) if x.shape[at] == 1 else None
    return _match_split_tile(op) if op.op_type == "reshape" else None


def _match_tile(op: Operation) -> tuple[Var, int, int] | None:
    """Match a tile along one axis, or a concat of a value with itself: (value, axis, times)."""
    if op.op_type == "concat" and op.axis.val is not None and all(value is op.values[0] for value in op.values):
        plain = not get_const_value(op.inputs.get("interleave"), False)
        return (op.values[0], int(op.axis.val) % op.values[0].rank, len(op.values)) if plain else None
    if op.op_type != "tile" or op.reps.val is None:
        return None
    repeated = [(at, int(times)) for at, times in enumerate(op.reps.val) if int(times) != 1]
    return (op.x, *repeated[0]) if len(repeated) == 1 else None


def _make_squeezed(x: Var, axis: int, times: int) -> _Broadcast:
    """Describe the repetition of `x` along its `axis` of extent 1, from before that axis was added if it was."""
    perm = tuple(range(x.rank - 1))
    inner: Var | None = x.op.x if x.op is not None and x.op.op_type in ("expand_dims", "reshape") else None
    if inner is not None and tuple(inner.shape) == (*x.shape[:axis], *x.shape[axis + 1:]):
        return _Broadcast(inner, None, perm, axis, times)
    return _Broadcast(x, axis, perm, axis, times)


def _match_split_tile(op: Operation) -> _Broadcast | None:
    """Match a reshape that splits a tiled axis into the repetitions and what is repeated."""
    tiled = None if op.x.op is None else _match_tile(op.x.op)
    if tiled is None:
        return None
    x, at, times = tiled
    split = [*x.shape[:at], times, *x.shape[at:]]
    return _Broadcast(x, None, tuple(range(x.rank)), at, times) if split == list(op.outputs[0].shape) else None


def find_other_reader(var: Var, allowed: Sequence[tuple[str, str]]) -> str:
    """Return why the repeated `var` is still needed after all `allowed` (op type, input) that read it are rewritten.

    The result is empty if it is not, so that the repetition goes away.
    """
    for each in get_consumers(var):
        if not any(each.op_type == kind and each.inputs.get(name) is var for kind, name in allowed):
            return f"the repeated value is also read by {each.op_type}"
        if sum(bound is var for bound in each.inputs.values()) > 1 and each.op_type == "matmul":
            return "the repeated value is both operands"
    return "the repeated value is an output" if var.consuming_blocks else ""


def build_heads(mb: RewriteBuilder, heads: RepeatedHeads) -> Var:
    """Build the value that is repeated, in the order of the repeated one."""
    base, perm = _find_transposed_value(mb, heads)
    if perm == tuple(range(base.rank)):
        return base
    transposed: Var = mb.once(("transposed", base, perm), lambda: mb.transpose(x=base, perm=list(perm)))
    return transposed


def build_second_operand(mb: RewriteBuilder, product: Operation, heads: RepeatedHeads) -> dict[str, Any]:
    """Build the second operand of a matmul from `heads`, with the matmul's own transpose where that suffices."""
    base, perm = _find_transposed_value(mb, heads)
    if perm != (*range(base.rank - 2), base.rank - 1, base.rank - 2):
        return {"y": build_heads(mb, heads)}
    return {"y": base, "transpose_y": not get_const_value(product.inputs.get("transpose_y"), False)}


def _find_transposed_value(mb: RewriteBuilder, heads: RepeatedHeads) -> tuple[Var, tuple[int, ...]]:
    """Return the value before all transposes, and the permutation that they make together."""
    base, perm = heads.base, heads.perm
    if heads.squeezed is not None:
        base = mb.once(("squeezed", base, heads.squeezed), lambda: mb.squeeze(x=heads.base, axes=[heads.squeezed]))
    while base.op is not None and base.op.op_type == "transpose":
        below = _read_perm(base.op)
        perm, base = tuple(below[at] for at in perm), base.op.x
    return base, perm
