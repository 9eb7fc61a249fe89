"""Edits of a pymil block in time proportional to their size: replacing vars and removing ops.

pymil's own `replace_uses_of_var_after_op` re-attaches every input of every consumer and `remove_ops` searches each
input's list of consumers. With consts shared by thousands of ops, that cost grows with the square of the program. Here
only the inputs that change are set again, and shared consts drop their removed consumers in one sweep at the end.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from coremltools.converters.mil.mil import Block, Function, Operation, Var

from ..utils.errors import RuleError
from .query import get_flat_inputs

__all__ = ["BlockEditor", "check_op_order", "get_first_op", "rebind_inputs"]


_OPS_WITH_EFFECTS = frozenset({"coreml_update_state", "write_state", "read_state", "classify"})
"Ops with side effects, or ops that the model interface refers to; never removed as unused."


class BlockEditor:
    """Edits a block during one walk over it. Call `flush` at the end; leaving the context manager calls it, too."""

    def __init__(self) -> None:
        self._dead: set[Operation] = set()
        self._stale: dict[Var, int] = {}
        self.removed = 0

    def __enter__(self) -> BlockEditor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.flush()

    def replace(self, old: Var, new: Var) -> None:
        """Replace every use of `old` by `new`. A block that returns `old` returns `new` under `old`'s name."""
        for op in dict.fromkeys(old.child_ops):
            if op in self._dead:
                continue
            op.set_inputs(**rebind_inputs(op, old, new))
        for block in dict.fromkeys(old.consuming_blocks):
            block.replace_block_output_var(old, new)
        old.consuming_blocks.clear()  # some passes of coremltools list a block twice if it returns a value twice

    def remove_if_unused(self, ops: Iterable[Operation]) -> None:
        """Remove each of `ops` whose outputs have no users, then the producers that lost their last user."""
        pending = list(ops)
        while pending:
            op = pending.pop()
            if op in self._dead or op.enclosing_block is None or op.op_type in _OPS_WITH_EFFECTS:
                continue
            if any(self._live_uses(var) or var.consuming_blocks for var in op.outputs):
                continue
            pending.extend(self._remove_op(op))

    def remove(self, ops: Iterable[Operation]) -> None:
        """Remove `ops` unconditionally. The users of each op must precede it in `ops`."""
        for op in ops:
            self._remove_op(op)

    def flush(self) -> None:
        """Drop removed ops from the consumer lists of shared consts."""
        for var in self._stale:
            var.child_ops[:] = [op for op in var.child_ops if op not in self._dead]
        self._stale.clear()

    def _live_uses(self, var: Var) -> int:
        return len(var.child_ops) - self._stale.get(var, 0)

    def _remove_op(self, op: Operation) -> list[Operation]:
        """Remove `op` and its nested blocks. Returns the producers that may have lost their last user."""
        self._dead.add(op)
        producers = []
        for block in op.blocks:
            block.set_outputs([])
            for inner in reversed(list(block.operations)):
                producers.extend(self._remove_op(inner))
        for var in get_flat_inputs(op):
            if var.op is not None and var.op.op_type == "const":
                self._stale[var] = self._stale.get(var, 0) + 1
            else:
                var.remove_child_op(op)
            if var.op is not None:
                producers.append(var.op)
        block = op.enclosing_block
        block.operations.remove(op)
        block._internal_vars.difference_update(op.internal_inputs.values())
        op.enclosing_block = None
        self.removed += op.op_type != "const"
        return producers


def rebind_inputs(op: Operation, old: Var, new: Var) -> dict[str, Var | tuple[Var, ...]]:
    """Return the inputs of `op` that read `old`, with `old` replaced by `new`."""
    found: dict[str, Var | tuple[Var, ...]] = {}
    for name, bound in op.inputs.items():
        if isinstance(bound, (list, tuple)):
            if any(var is old for var in bound):
                found[name] = tuple(new if var is old else var for var in bound)
        elif bound is old:
            found[name] = new
    return found


def get_first_op(block: Block) -> Operation | None:
    """Return the block's first op, or None for an empty block."""
    return block.operations[0] if len(block.operations) else None


def check_op_order(
    block: Block, written: Container[Operation] | None = None, visible: set[Var] | None = None
) -> None:
    """Raise RuleError if an op of `block` uses a value that is defined later or not at all: Core ML would reject it.

    `written` limits the check to these ops. The cost is linear in the number of ops.
    """
    visible = set() if visible is None else visible
    built = set(block.inputs.values() if isinstance(block, Function) else block.inputs) - visible
    visible |= built
    visible |= block._internal_vars
    for op in block.operations:
        if written is None or op in written:
            for inner in op.blocks:
                check_op_order(inner, written, visible)
            _check_visible(op.get_flattened_inputs(), f"op {op.name!r} uses", visible)
        built.update(op.outputs)
        visible.update(op.outputs)
    _check_visible(block.outputs, f"block {block.name!r} returns", visible)
    visible -= built


def _check_visible(used: Iterable[Var], who: str, visible: set[Var]) -> None:
    for var in used:
        if var not in visible:
            raise RuleError(
                f"{who} {var.name!r}, which no earlier op defines; expected ops in the order of their use: the rule "
                f"that inserted it has to choose the position"
            )
