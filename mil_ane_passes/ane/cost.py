"""Predicted estimates of Core ML's segmenter for one op, in ms, per backend, on an M4.

Shapes and types decide, never a weight's values. A compressed weight counts with its unpacked type and shape, which
are the declared ones. No such weight is among the published estimates, so the costs of all its users are guesses. The
laws of op types without a published estimate are those of the most similar ones: a mul uses the law of an add, an lstm
that of an rnn by its FLOPs, a matmul on the CPU that of a pool with as many operations. All others are charged for the
bytes moved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from coremltools.converters.mil.mil import Operation

from ..ir.query import get_const_value, is_compressed, is_opaque
from ..passes.plan import Cost
from . import cost_laws
from .cost_laws import CostLaw
from .sizes import Sizes, has_symbolic_shape, iterate_inputs

__all__ = ["estimate_cost"]

_UNIT_SIZES = Sizes()


@dataclass(frozen=True)
class _Charge:
    """The charge of an op: `quantity` by `law`, the ANE by the same law unless it has `ane` (a quantity by MEMORY).

    `least` are bytes: the CPU time is at least that of moving them. `sure`: this form of the op is among the measured
    ones.
    """

    law: CostLaw
    quantity: float
    ane: float | None = None
    least: float = 0.0
    sure: bool = True


def estimate_cost(op: Operation, *, takes: bool, sizes: Sizes = _UNIT_SIZES) -> Cost:
    """Estimate the cost of `op`.

    `takes`: whether it is supported on the ANE; `sizes` gives the extents of symbolic dimensions.
    """
    bill = _charge_memory(op, sizes) if is_opaque(op) else _CHARGES.get(op.op_type, _charge_memory)(op, sizes)
    law = bill.law
    bnns = max(law.compute_ms(law.bnns, bill.quantity), cost_laws.MEMORY.compute_ms(cost_laws.MEMORY.bnns, bill.least))
    classic = max(
        law.compute_ms(law.classic, bill.quantity), cost_laws.MEMORY.compute_ms(cost_laws.MEMORY.classic, bill.least)
    )
    ane = (
        law.compute_ms(law.ane, bill.quantity)
        if bill.ane is None
        else cost_laws.MEMORY.compute_ms(cost_laws.MEMORY.ane, bill.ane)
    )
    known = bill.sure and law.rows > 0 and op.op_type in cost_laws.MEASURED_OP_TYPES and not _is_unmeasured(op)
    return Cost(ane if takes else None, bnns, classic, guess=not known)


def _is_unmeasured(op: Operation) -> bool:
    return is_opaque(op) or any(
        is_compressed(var) or has_symbolic_shape(var) for var in [*iterate_inputs(op), *op.outputs]
    )


def _charge_memory(op: Operation, sizes: Sizes) -> _Charge:
    return _Charge(cost_laws.MEMORY, sizes.moved(op))


def _charge_relu(op: Operation, sizes: Sizes) -> _Charge:
    return _Charge(cost_laws.RELU, sizes.moved(op))


def _charge_arithmetic(op: Operation, sizes: Sizes) -> _Charge:
    return _Charge(cost_laws.ELEMENTS, sum(map(sizes.elements, iterate_inputs(op))))


def _charge_concat(op: Operation, sizes: Sizes) -> _Charge:
    return _Charge(cost_laws.CONCAT, sum(map(sizes.bytes, op.inputs["values"])))


def _charge_stack(op: Operation, sizes: Sizes) -> _Charge:
    """Charge a `stack`, for which only the first of the values is counted."""
    return _Charge(cost_laws.MEMORY, sizes.moved(op) - sum(map(sizes.bytes, op.inputs["values"][1:])))


def _charge_gather(op: Operation, sizes: Sizes) -> _Charge:
    return _Charge(cost_laws.GATHER, sum(map(sizes.elements, iterate_inputs(op))), ane=sizes.moved(op))


def _charge_transpose(op: Operation, sizes: Sizes) -> _Charge:
    perm = get_const_value(op.inputs.get("perm"))
    kept = bool(perm) and perm[0] == 0 and len(perm) == 4
    return _Charge(cost_laws.TRANSPOSE, sizes.moved(op), sure=kept)


def _charge_layer_norm(op: Operation, sizes: Sizes) -> _Charge:
    return _Charge(cost_laws.MEMORY, sizes.bytes(op.inputs["x"]) + sizes.bytes(op.outputs[0]))


def _charge_matmul(op: Operation, sizes: Sizes) -> _Charge:
    x, y, out = op.inputs["x"], op.inputs["y"], op.outputs[0]
    across = bool(get_const_value(op.inputs.get("transpose_x"), False)) and len(sizes.shape(x)) > 1
    inner = (sizes.shape(x) or (1,))[-2 if across else -1]
    moved = sizes.bytes(x) + sizes.bytes(y) + sizes.bytes(out)
    flops = 2 * sizes.elements(out) * inner
    return _Charge(
        cost_laws.PEAK, flops, ane=moved, least=moved, sure=flops / cost_laws.PEAK.bnns < moved / cost_laws.MEMORY.bnns
    )


def _charge_pool(op: Operation, sizes: Sizes) -> _Charge:
    kernel = math.prod(get_const_value(op.inputs.get("kernel_sizes"), [1]))
    moved = sizes.bytes(op.inputs["x"]) + 4 * kernel + sizes.bytes(op.outputs[0])
    return _Charge(cost_laws.PEAK, sizes.elements(op.outputs[0]) * kernel, ane=moved, least=moved)


def _charge_conv(op: Operation, sizes: Sizes) -> _Charge:
    weight, out = op.inputs["weight"], op.outputs[0]
    spread = max(1, math.prod(get_const_value(op.inputs.get("dilations"), [1])))
    flops = 2 * sizes.elements(out) * math.prod(sizes.shape(weight)[1:])
    intensity = flops / max(1, sum(map(sizes.bytes, (op.inputs["x"], weight, out))))
    law = cost_laws.DENSE_CONV if intensity >= cost_laws.DENSE_MIN_INTENSITY else \
        cost_laws.MIDDLE_CONV if intensity >= cost_laws.MIDDLE_MIN_INTENSITY else cost_laws.THIN_CONV
    tried = not any(low < intensity < high for low, high in cost_laws.UNMEASURED_INTENSITIES)
    return _Charge(law, flops / spread, sure=spread == 1 and tried)


def _charge_conv_transpose(op: Operation, sizes: Sizes) -> _Charge:
    shape = sizes.shape(op.inputs["weight"])
    groups = get_const_value(op.inputs.get("groups"), 1)
    flops = 2 * sizes.elements(op.outputs[0]) * math.prod(shape[:1]) * math.prod(shape[2:]) / groups
    return _Charge(cost_laws.CONV_TRANSPOSE, flops, sure=len(shape) == 4 and groups == 1)


def _charge_linear(op: Operation, sizes: Sizes) -> _Charge:
    weight, out, bias = op.inputs["weight"], op.outputs[0], op.inputs.get("bias")
    size, width = sizes.elements(weight), (sizes.shape(weight) or (1,))[-1]
    flops = 2 * sizes.elements(out) * width + 2 * sizes.elements(bias)
    rows = sizes.elements(out) // max(1, (sizes.shape(out) or (1,))[-1])
    law = cost_laws.SHORT_LINEAR if rows <= 16 else cost_laws.LIGHT_LINEAR if size <= 1 << 16 else \
        cost_laws.MIDDLE_LINEAR if size <= 1 << 17 else cost_laws.HEAVY_LINEAR
    return _Charge(law, flops, sure=size == 1 << 17)


def _charge_recurrent(op: Operation, sizes: Sizes) -> _Charge:
    """Charge a recurrent layer: each step multiplies each row of each weight once.

    A bidirectional layer has weights for both directions.
    """
    steps = math.prod(sizes.shape(op.inputs["x"])[:2])
    weights = [var for name, var in op.inputs.items() if name.startswith("weight_")]
    return _Charge(cost_laws.RECURRENT, 2 * steps * sum(map(sizes.elements, weights)), ane=sizes.moved(op))


_CHARGES = {
    "relu": _charge_relu,
    "add": _charge_arithmetic,
    "sub": _charge_arithmetic,
    "mul": _charge_arithmetic,
    "concat": _charge_concat,
    "stack": _charge_stack,
    "gather": _charge_gather,
    "transpose": _charge_transpose,
    "layer_norm": _charge_layer_norm,
    "matmul": _charge_matmul,
    "max_pool": _charge_pool,
    "avg_pool": _charge_pool,
    "conv": _charge_conv,
    "conv_transpose": _charge_conv_transpose,
    "linear": _charge_linear,
    "rnn": _charge_recurrent,
    "lstm": _charge_recurrent,
    "gru": _charge_recurrent,
}
