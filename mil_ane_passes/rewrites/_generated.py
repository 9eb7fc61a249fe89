"""Constants in the place of what a model generates, and the sizes that a generated value takes from others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ..core.build import RewriteBuilder
from ..core.edit import first_op
from ..core.query import consumers, is_symbolic, value
from ._lift import same_op

__all__ = ["Ends", "Size", "constant", "first_elements", "float_ends", "line", "replaced", "sizes", "too_large"]

_DEEPEST, _LONGEST, _MOVES = 16, 16, 4
"How far back a shape is followed, how many numbers it has at most, and how many moves stand before a cast."
_LAYOUT = ("expand_dims", "squeeze", "reshape", "transpose", "identity")
Array = np.ndarray[Any, Any]


class Size(NamedTuple):
    """Where a number of a shape comes from: axis `axis` of `var`."""

    var: Var
    axis: int


def constant(mb: RewriteBuilder, what: tuple[Any, ...], make: Callable[[], Array | np.generic]) -> Var:
    """A const of `make()`, one for all of the block who want the same."""

    def made() -> Any:
        with mb.at(first_op(mb.block), "_".join(str(each) for each in what[:5] if isinstance(each, (str, int)))):
            return mb.const(val=make())

    found: Var = mb.once(what, made)
    return found


def too_large(nbytes: int, max_bytes: int) -> str:
    return f"the constant is {nbytes} bytes, above max_bytes={max_bytes}"


@dataclass(frozen=True)
class Ends:
    """Where integers become floating-point numbers of type `kind`: each cast, and the ops of layout before it."""

    kind: Any
    casts: tuple[tuple[tuple[Operation, ...], Operation], ...]


def float_ends(op: Operation) -> Ends | None:
    """The casts to one floating-point type that all readers of `op` are, or lead to by layout alone; else None."""
    found: list[tuple[tuple[Operation, ...], Operation]] = []
    pending: list[tuple[tuple[Operation, ...], Var]] = [((), op.outputs[0])]
    while pending:
        path, var = pending.pop()
        readers = consumers(var)
        if not readers or var.consuming_blocks or len(found) + len(pending) > _LONGEST or len(path) > _MOVES:
            return None
        for reader in readers:
            if reader.enclosing_block is not op.enclosing_block:
                return None
            if reader.op_type == "cast" and types.is_float(reader.outputs[0].dtype):
                found.append((path, reader))
            elif reader.op_type in _LAYOUT and all(
                    given is var or (isinstance(given, Var) and given.val is not None)
                    for given in reader.inputs.values()):
                pending.append(((*path, reader), reader.outputs[0]))
            else:
                return None
    kinds = {cast.outputs[0].dtype for _, cast in found}
    return Ends(kinds.pop(), tuple(found)) if len(kinds) == 1 else None


def replaced(mb: RewriteBuilder, ends: Ends, made: Var) -> dict[Var, Var]:
    """What takes the place of the casts when `made`, of their type, takes that of the integers."""
    instead = {}
    for path, cast in ends.casts:
        value = made
        with mb.at(cast):
            for move in path:
                value = same_op(mb, move, x=value)
        instead[cast.outputs[0]] = value
    return instead


def sizes(shape: Var, depth: int = 0) -> list[int | Size | None] | None:
    """Where each number of a one-dimensional (or scalar) `shape` comes from; None for what is not known."""
    if shape.val is not None:
        return [int(each) for each in np.ravel(shape.val)] if np.size(shape.val) <= _LONGEST else None
    op = shape.op
    if op is None or depth > _DEEPEST:
        return None
    if op.op_type == "shape":
        return [Size(op.x, axis) if is_symbolic(extent) else int(extent) for axis, extent in enumerate(op.x.shape)]
    if op.op_type == "concat":
        return _joined([sizes(var, depth + 1) for var in op.inputs["values"]], op.inputs["values"])
    if op.op_type not in _STEPS:
        return None
    before = sizes(op.x, depth + 1)
    return None if before is None else _STEPS[op.op_type](op, before)


def _joined(parts: list[list[int | Size | None] | None], given: Any) -> list[int | Size | None] | None:
    lengths = [1 if var.rank == 0 else var.shape[0] for var in given]
    if any(is_symbolic(length) for length in lengths) or sum(map(int, lengths)) > _LONGEST:
        return None
    return [each for part, length in zip(parts, lengths) for each in (part or [None] * int(length))]


def _gathered(op: Operation, before: list[int | Size | None]) -> list[int | Size | None] | None:
    places = value(op.indices)
    if places is None or op.x.rank != 1:
        return None
    return [before[place] if -len(before) <= place < len(before) else None for place in np.ravel(places)]


def _sliced(op: Operation, before: list[int | Size | None]) -> list[int | Size | None] | None:
    if op.x.rank != 1 or any(op.inputs[name] is None or op.inputs[name].val is None for name in ("begin", "end")):
        return None
    masks = [bool((value(op.inputs.get(name)) or [False])[0]) for name in ("begin_mask", "end_mask")]
    begin, end = (None if mask else int(value(op.inputs[name])[0]) for mask, name in zip(masks, ("begin", "end")))
    step = int((value(op.inputs.get("stride")) or [1])[0])
    single = bool((value(op.inputs.get("squeeze_mask")) or [False])[0])
    return [before[begin or 0]] if single and -len(before) <= (begin or 0) < len(before) else before[begin:end:step]


def _kept(op: Operation, before: list[int | Size | None]) -> list[int | Size | None] | None:
    return before if types.is_int(op.outputs[0].dtype) else None


_STEPS: dict[str, Callable[[Operation, list[int | Size | None]], list[int | Size | None] | None]] = {
    "gather": _gathered, "slice_by_index": _sliced, "cast": _kept, "identity": _kept, "squeeze": _kept,
    "expand_dims": _kept, "reshape": _kept,
}


def line(mb: RewriteBuilder, size: Size, rank: int, axis: int) -> Var:
    """A part of the size's value that is as long, along `axis` of `rank` axes; the others are 1.

    Of floating point: integers are cast, in one op at the edge, as what follows would leave the ANE with them.
    """
    var = size.var
    if not types.is_float(var.dtype):
        var = mb.once(("cast", var), lambda: mb.cast(x=size.var, dtype="fp16"))
    ends = [int(each != size.axis) for each in range(var.rank)]
    part = var if var.rank == 1 else mb.slice_by_index(
        x=var, begin=[0] * var.rank, end=ends, end_mask=[each == size.axis for each in range(var.rank)])
    if (rank, axis) == (var.rank, size.axis):
        return part
    result: Var = mb.reshape(x=part, shape=[-1 if each == axis else 1 for each in range(rank)])
    return result


def first_elements(mb: RewriteBuilder, held: Var, like: Var, axis: int) -> Var:
    """As many elements of const `held` as `like` has along `axis`, of which no element is read.

    The two are joined, and as many elements cut off the end as `held` has.
    """
    joined = mb.concat(values=[held, like], axis=axis)
    ends = [0] * held.rank
    ends[axis] = -int(held.shape[axis])
    result: Var = mb.slice_by_index(x=joined, begin=[0] * held.rank, end=ends,
                                    end_mask=[each != axis for each in range(held.rank)])
    return result
