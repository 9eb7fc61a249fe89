"""Matching of values between two functions, and the dependencies of a value."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from coremltools.converters.mil.mil import Block, Function, Operation, Var

from ..ir.query import get_flat_inputs, iterate_ops_inside_out
from .coverage import BlockPath, iterate_nested_blocks

__all__ = ["FunctionValues", "find_ancestors", "find_counterparts", "find_state_updates", "is_constant"]


def is_constant(var: Var) -> bool:
    """Return whether `var` is stored in the program, as a const or a compressed constant."""
    return var.op is not None and (var.op.op_type == "const" or var.op.op_type.startswith("constexpr_"))


class FunctionValues:
    """The values that a function computes, nested blocks included, by place and name."""

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
        "For each loop variable of a block: the value it starts with and the one of the next iteration."
        for op in (op for op in self.order if op.op_type == "while_loop"):
            for block in op.blocks:
                self.carried.update(zip(block.inputs, map(list, zip(op.loop_vars, op.blocks[1].outputs))))
        self._named: dict[str, list[Var]] = {}
        for (_, called), var in self.computed.items():
            self._named.setdefault(called, []).append(var)

    def place(self, op: Operation) -> BlockPath:
        return self.blocks[op.enclosing_block]

    def sources(self, var: Var) -> list[Var]:
        """Follow a loop variable back to values that are fed, stored or computed.

        For other values return `var` alone.
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
        """Return all values of that name, in whichever block they are computed."""
        return self._named.get(name, [])


def find_counterparts(
    before: FunctionValues, after: FunctionValues, mapping: Mapping[str, str]
) -> dict[Var, list[Var]]:
    """Map values of `after` to their counterparts in `before`.

    These are the value of the same name in the same place, and those that `mapping` (name before -> name after) names.
    """
    pairs: dict[Var, list[Var]] = {}
    for key, var in after.computed.items():
        if key in before.computed:
            pairs.setdefault(var, []).append(before.computed[key])
    for old, new in mapping.items():
        for target in after.named(new):
            pairs.setdefault(target, []).extend(var for var in before.named(old) if var not in pairs[target])
    return {var: stands_for for var, stands_for in pairs.items() if stands_for}


def find_state_updates(values: FunctionValues, state: str) -> list[Operation]:
    """Return the ops that write the state called `state`, in program order."""
    held = values.function.inputs.get(state)
    return [op for op in values.order
            if op.op_type in ("write_state", "coreml_update_state") and op.inputs["state"] is held]


def find_ancestors(values: FunctionValues, outputs: Collection[str], states: Iterable[str]) -> set[Var]:
    """Return all values that one of the named outputs, or the final value of one of the states, depends on."""
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
                pending += _find_state_sources(values, var.name)  # only states are ever written
            continue
        pending += get_flat_inputs(var.op)
        pending += [out for block in var.op.blocks for out in block.outputs]
    return reached


def _find_state_sources(values: FunctionValues, state: str) -> list[Var]:
    """Return the values that the updates of a state depend on: those written, and conditions of enclosing blocks."""
    found: list[Var] = []
    for op in find_state_updates(values, state):
        found += [*get_flat_inputs(op), *op.outputs]
        owner = op.enclosing_block.outer_op
        while owner is not None:
            found += get_flat_inputs(owner)
            owner = owner.enclosing_block.outer_op
    return found
