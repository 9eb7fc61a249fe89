"""Readers of a weight: a rewrite with a new weight layout must apply to all of them, or store the weight twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from coremltools.converters.mil.mil import Block, Operation

from ...ir.query import get_consumers

__all__ = ["has_uniform_readers"]

_UNIFORM_READERS: WeakKeyDictionary[Operation, tuple[int, Any]] = WeakKeyDictionary()
"Weights whose readers were found uniform, with their number: every reader queries this, and it is computed once."


def has_uniform_readers(op: Operation, block: Block, settings: Callable[[Operation], Any]) -> bool:
    """Return whether all readers of the weight of `op` are ops of its type in `block` with the same `settings`."""
    mine = (op.op_type, block, settings(op))
    readers, known = _UNIFORM_READERS.get(op.weight.op, (0, None))
    if known == mine and len(op.weight.child_ops) <= readers:  # some of the uniform readers were removed since
        return True
    alike = all(other.op_type == op.op_type and other.enclosing_block is block and settings(other) == mine[-1]
                for other in get_consumers(op.weight))
    if alike:
        _UNIFORM_READERS[op.weight.op] = len(op.weight.child_ops), mine
    return alike
