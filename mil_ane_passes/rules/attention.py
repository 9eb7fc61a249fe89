"""Attention, softmax, and linears on sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import coremltools as ct
from coremltools.converters.mil.mil import (
    Block,
    Builder,
    Function,
    Operation,
    Program,
    Var,
    get_new_symbol,
    types,
)
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..ir.query import get_const_value, get_type_info, is_compressed, is_const, is_opaque
from ..passes.contract import FP32_UNSUPPORTED_REASON, BlockRule, Community, Example, Hit, Miss, Severity, Vendor
from ..passes.evidence import cite_apple_authoring_rules, cite_m4_study
from ..passes.examples import build_program, make_weight
from ..utils.text_format import format_count

_ATTENTION_OP = "scaled_dot_product_attention"


class SeveralAttentions(BlockRule):
    """Two fused attentions in one function may move the entire model to the CPU.

    why     Reported for attentions over a long sequence with large heads: with two of them in one function the ANE's
            compiler fails ("live input tensor not used in network"), and the model silently runs on the CPU. With one
            it compiles, and attentions over a sliding window cause no failure. A single one is accepted on an M4, with
            and without a mask. Apple advises to write attention as separate ops for the ANE.
    when    A function, including nested blocks, with two or more scaled_dot_product_attention. The size limit is
            unknown, so the finding states the longest keys and the largest head.
    fix     Decompose it into matmul, softmax, matmul (different rounding), one head at a time as Apple does; converting
            for iOS17 or earlier does so. coremltools' scaled_dot_product_attention_sliced_q slices the queries.
    """

    code, slug = "ANE232", "several-fused-attentions"
    severity = Severity.UNSUPPORTED
    confidence = "medium"
    advice = "Decompose attention into matmul, softmax, matmul (different rounding), or convert for iOS17."
    evidence = (
        Community("with two or more fused attentions over long keys in one function ANECCompile fails and the model "
                  "falls back to the CPU without an error; 9 layers with one compile, 10 layers with two do not",
                  source="https://github.com/kasper0406/stablehlo-coreml/pull/89", os="macOS 26.5 and 26.6",
                  date="2026-08-26"),
        cite_m4_study("one scaled_dot_product_attention is accepted, with a mask, too"),
        cite_apple_authoring_rules("no fused attention on the ANE's path: split heads, einsum, softmax, einsum"),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        if not isinstance(block, Function):
            return
        found = list(_iterate_attentions(block))
        if len(found) == 1:
            yield Miss(found[0], "one fused attention in the function, two are reported to fail")
        elif found:
            keys, heads = (max((op.key.shape[at] for op in found), key=_to_number) for at in (-2, -1))
            yield Hit(found[0], covers=found, note=f"{len(found)} fused attentions in one function (keys up to {keys} "
                                                   f"long, heads up to {heads}); two large ones are reported to fail")

    def examples(self) -> Iterable[Example]:
        yield Example("two", lambda: _build_attentions(2))
        yield Example(
            "one", lambda: _build_attentions(1), reason="one fused attention in the function, two are reported to fail"
        )
        yield Example("none", lambda: _build_attentions(0), reason="")


class SmallFusedAttention(BlockRule):
    """A fused attention on small tensors may be placed on the CPU.

    why     Models of a single fused attention were tried in eight sizes. Core ML's compute plan preferred the ANE if
            query, key and value have at least 2,097,152 elements each, in fp16; with 1,048,576 or fewer it preferred
            the CPU, although the ANE supports the op. The preference depends on the entire model: between convs, an M4
            runs a smaller one on the ANE. In a decoder step, the query is one row.
    when    scaled_dot_product_attention in fp16 whose largest operand, except the mask, has fewer than `least`
            elements. One finding per block. No measurement is published between 1,048,576 and `least`.
    fix     Decompose it into matmul, softmax, matmul (different rounding; `decompose_attention`), which are placed with
            their neighbours, and measure both on the device. Or batch several calls.
    """

    code, slug = "ANE524", "small-fused-attention"
    level, confidence = "note", "medium"
    advice = "Decompose it into matmul, softmax, matmul (decompose_attention), and measure both."
    evidence = (
        Community("one fused attention alone: query, key and value of 2,097,152 and 4,194,304 elements in fp16 are "
                  "preferred on the ANE, of 1,048,576 and fewer on the CPU, and in fp32 all; supported in all cases",
                  source="https://github.com/vx-lang/Vx/issues/437", date="2026-09-03"),
        cite_m4_study("one of 65,536 elements, with a mask, too, is accepted between convs"),
    )
    least: int = 1 << 21
    "Elements of the largest operand from which it is preferred on the ANE."

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        found = []
        for op in block.operations:
            if op.op_type != _ATTENTION_OP or is_opaque(op):
                continue
            size = _count_largest(op)
            if size is None:
                yield Miss(op, "its size is dynamic")
            elif op.outputs[0].dtype != types.fp16:
                yield Miss(op, FP32_UNSUPPORTED_REASON)
            elif size >= self.least:
                yield Miss(op, f"{size:,} elements in an operand, {self.least:,} are enough (least)", near=False)
            else:
                found.append((op, size))
        if found:
            op, size = max(found, key=lambda each: each[1])
            yield Hit(op, covers=[each for each, _ in found],
                      note=f"{format_count(len(found), 'fused attention')}, the largest with {size:,} elements in an "
                           f"operand; alone it is preferred on the ANE from {self.least:,} on")

    def examples(self) -> Iterable[Example]:
        yield Example("small", lambda: _build_attention(8))
        yield Example("large", lambda: _build_attention(1 << 15),
                      reason="2,097,152 elements in an operand, 2,097,152 are enough (least)")
        yield Example("fp32", lambda: _build_attention(8, types.fp32), reason=FP32_UNSUPPORTED_REASON)
        yield Example("flexible", lambda: _build_attention(get_new_symbol()),
                      reason="its size is dynamic")


def _count_largest(op: Operation) -> int | None:
    """Count the elements of the largest of query, key and value; None if one of them is flexible."""
    shapes = [get_type_info(var).shape for var in (op.query, op.key, op.value)]
    known = [prod(shape) for shape in shapes if shape is not None and not any(map(is_symbolic, shape))]
    return max(known) if len(known) == len(shapes) else None


def _build_attention(heads: Any, dtype: Any = types.fp16) -> Program:
    def build_body(q: Var, k: Var, v: Var) -> Var:
        result: Var = Builder.scaled_dot_product_attention(query=q, key=k, value=v, name="y")
        return result

    shape = (1, heads, 1, 64)
    return build_program(build_body, opset=ct.target.iOS18, dtype=dtype, q=shape, k=shape, v=shape)


def _iterate_attentions(block: Block) -> Iterator[Operation]:
    pending = [block]
    while pending:
        for op in pending.pop().operations:
            pending.extend(op.blocks)
            if op.op_type == _ATTENTION_OP and not is_opaque(op):
                yield op


def _to_number(extent: object) -> int:
    return int(str(extent)) if str(extent).isdigit() else 0


def _build_attentions(count: int) -> Program:
    def build_body(q: Var, k: Var, v: Var) -> Var:
        for _ in range(count):
            q = Builder.scaled_dot_product_attention(query=q, key=k, value=v)
        result: Var = Builder.relu(x=q, name="y")
        return result

    return build_program(build_body, opset=ct.target.iOS18, q=(1, 2, 3, 4), k=(1, 2, 5, 4), v=(1, 2, 5, 4))


class SequenceLinears(BlockRule):
    """Linear layers on (batch, sequence, channels) use a layout that Apple advises against on the ANE.

    why     Apple's transformers for the ANE write every linear layer as a 1x1 conv on (B, C, 1, S), so that the longer
            axis is last and no transposes are needed; its rules for Core AI agree. Measurements by others differ: an
            audio encoder became 1.5 times faster, other models loaded faster but did not run faster. Core ML on an M4
            accepts linear and matmul, so this moves no op off the ANE.
    when    At least `least` linears, or matmuls with a constant operand, on values of rank 3 whose sequence is longer
            than 1. One finding per block.
    fix     Use (B, C, 1, S) in the entire model and Conv2d(1x1) for Linear, with two more axes in the weight (different
            rounding). Converting single layers only adds transposes. Measure both.
    """

    code, slug = "ANE519", "linears-on-sequences"
    severity, confidence = Severity.SUGGESTION, "medium"
    advice = "Try the layout (B, C, 1, S) with 1x1 convs for the linear layers, and measure both."
    evidence = (
        Vendor("linear layers become 1x1 convs on (B, C, 1, S), the data format that suits the ANE", date="2022-06",
               source="https://machinelearning.apple.com/research/neural-engine-transformers"),
        cite_apple_authoring_rules("the same for Core AI, where a linear layer may fall back"),
        cite_m4_study("contradicts it: linear and matmul are accepted"),
        Community("an encoder with 1x1 convs for linears, (B, C, 1, S) and attention head by head runs in 7.60 ms, "
                  "before in 11.61 ms", source="https://github.com/FluidInference/FluidAudio/pull/410", chip="M4 Max",
                  date="2026-03-22"),
    )
    least: int = 4
    "Minimum number of such layers to report; our choice, no source states one."

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        found = [op for op in block.operations if op.op_type in ("linear", "matmul") and _is_on_sequence(op)]
        if len(found) >= self.least:
            shape = "x".join("?" if is_symbolic(extent) else str(extent) for extent in found[0].x.shape)
            yield Hit(found[0], covers=found,
                      note=f"{format_count(len(found), 'linear layer')} on sequences, the first on {shape}")

    def examples(self) -> Iterable[Example]:
        yield Example("a stack", lambda: _build_linears(4, (1, 16, 8)))
        yield Example("a few", lambda: _build_linears(3, (1, 16, 8)), reason="")
        yield Example("no sequence", lambda: _build_linears(4, (16, 8)), reason="")


def _is_on_sequence(op: Operation) -> bool:
    if is_opaque(op) or op.x.rank != 3:
        return False
    stored = op.op_type == "linear" or is_const(op.y) or is_compressed(op.y)
    return bool(stored and (is_symbolic(op.x.shape[1]) or op.x.shape[1] > 1))


def _build_linears(count: int, shape: tuple[int, ...]) -> Program:
    def build_body(x: Var) -> Var:
        for number in range(count):
            x = Builder.linear(x=x, weight=make_weight(8, 8), name=f"y{number}")
        return x

    return build_program(build_body, x=shape)


class SoftmaxAxis(BlockRule):
    """A large softmax over height or width prevents the ANE's compiler from splitting the work along that axis.

    why     Apple's rules for the Neural Engine: a softmax over a spatial axis of a large tensor limits how the tensor
            can be split; a softmax over channels does not. An M4 accepts any axis, so this affects speed only. No
            timings are published.
    when    softmax of a value of rank 4 over axis 2 or 3 with at least `least` elements. One finding per block.
    fix     Compute attention in the layout (1, C, 1, S), with keys on the channel axis, so that the softmax is over
            axis 1, as in Apple's transformers. Added transposes only pay off if they cancel with others.
    """

    code, slug = "ANE518", "softmax-axis"
    severity, confidence = Severity.SUGGESTION, "high"
    advice = "Change the layout of attention so that the softmax is over axis 1, the channels."
    evidence = (
        cite_apple_authoring_rules(
            "softmax over a spatial axis of a large tensor limits spatial splitting: put the axis on the channels"
        ),
        Vendor(
            "attention with the keys on axis 1, softmax over it",
            date="2022",
            source="apple/ml-ane-transformers ane_transformers/reference/multihead_attention.py",
        ),
        cite_m4_study("softmax over any axis is accepted"),
    )
    least: int = 1 << 20
    "Number of elements from which a tensor counts as large (2 MiB in fp16); our choice, no source states one."

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        found = [op for op in block.operations if op.op_type == "softmax" and not is_opaque(op) and self._is_large(op)]
        if found:
            largest = max(found, key=lambda op: prod(get_type_info(op.x).shape or ()))
            shape = "x".join(map(str, largest.x.shape))
            yield Hit(found[0], covers=found, note=f"{format_count(len(found), 'op')} over height or width, the "
                                                   f"largest of {shape}")

    def _is_large(self, op: Operation) -> bool:
        shape, axis = get_type_info(op.x).shape, get_const_value(op.axis, -1)
        return shape is not None and len(shape) == 4 and axis % 4 > 1 and prod(shape) >= self.least

    def examples(self) -> Iterable[Example]:
        yield Example("heads", lambda: _build_softmax((1, 8, 512, 512), -1))
        yield Example("channels", lambda: _build_softmax((1, 512, 8, 512), 1), reason="")
        yield Example("small", lambda: _build_softmax((1, 8, 16, 16), -1), reason="")


def _build_softmax(shape: tuple[int, ...], axis: int) -> Program:
    return build_program(lambda x: Builder.softmax(x=x, axis=axis, name="y"), x=shape)
