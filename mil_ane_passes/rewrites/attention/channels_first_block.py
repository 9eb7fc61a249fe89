"""Compute blocks of a transformer on (B, C, 1, S): 1x1 convs for linears, and attention head by head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.large_values import group_by_shared_values
from ...ir.query import get_const_value, get_consumers, get_static_shape, is_const, is_opaque
from ...passes.contract import BlockRewrite, Community, Exactness, Example, Hit, Miss, Severity, Vendor
from ...passes.evidence import cite_apple_authoring_rules, cite_m4_study
from ...passes.examples import make_example, make_weight
from ...rules.attention import SequenceLinears
from ...utils.text_format import format_count
from .._weights import find_reshape_obstacle, reshape_weight
from ..convolution._conv_1d_lifting import BINARY_OPS, UNARY_OPS

_PER_CHANNEL_OPS = ("batch_norm", "prelu", "softplus_parametric")
"Ops with parameters for axis 1, which are the channels in one layout and the sequence in the other."


class ChannelsFirstBlock(BlockRewrite):
    """Convert a stack of transformer blocks from (B, S, C) to (B, C, 1, S), with transposes at its ends only.

    why     Apple's layout of transformers for the ANE: the sequence on the last axis, linears as 1x1 convs, one einsum
            per head. Measured in favour: an audio encoder 11.61 -> 7.60 ms (M4 Max, partly by where ops run), Whisper
            tiny 29.4 -> 23.2 ms (M2 Ultra), and 33.6 -> 11.2 ms across two runtimes. Measured against it: in a language
            model on a Mac linears and 1x1 convs were equally fast within 2 %, and together with other changes, which
            moved ops off the ANE, this layout was 5 to 7 times slower (A19 Pro). The latency model, which charges both
            alike, sees no gain.
    when    By name only, because measurements contradict one another: measure both layouts. A region of static size
            with at least `least` linears and an attention: linear, layer_norm over the channels, elementwise ops, sums
            with constants per channel or position, and decomposed attention (reshape, transpose, matmul, scale,
            constant mask, softmax, matmul). At most `max_ends` values enter or leave it.
    exact   rounding: the same products, added in a different order; weights are views of the same bytes.
    cost    a transpose at each end, and ops per head: splits, two einsums, a softmax. Constants of the size of the
            sequence are stored transposed.

    before
        %0: fp16[1, 3, 4] = linear(x=%x, weight=<fp16[4, 4]>, bias=[-0.6875, -0.25, 0.1875, 0.625])
        %1: fp16[1, 3, 2, 2] = reshape(x=%0, shape=[1, 3, 2, 2])
        %2: fp16[1, 3, 4] = linear(x=%x, weight=<fp16[4, 4]>, bias=[-0.6875, -0.25, 0.1875, 0.625])
        %3: fp16[1, 3, 2, 2] = reshape(x=%2, shape=[1, 3, 2, 2])
        %4: fp16[1, 3, 4] = linear(x=%x, weight=<fp16[4, 4]>, bias=[-0.6875, -0.25, 0.1875, 0.625])
        %5: fp16[1, 3, 2, 2] = reshape(x=%4, shape=[1, 3, 2, 2])
        %6: fp16[1, 2, 3, 2] = transpose(x=%1, perm=[0, 2, 1, 3])
        %7: fp16[1, 2, 3, 2] = transpose(x=%3, perm=[0, 2, 1, 3])
        %8: fp16[1, 2, 3, 2] = transpose(x=%5, perm=[0, 2, 1, 3])
        %9: fp16[1, 2, 3, 3] = matmul(x=%6, y=%7, transpose_y=True)
        %10: fp16[1, 2, 3, 3] = softmax(x=%9)
        %11: fp16[1, 2, 3, 2] = matmul(x=%10, y=%8)
        %12: fp16[1, 3, 2, 2] = transpose(x=%11, perm=[0, 2, 1, 3])
        %13: fp16[1, 3, 4] = reshape(x=%12, shape=[1, 3, 4])
        %14: fp16[1, 3, 4] = linear(x=%13, weight=<fp16[4, 4]>, bias=[-0.6875, -0.25, 0.1875, 0.625])
        %y: fp16[1, 3, 4] = add(x=%x, y=%14)
    after
        %0: fp16[1, 4, 3] = transpose(x=%x, perm=[0, 2, 1])
        %1: fp16[1, 4, 1, 3] = expand_dims(x=%0, axes=[2])
        %2: fp16[1, 4, 1, 3] = conv(x=%1, weight=<fp16[4, 4, 1, 1]>, bias=[-0.6875, -0.25, 0.1875, 0.625])
        %3: fp16[1, 4, 1, 3] = conv(x=%1, weight=<fp16[4, 4, 1, 1]>, bias=[-0.6875, -0.25, 0.1875, 0.625])
        %4: fp16[1, 4, 1, 3] = conv(x=%1, weight=<fp16[4, 4, 1, 1]>, bias=[-0.6875, -0.25, 0.1875, 0.625])
        %5: fp16[1, 3, 1, 4] = transpose(x=%3, perm=[0, 3, 2, 1])
        %6: fp16[1, 2, 1, 3], %7: fp16[1, 2, 1, 3] = split(x=%2, num_splits=2, axis=1)
        %8: fp16[1, 3, 1, 2], %9: fp16[1, 3, 1, 2] = split(x=%5, num_splits=2, axis=3)
        %10: fp16[1, 2, 1, 3], %11: fp16[1, 2, 1, 3] = split(x=%4, num_splits=2, axis=1)
        %12: fp16[1, 3, 1, 3] = einsum(values=(%8, %6), equation=nchw,nwhu->nchu)
        %13: fp16[1, 3, 1, 3] = softmax(x=%12, axis=1)
        %14: fp16[1, 2, 1, 3] = einsum(values=(%10, %13), equation=nchw,nwhu->nchu)
        %15: fp16[1, 3, 1, 3] = einsum(values=(%9, %7), equation=nchw,nwhu->nchu)
        %16: fp16[1, 3, 1, 3] = softmax(x=%15, axis=1)
        %17: fp16[1, 2, 1, 3] = einsum(values=(%11, %16), equation=nchw,nwhu->nchu)
        %18: fp16[1, 4, 1, 3] = concat(values=(%14, %17), axis=1)
        %19: fp16[1, 4, 1, 3] = conv(x=%18, weight=<fp16[4, 4, 1, 1]>, bias=[-0.6875, -0.25, 0.1875, 0.625])
        %20: fp16[1, 4, 1, 3] = add(x=%1, y=%19)
        %21: fp16[1, 4, 3] = squeeze(x=%20, axes=[2])
        %y: fp16[1, 3, 4] = transpose(x=%21, perm=[0, 2, 1])
    """

    code, slug = "ANE519", "linears-on-sequences"
    fixes = (SequenceLinears,)
    stage = "layout"
    exactness = Exactness.ROUNDING
    bound = "the order of sums"
    preset = "named"
    severity, confidence = Severity.SUGGESTION, "low"
    roots = ("linear",)
    evidence = (
        Vendor("linear layers become 1x1 convs on (B, C, 1, S), heads are split", date="2022-06",
               source="https://machinelearning.apple.com/research/neural-engine-transformers"),
        cite_apple_authoring_rules("the same for Core AI, where a linear layer may fall back"),
        Community("an encoder with 1x1 convs for linears, (B, C, 1, S) and einsum for each head: 11.61 -> 7.60 ms, all "
                  "on the ANE afterwards", source="https://github.com/FluidInference/FluidAudio/pull/410",
                  chip="M4 Max", date="2026-03-22"),
        Community("Whisper tiny's encoder written so: 29.37 -> 23.17 ms", chip="M2 Ultra", date="2024",
                  source="https://github.com/ggml-org/whisper.cpp/pull/1716"),
        Community("contradicts it: chunks of a language model with Conv2d 1x1 and with linear 4.06 and 4.10 ms, end "
                  "to end "
                  "23.48 and 23.24 ms (4-bit weights)", source="john-rocky/CoreML-LLM PLAN3_PHASE2A", date="2026"),
        Community("contradicts it: (B, C, 8, 8) tiles with two more changes 12.3 -> 87.8 ms, off the ANE", chip="A19 "
                                                                                                                "Pro",
                  source="https://github.com/john-rocky/CoreML-LLM/pull/17", date="2026"),
        cite_m4_study("contradicts it: linear and matmul are accepted"),
    )

    least: int = 4
    "Minimum number of linears of a region."
    max_ends: int = 4
    "Maximum number of values that enter or leave a region, each with a transpose."

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        attentions = _find_attentions(block)
        for region in _iterate_regions(block, attentions):
            linears = [op for op in region.ops if op.op_type == "linear"]
            if len(linears) < self.least:
                continue
            ends = len(region.inputs) + len(region.outputs)
            if not any(op in attentions for op in region.ops):
                yield Miss(linears[0], f"{format_count(len(linears), 'linear')} without a decomposed attention "
                                       f"between them")
            elif ends > self.max_ends:
                yield Miss(linears[0], f"{format_count(ends, 'value')} enter or leave {len(region.ops)} convertible "
                                       f"ops, more than {self.max_ends} (max_ends)")
            else:
                yield Hit(linears[0], region=region, covers=linears, note=(
                    f"{format_count(len(linears), 'linear')} as 1x1 convs, {ends} transposes at the ends"))

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        return _build_region(mb, hit.region)

    def examples(self) -> Iterable[Example]:
        yield _make_block_example("a block")
        yield _make_block_example("masked", mask=True)
        yield _make_block_example("keys across", across=True)
        yield _make_block_example("an MLP", attends=False, reason=(
            "4 linears without a decomposed attention between them"))
        yield _make_block_example("cut apart", options={"max_ends": 1}, reason=(
            "2 values enter or leave 6 convertible ops, more than 1 (max_ends)"))


@dataclass(frozen=True)
class _Attention:
    """An attention on (B, S, C) values, from their reshapes to heads up to `end`, the reshape of its result.

    `steps` scale and mask the scores. `inside` are all ops but `end`.
    """

    end: Operation
    query: Var
    key: Var
    value: Var
    heads: int
    steps: tuple[Operation, ...]
    query_scales: tuple[Operation, ...]
    inside: tuple[Operation, ...]


@dataclass
class _Region:
    """Ops on (B, S, C) values, in block order; an attention is represented by its last op.

    `inputs` are the values that enter, `outputs` those that others read.
    """

    ops: list[Operation]
    attentions: dict[Operation, _Attention]
    inputs: dict[Var, None] = field(default_factory=dict)
    outputs: dict[Var, None] = field(default_factory=dict)


def _iterate_regions(block: Block, attentions: dict[Operation, _Attention]) -> Iterator[_Region]:
    values: dict[Operation, list[Var]] = {}
    for op in block.operations:
        operands = _list_operands(op, attentions)
        if operands and all(_is_sequence(var) for var in (*operands, *op.outputs)) and _can_turn(op, attentions):
            values[op] = [*operands, *op.outputs]
    for ops in group_by_shared_values(values):
        region = _Region(ops, attentions)
        members = set(ops)
        hidden = members.union(*(attentions[op].inside for op in ops if op in attentions))
        for op in ops:
            region.inputs.update(dict.fromkeys(
                var for var in _list_operands(op, attentions) if var.op not in members))
            for var in op.outputs:
                if var.consuming_blocks or not hidden.issuperset(get_consumers(var)):
                    region.outputs[var] = None
        yield region


def _is_sequence(var: Var) -> bool:
    return bool(var.rank == 3 and get_static_shape(var) is not None and var.dtype == types.fp16)


def _list_operands(op: Operation, attentions: dict[Operation, _Attention]) -> list[Var]:
    """Return the sequences that `op` reads; [] if it is not one that may be turned."""
    if is_opaque(op):
        return []
    if op in attentions:
        return [attentions[op].query, attentions[op].key, attentions[op].value]
    if op.op_type in BINARY_OPS:
        return [var for var in (op.x, op.y) if not is_const(var) and var.rank]
    unary = op.op_type in UNARY_OPS and op.op_type not in _PER_CHANNEL_OPS
    return [op.x] if unary or op.op_type in ("linear", "layer_norm") else []


def _can_turn(op: Operation, attentions: dict[Operation, _Attention]) -> bool:
    if op in attentions:
        return True
    if op.op_type == "linear":
        return find_reshape_obstacle(op.weight) is None and (op.bias is None or is_const(op.bias))
    if op.op_type == "layer_norm":
        return bool([axis % 3 for axis in get_const_value(op.axes, [0, 1, 2])] == [2])
    if op.op_type in BINARY_OPS:
        operands = [var for var in (op.x, op.y) if not is_const(var)]
        # Two computed values of one shape, or one and a constant that is the same for each element of the batch.
        return len({tuple(var.shape) for var in operands}) == 1 and all(
            var.rank < 3 or (var.rank == 3 and var.shape[0] == 1) for var in (op.x, op.y) if is_const(var))
    return True


def _find_attentions(block: Block) -> dict[Operation, _Attention]:
    """Find decomposed attentions by the reshape at their end."""
    found = {}
    for op in block.operations:
        attention = _read_attention(op) if op.op_type == "reshape" and not is_opaque(op) else None
        if attention is not None:
            found[op] = attention
    return found


def _read_attention(end: Operation) -> _Attention | None:
    back = _get_producer(end.x, "transpose", [0, 2, 1, 3])
    last = None if back is None else _get_producer(back.x, "matmul")
    if back is None or last is None or _is_transposed(last) or not _is_sequence(end.outputs[0]):
        return None
    softmax = _get_producer(last.x, "softmax")
    value = _read_heads(last.y, [0, 2, 1, 3])
    if softmax is None or value is None or get_const_value(softmax.axis, -1) not in (-1, 3):
        return None
    steps, scores = _read_steps(softmax.x, ("mul", "real_div", "add"))
    product = _get_producer(scores, "matmul")
    if product is None or get_const_value(product.transpose_x, False):
        return None
    scales, queries = _read_steps(product.x, ("mul", "real_div"))
    query = _read_heads(queries, [0, 2, 1, 3])
    key = _read_heads(product.y, [0, 2, 1, 3] if get_const_value(product.transpose_y, False) else [0, 2, 3, 1])
    if query is None or key is None or any(np.size(_get_constant(op).val) != 1 for op in scales):
        return None
    heads = int(query[0].outputs[0].shape[2])
    shape, rows, keys = query[0].x.shape, query[0].x.shape[1], key[0].x.shape[1]
    if any(int(each[0].outputs[0].shape[2]) != heads for each in (key, value)) or end.outputs[0].shape != (
            *shape[:2], value[0].x.shape[2]) or value[0].x.shape[1] != keys:
        return None
    if not all(_fits_scores(_get_constant(op), int(rows), int(keys), op.op_type != "add") for op in steps):
        return None
    inside = (back, last, softmax, *steps, product, *scales, *query, *key, *value)
    block = end.enclosing_block
    if any(op.enclosing_block is not block or op.outputs[0].consuming_blocks or len(get_consumers(op.outputs[0])) != 1
           for op in inside):
        return None
    return _Attention(end, query[0].x, key[0].x, value[0].x, heads, steps, scales, inside)


def _get_producer(var: Var, kind: str, perm: list[int] | None = None) -> Operation | None:
    """Return the op of that kind that computes `var`, a transpose with that permutation, or None."""
    op = var.op
    if op is None or op.op_type != kind or is_opaque(op):
        return None
    found = None if perm is None else [axis % len(perm) for axis in get_const_value(op.perm, [])]
    return op if found == perm else None


def _is_transposed(op: Operation) -> bool:
    return bool(get_const_value(op.transpose_x, False) or get_const_value(op.transpose_y, False))


def _read_heads(var: Var, perm: list[int]) -> tuple[Operation, Operation] | None:
    """Return the reshape of a sequence to heads, and the transpose with `perm` that computes `var` from it."""
    turn = _get_producer(var, "transpose", perm)
    cut = None if turn is None else _get_producer(turn.x, "reshape")
    if turn is None or cut is None or not _is_sequence(cut.x) or cut.outputs[0].rank != 4:
        return None
    known = get_static_shape(cut.outputs[0])
    return (cut, turn) if known is not None and known[:2] == tuple(cut.x.shape[:2]) else None


def _read_steps(var: Var, kinds: tuple[str, ...]) -> tuple[tuple[Operation, ...], Var]:
    """Return the ops of `kinds` with a constant that lead to `var`, in order, and the value that they begin with."""
    steps: list[Operation] = []
    while var.op is not None and var.op.op_type in kinds and not is_opaque(var.op) and (
            is_const(var.op.x) != is_const(var.op.y)) and not (var.op.op_type == "real_div" and is_const(var.op.x)):
        steps.insert(0, var.op)
        var = var.op.y if is_const(var.op.x) else var.op.x
    return tuple(steps), var


def _get_constant(op: Operation) -> Var:
    constant: Var = op.x if is_const(op.x) else op.y
    return constant


def _fits_scores(constant: Var, rows: int, keys: int, scalar: bool) -> bool:
    """Return whether a constant is one number, or a mask that is the same for each head and batch."""
    if np.size(constant.val) == 1:
        return True
    shape = (*[1] * (4 - constant.rank), *constant.shape)
    return not scalar and shape[:2] == (1, 1) and shape[2] in (1, rows) and shape[3] in (1, keys)


def _build_region(mb: RewriteBuilder, region: _Region) -> dict[Var, Var]:
    turned: dict[Var, Var] = {}

    def turn_value(var: Var) -> Var:
        if var not in turned:
            turned[var] = _turn_input(mb, var)
        return turned[var]

    replaced: dict[Var, Var] = {}
    for op in region.ops:
        with mb.at(op):
            if op in region.attentions:
                made = _build_attention(mb, region.attentions[op], turn_value)
            elif op.op_type == "linear":
                made = _build_conv(mb, op, turn_value)
            elif op.op_type == "layer_norm":
                made = rebuild_op(mb, op, x=turn_value(op.x), axes=[1])
            elif op.op_type in BINARY_OPS:
                made = rebuild_op(mb, op, x=_turn_operand(mb, op.x, turn_value), y=_turn_operand(mb, op.y, turn_value))
            else:
                made = rebuild_op(mb, op, x=turn_value(op.x))
            turned[op.outputs[0]] = made
            if op.outputs[0] in region.outputs:
                replaced[op.outputs[0]] = mb.transpose(x=mb.squeeze(x=made, axes=[2]), perm=[0, 2, 1])
    return replaced


def _turn_input(mb: RewriteBuilder, var: Var) -> Var:
    """Return (B, S, C) as (B, C, 1, S): what it was transposed from, if it was."""
    def build_transpose() -> Any:
        with mb.at(mb.find_insertion_point(var), var.name):
            source = _get_producer(var, "transpose", [0, 2, 1])
            swapped = mb.transpose(x=var, perm=[0, 2, 1]) if source is None else source.x
            return mb.expand_dims(x=swapped, axes=[2])

    made: Var = mb.once(("channels first", var), build_transpose)
    return made


def _turn_operand(mb: RewriteBuilder, var: Var, turn: Callable[[Var], Var]) -> Var:
    if var.rank == 0:
        return var
    if not is_const(var):
        return turn(var)
    shape = (*[1] * (3 - var.rank), *(int(extent) for extent in var.shape))
    if 1 in shape[1:]:
        return mb.reshaped(var, (shape[0], shape[2], 1, shape[1]))
    return mb.weight(var, "channels_first", lambda: np.asarray(var.val).reshape(shape).transpose(0, 2, 1)[:, :, None])


def _build_conv(mb: RewriteBuilder, op: Operation, turn: Callable[[Var], Var]) -> Var:
    weight = reshape_weight(mb, op.weight, (*(int(extent) for extent in op.weight.shape), 1, 1))
    bias = {} if op.bias is None else {"bias": op.bias}
    made: Var = mb.conv(x=turn(op.x), weight=weight, **bias)
    return made


def _build_attention(mb: RewriteBuilder, attention: _Attention, turn: Callable[[Var], Var]) -> Var:
    """Build the attention one head at a time, the keys on the channel axis of the scores: (B, T, 1, S)."""
    query, value = turn(attention.query), turn(attention.value)
    for op in attention.query_scales:
        query = _build_scaled(mb, op, query)
    key = mb.transpose(x=turn(attention.key), perm=[0, 3, 2, 1])
    parts = []
    for one_query, one_key, one_value in zip(*(_split_parts(mb, var, attention.heads, axis)
                                               for var, axis in ((query, 1), (key, 3), (value, 1)))):
        scores = mb.einsum(values=(one_key, one_query), equation="nchw,nwhu->nchu")
        for op in attention.steps:
            if np.size(_get_constant(op).val) == 1:
                scores = _build_scaled(mb, op, scores)
            else:
                scores = mb.add(x=scores, y=_turn_mask(mb, _get_constant(op)))
        weights = mb.softmax(x=scores, axis=1)
        parts.append(mb.einsum(values=(one_value, weights), equation="nchw,nwhu->nchu"))
    joined: Var = mb.concat(values=parts, axis=1) if len(parts) > 1 else parts[0]
    return joined


def _split_parts(mb: RewriteBuilder, var: Var, count: int, axis: int) -> list[Var]:
    return [var] if count == 1 else list(mb.split(x=var, num_splits=count, axis=axis))


def _build_scaled(mb: RewriteBuilder, op: Operation, x: Var) -> Var:
    """Build an op with one number on `x`."""
    number = np.asarray(_get_constant(op).val).reshape(-1)[0]
    made: Var = getattr(mb, op.op_type)(x=x, y=number)
    return made


def _turn_mask(mb: RewriteBuilder, mask: Var) -> Var:
    shape = (*[1] * (4 - mask.rank), *(int(extent) for extent in mask.shape))
    if 1 in shape[2:]:
        return mb.reshaped(mask, (1, shape[3], 1, shape[2]))
    return mb.weight(mask, "keys_first", lambda: np.asarray(mask.val).reshape(shape).transpose(0, 3, 1, 2))


def _make_block_example(
    name: str, *, attends: bool = True, mask: bool = False, across: bool = False, **settings: Any
) -> Example:
    """Make an example of a block of 4 linears with 2 heads on 3 positions of 4 channels."""
    def linear_op(x: Var) -> Var:
        made: Var = Builder.linear(x=x, weight=make_weight(4, 4), bias=make_weight(4))
        return made

    def build_body(x: Var) -> Var:
        heads = [Builder.reshape(x=linear_op(x), shape=[1, 3, 2, 2]) for _ in range(3)] if attends else [linear_op(
            linear_op(linear_op(x)))]
        if not attends:
            y: Var = Builder.add(x=x, y=linear_op(heads[0]), name="y")
            return y
        query, key, value = (Builder.transpose(x=each, perm=[0, 2, 3, 1] if across and each is heads[1] else [
            0, 2, 1, 3]) for each in heads)
        scores = Builder.matmul(x=query, y=key, transpose_y=not across)
        if mask:
            scores = Builder.add(x=Builder.mul(x=scores, y=np.float16(0.7)), y=make_weight(3, 3))
        made = Builder.matmul(x=Builder.softmax(x=scores, axis=-1), y=value)
        joined = Builder.reshape(x=Builder.transpose(x=made, perm=[0, 2, 1, 3]), shape=[1, 3, 4])
        y = Builder.add(x=x, y=linear_op(joined), name="y")
        return y

    return make_example(name, build_body, within=8.0, x=(1, 3, 4), **settings)
