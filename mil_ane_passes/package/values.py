"""Conversion of types and values of the model format to pymil's."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import get_new_symbol, mil_list, types
from coremltools.converters.mil.mil.program import get_new_variadic_symbol

from ..ir.constants import unpack_elements
from ..ir.oversized_inputs import MAX_RANK
from ..ir.type_inference import EvaluationBudget, count_elements
from ..utils.errors import InputError
from .blobs import Array, Blob, WeightFile, WeightFiles
from .limits import MAX_ELEMENTS

_REMEDY = "the package is damaged: use a fresh copy"


class Unrepresentable(Exception):
    """A type or value that pymil cannot represent; the op that holds it is loaded as opaque."""


class TypeReader:
    """Reads declared types; equal ones without unknown dimensions are read once."""

    def __init__(self) -> None:
        self._known: dict[bytes, Any] = {}

    def read(self, declared: Any) -> Any:
        """Return the pymil type of `declared` (a ValueType); `types.unknown` if pymil has no type for it."""
        key = declared.SerializeToString()
        if key not in self._known:
            result, fresh = self._read_new_type(declared)
            if fresh:
                return result
            self._known[key] = result
        return self._known[key]

    def _read_new_type(self, declared: Any) -> tuple[Any, bool]:
        """Return the type, and whether it has new symbols (then it must not be shared with equal declarations)."""
        kind = declared.WhichOneof("type")
        if kind == "tensorType":
            return self._read_tensor_type(declared.tensorType)
        if kind == "stateType":
            inner, fresh = self._read_new_type(declared.stateType.wrappedType)
            if types.is_scalar(inner):  # a state of rank 0 is a tensor in coremltools
                return types.state(types.tensor(inner, ())), fresh
            return (types.state(inner), fresh) if types.is_tensor(inner) else (types.unknown, False)
        if kind == "listType":
            inner, fresh = self._read_new_type(declared.listType.type)
            # The format does not declare whether a list may grow; coremltools' reader assumes that it may.
            return types.list(inner, None, dynamic_length=True), fresh
        if kind == "dictionaryType":
            key, _ = self._read_new_type(declared.dictionaryType.keyType)
            inner, fresh = self._read_new_type(declared.dictionaryType.valueType)
            return types.dict(key, inner), fresh
        if kind == "tupleType":
            inners = [self._read_new_type(inner) for inner in declared.tupleType.types]
            return types.tuple([inner for inner, _ in inners]), any(fresh for _, fresh in inners)
        return types.unknown, False

    @staticmethod
    def _read_tensor_type(tensor: Any) -> tuple[Any, bool]:
        dtype = types.type_mapping.PROTO_TO_BUILTIN_TYPE.get(tensor.dataType)
        if dtype is None:
            return types.unknown, False
        if tensor.rank < 0:
            return types.tensor(dtype, (get_new_variadic_symbol(),)), True
        if not tensor.dimensions:
            return dtype, False
        if len(tensor.dimensions) > MAX_RANK:
            return types.unknown, False
        shape = [_read_dimension(dimension) for dimension in tensor.dimensions]
        if count_elements(shape) > MAX_ELEMENTS:
            raise InputError(
                f"a tensor of shape {tuple(map(str, shape))}; expected no more than {MAX_ELEMENTS} elements; {_REMEDY}"
            )
        return types.tensor(dtype, shape), not all(isinstance(size, int) for size in shape)


@functools.lru_cache(maxsize=1 << 12)
def _decompose_type(sym_type: Any) -> tuple[bool, Any, tuple[Any, ...]] | None:
    """Return whether a type is a tensor, its dtype and its shape; None if it is neither a tensor nor a scalar."""
    if types.is_tensor(sym_type):
        return True, sym_type.get_primitive(), sym_type.get_shape()
    return (False, sym_type, ()) if types.is_scalar(sym_type) else None


def _read_dimension(dimension: Any) -> Any:
    if dimension.WhichOneof("dimension") == "constant":
        return int(dimension.constant.size)
    return get_new_variadic_symbol() if dimension.unknown.variadic else get_new_symbol()


class LoadedValue:
    """A value of the file: its pymil representation, and the blob that holds it, if any."""

    def __init__(self, value: Any, dtype: Any, file: WeightFile | None = None, blob: Blob | None = None) -> None:
        self.value, self.dtype, self.file, self.blob = value, dtype, file, blob


class ValueReader:
    """Reads values: those in weight files as views or `LazyValue`s, the others as read-only arrays and scalars."""

    def __init__(self, files: WeightFiles, type_reader: TypeReader, budget: EvaluationBudget | None = None) -> None:
        self._files, self._types = files, type_reader
        self.budget = budget or EvaluationBudget()

    def read(self, value: Any) -> LoadedValue:
        """Read `value` (a Value proto).

        Raises InputError when it contradicts its declared type, Unrepresentable when pymil cannot represent it.
        """
        sym_type = self._types.read(value.type)
        where = value.WhichOneof("value")
        form = _decompose_type(sym_type)
        if form is None and types.is_list(sym_type) and where == "immediateValue":
            elements = [self.read(element).value for element in value.immediateValue.list.values]
            if not elements:
                raise Unrepresentable("an empty list")
            return LoadedValue(mil_list(elements), sym_type)
        if where is None or form is None:
            raise Unrepresentable(f"a value of type {sym_type.__name__}")
        is_tensor, dtype, shape = form
        if not all(isinstance(size, int) for size in shape):
            raise Unrepresentable("a value of unknown shape")
        if where == "blobFileValue":
            return self._from_file(value.blobFileValue, dtype, shape)
        return LoadedValue(_read_immediate(value.immediateValue.tensor, dtype, shape, is_tensor), dtype)

    def _from_file(self, ref: Any, dtype: Any, shape: tuple[int, ...]) -> LoadedValue:
        count = math.prod(shape)
        file, blob = self._files.find_blob(ref.fileName, ref.offset, dtype, count)
        if types.is_sub_byte(dtype):
            return LoadedValue(file.make_lazy(blob, dtype, shape), dtype, file, blob)
        return LoadedValue(file.view_elements(blob, dtype).reshape(shape), dtype, file, blob)


def _read_immediate(tensor: Any, dtype: Any, shape: tuple[int, ...], is_tensor: bool) -> Any:
    kind = tensor.WhichOneof("value")
    stored = getattr(tensor, kind).values if kind else []
    count = math.prod(shape)
    if dtype == types.str and not is_tensor:
        _check_count(len(stored), 1, dtype)
        return str(stored[0])
    if isinstance(stored, bytes):
        flat = _decode_bytes(stored, dtype, count)
    else:
        _check_count(len(stored), count, dtype)  # before elements of another kind are converted
        flat = np.array(list(stored)).astype(types.nptype_from_builtin(dtype))
    _check_count(flat.size, count, dtype)
    array = flat.reshape(shape)
    # The array stands for the const's bytes in the file, so it is read-only: an edit must make a new const.
    array.flags.writeable = False
    # A numpy scalar cannot carry a sub-byte type; an array without dimensions can.
    return array if is_tensor or types.is_sub_byte(dtype) else types.nptype_from_builtin(dtype)(array.item())


def _decode_bytes(stored: bytes, dtype: Any, count: int) -> Array:
    np_type = types.nptype_from_builtin(dtype)
    if types.is_sub_byte(dtype):
        return unpack_elements(np.frombuffer(stored, np.uint8), dtype, count)
    itemsize = np.dtype(np_type).itemsize  # 0 for strings
    if not itemsize or len(stored) % itemsize:
        raise InputError(
            f"an inline value of {len(stored)} bytes; expected {count} elements of {types.builtin_to_string(dtype)} "
            f"as declared; {_REMEDY}"
        )
    return np.frombuffer(stored, np_type)


def _check_count(found: int, expected: int, dtype: Any) -> None:
    if found != expected:
        raise InputError(
            f"an inline value of {found} elements; "
            f"expected {expected} of {types.builtin_to_string(dtype)} as declared; {_REMEDY}"
        )
