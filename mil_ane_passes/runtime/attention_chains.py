"""Fused execution of decomposed attention: matmul, elementwise ops on the scores, softmax, matmul.

It calls the torch functions of the single ops, in the same order, but updates the scores in place. The scores of long
sequences are larger than the processor's caches and than all other values of a program, so they are computed in parts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from coremltools.converters.mil.mil import types

from ..ir.query import get_const_value, get_type_info, is_const_or_compressed
from .numeric import canonicalize_layout
from .ops.transformers import attend_in_parts

__all__ = ["AttentionChain", "ChainStep", "compute_chain", "plan_chains"]

_SCORES_AT_ONCE = 1 << 20
"The largest number of scores in memory at once: 4 MB of float32, which fit the caches of most processors."
_ELEMENTWISE: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "real_div": torch.div}


class ScoresOp(NamedTuple):
    """An elementwise op on the scores and another operand; `is_first` is true if the scores are its x."""

    op: Any
    other: Any
    is_first: bool


class AttentionChain(NamedTuple):
    """The ops of one attention, in order. The result of each op but the last has no other reader than the next op."""

    scores: Any
    steps: tuple[ScoresOp, ...]
    softmax: Any
    product: Any
    #: true for each of query, key and value that is transposed before it is multiplied
    transposed: tuple[bool, bool, bool]

    @property
    def ops(self) -> tuple[Any, ...]:
        """All ops of the chain."""
        return (self.scores, *(step.op for step in self.steps), self.softmax, self.product)


class ChainStep(NamedTuple):
    """One attention among the ops of a block: its ops, each with the variables to release after it."""

    chain: AttentionChain
    ops: list[tuple[Any, list[int]]]


def plan_chains(
    steps: Sequence[tuple[Any, list[int]]], operands: Mapping[Any, Sequence[Any]], outputs: Iterable[Any]
) -> list[tuple[Any, list[int]]]:
    """Replace the ops of each attention in `steps` by a `ChainStep` at its last op.

    `steps` are the ops of a block, each with the ids of the variables to release after it; `operands` are the variables
    that each op reads, also in nested blocks, `outputs` those of the block. An attention reads its operands at its last
    op, so they are released after it, even if another op was their last reader.
    """
    if not any(op.op_type == "softmax" for op, _ in steps):
        return list(steps)
    read = Counter(id(var) for op, _ in steps for var in operands[op]) + Counter(map(id, outputs))
    readers = {id(var): op for op, _ in steps for var in operands[op] if read[id(var)] == 1}
    chains = {op: chain for chain in _find_chains((op for op, _ in steps), readers) for op in chain.ops}
    released = dict(steps)
    last_reader = {id(var): chain.product for op, _ in steps if (chain := chains.get(op)) and op is chain.product
                   for each in chain.ops for var in operands[each]}
    planned: list[tuple[Any, list[int]]] = []
    deferred: dict[Any, list[int]] = {}
    done: set[Any] = set()

    def select_released(keys: list[int]) -> list[int]:
        """Return the variables that no later attention reads; defer the others."""
        for key in keys:
            if key in last_reader and last_reader[key] not in done:
                deferred.setdefault(last_reader[key], []).append(key)
        return [key for key in keys if key not in last_reader or last_reader[key] in done]

    for op, keys in steps:
        done.add(op)
        if op not in chains:
            planned.append((op, select_released(keys)))
        elif op is chains[op].product:
            inner = [(each, select_released(released[each])) for each in chains[op].ops]
            planned.append((ChainStep(chains[op], inner), deferred.pop(op, [])))
    return planned


def _find_chains(ops: Iterable[Any], readers: Mapping[int, Any]) -> list[AttentionChain]:
    """Find the attention among the `ops` of a block; each op is part of at most one chain.

    `readers` is the only op that reads a variable, by the id of the variable.
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
        steps.append(ScoresOp(op, op.y if op.x is last else op.x, op.x is last))
        last = op.outputs[0]
    if op is None or op.op_type != "softmax" or get_const_value(op.axis) not in (-1, len(last.shape) - 1):
        return None
    product = readers.get(id(op.outputs[0]))
    if product is None or product.op_type != "matmul" or product.x is not op.outputs[0] or _transposes(product, "x"):
        return None
    transposed = (_transposes(scores, "x"), not _transposes(scores, "y"), _transposes(product, "y"))
    chain = AttentionChain(scores, tuple(steps), op, product, transposed)
    # Weights may be multiplied in blocks of rows.
    operands = (scores.x, scores.y, product.y)
    is_plain = all(types.is_float(get_type_info(each.outputs[0]).dtype) for each in chain.ops)
    return chain if is_plain and not any(map(is_const_or_compressed, operands)) else None


def _transposes(matmul: Any, name: str) -> bool:
    return bool(get_const_value(getattr(matmul, f"transpose_{name}")))


def compute_chain(chain: AttentionChain, read: Callable[[Any], Any]) -> torch.Tensor | None:
    """Compute the result of `chain`; `read` returns the value of an operand.

    Returns None if the ops must run one by one: if they may reject the operands, or an operand extends the scores.
    """
    operands = [read(chain.scores.x), read(chain.scores.y), read(chain.product.y)]
    others = [read(step.other) for step in chain.steps]
    if not all(isinstance(each, torch.Tensor) and each.dtype == torch.float32 for each in (*operands, *others)):
        return None
    query, key, value = (each.mT if is_transposed and each.dim() > 1 else each
                         for each, is_transposed in zip(operands, chain.transposed))
    shape = _infer_scores_shape(query.shape, key.shape, value.shape, tuple(other.shape for other in others))
    if shape is None:
        return None
    contiguous_key = canonicalize_layout(key.mT)  # once, not for each part
    if math.prod(shape) <= _SCORES_AT_ONCE:
        return _compute_part(chain, query, contiguous_key.mT, value, others)
    y = query.new_empty((*shape[:-1], value.shape[-1]))
    attend_in_parts(
        query, contiguous_key.mT, value, others, y, _SCORES_AT_ONCE, lambda *parts: _compute_part(chain, *parts))
    return y


@lru_cache(4096)
def _infer_scores_shape(
    query: torch.Size, key: torch.Size, value: torch.Size, others: tuple[torch.Size, ...]
) -> tuple[int, ...] | None:
    """Return the shape of the scores for operands of these shapes; None if they do not fit, or if one extends it."""
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
