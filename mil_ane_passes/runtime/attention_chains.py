"""Attention that is written as a product, elementwise ops, a softmax and a product, computed in one step.

The same torch functions compute it as one by one, but change the scores in place. The scores of long sequences are
larger than the processor's caches and than all other values of a program: only a part of them is held at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from coremltools.converters.mil.mil import types

from ..ir.query import get_const_value, get_type_info, is_const_or_compressed
from .numeric import canonicalize_layout
from .ops.transformers import attend_in_parts

__all__ = ["AttentionChain", "compute_chain", "find_attention_chains"]

_SCORES_AT_ONCE = 1 << 20
"The most scores that are held at once: 4 MB of float32 stay in the caches of most processors."
_ELEMENTWISE: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "real_div": torch.div}


class Step(NamedTuple):
    """An elementwise op on the scores and another operand, of which the scores are the first or not."""

    op: Any
    other: Any
    is_first: bool


class AttentionChain(NamedTuple):
    """The ops of one attention, in their order. Only the next op reads the result of each but the last."""

    scores: Any
    steps: tuple[Step, ...]
    softmax: Any
    product: Any
    #: whether query, key and value are transposed before they are multiplied
    turned: tuple[bool, bool, bool]

    @property
    def ops(self) -> tuple[Any, ...]:
        """All ops of the chain."""
        return (self.scores, *(step.op for step in self.steps), self.softmax, self.product)


def find_attention_chains(ops: Iterable[Any], readers: Mapping[int, Any]) -> list[AttentionChain]:
    """Find the attention among the `ops` of a block; each op is in one chain at most.

    `readers` has the op of the block that reads a variable, by the id of the variable, where nothing else reads it.
    """
    found: list[AttentionChain] = []
    taken: set[Any] = set()
    for op in ops:
        chain = _match_chain(op, readers) if op.op_type == "matmul" else None
        if chain is not None and taken.isdisjoint(chain.ops):
            found.append(chain)
            taken.update(chain.ops)
    return found


def _match_chain(scores: Any, readers: Mapping[int, Any]) -> AttentionChain | None:
    steps = []
    last = scores.outputs[0]
    while (op := readers.get(id(last))) is not None and op.op_type in _ELEMENTWISE:
        steps.append(Step(op, op.y if op.x is last else op.x, op.x is last))
        last = op.outputs[0]
    if op is None or op.op_type != "softmax" or get_const_value(op.axis) not in (-1, len(last.shape) - 1):
        return None
    product = readers.get(id(op.outputs[0]))
    if product is None or product.op_type != "matmul" or product.x is not op.outputs[0] or _turns(product, "x"):
        return None
    turned = (_turns(scores, "x"), not _turns(scores, "y"), _turns(product, "y"))
    chain = AttentionChain(scores, tuple(steps), op, product, turned)
    # Weights may be multiplied in blocks of rows.
    operands = (scores.x, scores.y, product.y)
    is_plain = all(types.is_float(get_type_info(each.outputs[0]).dtype) for each in chain.ops)
    return chain if is_plain and not any(map(is_const_or_compressed, operands)) else None


def _turns(matmul: Any, name: str) -> bool:
    return bool(get_const_value(getattr(matmul, f"transpose_{name}")))


def compute_chain(chain: AttentionChain, read: Callable[[Any], Any]) -> torch.Tensor | None:
    """Compute the result of `chain`, whose operands `read` returns.

    Returns None where its ops are to be run one by one: for operands that they may refuse, or that extend the scores.
    """
    operands = [read(chain.scores.x), read(chain.scores.y), read(chain.product.y)]
    others = [read(step.other) for step in chain.steps]
    if not all(isinstance(each, torch.Tensor) and each.dtype == torch.float32 for each in (*operands, *others)):
        return None
    query, key, value = (each.mT if turned and each.dim() > 1 else each for each, turned in zip(operands, chain.turned))
    shape = _infer_scores_shape(query.shape, key.shape, value.shape, tuple(other.shape for other in others))
    if shape is None:
        return None
    turned_key = canonicalize_layout(key.mT)  # once, not for each part
    if math.prod(shape) <= _SCORES_AT_ONCE:
        return _compute_part(chain, query, turned_key.mT, value, others)
    y = query.new_empty((*shape[:-1], value.shape[-1]))
    attend_in_parts(
        query, turned_key.mT, value, others, y, _SCORES_AT_ONCE, lambda *parts: _compute_part(chain, *parts))
    return y


@lru_cache(4096)
def _infer_scores_shape(
    query: torch.Size, key: torch.Size, value: torch.Size, others: tuple[torch.Size, ...]
) -> tuple[int, ...] | None:
    """Return the shape of the scores for operands of these shapes; None where they do not fit, or extend it."""
    if min(map(len, (query, key, value))) < 2 or key[-1] != query[-1] or value[-2] != key[-2]:
        return None
    try:
        batch = torch.broadcast_shapes(query[:-2], key[:-2])
        shape = (*batch, query[-2], key[-2])
        is_kept = (batch, shape) == (
            torch.broadcast_shapes(batch, value[:-2]), torch.broadcast_shapes(shape, *others))
    except RuntimeError:  # the ops report it
        return None
    return shape if is_kept else None


def _compute_part(
    chain: AttentionChain, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, others: list[torch.Tensor]
) -> torch.Tensor:
    scores = torch.matmul(canonicalize_layout(query), canonicalize_layout(key.mT))
    for step, other in zip(chain.steps, others):
        _ELEMENTWISE[step.op.op_type](*((scores, other) if step.is_first else (other, scores)), out=scores)
    torch.softmax(scores, -1, out=scores)
    return torch.matmul(scores, canonicalize_layout(value))
