"""Complex tensors as pairs of real Vars: ML Programs have no complex type.

A complex value is coremltools' `ComplexVar`, made here without an op: only its real and imaginary parts are in the
program. `lower_complex` runs around every lowering and decides what an op does with such a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types
from coremltools.converters.mil.mil.var import ComplexVar

from .creation import make_filled_like
from .lowering import cast_to, to_tensor

__all__ = ["ComplexLiteral", "is_complex", "is_zero", "join_complex", "map_nested", "split_complex", "zeros_like"]


class ComplexLiteral(float):
    """A complex Python number of an exported program, as a float: coremltools reads no other literals."""

    imag_part: float

    def __new__(cls, value: complex) -> ComplexLiteral:
        made = super().__new__(cls, value.real)
        made.imag_part = value.imag
        return made


def is_complex(value: Any) -> bool:
    """Whether a value of the context is a complex number or tensor."""
    if isinstance(value, Var):
        return bool(types.is_complex(value.dtype))
    return isinstance(value, complex | ComplexLiteral)


def join_complex(real: Var, imag: Var) -> Var:
    """The complex value of two real Vars of equal shape."""
    real, imag = cast_to(real, types.fp32), cast_to(imag, types.fp32)
    return ComplexVar(name=f"{real.name}_complex", sym_type=types.tensor(types.complex64, real.shape), real=real,
                      imag=imag)


def split_complex(value: Any) -> tuple[Var, Var]:
    """The real and the imaginary part, both of the value's shape; zeros as imaginary part of a real value."""
    if isinstance(value, ComplexLiteral):
        return to_tensor(float(value)), to_tensor(value.imag_part)
    if isinstance(value, complex):
        return to_tensor(value.real), to_tensor(value.imag)
    if not is_complex(value):
        real = to_tensor(value)
        return real, zeros_like(real)
    if value.val is not None:  # a constant or a buffer of the module
        array = np.asarray(value.val)
        return to_tensor(np.real(array).astype(np.float32)), to_tensor(np.imag(array).astype(np.float32))
    if isinstance(value, ComplexVar) and isinstance(value.real, Var):
        return value.real, value.imag
    return mb.complex_real(data=value), mb.complex_imag(data=value)  # made by a lowering that the user registered


def zeros_like(x: Var) -> Var:
    """Zeros of the shape of `x`, a compile-time constant where the shape is."""
    return make_filled_like(x, 0.0, x.dtype if types.is_float(x.dtype) else types.fp32)


def is_zero(x: Var) -> bool:
    """Whether every element is known to be 0."""
    return x.val is not None and not np.any(x.val)


def map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """`function` of a value, or of every item of a (nested) list or tuple."""
    if isinstance(value, list | tuple):
        return type(value)(map_nested(function, item) for item in value)
    return function(value)
