"""Weights whose format or size keeps an op off the ANE, or slows it down."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Program, Var, types

from ..ane.op_support import M4
from ..ane.partitions import iterate_rows_by_function
from ..ir.query import count_stored_bytes, get_const_value, get_type_info, is_compressed, is_const
from ..passes.contract import Community, Example, Hit, Miss, PlanRule, Rule, Severity, Vendor
from ..passes.examples import build_program, make_example, make_weight
from ..passes.plan import Plan
from ._sizes import select_generations

_DATA_INPUTS = {"constexpr_blockwise_shift_scale": "data", "constexpr_affine_dequantize": "quantized_data"}
"Input of a compressed weight with its integers."
_CORES, _SLOW_SHARE_STEP, _SLOW_SHARE_MARGIN = 16, 1 << 20, 16 << 10
"Cores of an M4's ANE; a core's share of a weight streams slowly within 16 KiB of a multiple of 1 MiB."
_GB = 10 ** 9


class IntegerWeights(Rule):
    """An int8 or int4 weight is reported to keep its op off the ANE of an M4; other sources disagree.

    why     One report from an M4: Core ML supports every conv, linear and matmul with an int4 or int8 weight on the CPU
            only, at any depth and for any deployment target. In contrast, a language model with int8 weights and one
            scale per output channel has 99.5 % of its ops on the ANE of an A19 Pro, and Apple's guide recommends such
            weights for the ANE. No source states whether the chip, the OS or the format decides.
    when    On an M4: conv, linear and matmul with a scaled integer weight, except those with several scales along the
            input channels (ANE402). Palettized weights do not count.
    fix     Palettize (coremltools.optimize.coreml.palettize_weights), for which no such report exists; or measure the
            compute plan on a device with `mil-ane-passes mac-script`.
    no fix  Requantizing or palettizing changes the weight values, which is the decision of the model's author.
    """

    code, slug = "ANE240", "integer-weights"
    roots = ("conv", "linear", "matmul")
    targets = M4
    refuses, confidence = True, "low"
    advice = "Check the compute plan on a device, or palettize the weights instead."
    evidence = (
        Community("a conv, linear or matmul with an int4 or int8 constexpr weight reports supported=[CPU] from "
                  "MLComputePlan, up to target iOS26; the author asks to check other chips and systems",
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
        return Miss(op, "no integer weight with one scale per output channel", near=False)

    def examples(self) -> Iterable[Example]:
        yield Example("conv", lambda: _build_int8_conv((4, 1, 1, 1)))
        yield Example("one scale", lambda: _build_int8_conv((1, 1, 1, 1)))
        yield Example("first form", _build_affine_linear)
        yield Example("blocks", lambda: _build_int8_conv((4, 2, 1, 1)),
                      reason="no integer weight with one scale per output channel")
        yield make_example(
            "plain",
            lambda x: Builder.conv(x=x, weight=make_weight(4, 8, 1, 1)),
            reason="no integer weight with one scale per output channel",
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


def _build_int8_conv(scale: tuple[int, ...]) -> Program:
    data: np.ndarray[Any, Any] = (np.arange(32) % 15 - 7).reshape(4, 8, 1, 1).astype(np.int8)

    def build_body(x: Var) -> Var:
        stored = Builder.constexpr_blockwise_shift_scale(data=data, scale=make_weight(*scale) + np.float16(1))
        result: Var = Builder.conv(x=x, weight=stored, name="y")
        return result

    return build_program(build_body, opset=ct.target.iOS18, x=(1, 8, 5, 6))


def _build_affine_linear() -> Program:
    def build_body(x: Var) -> Var:
        stored = Builder.constexpr_affine_dequantize(
            quantized_data=np.arange(32, dtype=np.int8).reshape(4, 8), zero_point=np.int8(0), axis=0,
            scale=np.float16(0.5))
        result: Var = Builder.linear(x=x, weight=stored, name="y")
        return result

    return build_program(build_body, x=(3, 8))


class PerBlockInt8(Rule):
    """An int8 or int4 weight has one scale per block of input channels.

    why     Such weights gave silently wrong outputs on the Neural Engine: cosine 0.367 to the reference, 0.999 on the
            GPU. On an M4 a conv, linear or matmul with an int8 or int4 weight of any granularity ran on the CPU. The
            reports differ in the effect, but in neither of them does the ANE compute it correctly.
    when    conv, linear or matmul reads a constexpr_blockwise_shift_scale of integers with more than one block along
            the input channels. Weights with scales per output channel only do not count. The ANE of an M4 rejects the
            op; other chips may compute it, wrongly.
    fix     None by a rewrite. Palettize instead (cosine 0.9975 in the same report, groups of 32), or quantize per
            output channel: granularity="per_channel" in coremltools.optimize.
    no fix  Requantizing or palettizing changes the weight values, which is the decision of the model's author.
    """

    code, slug = "ANE402", "per-block-int8-weight"
    roots = ("conv", "linear", "matmul")
    refuses, confidence = True, "medium"
    advice = "Palettize the weight, or quantize it with one scale per output channel."
    evidence = (
        Community("8-bit weights with a scale for each block: output cosine 0.367 on the Neural Engine, 0.999 on the "
                  "GPU; 8-bit palettized in groups of 32: 0.9975 on the Neural Engine (Core AI)",
                  source="https://github.com/apple/coreai-models/issues/279", chip="iPhone 16 Pro Max", os="iOS 27.0",
                  date="2026-09"),
        Community("a conv, linear or matmul with an int4 or int8 constexpr weight reports supported=[CPU] from "
                  "MLComputePlan, up to target iOS26",
                  source="https://github.com/kasper0406/stablehlo-coreml/pull/110", chip="M4"),
        Community("constexpr_blockwise_shift_scale weights cannot be routed to the ANE (not through Core ML)",
                  source="https://github.com/sbryngelson/ANEForge"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        found = [(var, axis) for var, axis in _find_weights_with_axes(op)
                 if is_compressed(var) and var.op.op_type == "constexpr_blockwise_shift_scale"]
        if not found:
            return Miss(op, "no integer weight with scales", near=False)
        for var, axis in found:
            data, blocks = var.op.data, int(var.op.scale.shape[axis])
            if types.is_float(data.dtype):
                return Miss(op, "the scaled data are not integers", near=False)
            if blocks > 1:
                kind = types.builtin_to_string(data.dtype)
                return Hit(op, sure=bool(select_generations(tuple(self.generations), "m4")),
                           note=f"{kind} weight with one scale per {int(var.shape[axis]) // blocks} of "
                                f"{var.shape[axis]} input channels; palettize, or quantize per output channel")
        return Miss(op, "one scale for all input channels", near=False)

    def examples(self) -> Iterable[Example]:
        yield Example("conv", lambda: _build_blockwise_conv((4, 2, 1, 1)))
        yield Example("int4", lambda: _build_blockwise_conv((1, 4, 1, 1), types.np_int4_dtype))
        yield Example("linear", _build_blockwise_linear)
        yield Example("matmul", lambda: _build_blockwise_matmul((4, 1)))
        yield Example("matmul, transposed", lambda: _build_blockwise_matmul((1, 2), transpose_y=True))
        yield Example("per channel", lambda: _build_blockwise_conv((4, 1, 1, 1)),
                      reason="one scale for all input channels")
        yield Example("matmul per channel", lambda: _build_blockwise_matmul((1, 4)),
                      reason="one scale for all input channels")
        yield Example("scaled floats", lambda: _build_blockwise_conv((4, 2, 1, 1), np.float16),
                      reason="the scaled data are not integers")
        yield make_example(
            "plain",
            lambda x: Builder.conv(x=x, weight=make_weight(4, 8, 1, 1)),
            reason="no integer weight with scales",
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


def _build_blockwise_conv(scale: tuple[int, ...], dtype: type = np.int8) -> Program:
    return build_program(lambda x: Builder.conv(x=x, weight=_build_scaled_weight((4, 8, 1, 1), scale, dtype), name="y"),
                         opset=ct.target.iOS18, x=(1, 8, 5, 6))


def _build_blockwise_linear() -> Program:
    return build_program(lambda x: Builder.linear(x=x, weight=_build_scaled_weight((4, 8), (4, 4)), name="y"),
                         opset=ct.target.iOS18, x=(3, 8))


def _build_blockwise_matmul(scale: tuple[int, ...], transpose_y: bool = False) -> Program:
    return build_program(
        lambda x: Builder.matmul(x=x, y=_build_scaled_weight((8, 8), scale), transpose_y=transpose_y, name="y"),
        opset=ct.target.iOS18,
        x=(3, 8),
    )


class DmaNotch(Rule):
    """Each core's share of a weight is close to a multiple of 1 MiB, which streams slowly on an M4.

    why     According to one study an M4 streams weights at 17 to 25 GB/s if a core's share is within 16 KiB of a
            multiple of 1 MiB. Another author confirms it: a 2048x4096 layer took 840 us, and 430 us when split in two.
            The share is ceil(outputs / 16) * inputs * taps * 2 bytes, for 16 cores with equal work. Both timed convs;
            for linear and matmul this is predicted.
    when    On an M4: conv, linear and matmul with an uncompressed fp16 weight of such a size.
    fix     Split the weight along the input channels into two layers that are added (different rounding), neither of
            such a size; or change the width by a few channels in the model.
    """

    code, slug = "ANE521", "slow-weight-size"
    roots = ("conv", "linear", "matmul")
    targets = M4
    severity, confidence = Severity.SUGGESTION, "medium"
    advice = ("Split the weight along its input channels into two layers that are added, or change the layer's width "
              "in the model.")
    evidence = (
        Community("shares within 16 KiB of a multiple of 1 MiB stream at 17 to 25 GB/s; 2048x4096: 840 us, 430 us when "
                  "cut in two; not checked on M3 and A chips", chip="M4",
                  source="https://github.com/kasper0406/stablehlo-coreml/pull/110"),
        Community("the erratum, the model of a core's share and a workaround",
                  source="https://eiln.github.io/posts/ane-dma.html"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        weight = op.y if op.op_type == "matmul" else op.weight
        if not is_const(weight) or weight.dtype != types.fp16 or weight.rank < 2:
            return Miss(op, "no stored fp16 weight", near=False)
        shape = get_type_info(weight).shape or ()
        turned = op.op_type == "matmul" and not get_const_value(op.transpose_y, False)
        if op.op_type == "matmul" and prod(shape[:-2]) != 1:
            return Miss(op, "a batch of weights", near=False)
        outputs, inputs = (shape[-1], shape[-2]) if turned else (shape[-2], shape[-1])
        taps = 1
        if op.op_type == "conv":
            outputs, inputs, taps = shape[0], shape[1], prod(shape[2:])
        share = -(-outputs // _CORES) * inputs * taps * 2
        away = min(share % _SLOW_SHARE_STEP, _SLOW_SHARE_STEP - share % _SLOW_SHARE_STEP)
        if share < _SLOW_SHARE_STEP - _SLOW_SHARE_MARGIN or away > _SLOW_SHARE_MARGIN:
            return Miss(op, "no such size", near=False)
        return Hit(op, note=f"{'x'.join(map(str, shape))}: {share} bytes for each of {_CORES} cores, "
                            f"{'exactly' if not away else f'{away} bytes from'} {round(share / _SLOW_SHARE_STEP)} MiB")

    def examples(self) -> Iterable[Example]:
        yield Example("2048x4096", lambda: _build_zero_linear(2048, 4096))
        yield Example("close to it", lambda: _build_zero_linear(2048, 4100))
        yield Example("off it", lambda: _build_zero_linear(2048, 3072), reason="no such size")
        yield Example("small", lambda: _build_zero_linear(64, 64), reason="no such size")


def _build_zero_linear(outputs: int, inputs: int) -> Program:
    return build_program(lambda x: Builder.linear(x=x, weight=np.zeros((outputs, inputs), np.float16), name="y"),
                         x=(1, inputs))


class ModelSize(PlanRule):
    """The weights of a function exceed the limit of an iPhone's ANE.

    why     According to Apple a model for the Neural Engine of an iPhone cannot be larger than 1 GB. On a Mac with M1
            an entire model of 2 to 3 GB ran on the CPU, and all loaded models together had 3 GB at most. Later reports:
            about 1.4 GB per package on an iPhone 17 Pro, a package of 1.94 GB with no op on the ANE of a Mac, about 2
            GB per program. The limit depends on the device, not on the generation: an A15 and an M2 have the same ANE.
    when    The weights that a function's ops read, as they are stored (compressed ones by their packed size), exceed
            `phone` GB. In a package with several functions each one is counted separately, because one is loaded at a
            time.
    fix     Split the model between its layers: `edit --max-part-size 1GB`. ane::fp16_compute halves fp32 weights.
            Whether palettized weights help is unknown: in 2023, on an M1, 4 bits did not.
    """

    code, slug = "ANE510", "model-size"
    severity = Severity.UNSUPPORTED
    confidence = "high"
    advice = "Split the model between its layers: edit --max-part-size 1GB."
    evidence = (
        Vendor("to run on the Neural Engine of an iPhone a model cannot be larger than 1 GB; bisect_model cuts it",
               source="https://apple.github.io/coremltools/docs-guides/source/mlmodel-utilities.html"),
        Community("between 2 and 3 GB an entire model runs on the CPU; of five models of 0.8 GB the last one does; "
                  "4-bit weights do not help", chip="M1", date="2023-04-01",
                  source="smpanaro/more-ane-transformers src/experiments/NOTES.md"),
        Community("a package of 1.94 GB had no op on the ANE of a Mac, and about 1.4 GB per package was the limit on "
                  "an iPhone 17 Pro, for three models", chip="A19 Pro", source="john-rocky/CoreML-LLM", date="2026"),
        Community("a program of 1.5 GB compiles, one of 3.4 GB does not: about 2 GB per program (not through Core ML)",
                  source="https://github.com/sbryngelson/ANEForge/issues/45", date="2026"),
    )
    phone: float = 1.0
    "GB (10^9 bytes) of weights that an iPhone's ANE supports; Apple's number."
    mac: float = 3.0
    "GB of weights that an M1's ANE supports for all loaded models together, as reported."

    def match_plan(self, plan: Plan) -> Iterator[Hit | Miss]:
        sizes = {name: _count_weight_bytes(plan.program.functions[name]) for name, _ in iterate_rows_by_function(plan)}
        first = {name: rows[0].op for name, rows in iterate_rows_by_function(plan)}
        for name, size in sizes.items():
            if size > self.phone * _GB:
                where = f"{self.phone:g} GB (iPhone)"
                where += f" and than {self.mac:g} GB (M1)" if size > self.mac * _GB else ""
                yield Hit(
                    first[name],
                    note=f"the weights of function '{name}' take {_format_gigabytes(size)}, more than {where}",
                )
        files = plan.package.weight_bytes if plan.package is not None else 0
        if sizes and files > self.phone * _GB and max(sizes.values()) <= self.phone * _GB:
            yield Miss(
                next(iter(first.values())),
                f"the weight files have {_format_gigabytes(files)}, the largest function reads "
                f"{_format_gigabytes(max(sizes.values()))}",
            )

    def examples(self) -> Iterable[Example]:
        yield Example("above", _build_small_linear, options={"phone": 1e-7})
        yield Example("below", _build_small_linear, reason="", options={"phone": 1e-6})


def _format_gigabytes(size: int) -> str:
    return f"{size / _GB:.3g} GB"


def _count_weight_bytes(function: Block) -> int:
    """Count the bytes of a function's constants as stored, those of nested blocks included."""
    total, pending = 0, [function]
    while pending:
        for op in pending.pop().operations:
            if op.op_type == "const":
                total += count_stored_bytes(op.outputs[0])
            pending.extend(op.blocks)
    return total


def _build_small_linear() -> object:
    return build_program(lambda x: Builder.linear(x=x, weight=make_weight(8, 16), name="y"), x=(1, 16))
