"""What Core ML's segmenter is predicted to estimate for one op, in ms, per backend, on an M4.

Shapes and types decide, never a weight's values. A symbolic dimension counts as one element, as in the published
estimates. A compressed weight counts with the type and shape that it unpacks to, which is what its readers declare;
no such weight is among the published estimates, so all that read one are guesses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from coremltools.converters.mil.mil import Operation, Var, types

from ..core.plan import Cost
from ..core.query import is_compressed, is_opaque, is_symbolic, itemsize, value
from . import laws
from .laws import Law

__all__ = ["cost"]


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


def cost(op: Operation, *, takes: bool) -> Cost:
    """The estimates for `op`; `takes`: whether the ANE takes it."""
    bill = _default(op) if is_opaque(op) else _BILLS.get(op.op_type, _default)(op)
    law = bill.law
    bnns = max(law.ms(law.bnns, bill.quantity), laws.MEMORY.ms(laws.MEMORY.bnns, bill.least))
    classic = max(law.ms(law.classic, bill.quantity), laws.MEMORY.ms(laws.MEMORY.classic, bill.least))
    ane = law.ms(law.ane, bill.quantity) if bill.ane is None else laws.MEMORY.ms(laws.MEMORY.ane, bill.ane)
    known = bill.sure and law.rows > 0 and op.op_type in laws.MEASURED and not _unsure(op)
    return Cost(ane if takes else None, bnns, classic, guess=not known)


def _unsure(op: Operation) -> bool:
    return is_opaque(op) or any(is_compressed(var) or _symbolic(var) for var in [*_read(op), *op.outputs])


def _symbolic(var: Var) -> bool:
    return types.is_tensor(var.sym_type) and any(is_symbolic(d) for d in var.shape)


def _read(op: Operation) -> Iterable[Var]:
    """Each input of `op`, once for each time it is read, tuples opened."""
    for given in op.inputs.values():
        if given is not None:
            yield from given if isinstance(given, (list, tuple)) else (given,)


def _shape(var: Var | None) -> tuple[int, ...]:
    """The shape; symbolic dimensions are 1."""
    if var is None or not types.is_tensor(var.sym_type):
        return ()
    return tuple(1 if is_symbolic(d) else int(d) for d in var.shape)


def _elements(var: Var | None) -> int:
    if var is None or types.is_list(var.sym_type) or types.is_state(var.sym_type) or types.is_str(var.dtype):
        return 0
    return math.prod(_shape(var))


def _bytes(var: Var | None) -> int:
    count = _elements(var)
    return count * itemsize(var) if var is not None and count else 0


def _moved(op: Operation) -> int:
    """Bytes of all that is read, small parameters included, and of the first output."""
    return sum(map(_bytes, _read(op))) + sum(map(_bytes, op.outputs[:1]))


def _default(op: Operation) -> _Bill:
    return _Bill(laws.MEMORY, _moved(op))


def _relu(op: Operation) -> _Bill:
    return _Bill(laws.RELU, _moved(op))


def _arithmetic(op: Operation) -> _Bill:
    return _Bill(laws.ELEMENTS, sum(map(_elements, _read(op))))


def _concat(op: Operation) -> _Bill:
    return _Bill(laws.CONCAT, sum(map(_bytes, op.inputs["values"])))


def _stack(op: Operation) -> _Bill:
    """Of the values the first alone is counted."""
    return _Bill(laws.MEMORY, _moved(op) - sum(map(_bytes, op.inputs["values"][1:])))


def _gather(op: Operation) -> _Bill:
    return _Bill(laws.GATHER, sum(map(_elements, _read(op))), ane=_moved(op))


def _transpose(op: Operation) -> _Bill:
    perm = value(op.inputs.get("perm"))
    kept = bool(perm) and perm[0] == 0 and len(perm) == 4
    return _Bill(laws.TRANSPOSE, _moved(op), sure=kept)


def _layer_norm(op: Operation) -> _Bill:
    return _Bill(laws.MEMORY, _bytes(op.inputs["x"]) + _bytes(op.outputs[0]))


def _matmul(op: Operation) -> _Bill:
    x, y, out = op.inputs["x"], op.inputs["y"], op.outputs[0]
    across = bool(value(op.inputs.get("transpose_x"), False)) and len(_shape(x)) > 1
    inner = (_shape(x) or (1,))[-2 if across else -1]
    moved = _bytes(x) + _bytes(y) + _bytes(out)
    flops = 2 * _elements(out) * inner
    return _Bill(laws.PEAK, flops, ane=moved, least=moved, sure=flops / laws.PEAK.bnns < moved / laws.MEMORY.bnns)


def _pool(op: Operation) -> _Bill:
    kernel = math.prod(value(op.inputs.get("kernel_sizes"), [1]))
    moved = _bytes(op.inputs["x"]) + 4 * kernel + _bytes(op.outputs[0])
    return _Bill(laws.PEAK, _elements(op.outputs[0]) * kernel, ane=moved, least=moved)


def _conv(op: Operation) -> _Bill:
    weight, out = op.inputs["weight"], op.outputs[0]
    spread = math.prod(value(op.inputs.get("dilations"), [1]))
    flops = 2 * _elements(out) * math.prod(_shape(weight)[1:])
    intensity = flops / max(1, sum(map(_bytes, (op.inputs["x"], weight, out))))
    law = laws.DENSE_CONV if intensity >= laws.DENSE_FROM else \
        laws.MIDDLE_CONV if intensity >= laws.MIDDLE_FROM else laws.THIN_CONV
    return _Bill(law, flops / spread, sure=spread == 1)


def _conv_transpose(op: Operation) -> _Bill:
    shape = _shape(op.inputs["weight"])
    groups = value(op.inputs.get("groups"), 1)
    flops = 2 * _elements(op.outputs[0]) * math.prod(shape[:1]) * math.prod(shape[2:]) / groups
    return _Bill(laws.CONV_TRANSPOSE, flops, sure=len(shape) == 4 and groups == 1)


def _linear(op: Operation) -> _Bill:
    weight, out, bias = op.inputs["weight"], op.outputs[0], op.inputs.get("bias")
    size, width = _elements(weight), (_shape(weight) or (1,))[-1]
    flops = 2 * _elements(out) * width + 2 * _elements(bias)
    rows = _elements(out) // max(1, (_shape(out) or (1,))[-1])
    law = laws.SHORT_LINEAR if rows <= 16 else laws.LIGHT_LINEAR if size <= 1 << 16 else \
        laws.MIDDLE_LINEAR if size <= 1 << 17 else laws.HEAVY_LINEAR
    return _Bill(law, flops, sure=size == 1 << 17)


def _recurrent(op: Operation) -> _Bill:
    """A step multiplies each row of each weight once; a bidirectional layer has weights for both ways."""
    steps = math.prod(_shape(op.inputs["x"])[:2])
    weights = [var for name, var in op.inputs.items() if name.startswith("weight_")]
    return _Bill(laws.RECURRENT, 2 * steps * sum(map(_elements, weights)), ane=_moved(op))


_BILLS = {
    "relu": _relu, "add": _arithmetic, "sub": _arithmetic, "mul": _arithmetic, "concat": _concat, "stack": _stack,
    "gather": _gather, "transpose": _transpose, "layer_norm": _layer_norm, "matmul": _matmul, "max_pool": _pool,
    "avg_pool": _pool, "conv": _conv, "conv_transpose": _conv_transpose, "linear": _linear, "rnn": _recurrent,
    "lstm": _recurrent, "gru": _recurrent,
}
