"""Attention that is written as a product, elementwise ops, a softmax and a product, computed part by part.

The scores of long sequences are larger than the processor's caches and than all other values of a program. A part of
them is computed, normalized and multiplied at a time, by the same torch functions as one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from coremltools.converters.mil.mil import types

from ..ir.query import get_const_value, get_static_shape, get_type_info, is_const_or_compressed
from .numeric import canonicalize_layout
from .ops.activation import apply_softmax
from .ops.transformers import attend_in_parts

__all__ = ["AttentionChain", "compute_chain", "find_attention_chains"]

_FEW_SCORES = 1 << 20
"""The most scores that are left to the ops: 4 MB of float32 stay in the caches of most processors anyway."""
_SCORES_AT_ONCE = 1 << 18
"The most scores in a part, with which products are fast, and which stay in a core's own cache: 1 MB of float32."
_ELEMENTWISE: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "real_div": torch.div}


class AttentionChain(NamedTuple):
    """The ops of one attention, in their order. Only the next op reads the result of each but the last."""

    scores: Any
    elementwise: tuple[Any, ...]
    softmax: Any
    product: Any

    @property
    def ops(self) -> tuple[Any, ...]:
        """All ops of the chain."""
        return (self.scores, *self.elementwise, self.softmax, self.product)


def find_attention_chains(ops: Iterable[Any], readers: Mapping[int, Any]) -> list[AttentionChain]:
    """Find the attention with large scores, or scores of dynamic shape, among the `ops` of a block.

    `readers` has the op of the block that reads a variable, by the id of the variable, where nothing else reads it.
    """
    found = (_match_chain(op, readers) for op in ops if op.op_type == "matmul")
    return [chain for chain in found if chain is not None]


def _match_chain(scores: Any, readers: Mapping[int, Any]) -> AttentionChain | None:
    shape = get_static_shape(scores.outputs[0])
    if shape is not None and math.prod(shape) <= _FEW_SCORES:
        return None
    elementwise = []
    op = readers.get(id(scores.outputs[0]))
    while op is not None and op.op_type in _ELEMENTWISE:
        elementwise.append(op)
        op = readers.get(id(op.outputs[0]))
    if op is None or op.op_type != "softmax" or not _is_over_last_axis(op):
        return None
    product = readers.get(id(op.outputs[0]))
    if product is None or product.op_type != "matmul" or product.x is not op.outputs[0] or _turns(product, "x"):
        return None
    chain = AttentionChain(scores, tuple(elementwise), op, product)
    # Weights may be multiplied in blocks of rows.
    operands = (scores.x, scores.y, product.y)
    is_plain = all(types.is_float(get_type_info(each.outputs[0]).dtype) for each in chain.ops)
    return chain if is_plain and not any(map(is_const_or_compressed, operands)) else None


def _is_over_last_axis(softmax: Any) -> bool:
    return get_const_value(softmax.axis) in (-1, len(softmax.outputs[0].shape) - 1)


def _turns(matmul: Any, name: str) -> bool:
    """Return whether the operand `name` is transposed before it is multiplied."""
    return bool(get_const_value(getattr(matmul, f"transpose_{name}")))


def compute_chain(chain: AttentionChain, read: Callable[[Any], Any]) -> torch.Tensor | None:
    """Compute the result of `chain`, whose operands `read` returns.

    Returns None where its ops are to be run one by one: for few scores, and for operands that they may refuse.
    """
    product = chain.product
    query, key, value = read(chain.scores.x), read(chain.scores.y), read(product.y)
    steps = [_read_step(op, before, read) for before, op in zip(chain.ops, chain.elementwise)]
    if not all(isinstance(each, torch.Tensor) and each.dtype == torch.float32
               for each in (query, key, value, *(step.other for step in steps))):
        return None
    query, key, value = (each.mT if turned and each.dim() > 1 else each for each, turned in (
        (query, _turns(chain.scores, "x")), (key, _turns(chain.scores, "y")), (value, _turns(product, "y"))))
    shape = _infer_scores_shape(query, key, value, [step.other for step in steps])
    if shape is None or math.prod(shape) <= _FEW_SCORES:
        return None
    y = query.new_empty((*shape[:-1], value.shape[-1]))
    key = canonicalize_layout(key)  # once, not for each part
    attend_in_parts(query, key.mT, value, [step.other for step in steps], y, _SCORES_AT_ONCE,
                    lambda *parts: _compute_part(steps, *parts))
    return y


class _Step(NamedTuple):
    """An elementwise function of the scores and another operand, of which the scores are the first or not."""

    function: Callable[..., torch.Tensor]
    other: torch.Tensor
    is_first: bool


def _read_step(op: Any, before: Any, read: Callable[[Any], Any]) -> _Step:
    is_first = op.x is before.outputs[0]
    return _Step(_ELEMENTWISE[op.op_type], read(op.y if is_first else op.x), is_first)


def _infer_scores_shape(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, others: list[torch.Tensor]
) -> tuple[int, ...] | None:
    """Return the shape of the scores; None where operands do not fit, or extend it."""
    if min(each.dim() for each in (query, key, value)) < 2:
        return None
    rows, columns = query.shape[-2], key.shape[-1]
    if key.shape[-2] != query.shape[-1] or value.shape[-2] != columns:
        return None
    try:
        batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
        whole = torch.broadcast_shapes((*batch, rows, columns), *(each.shape for each in others))
        is_kept = torch.broadcast_shapes(batch, value.shape[:-2]) == batch
    except RuntimeError:  # the ops report it
        return None
    return tuple(whole) if is_kept and whole == (*batch, rows, columns) else None


def _compute_part(
    steps: list[_Step], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, others: list[torch.Tensor]
) -> torch.Tensor:
    scores = torch.matmul(canonicalize_layout(query), canonicalize_layout(key.mT))
    for step, other in zip(steps, others):
        step.function(*((scores, other) if step.is_first else (other, scores)), out=scores)
    return torch.matmul(apply_softmax(scores, -1), canonicalize_layout(value))
