"""Compute linear layers of rank 2 with a hard swish at rank 4."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import get_const_value, get_consumers, is_all_zero, is_compressed, is_const
from ...passes.contract import FP32_UNSUPPORTED_REASON, BlockRewrite, Exactness, Example, Hit, Miss
from ...passes.examples import make_example, make_weight
from ...rules.numerics import HardSwish, HardswishRank2, find_hard_swish

_OPERANDS = ("x", "y")


class HardSwishRank4(BlockRewrite):
    """Compute a linear layer of rank 2 and the hard swish after it at rank 4: rank 2 is reported to be wrong.

    why     A matrix product of rank 2 followed by a hard swish, the classifier of MobileNetV3, was off by 4 % of its
            norm on the Neural Engine, and correct as (1, 1, m, n) (Core AI; predicted for Core ML).
    when    linear or matmul of two values of rank 2 in fp16, a bias or not, and x * clip(x + 3, 0, 6) / 6, all in one
            block. A linear becomes a matmul, since linear supports no rank above 3; the weight stays as it is,
            compressed or not. A scale after the product, x * relu6(x + 3) / 6, is computed at rank 4, too.
    exact   rounding: the result of a linear with a bias is rounded before the bias is added. Otherwise bitwise: the
            same products, and data movement.
    cost    an expand_dims, a squeeze, and an add for the bias: MobileNetV3 keeps its estimated latency, and the
            estimate of Core ML's segmenter increases by 3 to 4 %.

    before
        %0: fp16[2, 4] = linear(x=%x, weight=<fp16[4, 8]>, bias=[-0.6875, -0.25, 0.1875, 0.625])
        %1: fp16[2, 4] = thresholded_relu(x=%0, alpha=-3.0)
        %2: fp16[2, 4] = sigmoid_hard(x=%1, alpha=0.1666259765625, beta=0.5)
        %y: fp16[2, 4] = mul(x=%1, y=%2)
    after
        %0: fp16[1, 1, 2, 8] = expand_dims(x=%x, axes=[0, 1])
        %1: fp16[1, 1, 2, 4] = matmul(x=%0, y=<fp16[4, 8]>, transpose_y=True)
        %2: fp16[1, 1, 2, 4] = add(x=%1, y=[-0.6875, -0.25, 0.1875, 0.625])
        %3: fp16[1, 1, 2, 4] = thresholded_relu(x=%2, alpha=-3.0)
        %4: fp16[1, 1, 2, 4] = sigmoid_hard(x=%3, alpha=0.1666259765625, beta=0.5)
        %5: fp16[1, 1, 2, 4] = mul(x=%3, y=%4)
        %y: fp16[2, 4] = squeeze(x=%5, axes=[0, 1])
    """

    fixes = (HardswishRank2,)
    stage = "numerics"
    exactness = Exactness.ROUNDING
    bound = "the sum of a linear is rounded to fp16 before its bias is added: half a unit in the last place of the sum"
    preset = "safe"
    roots = HardswishRank2.roots
    evidence = HardswishRank2.evidence

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        layers = set()
        for op in block.operations:
            if op.op_type not in self.roots:
                continue
            answer = self._match_gate(block, op)
            if isinstance(answer, Hit):
                if answer.found.layer in layers:  # it is replaced by the first hard swish
                    continue
                layers.add(answer.found.layer)
            yield answer

    def _match_gate(self, block: Block, op: Operation) -> Hit | Miss:
        found = find_hard_swish(op)
        if found is None or found.layer is None:
            return Miss(op, "no hard swish of a linear layer", near=False)
        layer = found.layer
        if found.x.rank != 2:
            return Miss(op, f"at rank {found.x.rank}; rank 2 was wrong", near=False)
        if found.x.dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        if any(var.rank != 2 for var in _get_operands(layer)):
            return Miss(op, "a vector times a stack of matrices")
        if any(each.enclosing_block is not block for each in found.ops):
            return Miss(op, "the linear layer and its hard swish are in different blocks")
        if any(each.outputs[0].rank != 2 for each in (*found.ops, *_find_scales(found))):
            return Miss(op, "another value raises the rank of the hard swish")
        adds_bias = layer.op_type == "linear" and _has_bias(layer)
        return Hit(op, found=found, exactness=None if adds_bias else Exactness.BITWISE,
                   note=f"a {layer.op_type} of {'x'.join(map(str, found.x.shape))} and its hard swish at rank 4")

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        found: HardSwish = hit.found
        ops = [*found.ops, *_find_scales(found)]
        raised: dict[Var, Var] = {}
        replaced: dict[Var, Var] = {}
        for op in ops:
            old = op.outputs[0]
            with mb.at(op):  # users of a value in between need it there
                changes = {name: raised[var] for name, var in op.inputs.items() if var in raised}
                raised[old] = _build_product(mb, op) if op is found.layer else rebuild_op(mb, op, **changes)
                if _is_used_outside(old, ops):
                    replaced[old] = mb.squeeze(x=raised[old], axes=[0, 1])
        return replaced

    def examples(self) -> Iterable[Example]:
        yield _make_example("a classifier", lambda x: Builder.linear(
            x=x, weight=make_weight(4, 8), bias=make_weight(4)))
        yield _make_example("without a bias", lambda x: Builder.linear(x=x, weight=make_weight(4, 8)))
        yield _make_example("a matmul and a bias", lambda x: Builder.add(
            x=Builder.matmul(x=x, y=make_weight(8, 4)), y=make_weight(1, 4)), _build_written_out)
        yield _make_example("weight first", lambda x: Builder.matmul(
            x=make_weight(4, 8), y=x, transpose_y=True), _build_written_out)
        yield _make_example("scaled at the end", lambda x: Builder.linear(x=x, weight=make_weight(4, 8)),
                            lambda x: Builder.mul(x=Builder.mul(x=x, y=_build_gate(x)), y=np.float16(1 / 6), name="y"))
        yield _make_example("used again", lambda x: Builder.linear(x=x, weight=make_weight(4, 8)),
                            lambda x: Builder.sub(x=_build_written_out(x), y=x, name="z"))
        yield _make_example("two gates", lambda x: Builder.linear(x=x, weight=make_weight(4, 8)),
                            lambda x: Builder.sub(x=Builder.mul(x=x, y=_build_gate(x)), y=_build_fused(x), name="z"))
        yield _make_example("any number of rows", lambda x: Builder.linear(
            x=x, weight=make_weight(4, 8), bias=make_weight(4)), shape=(None, 8))
        yield _make_example("rank 3", lambda x: Builder.linear(x=x, weight=make_weight(4, 8)), shape=(1, 2, 8),
                            reason="at rank 3; rank 2 was wrong")
        yield _make_example("a scale of rank 3", lambda x: Builder.linear(x=x, weight=make_weight(4, 8)),
                            lambda x: Builder.mul(x=Builder.mul(x=x, y=_build_gate(x)),
                                                  y=np.full((1, 1, 1), 1 / 6, np.float16), name="y"),
                            reason="another value raises the rank of the hard swish")
        yield _make_example("a vector", lambda x: Builder.matmul(x=np.ones(8, np.float16), y=x), _build_written_out,
                            shape=(2, 8, 4), reason="a vector times a stack of matrices")
        yield _make_example("fp32", lambda x: Builder.linear(x=x, weight=make_weight(4, 8).astype(np.float32)),
                            lambda x: Builder.mul(x=x, y=Builder.sigmoid_hard(
                                x=x, alpha=np.float32(1 / 6), beta=np.float32(0.5)), name="y"),
                            dtype=types.fp32, reason=FP32_UNSUPPORTED_REASON)
        yield _make_example("no layer", lambda x: Builder.relu(x=x), reason="no hard swish of a linear layer")


def _get_operands(layer: Operation) -> list[Var]:
    return [layer.x, layer.weight] if layer.op_type == "linear" else [layer.x, layer.y]


def _has_bias(layer: Operation) -> bool:
    return layer.bias is not None and not is_all_zero(layer.bias)


def _build_product(mb: RewriteBuilder, layer: Operation) -> Var:
    """Build the linear layer as a matmul of rank 4: operands that are not weights get two axes of size 1 in front."""
    def raise_rank(var: Var) -> Var:
        if is_const(var) or is_compressed(var):
            return var
        raised: Var = mb.expand_dims(x=var, axes=[0, 1])
        return raised

    if layer.op_type == "matmul":
        return rebuild_op(mb, layer, x=raise_rank(layer.x), y=raise_rank(layer.y))
    product: Var = mb.matmul(x=raise_rank(layer.x), y=layer.weight, transpose_y=True)
    if _has_bias(layer):
        product = mb.add(x=product, y=layer.bias)
    return product


def _find_scales(found: HardSwish) -> list[Operation]:
    """Find the product or quotient by a number that alone reads the hard swish: x * relu6(x + 3) / 6."""
    product = found.ops[-1]
    readers = get_consumers(product.outputs[0])
    if len(readers) != 1 or readers[0].op_type not in ("mul", "real_div"):
        return []
    reader = readers[0]
    numbers = [var for var in (reader.x, reader.y) if np.size(get_const_value(var, ())) == 1]
    return [reader] if numbers and reader.enclosing_block is product.enclosing_block else []


def _is_used_outside(var: Var, ops: Iterable[Operation]) -> bool:
    return bool(var.consuming_blocks) or any(op not in ops for op in get_consumers(var))


def _build_gate(x: Var) -> Var:
    gate: Var = Builder.relu6(x=Builder.add(x=x, y=np.float16(3)))
    return gate


def _build_written_out(x: Var) -> Var:
    result: Var = Builder.mul(x=x, y=Builder.mul(x=_build_gate(x), y=np.float16(1 / 6)), name="y")
    return result


def _build_fused(x: Var) -> Var:
    kept = Builder.thresholded_relu(x=x, alpha=np.float16(-3))
    gate = Builder.sigmoid_hard(x=kept, alpha=np.float16(1 / 6), beta=np.float16(0.5))
    result: Var = Builder.mul(x=kept, y=gate, name="y")
    return result


def _make_example(
    name: str, build_layer: Callable[[Var], Var], build_activation: Callable[[Var], Var] = _build_fused,
    shape: tuple[int | None, ...] = (2, 8), **settings: Any,
) -> Example:
    return make_example(name, lambda x: build_activation(build_layer(x)), x=shape, **settings)
