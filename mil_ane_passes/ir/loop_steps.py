"""Trip counts of loops, computed by evaluating the ops that the condition depends on, and bounds on loop counters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
from coremltools.converters.mil.mil import Block, Operation, Var, types

from ..utils.budget import get_current_budget
from .clone import clone_op, infer_outputs, map_inputs
from .query import get_flat_inputs, is_opaque

__all__ = ["UnknownStepCount", "count_steps", "find_counter_bounds"]


_MAX_COUNTED_STEPS = 10_000
"Most steps that are evaluated to count them: each takes a few milliseconds, and no caller unrolls more."
_LARGEST_COUNTS = {types.fp16: 2**11, types.fp32: 2**24, types.int32: 2**31 - 1}
"Largest n such that a dtype represents all integers up to n."
_MOVES = ("identity", "squeeze", "expand_dims", "reshape")


class UnknownStepCount(Exception):
    """The number of steps is unknown; the message states the reason."""


def count_steps(op: Operation, most: int) -> tuple[int, set[Operation]]:
    """Count the steps of the while_loop `op`, and return the count and the ops of its body that only count steps.

    Raises UnknownStepCount if the count depends on a dynamic value (the message has its name), or exceeds `most`.
    """
    condition, body = op.blocks
    tested, read = _slice_backward(condition, condition.outputs[:1])
    carried, counting = set(read), list[Operation]()
    while True:
        counting, read = _slice_backward(body, [body.outputs[place] for place in sorted(carried)])
        if set(read) <= carried:
            break
        carried |= set(read)
    for place in sorted(carried):
        if op.loop_vars[place].val is None:
            raise UnknownStepCount(_format_dependency(op.loop_vars[place]))
    now: dict[int, Var] = {place: op.loop_vars[place] for place in carried}
    budget = get_current_budget()
    for step in range(min(most, _MAX_COUNTED_STEPS) + 1):
        if budget.is_time_over:
            raise UnknownStepCount(
                f"the number of steps was not determined within {budget.max_seconds:g} s (max_seconds)"
            )
        if not _require_known_value(condition.outputs[0], _evaluate_ops(condition, tested, now)).val:
            return step, set(counting)
        env = _evaluate_ops(body, counting, now)
        now = {place: _require_known_value(body.outputs[place], env) for place in carried}
    if most > _MAX_COUNTED_STEPS:
        raise UnknownStepCount(f"it runs more than {_MAX_COUNTED_STEPS} steps, the limit for counting")
    raise UnknownStepCount(f"it runs more than {most} steps (max_steps)")


def _format_dependency(var: Var) -> str:
    return f"the number of steps depends on '{var.name}', which is dynamic"


def _slice_backward(block: Block, required: Iterable[Var]) -> tuple[list[Operation], list[int]]:
    """Return the ops of `block` that the vars `required` depend on, in order, and the indices of the block inputs that
    these ops read."""
    places = {var: place for place, var in enumerate(block.inputs)}
    found: set[Operation] = set()
    read: list[int] = []
    pending = list(required)
    seen = set(pending)
    while pending:
        var = pending.pop()
        if var in places:
            read.append(places[var])
        elif var.op is not None and var.op.enclosing_block is block:
            if var.op not in found:
                found.add(var.op)
                fresh = [each for each in get_flat_inputs(var.op) if each not in seen]
                seen.update(fresh)
                pending += fresh
        elif var.val is None:
            raise UnknownStepCount(_format_dependency(var))
    return [op for op in block.operations if op in found], read


def _evaluate_ops(block: Block, ops: Iterable[Operation], now: dict[int, Var]) -> dict[Var, Var]:
    env = {block.inputs[place]: var for place, var in now.items()}
    for op in ops:
        if op.op_type == "const":
            continue
        if op.blocks or is_opaque(op):
            raise UnknownStepCount(_format_dependency(op.outputs[0]))
        env.update(zip(op.outputs, infer_outputs(clone_op(op, map_inputs(op, env)), op).outputs))
    return env


def _require_known_value(var: Var, env: dict[Var, Var]) -> Var:
    built = env.get(var, var)
    if built.val is None:
        raise UnknownStepCount(_format_dependency(var))
    return built


def find_counter_bounds(var: Var) -> tuple[int, int] | None:
    """Return the smallest and the largest integer value of the counter `var` of a while_loop; None for other vars.

    A counter starts at constant integers (of any dtype), each step adds a constant, non-negative integer, and the loop
    continues only while it is below a constant. The bounds include its value after the last step.
    """
    found = _find_loop_input(var)
    if found is None:
        return None
    loop, place = found
    start = _read_whole(loop.loop_vars[place])
    step = _read_step(loop.blocks[1], place)
    condition = loop.blocks[0]
    ends = [_read_end(each, condition.inputs[place]) for each in _iterate_conjuncts(condition.outputs[0])]
    last = min((end for end in ends if end is not None), default=None)
    if start is None or step is None or last is None:
        return None
    high = max(start[1], last + step[1])
    return (start[0], high) if step[0] >= 0 and max(-start[0], high) <= _LARGEST_COUNTS.get(var.dtype, -1) else None


def _find_loop_input(var: Var) -> tuple[Operation, int] | None:
    """Return the while_loop that has `var` as an input of one of its blocks, and the input's index; None otherwise."""
    block = var.child_ops[0].enclosing_block if var.op is None and var.child_ops else None
    while block is not None and block.outer_op is not None:
        if var in block.inputs:
            is_loop = block.outer_op.op_type == "while_loop"
            return (block.outer_op, list(block.inputs).index(var)) if is_loop else None
        block = block.outer_op.enclosing_block
    return None


def _read_whole(var: Var) -> tuple[int, int] | None:
    """Return the smallest and the largest integer in the constant `var`; None if it has other values."""
    if var.val is None or not np.size(var.val):
        return None
    values = np.asarray(var.val, np.float64)
    if not np.isfinite(values).all() or (values != np.round(values)).any():
        return None
    return int(values.min()), int(values.max())


def _skip_moves(var: Var) -> Var:
    while var.op is not None and var.op.op_type in _MOVES:
        var = var.op.x
    return var


def _read_step(body: Block, place: int) -> tuple[int, int] | None:
    """Return the smallest and the largest integer that a step adds to the loop variable of index `place`.

    Returns None if the step computes anything else.
    """
    op, counter = _skip_moves(body.outputs[place]).op, body.inputs[place]
    if op is None or op.op_type != "add":
        return None
    added = [other for one, other in ((op.x, op.y), (op.y, op.x)) if _skip_moves(one) is counter]
    return _read_whole(added[0]) if added else None


def _iterate_conjuncts(var: Var) -> Iterator[Var]:
    """Yield the operands of the conjunction `var`: all of them are true if `var` is."""
    var = _skip_moves(var)
    if var.op is not None and var.op.op_type == "logical_and":
        yield from _iterate_conjuncts(var.op.x)
        yield from _iterate_conjuncts(var.op.y)
    else:
        yield var


def _read_end(condition: Var, counter: Var) -> int | None:
    """Return the largest integer `counter` for which `condition` is true; None if `condition` is not a bound on it."""
    op = condition.op
    if op is None or op.op_type not in ("less", "less_equal", "greater", "greater_equal"):
        return None
    low, high = (op.x, op.y) if op.op_type.startswith("less") else (op.y, op.x)
    if _skip_moves(low) is not counter or high.val is None or not np.isfinite(high.val).all():
        return None
    end = float(np.max(high.val))
    return math.floor(end) if op.op_type.endswith("equal") else math.ceil(end) - 1
