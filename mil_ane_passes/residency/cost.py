"""What Core ML's segmenter is predicted to estimate for one op, in ms, per backend, on an M4.

Shapes and types decide, never a weight's values. A compressed weight counts with the type and shape that it unpacks to,
which is what its readers see declared; no such weight is among the published estimates, so all that read one are
guesses. The laws of kinds without a published estimate are those of their nearest kin: a mul is taken for an add, an
lstm for an rnn by its FLOPs, a matmul on the CPU for a pool that does as many operations; the rest moves bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from coremltools.converters.mil.mil import Operation

from ..core.plan import Cost
from ..core.query import is_compressed, is_opaque, value
from . import laws
from .laws import Law
from .sizes import Sizes, read, unsettled

__all__ = ["cost"]

_ALL_ONES = Sizes()


@dataclass(frozen=True)
class _Bill:
    """What an op is charged: `quantity` by `law`, the ANE by the same law unless it has `ane` (a quantity by MEMORY).

    `least` are bytes: the CPU needs no less than they take. `sure`: this form of the op is among the measured ones.
    """

    law: Law
    quantity: float
    ane: float | None = None
    least: float = 0.0
    sure: bool = True


def cost(op: Operation, *, takes: bool, sizes: Sizes = _ALL_ONES) -> Cost:
    """The estimates for `op`; `takes`: whether the ANE takes it; `sizes` knows what symbolic dimensions stand for."""
    bill = _default(op, sizes) if is_opaque(op) else _BILLS.get(op.op_type, _default)(op, sizes)
    law = bill.law
    bnns = max(law.ms(law.bnns, bill.quantity), laws.MEMORY.ms(laws.MEMORY.bnns, bill.least))
    classic = max(law.ms(law.classic, bill.quantity), laws.MEMORY.ms(laws.MEMORY.classic, bill.least))
    ane = law.ms(law.ane, bill.quantity) if bill.ane is None else laws.MEMORY.ms(laws.MEMORY.ane, bill.ane)
    known = bill.sure and law.rows > 0 and op.op_type in laws.MEASURED and not _unsure(op)
    return Cost(ane if takes else None, bnns, classic, guess=not known)


def _unsure(op: Operation) -> bool:
    return is_opaque(op) or any(is_compressed(var) or unsettled(var) for var in [*read(op), *op.outputs])


def _default(op: Operation, sizes: Sizes) -> _Bill:
    return _Bill(laws.MEMORY, sizes.moved(op))


def _relu(op: Operation, sizes: Sizes) -> _Bill:
    return _Bill(laws.RELU, sizes.moved(op))


def _arithmetic(op: Operation, sizes: Sizes) -> _Bill:
    return _Bill(laws.ELEMENTS, sum(map(sizes.elements, read(op))))


def _concat(op: Operation, sizes: Sizes) -> _Bill:
    return _Bill(laws.CONCAT, sum(map(sizes.bytes, op.inputs["values"])))


def _stack(op: Operation, sizes: Sizes) -> _Bill:
    """Of the values the first alone is counted."""
    return _Bill(laws.MEMORY, sizes.moved(op) - sum(map(sizes.bytes, op.inputs["values"][1:])))


def _gather(op: Operation, sizes: Sizes) -> _Bill:
    return _Bill(laws.GATHER, sum(map(sizes.elements, read(op))), ane=sizes.moved(op))


def _transpose(op: Operation, sizes: Sizes) -> _Bill:
    perm = value(op.inputs.get("perm"))
    kept = bool(perm) and perm[0] == 0 and len(perm) == 4
    return _Bill(laws.TRANSPOSE, sizes.moved(op), sure=kept)


def _layer_norm(op: Operation, sizes: Sizes) -> _Bill:
    return _Bill(laws.MEMORY, sizes.bytes(op.inputs["x"]) + sizes.bytes(op.outputs[0]))


def _matmul(op: Operation, sizes: Sizes) -> _Bill:
    x, y, out = op.inputs["x"], op.inputs["y"], op.outputs[0]
    across = bool(value(op.inputs.get("transpose_x"), False)) and len(sizes.shape(x)) > 1
    inner = (sizes.shape(x) or (1,))[-2 if across else -1]
    moved = sizes.bytes(x) + sizes.bytes(y) + sizes.bytes(out)
    flops = 2 * sizes.elements(out) * inner
    return _Bill(laws.PEAK, flops, ane=moved, least=moved, sure=flops / laws.PEAK.bnns < moved / laws.MEMORY.bnns)


def _pool(op: Operation, sizes: Sizes) -> _Bill:
    kernel = math.prod(value(op.inputs.get("kernel_sizes"), [1]))
    moved = sizes.bytes(op.inputs["x"]) + 4 * kernel + sizes.bytes(op.outputs[0])
    return _Bill(laws.PEAK, sizes.elements(op.outputs[0]) * kernel, ane=moved, least=moved)


def _conv(op: Operation, sizes: Sizes) -> _Bill:
    weight, out = op.inputs["weight"], op.outputs[0]
    spread = math.prod(value(op.inputs.get("dilations"), [1]))
    flops = 2 * sizes.elements(out) * math.prod(sizes.shape(weight)[1:])
    intensity = flops / max(1, sum(map(sizes.bytes, (op.inputs["x"], weight, out))))
    law = laws.DENSE_CONV if intensity >= laws.DENSE_FROM else \
        laws.MIDDLE_CONV if intensity >= laws.MIDDLE_FROM else laws.THIN_CONV
    tried = not any(low < intensity < high for low, high in laws.UNTRIED)
    return _Bill(law, flops / spread, sure=spread == 1 and tried)


def _conv_transpose(op: Operation, sizes: Sizes) -> _Bill:
    shape = sizes.shape(op.inputs["weight"])
    groups = value(op.inputs.get("groups"), 1)
    flops = 2 * sizes.elements(op.outputs[0]) * math.prod(shape[:1]) * math.prod(shape[2:]) / groups
    return _Bill(laws.CONV_TRANSPOSE, flops, sure=len(shape) == 4 and groups == 1)


def _linear(op: Operation, sizes: Sizes) -> _Bill:
    weight, out, bias = op.inputs["weight"], op.outputs[0], op.inputs.get("bias")
    size, width = sizes.elements(weight), (sizes.shape(weight) or (1,))[-1]
    flops = 2 * sizes.elements(out) * width + 2 * sizes.elements(bias)
    rows = sizes.elements(out) // max(1, (sizes.shape(out) or (1,))[-1])
    law = laws.SHORT_LINEAR if rows <= 16 else laws.LIGHT_LINEAR if size <= 1 << 16 else \
        laws.MIDDLE_LINEAR if size <= 1 << 17 else laws.HEAVY_LINEAR
    return _Bill(law, flops, sure=size == 1 << 17)


def _recurrent(op: Operation, sizes: Sizes) -> _Bill:
    """A step multiplies each row of each weight once; a bidirectional layer has weights for both ways."""
    steps = math.prod(sizes.shape(op.inputs["x"])[:2])
    weights = [var for name, var in op.inputs.items() if name.startswith("weight_")]
    return _Bill(laws.RECURRENT, 2 * steps * sum(map(sizes.elements, weights)), ane=sizes.moved(op))


_BILLS = {
    "relu": _relu, "add": _arithmetic, "sub": _arithmetic, "mul": _arithmetic, "concat": _concat, "stack": _stack,
    "gather": _gather, "transpose": _transpose, "layer_norm": _layer_norm, "matmul": _matmul, "max_pool": _pool,
    "avg_pool": _pool, "conv": _conv, "conv_transpose": _conv_transpose, "linear": _linear, "rnn": _recurrent,
    "lstm": _recurrent, "gru": _recurrent,
}
