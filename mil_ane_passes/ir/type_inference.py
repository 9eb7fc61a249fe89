"""Type inference by coremltools, without its side effects on the op's inputs and with a limit on evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
from coremltools.converters.mil.mil import Block, Operation, Var, get_new_symbol, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from .coremltools_internals import is_evaluated_wrongly
from .query import get_flat_inputs, is_opaque

__all__ = ["COREMLTOOLS_ERRORS", "MAX_EVALUATED_ELEMENTS", "EvaluationBudget", "count_elements", "infer_types",
           "is_scalar_update", "limit_evaluation", "propagate_symbols", "raise_not_evaluated", "refine_type"]

MAX_EVALUATED_ELEMENTS = 1 << 20
"""Most elements of an evaluated output, because a package may declare any size.

Outputs of shape computations are far smaller, and a million elements are evaluated in milliseconds.
"""
_MAX_EVALUATED_IN_ALL = 1 << 22
"Most elements that are evaluated for one program: four ops of the largest size, or thousands of shape computations."
_ORIGINAL_AUTO_VAL = Operation._auto_val
COREMLTOOLS_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError)
"Errors that coremltools raises on inputs it does not accept; NameError: `conv_transpose` with an unknown `pad_type`."


def infer_types(op: Operation, known: Sequence[Any] = ()) -> Any:
    """Infer the output types of `op` as `op.type_inference()` does: a type, or a tuple of types.

    `known` are the types that a file declares, or those of the original of a copy; else those that the op has. A select
    whose known type is coremltools' keeps to that, as the types of its users follow from it.

    For slices and updates of slices, coremltools converts negative ends to positive ones in place. These arrays belong
    to the file, and another slice may use them on a longer axis, so a copy is passed instead. For an op with nested
    blocks, coremltools infers the types of one path only, so `_join_output_types` infers the types for all paths. For a
    select, it leaves out the condition. For an update of a state of rank 0, it refuses scalars.
    """
    if op.op_type == "coreml_update_state" and is_scalar_update(op):
        return op.state.sym_type.wrapped_type()
    if op.op_type == "select":
        chosen = op.type_inference()
        known = known or [var.sym_type for var in op.outputs or ()]
        return chosen if known and _has_form_of(chosen, known[0]) else _infer_select_type(op, chosen)
    joined = _join_output_types(op) if op.blocks else None
    if joined is not None:
        return joined
    if op.op_type not in ("slice_by_index", "slice_update"):
        return op.type_inference()
    inputs = {side: getattr(op, side) for side in ("begin", "end")}
    try:
        for side, var in inputs.items():
            setattr(op, side, SimpleNamespace(val=None if var.val is None else np.array(var.val)))
        return op.type_inference()
    finally:
        for side, var in inputs.items():
            setattr(op, side, var)


def is_scalar_update(update: Operation) -> bool:
    """Return whether an update writes a scalar to a state of rank 0 of its dtype, as which MIL has a tensor."""
    wrapped = update.state.sym_type.wrapped_type()
    return (types.is_tensor(wrapped) and not wrapped.get_shape() and types.is_scalar(update.value.sym_type)
            and update.value.sym_type == wrapped.get_primitive())


def _has_form_of(one: Any, other: Any) -> bool:
    """Return whether two types have one rank and 1 as the size of the same axes; other sizes may differ."""
    shapes = [list(each.get_shape()) if types.is_tensor(each) else [] for each in (one, other)]
    return len(shapes[0]) == len(shapes[1]) and all((a == 1) == (b == 1) for a, b in zip(*shapes))


def _infer_select_type(op: Operation, chosen: Any) -> Any:
    """Return the type of a select, with the shape of the broadcast of all its operands.

    `chosen` is coremltools' type, the broadcast of `a` and `b` alone: a number for two numbers, whatever the condition.
    """
    condition = op.cond.sym_type
    ours, other = (list(each.get_shape()) if types.is_tensor(each) else [] for each in (chosen, condition))
    sizes = [size if own == 1 else own for own, size in zip_longest(reversed(ours), reversed(other), fillvalue=1)]
    if sizes[::-1] == ours:
        return chosen
    return types.tensor(chosen.get_primitive() if types.is_tensor(chosen) else chosen, sizes[::-1])


@contextmanager
def limit_evaluation() -> Iterator[None]:
    """Limit constant folding of ops built inside the `with`: a value must not be much larger than its operands.

    Ops that coremltools evaluates wrongly (`is_evaluated_wrongly`) are not folded.

    coremltools evaluates every op whose operands are constants, and the result of a `tile` or `fill` of one number has
    any size that a package declares. Results as large as their operands, such as transposed weights, are evaluated.
    """
    Operation._auto_val = _evaluate_within_limit
    try:
        yield
    finally:
        Operation._auto_val = _ORIGINAL_AUTO_VAL


def _evaluate_within_limit(op: Operation, output_types: Any) -> Any:
    built = max(map(_count_elements, output_types), default=0)
    if is_evaluated_wrongly(op) or (
        built > MAX_EVALUATED_ELEMENTS
        and op.op_type != "const"
        and built > sum(_count_elements(var.sym_type) for var in get_flat_inputs(op))
    ):
        return (None,) * len(output_types)
    return _ORIGINAL_AUTO_VAL(op, output_types)


def _count_elements(sym_type: Any) -> int:
    """Count the elements of a value of the type; symbolic dimensions count as 1."""
    return math.prod(size for size in sym_type.get_shape() if isinstance(size, int)) if types.is_tensor(sym_type) else 1


def raise_not_evaluated() -> NoReturn:
    """Raise NotImplementedError.

    Used as `value_inference` of an op that must not be evaluated, because that reads weights.
    """
    raise NotImplementedError("large values are not read")


def refine_type(inferred: Any, known: Any) -> Any:
    """Return the type `inferred`, with its symbolic sizes replaced by the fixed sizes of the type `known`."""
    if inferred is known or not (types.is_tensor(inferred) and types.is_tensor(known)):
        return inferred
    ours, other = inferred.get_shape(), known.get_shape()
    if len(ours) != len(other):
        return inferred
    shape = [b if is_symbolic(a) and not is_symbolic(b) else a for a, b in zip(ours, other, strict=True)]
    return inferred if list(ours) == shape else types.tensor(inferred.get_primitive(), shape)


def propagate_symbols(block: Block, changed: set[Var]) -> Operation | None:
    """Infer again the types of all values in `block` that are computed from the values `changed`.

    Returns the first op whose types cannot be inferred any more, as coremltools' inference requires equal symbols:
    coremltools could not read a file with it. Returns None if there is no such op.

    The symbolic sizes of the values `changed` are other symbols than when their users were built. Values whose types
    change are added to `changed`.

    A file does not name symbols. Without this function, two sizes could have the same symbol in memory, but different
    symbols after saving and loading, and rules would match differently.
    """
    for op in block.operations:
        for inner in op.blocks:
            unreadable = propagate_symbols(inner, changed)
            if unreadable is not None:
                return unreadable
        read = [*get_flat_inputs(op), *(var for inner in op.blocks for var in inner.outputs)]
        if not changed.isdisjoint(read) and not is_opaque(op):
            inferred = _infer_symbols(op)
            if inferred is None:
                return op
            changed.update(inferred)
    return None


def _infer_symbols(op: Operation) -> list[Var] | None:
    """Set the types, and the symbolic values, of the outputs of `op` that follow from its inputs.

    Returns the changed outputs, or None if coremltools cannot infer the types.
    """
    try:
        found = infer_types(op)
        found = found if isinstance(found, tuple) else (found,)
        built = tuple(refine_type(new, var.sym_type) for new, var in zip(found, op.outputs, strict=True))
        if not all(types.is_compatible_type(new, var.sym_type) for new, var in zip(built, op.outputs)):
            return []
        unknown = [var.sym_val is not None and var.val is None for var in op.outputs]
        with limit_evaluation():
            values = op._auto_val(built) if any(unknown) else (None,) * len(built)
    except COREMLTOOLS_ERRORS:
        return None
    changed = []
    for var, sym_type, value, is_unknown in zip(op.outputs, built, values, unknown, strict=True):
        if is_unknown or sym_type is not var.sym_type:
            var._sym_type, var._sym_val = sym_type, value if is_unknown else var._sym_val
            changed.append(var)
    return changed


def _join_output_types(op: Operation) -> tuple[Any, ...] | None:
    """Join the output types of `op` over all paths through its blocks.

    Returns None for an op that coremltools infers correctly.

    coremltools infers the types of one path: the first branch of a `cond`, the body of a `while_loop` (which may never
    run). A size that differs on another path, or is unknown there, is symbolic. Raises ValueError when no single type
    fits all paths.
    """
    if op.op_type == "cond" and len(op.blocks) == 2:
        known = op.pred.val
        ways = op.blocks if known is None else (op.blocks[0 if known else 1],)
        return _join_paths([[var.sym_type for var in block.outputs] for block in ways])
    if op.op_type == "while_loop" and len(op.blocks) == 2:
        return _join_paths([[var.sym_type for var in ends] for ends in (op.loop_vars, op.blocks[1].outputs)])
    return None


def _join_paths(ways: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    first = list(ways[0])
    for way in ways[1:]:
        first = [_widen_type(a, b) for a, b in zip(first, way, strict=True)]
    return tuple(first)


def _widen_type(a: Any, b: Any) -> Any:
    """Return a type that fits both. Raises ValueError if no type does."""
    if a is b or a == b:
        return a
    if not (types.is_tensor(a) and types.is_tensor(b)):
        return a
    ours, other = a.get_shape(), b.get_shape()
    if a.get_primitive() != b.get_primitive() or len(ours) != len(other):
        raise ValueError(f"one path gives {a.__type_info__()}, another one {b.__type_info__()}")
    shape = [_join_size(x, y) for x, y in zip(ours, other)]
    return types.tensor(a.get_primitive(), shape)


def _join_size(x: Any, y: Any) -> Any:
    if is_symbolic(x):
        return x
    if is_symbolic(y):
        return y
    return x if x == y else get_new_symbol()


def count_elements(shape: Iterable[Any]) -> int:
    """Return the number of elements of a shape over its known dimensions; a dimension of 0 counts as 1."""
    return math.prod(max(size, 1) for size in shape if isinstance(size, int))


class EvaluationBudget:
    """Number of elements that may still be evaluated for a program: at most `each` per op, and `in_all` in total."""

    def __init__(self, each: int = MAX_EVALUATED_ELEMENTS, in_all: int = _MAX_EVALUATED_IN_ALL) -> None:
        self._each, self._left = each, in_all

    def can_evaluate(self, count: int) -> bool:
        """Return whether an op with outputs of `count` elements may be evaluated."""
        return count <= min(self._each, self._left)

    def spend_elements(self, count: int) -> None:
        """Subtract `count` evaluated elements."""
        self._left -= count
