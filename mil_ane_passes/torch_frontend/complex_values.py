"""Complex tensors as pairs of real Vars, since ML Programs have no complex type.

A complex value is coremltools' `ComplexVar`, made here without an op: only its real and imaginary parts are in the
program. `lower_complex` wraps every lowering and decides how an op handles such a value.
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
    """A complex Python number of an exported program, as a float, since coremltools reads no other literals."""

    imag_part: float

    def __new__(cls, value: complex) -> ComplexLiteral:
        built = super().__new__(cls, value.real)
        built.imag_part = value.imag
        return built


def is_complex(value: Any) -> bool:
    """Return whether a value of the context is a complex number or tensor."""
    if isinstance(value, Var):
        return bool(types.is_complex(value.dtype))
    return isinstance(value, complex | ComplexLiteral)


def join_complex(real: Var, imag: Var) -> Var:
    """Make a complex value from two real Vars of equal shape."""
    real, imag = cast_to(real, types.fp32), cast_to(imag, types.fp32)
    return ComplexVar(name=f"{real.name}_complex", sym_type=types.tensor(types.complex64, real.shape), real=real,
                      imag=imag)


def split_complex(value: Any) -> tuple[Var, Var]:
    """Return the real and the imaginary part, both of the value's shape.

    The imaginary part of a real value is zeros.
    """
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
    """Make zeros of the shape of `x`, as a compile-time constant where the shape is one."""
    return make_filled_like(x, 0.0, x.dtype if types.is_float(x.dtype) else types.fp32)


def is_zero(x: Var) -> bool:
    """Return whether every element is a compile-time 0."""
    return x.val is not None and not np.any(x.val)


def map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply `function` to a value, or to every item of a (nested) list or tuple."""
    if isinstance(value, list | tuple):
        return type(value)(map_nested(function, item) for item in value)
    return function(value)
