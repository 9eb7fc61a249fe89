"""Find integer weights with one scale for each output channel, on an M4."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ..ane.op_support import M4
from ..ir.query import is_compressed
from ..passes.contract import Community, Example, Hit, Miss, Rule, Vendor
from ..passes.examples import build_program, make_example, make_weight

_DATA_INPUTS = {"constexpr_blockwise_shift_scale": "data", "constexpr_affine_dequantize": "quantized_data"}
"Input of a compressed weight with its integers."


class IntegerWeights(Rule):
    """An int8 or int4 weight was reported to keep its op off the ANE of an M4; other sources disagree.

    why     One report from an M4: Core ML offers the CPU only for every conv, linear and matmul with an int4 or int8
            weight, at any depth and for any deployment target. Against it: a language model with int8 weights, one
            scale for each output channel, has 99.5 % of its ops on the ANE of an A19 Pro, and Apple's guide counts such
            weights among what gains on the ANE. What decides, the chip, the system or the form, nobody says.
    when    On an M4: conv, linear and matmul that read a weight of integers with scales, but those with several
            scales along the input channels, which are ANE402's. Palettized weights are none.
    fix     Palettize (coremltools.optimize.coreml.palettize_weights), which no report of this kind speaks of; or
            ask a device: the plan that `mil-ane-passes mac-script` brings back tells for each op.
    no fix  Palettizing or quantizing anew changes the weights, which is for who made them to decide.
    """

    code, slug = "ANE240", "integer-weights"
    roots = ("conv", "linear", "matmul")
    targets = M4
    refuses, confidence = True, "low"
    advice = "Look at the compute plan on a device, or palettize the weights instead."
    evidence = (
        Community("a conv, linear or matmul with an int4 or int8 constexpr weight reports supported=[CPU] from "
                  "MLComputePlan, up to target iOS26; to be checked again on other chips and systems, its author says",
                  source="https://github.com/kasper0406/stablehlo-coreml/pull/110", chip="M4"),
        Community("contradicts it: with int8 weights, one scale for each output channel, target iOS17, 99.5 % of the "
                  "ops of a language model are on the ANE by MLComputePlan", chip="A19 Pro (iPhone 17 Pro)",
                  os="iOS 26.4.1", source="https://huggingface.co/niduank/Qwen2.5-0.5B-Instruct-ANE-int8"),
        Vendor("contradicts it: int8 weights and activations gain on the Neural Engine of A17 Pro and M4",
               source="https://apple.github.io/coremltools/docs-guides/source/opt-quantization-perf.html"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        for var in (op.x, op.y) if op.op_type == "matmul" else (op.weight,):
            kind = _read_stored_integer_type(var)
            if kind and not _has_blocks(op, var):
                return Hit(op, sure=False, likely=True,
                           note=f"{kind} weight with scales: reported on the CPU of an M4, on the ANE of an A19 Pro")
        return Miss(op, "no weight of integers with scales by output channel", near=False)

    def examples(self) -> Iterable[Example]:
        yield Example("conv", lambda: _build_conv((4, 1, 1, 1)))
        yield Example("one scale", lambda: _build_conv((1, 1, 1, 1)))
        yield Example("first form", _build_affine_linear)
        yield Example("blocks", lambda: _build_conv((4, 2, 1, 1)),
                      reason="no weight of integers with scales by output channel")
        yield make_example(
            "plain",
            lambda x: Builder.conv(x=x, weight=make_weight(4, 8, 1, 1)),
            reason="no weight of integers with scales by output channel",
            x=(1, 8, 5, 6),
        )


def _read_stored_integer_type(var: Var) -> str:
    """Return the type of the integers that `var` is stored as; "" where it is not stored as integers."""
    if not is_compressed(var) or var.op.op_type not in _DATA_INPUTS:
        return ""
    data = var.op.inputs[_DATA_INPUTS[var.op.op_type]]
    return "" if data is None or types.is_float(data.dtype) else str(types.builtin_to_string(data.dtype))


def _has_blocks(op: Operation, var: Var) -> bool:
    """Return whether there are several scales along the input channels."""
    if var.op.op_type != "constexpr_blockwise_shift_scale":
        return False
    axis = 1
    if op.op_type == "matmul":
        flipped = op.transpose_y if var is op.y else op.transpose_x
        axis = -2 if (var is op.y) is not bool(flipped is not None and flipped.val) else -1
    return int(var.op.scale.shape[axis]) > 1


def _build_conv(scale: tuple[int, ...]) -> Program:
    data: np.ndarray[Any, Any] = (np.arange(32) % 15 - 7).reshape(4, 8, 1, 1).astype(np.int8)

    def body(x: Var) -> Var:
        stored = Builder.constexpr_blockwise_shift_scale(data=data, scale=make_weight(*scale) + np.float16(1))
        result: Var = Builder.conv(x=x, weight=stored, name="y")
        return result

    return build_program(body, opset=ct.target.iOS18, x=(1, 8, 5, 6))


def _build_affine_linear() -> Program:
    def body(x: Var) -> Var:
        stored = Builder.constexpr_affine_dequantize(
            quantized_data=np.arange(32, dtype=np.int8).reshape(4, 8), zero_point=np.int8(0), axis=0,
            scale=np.float16(0.5))
        result: Var = Builder.linear(x=x, weight=stored, name="y")
        return result

    return build_program(body, x=(3, 8))
