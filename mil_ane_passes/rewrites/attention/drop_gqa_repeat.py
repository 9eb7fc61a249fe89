"""Attend to grouped keys and values without repeating them for each query head."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var

from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import get_const_value, get_consumers, get_static_shape, is_opaque, is_symbolic
from ...passes.contract import Community, Exactness, Example, Hit, Miss, Rewrite, Severity
from ...passes.examples import make_example, make_weight
from ._repeated_heads import (
    RepeatedHeads,
    build_heads,
    build_second_operand,
    find_other_reader,
    match_repeated_heads,
)

_UNARY_OPS = (
    "abs", "cast", "clip", "exp", "exp2", "identity", "linear_activation", "scaled_tanh", "sigmoid", "sqrt", "square",
    "tanh",
)
_BINARY_OPS = ("add", "maximum", "minimum", "mul", "real_div", "select", "sub")
_OPERANDS = ("x", "y", "cond", "a", "b")
_MAX_CHAIN = 12
"""Maximum number of ops between the two matmuls of an attention: a scale, a cap, a mask, casts and the softmax are
eight."""
_READERS = (("matmul", "y"), ("scaled_dot_product_attention", "key"), ("scaled_dot_product_attention", "value"))


class DropGqaRepeat(Rewrite):
    """Multiply the queries of a group with its keys in one matmul, instead of repeating the keys.

    why     With grouped-query attention several heads share keys and values. Exporters repeat these to the number of
            heads: a tile of rank 5 and a reshape, over all keys and values, in each layer and for each token.
    when    matmul with a repeated second operand, and scaled_dot_product_attention with repeated keys and values, in
            the forms in which coremltools converts expand, repeat, repeat_interleave, stack, cat, indexing and
            enable_gqa. The heads of a group are adjacent, so that queries (B, H, T, D) become (B, G, H/G * T, D) by a
            reshape. Ops between the two matmuls of an attention (scale, cap, mask, softmax) are computed on the grouped
            scores if they treat all rows alike: one query, or a mask without a query axis. Otherwise the scores are
            reshaped before and after these ops, only if they have fewer elements than the repeated values (decode, and
            prefill in chunks).
    exact   rounding: the same sums over the same numbers. Their order may depend on the number of rows; in the
            reference runtime they differ in the last bits at float32.
    cost    none besides reshapes that keep the last axis: of the queries and the result, or of the scores.

    before
        %0: fp16[1, 2, 1, 5, 8] = expand_dims(x=%k, axes=[2])
        %1: fp16[1, 2, 2, 5, 8] = tile(x=%0, reps=[1, 1, 2, 1, 1])
        %2: fp16[1, 4, 5, 8] = reshape(x=%1, shape=[1, 4, 5, 8])
        %3: fp16[1, 4, 3, 5] = matmul(x=%q, y=%2, transpose_y=True)
        %4: fp16[1, 4, 3, 5] = softmax(x=%3)
        %5: fp16[1, 2, 1, 5, 8] = expand_dims(x=%v, axes=[2])
        %6: fp16[1, 2, 2, 5, 8] = tile(x=%5, reps=[1, 1, 2, 1, 1])
        %7: fp16[1, 4, 5, 8] = reshape(x=%6, shape=[1, 4, 5, 8])
        %y: fp16[1, 4, 3, 8] = matmul(x=%4, y=%7)
    after
        %0: fp16[1, 2, 6, 8] = reshape(x=%q, shape=[1, 2, 6, 8])
        %1: fp16[1, 2, 6, 5] = matmul(x=%0, y=%k, transpose_y=True)
        %2: fp16[1, 2, 6, 5] = softmax(x=%1)
        %3: fp16[1, 2, 6, 8] = matmul(x=%2, y=%v)
        %y: fp16[1, 4, 3, 8] = reshape(x=%3, shape=[1, 4, 3, 8])
    """

    code, slug = "ANE542", "repeated-keys-and-values"
    stage = "layout"
    exactness = Exactness.ROUNDING
    bound = "the same sums over the same numbers; their order may depend on the number of rows"
    preset = "full"
    roots = ("matmul", "scaled_dot_product_attention")
    severity, confidence = Severity.SUGGESTION, "low"
    evidence = (
        Community(
            "removing the repetition makes a decoder 10 to 15 % faster on Core ML, depending on the hardware",
            source="https://github.com/pytorch/executorch/pull/16144", os="iOS 26", date="2025-12-09",
        ),
        Community(
            "6 % of a block (not through Core ML)", chip="M5 Pro", source="MidasMulli/ane-compiler README", date="2026",
        ),
        Community(
            "contradicts it: three changes at once, among them keys that are broadcast over the groups (a form of "
            "another "
            "rank than this one), left the ANE and took four to seven times as long", chip="A19 Pro",
            source="https://github.com/john-rocky/CoreML-LLM/pull/17", date="2026",
        ),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if op.op_type == "scaled_dot_product_attention":
            return self._match_fused(op)
        heads = match_repeated_heads(op.y)
        if heads is None:
            return Miss(op, "no repeated operand", near=False)
        obstacle = _find_product_obstacle(op, heads)
        if obstacle:
            return Miss(op, obstacle)
        start = _find_first_product(op, heads)
        if start is not None:
            return Hit(op, start=start, heads=heads, note=_describe_repetition(heads, op.y))
        end = _find_last_product(op)
        if end is not None:
            return Miss(op, "rewritten together with the matmul that reads its scores", near=False)
        obstacle = _find_shape_obstacle(op, heads)
        if obstacle:
            return Miss(op, obstacle)
        return Hit(op, start=None, heads=heads, note=_describe_repetition(heads, op.y))

    def _match_fused(self, op: Operation) -> Hit | Miss:
        keys, values = match_repeated_heads(op.key), match_repeated_heads(op.value)
        if keys is None or values is None:
            return Miss(op, "no repeated keys and values", near=False)
        axis = op.query.rank - 3
        if (keys.axis, values.axis, keys.times) != (axis, axis, values.times) or axis < 0:
            return Miss(op, "keys and values are repeated along axes other than that of the heads")
        obstacle = find_other_reader(op.key, _READERS) or find_other_reader(op.value, _READERS)
        if obstacle:
            return Miss(op, obstacle)
        mask = op.inputs.get("attn_mask")
        if mask is not None and not _is_same_for_all_rows(mask):
            return Miss(op, "the mask has one row per query: use ane::decompose_attention")
        obstacle = _find_unknown_lengths(op.query, op.outputs[0])
        return Miss(op, obstacle) if obstacle else Hit(
            op, start=None, heads=keys, values=values, note=_describe_repetition(keys, op.key))

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        op, heads = hit.op, hit.heads
        if op.op_type == "scaled_dot_product_attention":
            mixed = rebuild_op(mb, op, query=_group_rows(mb, op.query, heads), key=build_heads(mb, heads),
                               value=build_heads(mb, hit.values))
        elif hit.start is None:
            mixed = rebuild_op(mb, op, x=_group_rows(mb, op.x, heads), **build_second_operand(mb, op, heads))
        else:
            mixed = _build_grouped_attention(mb, op, hit.start, heads)
        result: Var = mb.reshape(x=mixed, shape=_make_shape(op.outputs[0].shape))
        return result

    def examples(self) -> Iterable[Example]:
        def make_case(name: str, repeat: Callable[[Var], Var] = _expand_heads, *, queries: tuple[int | None, ...] = (
                1, 4, 3, 8), keys: tuple[int | None, ...] = (1, 2, 5, 8), reason: str | None = None,
                **settings: Any) -> Example:
            return make_example(name, partial(_build_attention, repeat=repeat, **settings), q=queries, k=keys, v=keys,
                                reason=reason)

        yield make_case("expanded and merged")
        yield make_case("scaled, capped and masked", capped=True)
        yield make_case("a mask for one query", queries=(1, 4, 1, 8), mask=(1, 1, 1, 5))
        yield make_case("a mask for each query of a few", queries=(1, 4, 2, 8), mask=(1, 1, 2, 5))
        yield make_case("repeat_interleave", _interleave_heads)
        yield make_case("stacked with itself", lambda x: Builder.concat(values=[x, x], axis=1, interleave=True))
        yield make_case("gathered", lambda x: Builder.gather(x=x, indices=[0, 0, 1, 1], axis=1))
        yield make_case("head by head", _concat_heads)
        yield make_case("a dynamic number of queries", queries=(1, 4, None, 8))
        yield make_case("a dynamic number of keys", keys=(1, 2, None, 8))
        yield make_case("rank 3", lambda x: Builder.gather(x=x, indices=[0, 0, 0, 1, 1, 1], axis=0),
                        queries=(6, 3, 8), keys=(2, 5, 8))
        yield make_example("fused", _build_fused_attention, opset=ct.target.iOS18, q=(1, 4, 3, 8), k=(1, 2, 5, 8),
                           v=(1, 2, 5, 8))
        yield make_example("fused, with a mask for each query", partial(_build_fused_attention, rows=3),
                           opset=ct.target.iOS18, q=(1, 4, 3, 8), k=(1, 2, 5, 8), v=(1, 2, 5, 8),
                           reason="the mask has one row per query: use ane::decompose_attention")
        yield make_case("a mask for each query of many", queries=(1, 4, 16, 8), mask=(1, 1, 16, 5),
                        reason="832 elements would be reshaped to avoid writing 320")
        yield make_case("repeated in turn", lambda x: Builder.concat(values=[x, x], axis=1),
                        reason="no repeated operand")
        yield make_case("as first operand", mixed=lambda x, y: Builder.matmul(x=y, y=x, transpose_y=True),
                        reason="no repeated operand", values=False)
        yield make_case("read elsewhere", values=False, read=True,
                        reason="the repeated value is also read by reduce_max")
        yield make_case("queries transposed", queries=(1, 4, 8, 3), values=False,
                        mixed=lambda x, y: Builder.matmul(x=x, y=y, transpose_x=True, transpose_y=True),
                        reason="the first operand is transposed: its rows are not contiguous")
        yield make_case("one query for all heads", queries=(1, 1, 3, 8), values=False,
                        reason="the operands differ in batch or number of heads, or these are dynamic")
        yield make_case("two dynamic lengths", queries=(1, 4, None, 8), keys=(1, 2, None, 8), values=False,
                        reason="two lengths are dynamic: a reshape cannot express them")


def _expand_heads(x: Var, times: int = 2) -> Var:
    """Build what coremltools converts expand or repeat along a new axis, and reshape, to."""
    batch, heads, rows, width = (-1 if is_symbolic(extent) else int(extent) for extent in x.shape)
    tiled = Builder.tile(x=Builder.expand_dims(x=x, axes=[2]), reps=[1, 1, times, 1, 1])
    merged: Var = Builder.reshape(x=tiled, shape=[batch, heads * times, rows, width])
    return merged


def _interleave_heads(x: Var, times: int = 2) -> Var:
    """Build what coremltools converts repeat_interleave to."""
    batch, heads, rows, width = map(int, x.shape)
    tiled = Builder.tile(x=Builder.transpose(x=x, perm=[1, 0, 2, 3]), reps=[times, 1, 1, 1])
    apart = Builder.reshape(x=tiled, shape=[times, heads, batch, rows, width])
    merged = Builder.reshape(x=Builder.transpose(x=apart, perm=[1, 0, 2, 3, 4]), shape=[-1, batch, rows, width])
    heads_first: Var = Builder.transpose(x=merged, perm=[1, 0, 2, 3])
    return heads_first


def _concat_heads(x: Var) -> Var:
    first, second = (Builder.slice_by_index(x=x, begin=[0, at, 0, 0], end=[1, at + 1, 5, 8]) for at in range(2))
    joined: Var = Builder.concat(values=[first, first, second, second], axis=1)
    return joined


def _build_attention(
    q: Var, k: Var, v: Var, repeat: Callable[[Var], Var], *, mask: tuple[int, ...] | None = None, capped: bool = False,
    values: bool = True, read: bool = False, mixed: Callable[[Var, Var], Var] | None = None,
) -> list[Var]:
    """Build an attention whose keys and values are repeated, or (without `values`) its scores."""
    keys = repeat(k)
    scores = mixed(q, keys) if mixed is not None else Builder.matmul(x=q, y=keys, transpose_y=True)
    if capped:
        scores = Builder.mul(x=Builder.tanh(x=Builder.mul(x=scores, y=np.float16(0.125))), y=np.float16(4))
        scores = Builder.add(x=scores, y=make_weight(1, 1, 1, int(k.shape[-2])))
    if mask is not None:
        scores = Builder.add(x=scores, y=make_weight(*mask))
    if not values:
        built = [Builder.softmax(x=scores, axis=-1, name="y")]
        return [*built, Builder.reduce_max(x=keys, axes=[-1], name="z")] if read else built
    return [Builder.matmul(x=Builder.softmax(x=scores, axis=-1), y=repeat(v), name="y")]


def _build_fused_attention(q: Var, k: Var, v: Var, rows: int = 1) -> Var:
    built: Var = Builder.scaled_dot_product_attention(
        query=q, key=_expand_heads(k), value=_expand_heads(v), attn_mask=make_weight(rows, 5), name="y")
    return built


def _describe_repetition(heads: RepeatedHeads, repeated: Var) -> str:
    count = repeated.shape[heads.axis]
    return f"{int(count) // heads.times} heads are repeated {heads.times} times: {count} for the queries"


def _find_product_obstacle(op: Operation, heads: RepeatedHeads) -> str:
    """Return why the rows of the first operand cannot be grouped, or ""."""
    if op.x.rank != op.y.rank or heads.axis != op.y.rank - 3:
        return "the repeated axis is not that of the heads, the third from the end"
    if get_const_value(op.inputs.get("transpose_x"), False):
        return "the first operand is transposed: its rows are not contiguous"
    if any(is_symbolic(extent) or is_symbolic(other) or extent != other
           for extent, other in zip(op.x.shape[:-2], op.y.shape[:-2], strict=True)):
        return "the operands differ in batch or number of heads, or these are dynamic"
    return find_other_reader(op.y, _READERS)


def _find_shape_obstacle(op: Operation, heads: RepeatedHeads) -> str:
    """Return why the reshapes of an operand and the result cost more than the repetition, or cannot be stated."""
    unknown = _find_unknown_lengths(op.x, op.outputs[0])
    if unknown:
        return unknown
    first, result, repeated = map(_count_elements, (op.x, op.outputs[0], op.y))
    if first is None or result is None or repeated is None:
        rows, width = op.x.shape[-2], min((each.shape[-1] for each in (op.x, op.outputs[0])), key=is_symbolic)
        if is_symbolic(rows) or is_symbolic(width) or int(rows) > int(width):
            return "whether the repeated values or the scores are larger depends on the length"
    elif first + result > 2 * repeated:  # repeated values are written by a tile and again by a reshape
        return f"{first + result} elements would be reshaped to avoid writing {2 * repeated}"
    return ""


def _count_elements(var: Var) -> int | None:
    shape = get_static_shape(var)
    return None if shape is None else math.prod(shape)


def _find_unknown_lengths(*values: Var) -> str:
    if any(sum(map(is_symbolic, var.shape)) > 1 or any(map(is_symbolic, var.shape[:-2])) for var in values):
        return "two lengths are dynamic: a reshape cannot express them"
    return ""


def _make_shape(shape: Sequence[Any]) -> list[int]:
    return [-1 if is_symbolic(extent) else int(extent) for extent in shape]


def _group_rows(mb: RewriteBuilder, x: Var, heads: RepeatedHeads) -> Var:
    """Reshape (..., H, T, D) to (..., H/n, n*T, D)."""
    *lead, count, rows, width = _make_shape(x.shape)
    grouped = [*lead, count // heads.times, -1 if rows == -1 else rows * heads.times, width]
    built: Var = mb.once(("rows", x, heads.times), lambda: mb.reshape(x=x, shape=grouped))
    return built


def _is_same_for_all_rows(var: Var) -> bool:
    """Return whether `var`, broadcast to scores, has no axis of heads and none of queries."""
    return all(not is_symbolic(extent) and int(extent) == 1 for extent in var.shape[-3:-1])


def _find_chain_input(op: Operation) -> Var | None:
    """Return the scores that `op` computes on, row by row and alike for all rows; None if it does not."""
    if is_opaque(op) or len(op.outputs) != 1:
        return None
    if op.op_type == "softmax":
        x: Var = op.x
        return x if int(get_const_value(op.inputs.get("axis"), -1)) % op.x.rank == op.x.rank - 1 else None
    if op.op_type in _UNARY_OPS:
        return op.x
    if op.op_type not in _BINARY_OPS:
        return None
    shape = tuple(op.outputs[0].shape)
    operands = [op.inputs[name] for name in _OPERANDS if op.inputs.get(name) is not None]
    scores = [var for var in operands if tuple(var.shape) == shape and not _is_same_for_all_rows(var)]
    if len(scores) != 1 or any(not _is_same_for_all_rows(var) for var in operands if var is not scores[0]):
        return None
    return scores[0]


def _find_first_product(op: Operation, heads: RepeatedHeads) -> Operation | None:
    """Find the product of queries and keys, repeated alike, whose scores `op` multiplies with the values."""
    var = op.x
    for _ in range(_MAX_CHAIN):
        if var.op is None or var.consuming_blocks or len(get_consumers(var)) != 1:
            return None
        if var.op.enclosing_block is not op.enclosing_block:
            return None
        if var.op.op_type == "matmul":
            first = var.op
            keys = match_repeated_heads(first.y)
            alike = keys is not None and keys.times == heads.times and not _find_product_obstacle(first, keys)
            return first if alike and not _find_unknown_lengths(first.x, op.outputs[0]) else None
        source = _find_chain_input(var.op)
        if source is None or var.rank != op.x.rank:
            return None
        var = source
    return None


def _find_last_product(op: Operation) -> Operation | None:
    """Find the product with repeated values that reads the scores that `op` computes, grouped like them."""
    var = op.outputs[0]
    for _ in range(_MAX_CHAIN):
        readers = get_consumers(var)
        if len(readers) != 1 or var.consuming_blocks:
            return None
        (reader,) = readers
        if reader.op_type == "matmul":
            values = match_repeated_heads(reader.y) if reader.x is var else None
            grouped = values is not None and not _find_product_obstacle(reader, values)
            return reader if grouped and values and _find_first_product(reader, values) is op else None
        if _find_chain_input(reader) is not var:
            return None
        var = reader.outputs[0]
    return None


def _build_grouped_attention(mb: RewriteBuilder, last: Operation, first: Operation, heads: RepeatedHeads) -> Var:
    """Build both products and what stands between them on grouped rows."""
    chain: list[Operation] = []
    var = last.x
    while var.op is not first:
        chain.append(var.op)
        source = _find_chain_input(var.op)
        assert source is not None
        var = source
    keys = match_repeated_heads(first.y)
    assert keys is not None
    scores = rebuild_op(mb, first, x=_group_rows(mb, first.x, keys), **build_second_operand(mb, first, keys))
    for op in reversed(chain):
        source = _find_chain_input(op)
        changes = {name: scores for name, var in op.inputs.items() if var is source}
        scores = rebuild_op(mb, op, **changes)
    return rebuild_op(mb, last, x=scores, **build_second_operand(mb, last, heads))
