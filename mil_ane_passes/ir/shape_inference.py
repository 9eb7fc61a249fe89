"""Inference of all types and values of a function from the shapes of its inputs, in place, by coremltools.

The file declares the types of loop variables. If the initial value of a loop variable has a known size, and the body
returns the same size for it, this is the size of the loop variable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from coremltools.converters.mil.mil import Block, Function, Operation, Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from .clone import clone_function
from .coremltools_internals import evaluate_op, get_typed_value, set_stored_type, set_typed_value
from .oversized_inputs import Rejected, reject_oversized_inputs
from .query import get_flat_inputs, is_opaque
from .type_inference import (
    COREMLTOOLS_ERRORS,
    MAX_EVALUATED_ELEMENTS,
    EvaluationBudget,
    count_elements,
    infer_types,
    refine_type,
)

__all__ = ["ShapeInference", "Sizes", "get_sizes", "infer_fixed_sizes", "set_input_shape"]

Sizes = tuple[int | None, ...]
_MAX_ROUNDS = 8
"Most rounds of guesses about the sizes of one loop, as each infers the whole body; then the declared types are used."
_EVALUATION_LIMITS = 1 << 22, 1 << 25
"Most elements of one op's outputs, and of all ops, that are evaluated: masks of 2048 x 2048, and their operands."
_EVALUATION_LIMITS_OF_SIZES = 1 << 12, MAX_EVALUATED_ELEMENTS
"The same where sizes alone are inferred: sizes are computed from vectors of a few elements."


def get_sizes(sym_type: Any) -> Sizes | None:
    """Return the sizes of a pymil type (unknown ones are None); None if it is not a tensor or its rank is unknown."""
    if types.is_state(sym_type):
        return get_sizes(sym_type.wrapped_type())
    if not types.is_tensor(sym_type):
        return () if types.is_scalar(sym_type) else None
    shape = sym_type.get_shape()
    if any(is_symbolic(size) and str(size).startswith("*") for size in shape):
        return None
    return tuple(None if is_symbolic(size) else int(size) for size in shape)


def set_input_shape(function: Function, name: str, shape: Iterable[int]) -> Var:
    """Declare the shape of an input or state; `ShapeInference` then infers the values that depend on it."""
    var, sizes = function.inputs[name], tuple(shape)
    function.placeholder_inputs[name].sym_shape = sizes
    inner = var.sym_type.wrapped_type() if types.is_state(var.sym_type) else var.sym_type
    made = types.tensor(inner.get_primitive(), sizes)
    set_stored_type(var, types.state(made) if types.is_state(var.sym_type) else made)
    return var


def infer_fixed_sizes(function: Function, shapes: Mapping[str, Iterable[int]]) -> dict[Var, tuple[int, ...]]:
    """Infer the sizes of the values that have symbolic sizes, if inputs have these `shapes`; others are omitted.

    The function is not changed: the shapes are those of a copy, which shares its weights.
    """
    fixed = clone_function(function)
    ShapeInference(fixed, [set_input_shape(fixed, name, shape) for name, shape in shapes.items()],
                   _EVALUATION_LIMITS_OF_SIZES)
    inputs = zip(function.inputs.values(), fixed.inputs.values(), strict=True)
    found = {}
    for var, copied in (*inputs, *_iterate_vars_of_both(function, fixed)):
        own, sizes = get_sizes(var.sym_type), get_sizes(copied.sym_type)
        if sizes is not None and (own is None or None in own):
            known = tuple(size for size in sizes if size is not None)
            if len(known) == len(sizes):
                found[var] = known
    return found


def _iterate_vars_of_both(block: Block, other: Block) -> Iterator[tuple[Var, Var]]:
    """Yield each computed value of `block` and of nested ones, with that of its copy."""
    for op, copied in zip(block.operations, other.operations, strict=True):
        if op.op_type == "const":
            continue
        for inner, inner_copy in zip(op.blocks, copied.blocks, strict=True):
            yield from zip(inner.inputs, inner_copy.inputs, strict=True)
            yield from _iterate_vars_of_both(inner, inner_copy)
        yield from zip(op.outputs, copied.outputs, strict=True)


class ShapeInference:
    """Infers the types and values that depend on the `changed` values of a function.

    `limits` are the most elements of one op's outputs, and of all ops, that are evaluated.

    `declared` are the previous types of all values that were inferred again. If coremltools' inference contradicts
    them, the op keeps its types, and is added to `rejected` with coremltools' error ("" if it only infers other types).
    """

    def __init__(
        self, function: Function, changed: Iterable[Var], limits: tuple[int, int] = _EVALUATION_LIMITS
    ) -> None:
        self.declared: dict[Var, Any] = {}
        self.rejected: dict[Operation, str] = {}
        self._changed = set(changed)
        self._budget = EvaluationBudget(*limits)
        with function:  # coremltools reads the opset of the current function
            self._infer_block(function)

    def _infer_block(self, block: Block) -> None:
        for op in block.operations:
            if op.op_type == "while_loop" and len(op.blocks) == 2 and hasattr(op, "loop_vars"):
                self._infer_loop(op)
            else:
                for inner in op.blocks:
                    self._infer_block(inner)
            read = [*get_flat_inputs(op), *(var for inner in op.blocks for var in inner.outputs)]
            if not is_opaque(op) and not self._changed.isdisjoint(read):
                self._infer_op(op)

    def _infer_op(self, op: Operation) -> None:
        then = [self.declared.setdefault(var, var.sym_type) for var in op.outputs]
        self.rejected.pop(op, None)
        try:
            reject_oversized_inputs(type(op), op.inputs, len(then))
            found = infer_types(op)
            found = found if isinstance(found, tuple) else (found,)
            if len(found) != len(then) or not all(map(types.is_compatible_type, found, then)):
                raise Rejected
        except (*COREMLTOOLS_ERRORS, Rejected) as error:
            self.rejected[op] = "" if isinstance(error, Rejected) else " ".join(str(error).split())
            made, values = tuple(then), (None,) * len(then)
        else:
            made = tuple(map(refine_type, found, then))
            values = self._evaluate(op, made)
        for var, sym_type, value in zip(op.outputs, made, values, strict=True):
            if sym_type is not var.sym_type or value is not None or get_typed_value(var) is not None:
                self._changed.add(var)
            set_stored_type(var, sym_type)
            set_typed_value(var, value)

    def _evaluate(self, op: Operation, made: tuple[Any, ...]) -> tuple[Any, ...]:
        count = sum(count_elements(each.get_shape()) if types.is_tensor(each) else 1 for each in made)
        if not self._budget.can_evaluate(count):
            return (None,) * len(made)
        try:
            values = evaluate_op(op, made)
        except COREMLTOOLS_ERRORS:
            return (None,) * len(made)
        if any(value is not None for value in values):
            self._budget.spend_elements(count)
        return values

    def _infer_loop(self, op: Operation) -> None:
        """Infer the blocks of a loop, with sizes of its variables that are valid in every iteration."""
        condition, body = op.blocks
        then = [self.declared.setdefault(var, var.sym_type) for var in body.inputs]
        for block in op.blocks:
            for var in block.inputs:
                self.declared.setdefault(var, var.sym_type)
        wrong: set[tuple[int, int]] = set()
        for last in (*[False] * _MAX_ROUNDS, True):
            made = [kind if last else _guess_sizes(kind, first.sym_type, {axis for at, axis in wrong if at == place})
                    for place, (kind, first) in enumerate(zip(then, op.loop_vars))]
            for block in op.blocks:
                for var, sym_type in zip(block.inputs, made, strict=True):
                    if var.sym_type is not sym_type:
                        self._changed.add(var)
                        set_stored_type(var, sym_type)
            self._infer_block(condition)
            self._infer_block(body)
            failed = {(place, axis) for place, (kind, guess, out) in enumerate(zip(then, made, body.outputs))
                      for axis in _find_other_sizes(kind, guess, out.sym_type)}
            if not failed:
                return
            wrong |= failed


def _guess_sizes(declared: Any, first: Any, wrong: set[int]) -> Any:
    """Return the type of a loop variable with unknown sizes taken from its initial value, except for axes in `wrong`.
    """
    sizes, known = get_sizes(declared), get_sizes(first)
    if sizes is None or known is None or len(sizes) != len(known) or not types.is_tensor(declared):
        return declared
    shape = [old if size is not None or new is None or axis in wrong else new
             for axis, (old, size, new) in enumerate(zip(declared.get_shape(), sizes, known))]
    return declared if shape == list(declared.get_shape()) else types.tensor(declared.get_primitive(), shape)


def _find_other_sizes(declared: Any, guess: Any, out: Any) -> list[int]:
    """Return the axes for which the body returns another size than the guessed one."""
    if guess is declared:
        return []
    sizes, guessed, made = get_sizes(declared) or (), get_sizes(guess) or (), get_sizes(out)
    return [axis for axis, (size, new) in enumerate(zip(sizes, guessed)) if size is None and new is not None
            and (made is None or axis >= len(made) or made[axis] != new)]
