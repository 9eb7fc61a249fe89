"""Trip counts of loops, computed by evaluating the ops that the condition depends on, step by step."""

from __future__ import annotations

from collections.abc import Iterable

from coremltools.converters.mil.mil import Block, Operation, Var

from ..utils.budget import get_current_budget
from .clone import clone_op, infer_outputs, map_inputs
from .query import get_flat_inputs, is_opaque

__all__ = ["UnknownStepCount", "count_steps"]


_MAX_COUNTED_STEPS = 10_000
"Limit on the evaluated steps: each takes some milliseconds, and no caller unrolls more."


class UnknownStepCount(Exception):
    """The number of steps is unknown; the message is the reason."""


def count_steps(op: Operation, most: int) -> tuple[int, set[Operation]]:
    """Count the steps that the while_loop `op` runs, and return the ops of its body that only count them.

    Raises UnknownStepCount, naming the value that decides, if it is unknown, and if there are more than `most` steps.
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
                f"the number of steps was not found out within {budget.max_seconds:g} s (max_seconds)"
            )
        if not _require_known_value(condition.outputs[0], _evaluate_ops(condition, tested, now)).val:
            return step, set(counting)
        env = _evaluate_ops(body, counting, now)
        now = {place: _require_known_value(body.outputs[place], env) for place in carried}
    if most > _MAX_COUNTED_STEPS:
        raise UnknownStepCount(f"it runs more than {_MAX_COUNTED_STEPS} steps, and no more are counted")
    raise UnknownStepCount(f"it runs more than {most} steps (max_steps)")


def _format_dependency(var: Var) -> str:
    return f"the number of steps depends on '{var.name}', which is known only at run time"


def _slice_backward(block: Block, required: Iterable[Var]) -> tuple[list[Operation], list[int]]:
    """Return the ops of `block` that the vars `required` depend on, in order, and the block inputs read, by index."""
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
