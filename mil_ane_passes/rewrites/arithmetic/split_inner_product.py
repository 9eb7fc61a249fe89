"""Split products over a long inner dimension into products that are added."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ane.limits import collect_evidence, find_limit
from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import get_const_value, is_compressed, is_const, is_symbolic
from ...ir.weight_cuts import slice_weight
from ...passes.contract import FP32_UNSUPPORTED_REASON, Exactness, Example, Hit, Miss, Rewrite
from ...passes.examples import make_example, make_weight
from ...passes.targets import format_generations
from ...rules.shapes import MatmulInnerDimension
from .._target_gate import describe_supporting_targets, find_limiting_generations
from .._weights import find_slicing_obstacle, split_evenly


class SplitInnerProduct(Rewrite):
    """Split a matmul or linear along a long inner dimension: slices of both operands, one product each, and adds.

    why     Core ML's message on an M4: the inner dimension, at two bytes per element, must fit into 65536 bytes; 32768
            elements pass, 49152 do not. Without Core ML, the limit of the ANE's compiler is 16384 on M1 and M2; there
            the operand itself is too long for the ANE, so a split does not help.
    when    fp16; the inner dimension is static, and every generation of the target rejects it or the operand. A
            constant operand is split, too, and stored again up to `max_bytes` if it has other users; compressed
            operands are skipped. The limit was measured for two computed operands only.
    exact   rounding: the same products; each part's sum is rounded to fp16, and each add.
    cost    one add of the result's size per additional part; the split moves the operands once more.

    before
        %y: fp16[1, 2, 3] = matmul(x=%x, y=%z, transpose_x=True)
    after
        %0: fp16[1, 20000, 2], %1: fp16[1, 20000, 2] = split(x=%x, split_sizes=[20000, 20000], axis=-2)
        %2: fp16[1, 20000, 3], %3: fp16[1, 20000, 3] = split(x=%z, split_sizes=[20000, 20000], axis=-2)
        %4: fp16[1, 2, 3] = matmul(x=%0, y=%2, transpose_x=True)
        %5: fp16[1, 2, 3] = matmul(x=%1, y=%3, transpose_x=True)
        %y: fp16[1, 2, 3] = add(x=%4, y=%5)
    """

    fixes = (MatmulInnerDimension,)
    stage = "decompose"
    exactness = Exactness.ROUNDING
    bound = ("half a unit in the last place for each part and each add (measured: below 1e-3 of the largest result); "
             "a part that overflows fp16 although the sum does not is infinite")
    keeps_nonfinite = False  # parts that overflow with both signs sum to NaN
    preset = "full"
    roots = ("matmul", "linear")
    evidence = collect_evidence("matmul-inner")

    max_parts: int = 8
    "Maximum number of parts of one product."
    max_bytes: int = 1 << 24
    "Maximum additional weight bytes for one op, if another op uses the entire constant operand."
    always: bool = False
    "Rewrite even if a generation of the target supports the product."

    def match(self, op: Operation) -> Hit | Miss:
        axis_x, axis_y = _find_inner_axes(op)
        inner = op.x.shape[axis_x] if op.x.rank else 1
        if is_symbolic(inner):
            return Miss(op, "the inner dimension is symbolic", near=False)
        limited = find_limiting_generations("matmul-inner", int(inner), self.generations)
        if not limited:
            return Miss(op, "fits", near=False)
        # Where the operand itself is too long, so is the value that parts would be sliced from.
        fixable = [each for each in limited if not find_limiting_generations("spatial", int(inner), [each])]
        if not fixable:
            return Miss(
                op,
                f"an operand that is {inner} long is unsupported on {format_generations(limited)}, and so are slices "
                f"of it",
            )
        if len(limited) < len(self.generations) and not self.always:
            return Miss(op, describe_supporting_targets(self.generations, limited))
        longest = min(bound.most for each in fixable if (bound := find_limit("matmul-inner", [each])))
        parts = split_evenly(int(inner), longest)
        reason = self._find_operand_obstacle(op, len(parts))
        if reason:
            return Miss(op, reason)
        return Hit(op, parts=parts, axes=(axis_x, axis_y),
                   note=f"inner dimension {inner} in {len(parts)} parts of {longest} at most")

    def _find_operand_obstacle(self, op: Operation, count: int) -> str:
        if op.x.dtype != types.fp16:
            return FP32_UNSUPPORTED_REASON
        if count > self.max_parts:
            return f"{count} parts, above max_parts={self.max_parts}"
        for name, var in _get_operands(op).items():
            if is_compressed(var):
                return f"operand {name} is compressed: its parts would have to be decompressed"
            if is_const(var) and (
                reason := find_slicing_obstacle(var, op, lambda other: _is_summed_alike(op, other), self.max_bytes)
            ):
                return reason
        return ""

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Any:
        op, parts = hit.op, hit.parts
        slices: dict[str, list[Var]] = {}
        for (name, var), axis in zip(_get_operands(op).items(), hit.axes):
            if is_const(var):
                slices[name] = [slice_weight(mb, var, axis, *part) for part in parts]
            else:
                slices[name] = mb.split(x=var, split_sizes=[stop - start for start, stop in parts], axis=axis)
        total: Any = None
        for number in range(len(parts)):
            changes: dict[str, Any] = {name: operands[number] for name, operands in slices.items()}
            if number and op.op_type == "linear":  # the bias is added once
                changes["bias"] = mb.once(("no bias", op.outputs[0].shape[-1]), lambda: mb.const(
                    val=np.zeros(op.weight.shape[0], np.float16), name="no_bias"))
            term = rebuild_op(mb, op, **changes)
            total = term if total is None else mb.add(x=total, y=term)
        return total

    def examples(self) -> Iterable[Example]:
        yield make_example("two computed", lambda x, z: Builder.matmul(x=x, y=z, transpose_x=True, name="y"),
                           within=1.0, x=(1, 40000, 2), z=(1, 40000, 3))
        yield make_example(
            "linear",
            lambda x: Builder.linear(
                x=Builder.add(x=Builder.reduce_mean(x=x, axes=[1], keep_dims=True), y=make_weight(33000)),
                weight=make_weight(2, 33000),
                bias=make_weight(2),
                name="y",
            ),
            within=1.0,
            x=(3, 4),
        )
        yield make_example(
            "supported on M4",
            lambda x, z: Builder.matmul(x=x, y=z, name="y"),
            reason="an operand that is 20000 long is unsupported on A12, A13, M1, M2 and M3, and so are slices of it",
            x=(2, 20000), z=(20000, 2),
        )
        yield make_example("fits", lambda x, z: Builder.matmul(x=x, y=z, name="y"), reason="fits",
                           x=(2, 16384), z=(16384, 2))
        yield make_example(
            "read whole", _build_shared_weight, options={"max_bytes": 0}, x=(2, 33000),
            reason="the weight 'w' is also used as a whole: its pieces would add 132.0 kB, above max_bytes=0")


def _find_inner_axes(op: Operation) -> tuple[int, int]:
    """Return the axes that are summed over, counted from the end, as a split needs them."""
    if op.op_type == "linear":
        return -1, -1
    transpose_x, transpose_y = (get_const_value(op.inputs.get(name), False) for name in ("transpose_x", "transpose_y"))
    return -2 if transpose_x and op.x.rank > 1 else -1, -1 if transpose_y or op.y.rank < 2 else -2


def _get_operands(op: Operation) -> dict[str, Var]:
    """Return the two operands of a product, the constant one of a linear second."""
    return {"x": op.x, "weight": op.weight} if op.op_type == "linear" else {"x": op.x, "y": op.y}


def _is_summed_alike(op: Operation, other: Operation) -> bool:
    """Return whether `other` sums over the same axes, and has the constant operand of `op` as the same input."""
    operands = _get_operands(other)
    return _find_inner_axes(op) == _find_inner_axes(other) and all(
        operands[name] is var for name, var in _get_operands(op).items() if is_const(var)
    )


def _build_shared_weight(x: Var) -> list[Var]:
    weight = Builder.const(val=make_weight(2, 33000), name="w")
    return [Builder.linear(x=x, weight=weight), Builder.mul(x=x, y=weight)]
