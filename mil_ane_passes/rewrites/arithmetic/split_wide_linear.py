"""Split linear layers whose output is too long for the ANE."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ane.limits import collect_evidence, find_limit
from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import get_const_value, is_compressed, is_const
from ...passes.contract import FP32_UNSUPPORTED_REASON, Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_m1_gpt_notes
from ...passes.examples import make_example, make_weight
from ...rules.shapes import DimensionLimit
from .._target_gate import describe_supporting_targets, find_limiting_generations
from .._weights import find_slicing_obstacle, slice_weight, split_evenly


class SplitWideLinear(Rewrite):
    """Cut a linear, a matmul with a constant, or a 1x1 conv along its output into supported layers, and concat.

    why     The head of a language model has 50257 to 262144 outputs. No axis may be longer than 65536 on an M4, or
            16384 (65536 for channels) up to M3, so the largest product of the model falls off the ANE.
    when    fp16, a plain constant weight, and every generation looked at rejects the output. The concat has the long
            output itself and stays off the ANE, as does what reads it: the product moves, and the number of refused
            ops stays. A weight that something else reads whole, such as a tied embedding, is not stored twice above
            `max_bytes`, and a compressed one is not unpacked.
    exact   rounding, by the letter: each output is the same sum of the same products, of a matrix of another size.
    cost    a concat on the CPU. Parts of a weight are views of its bytes where the output is its first axis; a weight
            that is read whole elsewhere is stored again, up to `max_bytes`.

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
    bound = "each output is one sum of the same products; in which order a machine adds may depend on the matrix's size"
    preset = "full"
    roots = ("linear", "matmul", "conv")
    evidence = (
        *collect_evidence("spatial", "channels"),
        cite_m1_gpt_notes("products with 50257 columns exceed a limit of the ANE"),
    )

    max_parts: int = 32
    "The most parts that one layer is split into."
    max_bytes: int = 1 << 24
    "The most bytes by which the weights may grow for one op, where another op reads the entire weight."
    always: bool = False
    "Rewrite also where a requested generation supports the output as it is."

    def match(self, op: Operation) -> Hit | Miss:
        name, axis = _find_weight_axis(op)
        weight = op.inputs[name]
        if not weight.rank or (op.op_type == "conv" and any(size != 1 for size in op.weight.shape[2:])):
            return Miss(op, "no product at single places", near=False)
        is_constant = is_const(weight) or is_compressed(weight)
        if op.op_type == "matmul" and (weight.rank != 2 or op.x.rank < 2 or not is_constant):
            return Miss(op, "no constant matrix", near=False)
        width, limit_name = int(weight.shape[axis]), "channels" if op.op_type == "conv" else "spatial"
        limited = find_limiting_generations(limit_name, width, self.generations)
        if not limited:
            return Miss(op, "fits", near=False)
        if len(limited) < len(self.generations) and not self.always:
            return Miss(op, describe_supporting_targets(self.generations, limited))
        reason = self._find_weight_obstacle(op, name, axis)
        if reason:
            return Miss(op, reason)
        limit = find_limit(limit_name, limited)
        assert limit is not None
        parts = split_evenly(width, limit.most)
        if len(parts) > self.max_parts:
            return Miss(op, f"{len(parts)} parts, above max_parts={self.max_parts}")
        return Hit(op, parts=parts, weight=name, axis=axis,
                   note=f"{width} outputs in {len(parts)} parts of {limit.most} at most; the concat stays off the ANE")

    def _find_weight_obstacle(self, op: Operation, name: str, axis: int) -> str:
        weight, bias = op.inputs[name], op.inputs.get("bias")
        if op.x.dtype != types.fp16:
            return FP32_UNSUPPORTED_REASON
        if is_compressed(weight):
            return f"the weight is compressed by {weight.op.op_type}: its parts would have to be unpacked"
        if not is_const(weight) or (bias is not None and not is_const(bias)):
            return "the weight or the bias is computed, or the bias compressed"
        if op.op_type == "conv" and get_const_value(op.groups, 1) != 1:
            return "the conv has groups"
        return find_slicing_obstacle(
            weight,
            op,
            lambda other: other.inputs.get(name) is weight and _find_weight_axis(other) == (name, axis),
            self.max_bytes,
        )

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        op, parts = hit.op, []
        for part in hit.parts:
            changes: dict[str, Any] = {hit.weight: slice_weight(mb, op.inputs[hit.weight], hit.axis, *part)}
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
            "taken on M4", lambda x: Builder.linear(x=_reduce_to_four(x), weight=make_weight(20000, 4), name="y"),
            reason="taken on M4, A18, M5 and M6; name an older target, or always=true", x=(2, 3))
        yield make_example(
            "fits", lambda x: Builder.linear(x=_reduce_to_four(x), weight=make_weight(16384, 4), name="y"),
            reason="fits", x=(2, 3))
        yield make_example(
            "tied", _build_tied_weight, options={"max_bytes": 0}, x=(2,),
            reason="the weight 'w' is read whole as well: its pieces would add 524.3 kB, above max_bytes=0")


def _find_weight_axis(op: Operation) -> tuple[str, int]:
    """Return the input that is the weight, and its axis that becomes the output's."""
    if op.op_type == "matmul":
        return "y", 0 if get_const_value(op.inputs.get("transpose_y"), False) else 1
    return "weight", 0


def _reduce_to_four(x: Var) -> Any:
    return Builder.add(x=Builder.reduce_mean(x=x, axes=[1], keep_dims=True), y=make_weight(4))


def _build_tied_weight(x: Var) -> Any:
    weight = Builder.const(val=make_weight(65540, 4), name="w")
    rows = Builder.gather(x=weight, indices=Builder.cast(x=x, dtype="int32"), axis=0)
    return Builder.linear(x=rows, weight=weight, name="y")
