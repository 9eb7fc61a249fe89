"""Find integer weights with more than one scale across the input channels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ..ir.query import get_const_value, is_compressed
from ..passes.contract import Community, Example, Hit, Miss, Rule
from ..passes.examples import build_program, make_example, make_weight
from ._sizes import select_generations


class PerBlockInt8(Rule):
    """An int8 or int4 weight has a scale for each block of input channels.

    why     Such weights gave wrong outputs on the Neural Engine, silently: cosine 0.367 to the reference, 0.999 on
            the GPU. On an M4 a conv, linear or matmul with an int8 or int4 weight of any granularity was given to
            the CPU. The reports differ in what happens; in neither does the ANE compute it right.
    when    conv, linear or matmul reads a constexpr_blockwise_shift_scale of integers with more than one block along
            the input channels. Scales for each output channel only are left out. That the ANE rejects the op was seen
            on an M4; elsewhere it may compute it, wrongly.
    fix     None here. Palettize instead (cosine 0.9975 in the same report, groups of 32), or quantize for each
            output channel: granularity="per_channel" in coremltools.optimize.
    no fix  Quantizing or palettizing anew changes the weights, which is for who made them to decide.
    """

    code, slug = "ANE402", "per-block-int8-weight"
    roots = ("conv", "linear", "matmul")
    refuses, confidence = True, "medium"
    advice = "Palettize the weight, or quantize it with one scale for each output channel."
    evidence = (
        Community("8-bit weights with a scale for each block: output cosine 0.367 on the Neural Engine, 0.999 on the "
                  "GPU; 8-bit palettized in groups of 32: 0.9975 on the Neural Engine (Core AI)",
                  source="https://github.com/apple/coreai-models/issues/279", chip="iPhone 16 Pro Max", os="iOS 27.0",
                  date="2026-09"),
        Community("a conv, linear or matmul with an int4 or int8 constexpr weight reports supported=[CPU] from "
                  "MLComputePlan, up to target iOS26",
                  source="https://github.com/kasper0406/stablehlo-coreml/pull/110", chip="M4"),
        Community("constexpr_blockwise_shift_scale weights cannot be routed to the ANE (a private route)",
                  source="https://github.com/sbryngelson/ANEForge"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        found = [(var, axis) for var, axis in _find_weights_with_axes(op)
                 if is_compressed(var) and var.op.op_type == "constexpr_blockwise_shift_scale"]
        if not found:
            return Miss(op, "no weight of integers with scales", near=False)
        for var, axis in found:
            data, blocks = var.op.data, int(var.op.scale.shape[axis])
            if types.is_float(data.dtype):
                return Miss(op, "the scaled data are not integers", near=False)
            if blocks > 1:
                kind = types.builtin_to_string(data.dtype)
                return Hit(op, sure=bool(select_generations(tuple(self.generations), "m4")),
                           note=f"{kind} weight with a scale for every {int(var.shape[axis]) // blocks} of "
                                f"{var.shape[axis]} input channels; palettize, or quantize by output channel")
        return Miss(op, "one scale for all input channels", near=False)

    def examples(self) -> Iterable[Example]:
        yield Example("conv", lambda: _build_conv((4, 2, 1, 1)))
        yield Example("int4", lambda: _build_conv((1, 4, 1, 1), types.np_int4_dtype))
        yield Example("linear", _build_linear)
        yield Example("matmul", lambda: _build_matmul((4, 1)))
        yield Example("matmul, transposed", lambda: _build_matmul((1, 2), transpose_y=True))
        yield Example("per channel", lambda: _build_conv((4, 1, 1, 1)), reason="one scale for all input channels")
        yield Example("matmul per channel", lambda: _build_matmul((1, 4)), reason="one scale for all input channels")
        yield Example("scaled floats", lambda: _build_conv((4, 2, 1, 1), np.float16),
                      reason="the scaled data are not integers")
        yield make_example(
            "plain",
            lambda x: Builder.conv(x=x, weight=make_weight(4, 8, 1, 1)),
            reason="no weight of integers with scales",
            x=(1, 8, 5, 6),
        )


def _find_weights_with_axes(op: Operation) -> list[tuple[Var, int]]:
    """Return the inputs of `op` that may be weights, each with the axis of its input channels."""
    if op.op_type == "matmul":
        return [
            (op.y, -1 if get_const_value(op.transpose_y, False) else -2),
            (op.x, -2 if get_const_value(op.transpose_x, False) else -1),
        ]
    return [(op.weight, 1)]


def _build_scaled_weight(shape: tuple[int, ...], scale: tuple[int, ...], dtype: type = np.int8) -> Var:
    data: np.ndarray[Any, Any] = (np.arange(np.prod(shape)) % 15 - 7).reshape(shape).astype(dtype)
    return Builder.constexpr_blockwise_shift_scale(data=data, scale=make_weight(*scale) + np.float16(1))


def _build_conv(scale: tuple[int, ...], dtype: type = np.int8) -> Program:
    return build_program(lambda x: Builder.conv(x=x, weight=_build_scaled_weight((4, 8, 1, 1), scale, dtype), name="y"),
                         opset=ct.target.iOS18, x=(1, 8, 5, 6))


def _build_linear() -> Program:
    return build_program(lambda x: Builder.linear(x=x, weight=_build_scaled_weight((4, 8), (4, 4)), name="y"),
                         opset=ct.target.iOS18, x=(3, 8))


def _build_matmul(scale: tuple[int, ...], transpose_y: bool = False) -> Program:
    return build_program(
        lambda x: Builder.matmul(x=x, y=_build_scaled_weight((8, 8), scale), transpose_y=transpose_y, name="y"),
        opset=ct.target.iOS18,
        x=(3, 8),
    )
