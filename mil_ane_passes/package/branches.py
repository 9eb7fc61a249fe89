"""The types of what ops with nested blocks give: all that each way through them can make.

The host gives the types of one way: the first branch of a `cond`, the body of a `while_loop` (which may never run). A
size that is another on another way, or not known there, is no size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coremltools.converters.mil.mil import Operation, get_new_symbol, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

__all__ = ["joined"]


def joined(op: Operation) -> tuple[Any, ...] | None:
    """The output types of `op`; None for an op the host's own rule is right about.

    Raises ValueError when the ways give what no one type holds.
    """
    if op.op_type == "cond" and len(op.blocks) == 2:
        known = op.pred.val
        ways = op.blocks if known is None else (op.blocks[0 if known else 1],)
        return _joined([[var.sym_type for var in block.outputs] for block in ways])
    if op.op_type == "while_loop" and len(op.blocks) == 2:
        return _joined([[var.sym_type for var in ends] for ends in (op.loop_vars, op.blocks[1].outputs)])
    return None


def _joined(ways: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    first = list(ways[0])
    for way in ways[1:]:
        first = [_wider(a, b) for a, b in zip(first, way, strict=True)]
    return tuple(first)


def _wider(a: Any, b: Any) -> Any:
    """A type that both fit; ValueError when there is none."""
    if a is b or a == b:
        return a
    if not (types.is_tensor(a) and types.is_tensor(b)):
        return a
    ours, theirs = a.get_shape(), b.get_shape()
    if a.get_primitive() != b.get_primitive() or len(ours) != len(theirs):
        raise ValueError(f"one way gives {a.__type_info__()}, another {b.__type_info__()}")
    shape = [_size(x, y) for x, y in zip(ours, theirs)]
    return types.tensor(a.get_primitive(), shape)


def _size(x: Any, y: Any) -> Any:
    if is_symbolic(x):
        return x
    if is_symbolic(y):
        return y
    return x if x == y else get_new_symbol()
