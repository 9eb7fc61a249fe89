"""Split linear layers whose output exceeds the ANE's dimension limit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ane.limits import collect_evidence, find_limit
from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import get_const_value, is_compressed, is_const
from ...ir.weight_cuts import cut_weight, find_cut_unit, slice_weight
from ...passes.contract import FP32_UNSUPPORTED_REASON, Community, Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_m1_gpt_notes
from ...passes.examples import make_example, make_weight
from ...passes.targets import parse_target
from ...rules.shapes import DimensionLimit
from .._target_gate import describe_supporting_targets, find_limiting_generations
from .._weights import find_sharing_obstacle, split_evenly

_SLOWER_CHIP = "a19"
"The chip on which tiles were measured to be slower, although the output exceeds the stated limit."


class SplitWideLinear(Rewrite):
    """Split a linear, a matmul with a constant, or a 1x1 conv along its outputs into supported layers, and concat them.

    why     The head of a language model has 50257 to 262144 outputs. No axis may be longer than 65536 on an M4, or
            16384 (65536 for channels) up to M3, so the largest product of the model leaves the ANE. On an M2 Pro
            50257 outputs in 4 tiles took 3.4 ms on the ANE, 10.8 ms without it.
    when    fp16, a stored weight, and every generation of the target rejects the output. The concat has the long output
            and stays off the ANE with its users: the product moves to the ANE, but the number of unsupported ops stays
            the same. A weight with other users, such as a tied embedding, is not stored twice above `max_bytes`. A
            compressed one is split in compressed form (tables shared); sparse ones and tables of vectors are skipped.
            Not if the output fits, where tiles save no time. Not for target a19 or m5, whose generation was measured to
            lose 4.6 % with 262144 outputs in 16 tiles.
    exact   rounding, formally: each output is the same sum of the same products, but of a matrix of different size.
    cost    a concat on the CPU. Parts of a weight share its bytes if the output is its first axis; a weight with other
            users is stored again, up to `max_bytes`.

    before
        %0: fp16[2, 1] = reduce_mean(x=%x, axes=[1], keep_dims=True)
        %1: fp16[2, 4] = add(x=%0, y=[-0.6875, -0.25, 0.1875, 0.625])
        %y: fp16[2, 65540] = linear(x=%1, weight=<fp16[65540, 4]>, bias=<fp16[65540]>)
    after
        %0: fp16[2, 1] = reduce_mean(x=%x, axes=[1], keep_dims=True)
        %1: fp16[2, 4] = add(x=%0, y=[-0.6875, -0.25, 0.1875, 0.625])
        %2: fp16[2, 13108] = linear(x=%1, weight=<fp16[13108, 4]>, bias=<fp16[13108]>)
        %3: fp16[2, 13108] = linear(x=%1, weight=<fp16[13108, 4]>, bias=<fp16[13108]>)
        %4: fp16[2, 13108] = linear(x=%1, weight=<fp16[13108, 4]>, bias=<fp16[13108]>)
        %5: fp16[2, 13108] = linear(x=%1, weight=<fp16[13108, 4]>, bias=<fp16[13108]>)
        %6: fp16[2, 13108] = linear(x=%1, weight=<fp16[13108, 4]>, bias=<fp16[13108]>)
        %y: fp16[2, 65540] = concat(values=(%2, %3, %4, %5, %6), axis=-1)
    """

    fixes = (DimensionLimit,)
    stage = "decompose"
    exactness = Exactness.ROUNDING
    bound = "each output is a sum of the same products; the order of additions may depend on the matrix size"
    preset = "full"
    roots = ("linear", "matmul", "conv")
    evidence = (
        *collect_evidence("spatial", "channels"),
        cite_m1_gpt_notes("products with 50257 columns exceed a limit of the ANE"),
        Community("the head of gpt2-medium (50257) in 4 tiles of 16384 takes 3.4 ms a token, 10.8 ms on the CPU; that "
                  "of Qwen3-0.6B (151936) in 10 tiles 8.2 and 30.1 ms (not through Core ML)", chip="M2 Pro",
                  os="macOS 26.5.2", date="2026-08-18", source="https://github.com/sbryngelson/ANEForge/pull/240"),
        Community("contradicts it: 262144 outputs in 16 tiles make a decoder 4.6 % slower end to end",
                  source="john-rocky/CoreML-LLM", chip="A19 Pro"),
        Community("if the output fits: 8192 outputs, 1024 rows, take 38.8 ms, 39.8 in two tiles (not "
                  "through Core ML)", source="trisanths/ane-llm-prefill", chip="M2 Pro", os="macOS 27"),
    )

    max_parts: int = 32
    "Maximum number of parts of one layer."
    max_bytes: int = 1 << 24
    "Maximum additional weight bytes for one op, if another op uses the entire weight."
    always: bool = False
    "Rewrite even if a generation of the target supports the output."

    def match(self, op: Operation) -> Hit | Miss:
        name, axis = _find_weight_axis(op)
        weight = op.inputs[name]
        if not weight.rank or (op.op_type == "conv" and any(size != 1 for size in op.weight.shape[2:])):
            return Miss(op, "not a pointwise product", near=False)
        is_constant = is_const(weight) or is_compressed(weight)
        if op.op_type == "matmul" and (weight.rank != 2 or op.x.rank < 2 or not is_constant):
            return Miss(op, "no constant matrix", near=False)
        width, limit_name = int(weight.shape[axis]), "channels" if op.op_type == "conv" else "spatial"
        limited = find_limiting_generations(limit_name, width, self.generations)
        if not limited:
            return Miss(op, "fits", near=False)
        if len(limited) < len(self.generations) and not self.always:
            return Miss(op, describe_supporting_targets(self.generations, limited))
        if list(self.generations) == list(parse_target(_SLOWER_CHIP)) and not self.always:
            return Miss(op, "tiles were measured to be slower on A19 Pro; choose another target, or always=true")
        limit = find_limit(limit_name, limited)
        assert limit is not None
        parts = self._compute_parts(op.inputs[name], axis, limit.most)
        reason = (self._find_form_obstacle(op, name) or self._find_parts_obstacle(op.inputs[name], parts, axis)
                  or find_sharing_obstacle(op.inputs[name], op, partial(_is_cut_alike, name, axis), self.max_bytes))
        if reason:
            return Miss(op, reason)
        return Hit(op, parts=parts, weight=name, axis=axis,
                   note=f"{width} outputs in {len(parts)} parts of {limit.most} at most; the concat stays off the ANE")

    def _find_form_obstacle(self, op: Operation, name: str) -> str:
        weight, bias = op.inputs[name], op.inputs.get("bias")
        if op.x.dtype != types.fp16:
            return FP32_UNSUPPORTED_REASON
        if not (is_const(weight) or is_compressed(weight)) or (bias is not None and not is_const(bias)):
            return "the weight or the bias is computed, or the bias compressed"
        if op.op_type == "conv" and get_const_value(op.groups, 1) != 1:
            return "the conv has groups"
        return ""

    def _compute_parts(self, weight: Var, axis: int, most: int) -> list[tuple[int, int]]:
        """Compute even parts; those of a compressed weight end where its blocks do."""
        unit, width = find_cut_unit(weight, axis), int(weight.shape[axis])
        if isinstance(unit, str) or unit == 1 or unit > most:
            return split_evenly(width, most)
        blocks = split_evenly(-(-width // unit), most // unit)
        return [(start * unit, min(stop * unit, width)) for start, stop in blocks]

    def _find_parts_obstacle(self, weight: Var, parts: list[tuple[int, int]], axis: int) -> str:
        if len(parts) > self.max_parts:
            return f"{len(parts)} parts, above max_parts={self.max_parts}"
        unit = find_cut_unit(weight, axis)
        if isinstance(unit, str):
            return unit
        if any(start % unit for start, _ in parts):
            return f"blocks of {unit} outputs of the compressed weight are longer than a part"
        return ""

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        op, parts = hit.op, []
        for part in hit.parts:
            changes: dict[str, Any] = {hit.weight: cut_weight(mb, op.inputs[hit.weight], hit.axis, *part)}
            if op.inputs.get("bias") is not None:
                changes["bias"] = slice_weight(mb, op.bias, 0, *part)
            parts.append(rebuild_op(mb, op, **changes))
        result: Var = mb.concat(values=parts, axis=1 if op.op_type == "conv" else -1)
        return result

    def examples(self) -> Iterable[Example]:
        yield make_example(
            "a head",
            lambda x: Builder.linear(
                x=_reduce_to_four(x), weight=make_weight(65540, 4), bias=make_weight(65540), name="y"
            ),
            options={"max_parts": 9},
            x=(2, 3),
        )
        yield make_example(
            "matmul", lambda x: Builder.matmul(x=_reduce_to_four(x), y=make_weight(4, 65540), name="y"), x=(2, 3)
        )
        yield make_example(
            "conv",
            lambda x: Builder.conv(
                x=Builder.reduce_mean(x=x, axes=[0, 3], keep_dims=True), weight=make_weight(65540, 2, 1, 1), name="y"
            ),
            x=(1, 2, 3, 1),
        )
        yield make_example(
            "supported on M4", lambda x: Builder.linear(x=_reduce_to_four(x), weight=make_weight(20000, 4), name="y"),
            reason="supported on M4, A18, M5 and M6; choose an older target, or always=true", x=(2, 3))
        yield make_example(
            "fits", lambda x: Builder.linear(x=_reduce_to_four(x), weight=make_weight(16384, 4), name="y"),
            reason="fits", x=(2, 3))
        yield make_example(
            "palette", lambda x: Builder.linear(x=_reduce_to_four(x), weight=_build_palette(65544, 4), name="y"),
            opset=ct.target.iOS18, x=(2, 3))
        yield make_example(
            "tied", _build_tied_weight, options={"max_bytes": 0}, x=(2,),
            reason="the weight 'w' is also used as a whole: its pieces would add 524.3 kB, above max_bytes=0")


def _find_weight_axis(op: Operation) -> tuple[str, int]:
    """Return the input that is the weight, and its axis that becomes the output's."""
    if op.op_type == "matmul":
        return "y", 0 if get_const_value(op.inputs.get("transpose_y"), False) else 1
    return "weight", 0


def _is_cut_alike(name: str, axis: int, op: Operation, weight: Var) -> bool:
    """Return whether `op` reads `weight` as its own weight `name`, with its outputs along `axis`."""
    return (op.op_type in ("linear", "matmul", "conv") and op.inputs.get(name) is weight
            and _find_weight_axis(op) == (name, axis))


def _reduce_to_four(x: Var) -> Any:
    return Builder.add(x=Builder.reduce_mean(x=x, axes=[1], keep_dims=True), y=make_weight(4))


def _build_palette(*shape: int) -> Any:
    """Build a weight with one table for 8 outputs each."""
    indices = (np.arange(math.prod(shape)) * 5 % 16).reshape(shape).astype(types.np_uint4_dtype)
    return Builder.constexpr_lut_to_dense(indices=indices, lut=make_weight(shape[0] // 8, 1, 16, 1))


def _build_tied_weight(x: Var) -> Any:
    weight = Builder.const(val=make_weight(65540, 4), name="w")
    rows = Builder.gather(x=weight, indices=Builder.cast(x=x, dtype="int32"), axis=0)
    return Builder.linear(x=rows, weight=weight, name="y")
