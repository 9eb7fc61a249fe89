"""What Core ML's segmenter is predicted to estimate for one op, in ms, per backend, on an M4."""

from __future__ import annotations

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ..core.plan import Cost
from ..core.query import flat_inputs, itemsize, static_shape

__all__ = ["cost"]

_ANE, _CPU = 68 * 1024 ** 3, 68 / 1.2 * 1024 ** 3
"Bytes a second of the default law."


def cost(op: Operation, *, takes: bool) -> Cost:
    """The estimates for `op`; `takes`: whether the ANE takes it."""
    moved = sum(_bytes(var) for var in [*dict.fromkeys(flat_inputs(op)), *op.outputs[:1]])
    milliseconds = moved / _CPU * 1e3
    return Cost(moved / _ANE * 1e3 if takes else None, milliseconds, milliseconds, guess=True)


def _bytes(var: Var) -> int:
    shape = static_shape(var) if types.is_tensor(var.sym_type) else ()
    if shape is None or types.is_list(var.sym_type) or types.is_str(var.dtype):
        return 0
    return int(np.prod(shape, dtype=np.int64)) * itemsize(var)
