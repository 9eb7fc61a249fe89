"""How MIL values live in torch tensors under each precision.

Floats: float64 everywhere, float32 everywhere, or (precision "float16") stored as declared and computed in float32.
Integers of every width live in int32 (int64 for 64 bits and uint32) and are wrapped to their declared range when
stored: torch lacks most kernels for the unsigned and the sub-byte types.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from coremltools.converters.mil.mil import types

from ..core.mapped_files import check_file_of, is_mapped, iterate_chunks, read_once

__all__ = ["Precision", "canonicalize_layout", "get_bit_width", "is_tensor_value"]

#: torch allocates on this boundary; vector libraries may round differently on another, so everything is brought to it.
_ALIGNMENT = 64

#: the largest number of fp16
_FP16_MAX = 65504.0

#: what torch reads as numpy lays it out, in the machine's byte order
_SHARED_NUMPY_DTYPES = frozenset(map(np.dtype, ("f2", "f4", "f8", "i4", "i8", "?")))


def canonicalize_layout(x: torch.Tensor) -> torch.Tensor:
    """`x` with the one canonical memory layout of its shape: dense, row-major, aligned."""
    x = x.contiguous()
    if x.data_ptr() % _ALIGNMENT:
        x = x.clone()
    # Axes of extent 1 may carry any stride and still count as contiguous; kernels look at strides to pick a layout.
    return x.view(-1).view(x.shape) if 1 in x.shape else x


def get_bit_width(dtype: Any) -> int:
    """Bits of an integer builtin type."""
    return int(dtype.get_bitwidth())


def is_tensor_value(value: object) -> bool:
    """True for what `Precision.tensor` can turn into a tensor (not for strings, lists and states)."""
    return isinstance(value, (bool, int, float, np.generic, np.ndarray)) and not isinstance(value, np.str_)


def _copy_elements(out: torch.Tensor, array: np.ndarray[Any, Any]) -> None:
    """Copy the elements of `array` to `out`, which has as many."""
    if array.dtype in _SHARED_NUMPY_DTYPES and array.flags.c_contiguous and array.nbytes:
        # The same bits as from numpy, and several times faster from float16.
        out.copy_(torch.from_numpy(np.asarray(_WritableView(array))))
    else:
        np.copyto(out.numpy(), array, casting="unsafe")


class _WritableView:
    """An array's memory offered as writable: torch warns of arrays that are not. No kernel writes to its operands."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


class Precision:
    """One precision's rules for entering, computing, storing and leaving."""

    def __init__(self, name: str, finite_constants: bool = False, rounded_steps: bool = False) -> None:
        self.name = name
        #: whether recurrent layers round within a step
        self.rounded_steps = rounded_steps and name == "float16"
        #: what stands for a huge number among the constants, or None
        self.infinity = None if not finite_constants else 3e4 if name == "float16" else 1e6
        self.compute = torch.float64 if name == "float64" else torch.float32
        self._storage: dict[Any, torch.dtype] = {}

    def tensor(self, value: Any) -> torch.Tensor:
        """A numpy value as a tensor in the computing dtype, in memory that torch allocated (never shared)."""
        array = np.asarray(value)
        out = torch.empty(array.shape, dtype=self._computed(array.dtype))
        if is_mapped(array) and array.flags.c_contiguous:
            for start, piece in iterate_chunks(array):
                _copy_elements(out.view(-1)[start : start + piece.size], piece)
            return out
        check_file_of(array)
        _copy_elements(out, array)
        return out

    def constant(self, value: Any) -> torch.Tensor:
        """As `tensor`, with what fp16 cannot hold, or only just, read as this precision reads it in constants."""
        made = self.tensor(value)
        if self.infinity is not None and made.is_floating_point():
            made.masked_fill_(made >= _FP16_MAX, self.infinity).masked_fill_(made <= -_FP16_MAX, -self.infinity)
        return made

    def shared(self, value: Any) -> torch.Tensor | None:
        """As `constant`, but on the memory of `value` itself, or for a file's on the memory that all runs share; None
        where it has another dtype or layout."""
        array = np.asarray(value)
        if not self._is_as_stored(array):
            return None
        if is_mapped(array):
            return torch.from_numpy(read_once(array))
        found = torch.from_numpy(np.asarray(_WritableView(array)))
        return found if found.data_ptr() % _ALIGNMENT == 0 else None

    def is_read_once(self, value: Any) -> bool:
        """Whether `shared` reads `value` from a file."""
        array = np.asarray(value)
        return self._is_as_stored(array) and is_mapped(array)

    def _is_as_stored(self, array: np.ndarray[Any, Any]) -> bool:
        if self.infinity is not None or array.dtype not in _SHARED_NUMPY_DTYPES:
            return False
        # torch's names of these dtypes are numpy's
        is_computed = str(self._computed(array.dtype)) == f"torch.{array.dtype.name}"
        return bool(is_computed and array.flags.c_contiguous and array.nbytes)

    def nbytes(self, value: Any) -> int:
        """The bytes of `tensor(value)`."""
        array = np.asarray(value)
        return int(array.size * self._computed(array.dtype).itemsize)

    def _computed(self, dtype: np.dtype[Any]) -> torch.dtype:
        if dtype.kind == "f":
            return self.compute
        if dtype.kind == "b":
            return torch.bool
        return torch.int64 if dtype.itemsize == 8 or dtype == np.uint32 else torch.int32

    def operand(self, value: Any) -> Any:
        """A stored value as the kernels see it: floats in the computing dtype."""
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != self.compute:
            return value.to(self.compute)
        return value

    def store(self, value: torch.Tensor, dtype: Any) -> torch.Tensor:
        """A kernel's result as it is kept for a variable declared as builtin type `dtype`."""
        storage = self.storage(dtype)
        if value.is_floating_point() and not (storage.is_floating_point or storage == torch.bool):
            # MIL does not define it and no report of a device was found. arm64's conversions saturate, which is what is
            # done here for every width: NaN becomes 0, what is out of range the nearest end of the declared type.
            lowest, highest = _get_integer_range(dtype)
            value = value.double().nan_to_num(0.0).clamp(lowest, min(highest, 2**63 - 1024))
        value = value.to(storage)
        if not (storage.is_floating_point or storage == torch.bool):
            value = self._wrap_integers(value, dtype)
        stored = canonicalize_layout(value)
        # A part of something larger would keep the whole in memory.
        return stored.clone() if stored.untyped_storage().nbytes() > stored.nbytes else stored

    def storage(self, dtype: Any) -> torch.dtype:
        """The torch dtype that variables declared as builtin type `dtype` are kept in."""
        if dtype not in self._storage:
            self._storage[dtype] = self._storage_of(dtype)
        return self._storage[dtype]

    def _storage_of(self, dtype: Any) -> torch.dtype:
        if types.is_float(dtype):
            return torch.float16 if self.name == "float16" and dtype == types.fp16 else self.compute
        if types.is_bool(dtype):
            return torch.bool
        return torch.int64 if get_bit_width(dtype) == 64 or dtype == types.uint32 else torch.int32

    @staticmethod
    def _wrap_integers(value: torch.Tensor, dtype: Any) -> torch.Tensor:
        bits = get_bit_width(dtype)
        if bits >= 64 or dtype == types.int32:
            return value
        value = value & ((1 << bits) - 1)
        if dtype.is_unsigned():
            return value
        return torch.where(value >= 1 << (bits - 1), value - (1 << bits), value)

    def numpy_dtype(self, dtype: Any) -> np.dtype[Any]:
        """The dtype that results declared as builtin type `dtype` are returned in."""
        if types.is_float(dtype):
            half = self.name == "float16" and dtype == types.fp16
            return np.dtype(np.float64 if self.name == "float64" else np.float16 if half else np.float32)
        if types.is_bool(dtype):
            return np.dtype(np.bool_)
        # Sub-byte types carry metadata on their numpy dtype; users get the plain container type.
        container: str = np.dtype(types.nptype_from_builtin(dtype)).str
        return np.dtype(container)

    def numpy(self, value: torch.Tensor, dtype: Any) -> np.ndarray[Any, Any]:
        """A stored tensor as the numpy array handed to the user, in memory of its own."""
        return np.array(value.numpy(), dtype=self.numpy_dtype(dtype))


def _get_integer_range(dtype: Any) -> tuple[int, int]:
    """The smallest and the largest integer of builtin type `dtype`."""
    bits = get_bit_width(dtype)
    return (0, (1 << bits) - 1) if dtype.is_unsigned() else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
