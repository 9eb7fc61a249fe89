"""Numeric formats: the torch dtypes in which MIL values are stored and computed at each precision.

Floats are float64 everywhere, float32 everywhere, or (precision "float16") stored as declared and computed in float32.
Integers of every width are stored in int32 (int64 for 64 bits and uint32) and wrapped to their declared range, since
torch lacks most kernels for the unsigned and the sub-byte types.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from coremltools.converters.mil.mil import types

from ..utils.mapped_files import check_file_of, is_mapped, iterate_chunks, read_once, release_pages

__all__ = [
    "HUGE",
    "Precision",
    "ReusedMemory",
    "canonicalize_layout",
    "get_bit_width",
    "have_equal_bits",
    "is_tensor_value",
]

#: torch allocates at this alignment. At another one vector libraries may round differently, so all tensors get it.
_ALIGNMENT = 64

#: reused memory may be at most this many times as large as the tensor: a larger piece is left for a larger tensor
_MAX_EXCESS = 8

#: memory of constants is reused from this many bytes on; the C library reuses smaller blocks itself
_LARGE_BYTES = 1 << 20

#: elements of a matrix that are converted at once: they and the results computed from them fit in the processor's cache
_BLOCK_ELEMENTS = 1 << 18

#: constants of this magnitude, the largest of fp16, or a larger one are changed by `finite_constants`
HUGE = 65504.0

#: integer dtype by size in bytes: the bits of elements are compared as these integers
_INTEGERS_BY_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: elements that are compared first: most different tensors already differ in one of them
_SAMPLES = 64

#: the dtypes that torch reads in numpy's layout, in the machine's byte order
_SHARED_NUMPY_DTYPES = frozenset(map(np.dtype, ("f2", "f4", "f8", "i4", "i8", "?")))

#: floats that torch converts from numpy's layout
_NARROW_FLOATS = frozenset(map(np.dtype, ("f2", "f4")))


class ReusedMemory:
    """Memory of large tensors that is reused when the previous tensor in it was deleted.

    The first write to a new page takes several times as long as the conversion of the numbers that fit in it.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[np.ndarray[Any, Any], weakref.ref[np.ndarray[Any, Any]]]] = []
        "Pieces of memory, each with a weak reference to the view that the last tensor in it used."

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor with the alignment of torch's own tensors."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _LARGE_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        memory = self._take_piece(nbytes + _ALIGNMENT)
        first = -memory.__array_interface__["data"][0] % _ALIGNMENT
        view = memory[first : first + nbytes]
        self._pieces.append((memory, weakref.ref(view)))
        return torch.from_numpy(view).view(dtype).view(tuple(shape))

    def _take_piece(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Return the smallest free piece that is large enough, but at most `_MAX_EXCESS` times as large as needed.

        Without such a piece, allocate one and drop the free pieces that are too small.
        """
        free = [each for each in self._pieces if each[1]() is None]
        fitting = [each for each in free if nbytes <= each[0].size <= _MAX_EXCESS * nbytes]
        if fitting:
            taken = min(fitting, key=lambda each: each[0].size)
            self._pieces = [each for each in self._pieces if each is not taken]
            return taken[0]
        self._pieces = [each for each in self._pieces if each[1]() is not None or each[0].size > nbytes]
        del free
        return np.empty(nbytes, np.uint8)


def canonicalize_layout(x: torch.Tensor) -> torch.Tensor:
    """Return `x` in the canonical memory layout of its shape: dense, row-major, aligned."""
    shape = x.shape
    if x.stride() != _get_row_major_strides(shape):
        # Axes of extent 1 may carry any stride and still count as contiguous; kernels look at strides to pick a layout.
        x = x.contiguous().view(-1).view(shape)
    return x.clone() if x.data_ptr() % _ALIGNMENT else x


@lru_cache(256)
def make_scalar(number: float, dtype: torch.dtype) -> torch.Tensor:
    """Return `number` as a tensor of rank 0, not to be changed; torch makes a new one of each number at each use."""
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=dtype)


@lru_cache(4096)
def _get_row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())


def get_bit_width(dtype: Any) -> int:
    """Return the number of bits of an integer builtin type."""
    return int(dtype.get_bitwidth())


def is_tensor_value(value: object) -> bool:
    """Return whether `Precision.tensor` can convert `value` to a tensor (not strings, lists and states)."""
    return isinstance(value, (bool, int, float, np.generic, np.ndarray)) and not isinstance(value, np.str_)


def have_equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bits: -0 differs from 0, and a NaN equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    one, other = (each.reshape(-1).view(_INTEGERS_BY_SIZE[each.element_size()]) for each in (one, other))
    step = max(1, one.numel() // _SAMPLES)
    return bool(torch.equal(one[::step], other[::step])) and (step == 1 or bool(torch.equal(one, other)))


def _copy_elements(out: torch.Tensor, array: np.ndarray[Any, Any]) -> None:
    """Copy the elements of `array` to `out`, which has the same number of elements."""
    if array.dtype in _SHARED_NUMPY_DTYPES and array.flags.c_contiguous and array.nbytes:
        # torch gives the same bits as numpy, and converts float16 several times faster.
        out.copy_(torch.from_numpy(np.asarray(_WritableView(array))))
    else:
        np.copyto(out.numpy(), array, casting="unsafe")


class _WritableView:
    """An array's memory exposed as writable, since torch warns about read-only arrays.

    No kernel writes to its operands.
    """

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


class Precision:
    """The rules of one precision for reading, computing, storing and returning values."""

    def __init__(self, name: str, finite_constants: bool = False, rounded_steps: bool = False) -> None:
        self.name = name
        #: rounds within the step of a recurrent layer
        self.rounded_steps = rounded_steps and name == "float16"
        #: the number that replaces a huge constant, or None
        self.infinity = None if not finite_constants else 3e4 if name == "float16" else 1e6
        self.compute = torch.float64 if name == "float64" else torch.float32
        self._storage: dict[Any, torch.dtype] = {}
        self._reused = ReusedMemory()

    def has_constants_of(self, other: Precision) -> bool:
        """Return whether `constant` and `shared` return the same tensors as the methods of `other`."""
        return self.compute == other.compute and self.infinity == other.infinity

    def tensor(self, value: Any, passing: bool = False) -> torch.Tensor:
        """Convert a numpy value to a tensor in the computing dtype, in new memory.

        A `passing` tensor is read by one op and then dropped; its memory may be reused.
        """
        array = np.asarray(value)
        out = self.allocate(array.shape, self._get_compute_dtype(array.dtype), passing)
        if is_mapped(array) and array.flags.c_contiguous:
            for start, piece in iterate_chunks(array):
                _copy_elements(out.view(-1)[start : start + piece.size], piece)
            return out
        check_file_of(array)
        _copy_elements(out, array)
        return out

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, passing: bool) -> torch.Tensor:
        """Return an uninitialized tensor; `passing` as in `tensor`."""
        return self._reused.allocate(shape, dtype) if passing else torch.empty(tuple(shape), dtype=dtype)

    def constant(self, value: Any, passing: bool = False) -> torch.Tensor:
        """Convert a constant as `tensor` does.

        With `finite_constants`, magnitudes of 65504 and more become the finite number of this precision.
        """
        return self._limit_magnitudes(self.tensor(value, passing))

    def _limit_magnitudes(self, made: torch.Tensor) -> torch.Tensor:
        if self.infinity is not None and made.is_floating_point():
            made.masked_fill_(made >= HUGE, self.infinity).masked_fill_(made <= -HUGE, -self.infinity)
        return made

    def can_convert_in_blocks(self, value: Any) -> bool:
        """Return whether `iterate_blocks` converts `value`: a large matrix of narrower floats than results."""
        array = np.asarray(value)
        return bool(array.ndim == 2 and array.dtype in _NARROW_FLOATS and array.itemsize < self.compute.itemsize
                    and array.size > _BLOCK_ELEMENTS and min(array.strides) > 0)

    def iterate_blocks(self, value: Any) -> Iterator[tuple[int, torch.Tensor]]:
        """Convert a matrix as `constant` does, some rows at a time; yields the index of the first row, and the rows.

        The next rows reuse the same memory, so the rows stay in the processor's cache. The products with all blocks of
        rows take half as long as one product with the entire matrix, which is written to memory and read again.
        """
        array = np.asarray(value)
        count = max(1, _BLOCK_ELEMENTS // array.shape[1])
        out = torch.empty((count, array.shape[1]), dtype=self.compute)
        between = torch.empty(out.shape) if self.compute == torch.float64 else out  # torch converts to float64 slowly
        for start, piece in self._iterate_rows(array, count):
            made, first = out[: len(piece)], between[: len(piece)]
            first.copy_(torch.from_numpy(np.asarray(_WritableView(piece))))
            yield start, self._limit_magnitudes(made if between is out else made.copy_(first))

    @staticmethod
    def _iterate_rows(array: np.ndarray[Any, Any], count: int) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
        if is_mapped(array) and array.flags.c_contiguous:
            width = array.shape[1]
            for start, piece in iterate_chunks(array, count * width):
                yield start // width, piece.reshape(-1, width)
            return
        check_file_of(array)
        for start in range(0, len(array), count):
            rows = array[start : start + count]
            yield start, rows
            release_pages(rows)

    def make_small_constant(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        """Return the same tensor as `constant` in less time, for a small array that is not mapped."""
        if self.infinity is not None:
            return self.constant(array)
        made = torch.empty(array.shape, dtype=self._get_compute_dtype(array.dtype))
        np.copyto(made.numpy(), array, casting="unsafe")
        return made

    def shared(self, value: Any) -> torch.Tensor | None:
        """Return a tensor that uses the memory of `value`, or for a mapped file the memory that all runs share.

        Returns None if `value` is not stored in the computing dtype and a suitable layout, or if `finite_constants` may
        change it.
        """
        array = np.asarray(value)
        if not self._is_as_stored(array):
            return None
        if is_mapped(array):
            return torch.from_numpy(read_once(array))
        found = torch.from_numpy(np.asarray(_WritableView(array)))
        return found if found.data_ptr() % _ALIGNMENT == 0 else None

    def is_read_once(self, value: Any) -> bool:
        """Return whether `shared` reads `value` from a file into memory."""
        array = np.asarray(value)
        return self._is_as_stored(array) and is_mapped(array)

    def _is_as_stored(self, array: np.ndarray[Any, Any]) -> bool:
        if self.infinity is not None or array.dtype not in _SHARED_NUMPY_DTYPES:
            return False
        # torch and numpy use the same names for these dtypes
        is_computed = str(self._get_compute_dtype(array.dtype)) == f"torch.{array.dtype.name}"
        return bool(is_computed and array.flags.c_contiguous and array.nbytes)

    def nbytes(self, value: Any) -> int:
        """Return the bytes of `tensor(value)`."""
        array = np.asarray(value)
        return int(array.size * self._get_compute_dtype(array.dtype).itemsize)

    def _get_compute_dtype(self, dtype: np.dtype[Any]) -> torch.dtype:
        if dtype.kind == "f":
            return self.compute
        if dtype.kind == "b":
            return torch.bool
        return torch.int64 if dtype.itemsize == 8 or dtype == np.uint32 else torch.int32

    def operand(self, value: Any) -> Any:
        """Return a stored value in the form kernels expect: floats in the computing dtype."""
        if not isinstance(value, torch.Tensor) or value.dtype is self.compute or not value.is_floating_point():
            return value
        return value.to(self.compute)

    def store(self, value: torch.Tensor, dtype: Any) -> torch.Tensor:
        """Convert a kernel's result to the form in which a variable of builtin type `dtype` is stored."""
        storage = self._storage.get(dtype) or self.storage(dtype)
        if value.dtype is storage and (storage.is_floating_point or storage is torch.bool):
            stored = canonicalize_layout(value)
            return stored.clone() if stored.untyped_storage().nbytes() > stored.nbytes else stored
        if value.is_floating_point() and not (storage.is_floating_point or storage == torch.bool):
            # MIL does not define this conversion, and no report about a device was found. arm64's conversions saturate,
            # and so does this one at every width: NaN becomes 0, and a value out of range becomes the nearest end of
            # the declared type's range.
            lowest, highest = _get_integer_range(dtype)
            value = value.double().nan_to_num(0.0).clamp(lowest, min(highest, 2**63 - 1024))
        if value.dtype is not storage:
            value = value.to(storage)
        if not (storage.is_floating_point or storage == torch.bool):
            value = self._wrap_integers(value, dtype)
        stored = canonicalize_layout(value)
        # A view would keep the larger tensor that it belongs to in memory.
        return stored.clone() if stored.untyped_storage().nbytes() > stored.nbytes else stored

    def storage(self, dtype: Any) -> torch.dtype:
        """Return the torch dtype in which variables of builtin type `dtype` are stored."""
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
        """Return the numpy dtype in which results of builtin type `dtype` are returned."""
        if types.is_float(dtype):
            half = self.name == "float16" and dtype == types.fp16
            return np.dtype(np.float64 if self.name == "float64" else np.float16 if half else np.float32)
        if types.is_bool(dtype):
            return np.dtype(np.bool_)
        # Sub-byte types carry metadata on their numpy dtype; users get the plain container type.
        container: str = np.dtype(types.nptype_from_builtin(dtype)).str
        return np.dtype(container)

    def numpy(self, value: torch.Tensor, dtype: Any) -> np.ndarray[Any, Any]:
        """Copy a stored tensor to the numpy array returned to the user."""
        return np.array(value.numpy(), dtype=self.numpy_dtype(dtype))


def _get_integer_range(dtype: Any) -> tuple[int, int]:
    """Return the smallest and the largest integer of builtin type `dtype`."""
    bits = get_bit_width(dtype)
    return (0, (1 << bits) - 1) if dtype.is_unsigned() else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
