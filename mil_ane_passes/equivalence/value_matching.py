"""Matching of values between two functions, and the dependencies of a value."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from coremltools.converters.mil.mil import Block, Function, Operation, Var

from ..ir.query import get_flat_inputs, iterate_nested_ops, iterate_ops_inside_out
from ..ir.value_numbering import ValueNumbering
from ..utils.garbage_collection import pause_garbage_collection
from .coverage import BlockPath, iterate_nested_blocks

__all__ = [
    "FunctionMatch",
    "FunctionValues",
    "OpMatch",
    "find_ancestors",
    "find_counterparts",
    "find_state_updates",
    "is_constant",
    "list_operands",
    "match_functions",
]

_STATE_OPS = frozenset({"read_state", "write_state", "coreml_update_state"})
"Ops whose results depend on the time at which they run, or that have side effects."


def is_constant(var: Var) -> bool:
    """Return whether `var` is stored in the program, as a const or a compressed constant."""
    return var.op is not None and _is_constant_op(var.op)


def _is_constant_op(op: Operation) -> bool:
    return bool(op.op_type == "const" or op.op_type.startswith("constexpr_"))


@dataclass(frozen=True)
class OpMatch:
    """The counterpart of an op of the second function in the first function.

    `pairs` are the op's outputs, each with its counterpart: the value of the first function to which it may be equal.
    `operands` are the computed values that the op reads. If `is_same`, the counterparts are the results of an equal op
    on the counterparts of `operands`.
    """

    operands: tuple[Var, ...]
    pairs: tuple[tuple[Var, Var], ...]
    is_same: bool
    counterpart: Operation
    "The op of the first function that computes the first counterpart."


@dataclass(frozen=True)
class FunctionMatch:
    """The matches of the ops and inputs of the second function in the first function.

    `inputs` maps an input to the input of the first function with the same name and type.
    """

    ops: Mapping[Operation, OpMatch]
    inputs: Mapping[Var, Var]


class FunctionValues:
    """The values that a function computes, including nested blocks, by block and name."""

    def __init__(self, name: str, function: Function) -> None:
        self.function = function
        self.blocks: dict[Block, BlockPath] = {block: place for place, block in iterate_nested_blocks(name, function)}
        self.computed: dict[tuple[BlockPath, str], Var] = {
            (place, var.name): var for block, place in self.blocks.items() for op in block.operations
            for var in op.outputs if not is_constant(var)}
        self.order: dict[Operation, int] = {}
        for op in iterate_ops_inside_out(function):
            self.order[op] = len(self.order)
        self.carried: dict[Var, list[Var]] = {}
        "For each loop variable of a block: its initial value, and its value for the next iteration."
        for op in (op for op in self.order if op.op_type == "while_loop"):
            for block in op.blocks:
                self.carried.update(zip(block.inputs, map(list, zip(op.loop_vars, op.blocks[1].outputs))))
        self._named: dict[str, list[Var]] = {}
        for (_, called), var in self.computed.items():
            self._named.setdefault(called, []).append(var)

    def place(self, op: Operation) -> BlockPath:
        return self.blocks[op.enclosing_block]

    def sources(self, var: Var) -> list[Var]:
        """Follow a loop variable back to values that are fed, stored or computed; for another value, return it alone.
        """
        found: list[Var] = []
        pending, seen = [var], {var}
        while pending:
            each = pending.pop()
            ways = self.carried.get(each)
            if ways is None:
                found.append(each)
                continue
            fresh = [way for way in dict.fromkeys(ways) if way not in seen]
            seen.update(fresh)
            pending += fresh
        return found

    def named(self, name: str) -> list[Var]:
        """Return all values of that name, in any block."""
        return self._named.get(name, [])


def find_counterparts(
    before: FunctionValues, after: FunctionValues, mapping: Mapping[str, str]
) -> dict[Var, list[Var]]:
    """Map values of `after` to their counterparts in `before`.

    The counterparts are values of the same name in the same block, and the values that `mapping` (name before -> name
    after) lists.
    """
    pairs: dict[Var, list[Var]] = {}
    for key, var in after.computed.items():
        if key in before.computed:
            pairs.setdefault(var, []).append(before.computed[key])
    for old, new in mapping.items():
        for target in after.named(new):
            pairs.setdefault(target, []).extend(var for var in before.named(old) if var not in pairs[target])
    return {var: stands_for for var, stands_for in pairs.items() if stands_for}


@pause_garbage_collection()
def match_functions(before: FunctionValues, after: FunctionValues, mapping: Mapping[str, str]) -> FunctionMatch:
    """Match the inputs and ops of the function `after`, without those of nested blocks, with values of `before`.

    Inputs match if they have the same name and type. An op is the same as an op of `before` if it has the same type and
    equal constants, and reads the counterparts of that op's operands. The counterpart of the result of any other op is
    the value of the same name, or the one that `mapping` (name before -> name after) lists; downstream ops are matched
    as if the two were equal.
    """
    numbering = ValueNumbering()
    first: dict[int, Var] = {}
    numbering.number_inputs(before.function)
    for op in before.function.operations:
        _number_op(numbering, op)
        if not _is_constant_op(op):
            first.update((numbering.numbers[var], var) for var in op.outputs if numbering.numbers[var] not in first)
    numbering.number_inputs(after.function)
    inputs = {var: other for name, var in after.function.inputs.items()
              if (other := before.function.inputs.get(name)) is not None
              and numbering.numbers[var] == numbering.numbers[other]}
    named, inner = find_counterparts(before, after, mapping), set(before.function.operations)
    found: dict[Operation, OpMatch] = {}
    for op in after.function.operations:
        _number_op(numbering, op)
        if _is_constant_op(op):
            continue
        numbers = [numbering.numbers[var] for var in op.outputs]
        is_same = bool(numbers) and all(number in first for number in numbers)
        if is_same:
            pairs = [(var, first[number]) for var, number in zip(op.outputs, numbers)]
        else:
            pairs = [(var, other) for var in op.outputs for other in named.get(var, ())[:1] if other.op in inner]
            numbering.numbers.update((var, numbering.numbers[other]) for var, other in pairs)
        if pairs:
            found[op] = OpMatch(list_operands(op, after.function), tuple(pairs), is_same, pairs[0][1].op)
    return FunctionMatch(found, inputs)


def _number_op(numbering: ValueNumbering, op: Operation) -> None:
    if op.op_type in _STATE_OPS or any(inner.op_type in _STATE_OPS for block in op.blocks
                                       for inner in iterate_nested_ops(block)):
        numbering.assign_new_numbers(op)
    else:
        numbering.number_op(op)


def list_operands(op: Operation, function: Function) -> tuple[Var, ...]:
    """List the computed values of `function` that an op reads, also inside its blocks."""
    read = [*get_flat_inputs(op)]
    for block in op.blocks:
        read += block.outputs
        read += [var for inner in iterate_nested_ops(block) for var in get_flat_inputs(inner)]
        read += [var for inner in iterate_nested_ops(block) for each in inner.blocks for var in each.outputs]
    inputs = set(function.inputs.values())
    return tuple(dict.fromkeys(var for var in read if not is_constant(var) and (
        var in inputs or (var.op is not None and var.op.enclosing_block is function))))


def find_state_updates(values: FunctionValues, state: str) -> list[Operation]:
    """Return the ops that write the state called `state`, in program order."""
    held = values.function.inputs.get(state)
    return [op for op in values.order
            if op.op_type in ("write_state", "coreml_update_state") and op.inputs["state"] is held]


def find_ancestors(values: FunctionValues, outputs: Collection[str], states: Iterable[str]) -> set[Var]:
    """Return all values on which one of the named outputs, or the final value of one of the states, depends."""
    reached: set[Var] = set()
    pending = [var for var in values.function.outputs if var.name in outputs]
    for state in states:
        pending += _find_state_sources(values, state)
    while pending:
        var = pending.pop()
        if var in reached:
            continue
        reached.add(var)
        if var.op is None:
            if var in values.function.inputs.values():
                pending += _find_state_sources(values, var.name)  # only inputs that are states have updates
            continue
        pending += get_flat_inputs(var.op)
        pending += [out for block in var.op.blocks for out in block.outputs]
    return reached


def _find_state_sources(values: FunctionValues, state: str) -> list[Var]:
    """Return the values on which the updates of a state depend: written values, and conditions of enclosing blocks."""
    found: list[Var] = []
    for op in find_state_updates(values, state):
        found += [*get_flat_inputs(op), *op.outputs]
        owner = op.enclosing_block.outer_op
        while owner is not None:
            found += get_flat_inputs(owner)
            owner = owner.enclosing_block.outer_op
    return found
