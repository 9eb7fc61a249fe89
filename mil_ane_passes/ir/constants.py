"""Constants without copies: views of mapped blobs, and values that are unpacked only when read.

A const loaded from a weight file carries the location of its bytes (`op.blob`, a `BlobRef`). A sub-byte const (int4,
uint1, ...) is stored packed and pymil represents it unpacked, so its value is a `LazyValue`: nothing is read until
`.val` is accessed. A reshaped const shares both with the original.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import InternalVar, Operation, Var, types
from coremltools.converters.mil.mil.block import curr_block
from coremltools.converters.mil.mil.builder import _BEFORE_OP_STACK
from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry
from coremltools.converters.mil.mil.scope import SCOPE_STACK

__all__ = ["BlobRef", "LazyValue", "get_blob_ref", "is_stored_alike", "make_bare_var", "make_const",
           "make_reshaped_const", "unpack_codes", "unpack_elements"]

_ELEMENTS_AT_ONCE = 1 << 18
"Elements that are unpacked at once: few enough for the processor's cache. A multiple of 8 ends at a byte boundary."


@dataclass(frozen=True)
class BlobRef:
    """Location of a const's bytes in a package.

    `file` is the weight file on disk, `name` its name as the program's proto spells it
    (`@model_path/weights/weight.bin`), `offset` the position of the blob's 64-byte metadata, `nbytes` its payload.
    `opened` identifies the file even if another one is at the same path later: device, inode, size and time of the last
    change at the time it was opened.
    """

    file: Path
    name: str
    offset: int
    nbytes: int
    opened: tuple[int, ...]


class LazyValue:
    """Lazy replacement for a const's value (`Var._sym_val`): reads it on the first access of `.val`.

    `read` returns the flat, unpacked elements, `read_packed` the bytes they are stored in; `shape` is the shape of the
    value.
    """

    def __init__(self, read: Callable[[], np.ndarray[Any, Any]], shape: tuple[int, ...],
                 read_packed: Callable[[], bytes]) -> None:
        self._read = read
        self.read_packed = read_packed
        self.shape = shape
        self._value: np.ndarray[Any, Any] | None = None

    @property
    def val(self) -> np.ndarray[Any, Any]:
        if self._value is None:
            self._value = self._read().reshape(self.shape)
        return self._value

    def read(self) -> np.ndarray[Any, Any]:
        """Return the elements without caching them; they are read again unless `val` was accessed before."""
        return self._read().reshape(self.shape) if self._value is None else self._value

    def reshaped(self, shape: tuple[int, ...]) -> LazyValue:
        """Return the same elements with another shape, still unread."""
        return LazyValue(self._read, shape, self.read_packed)


def unpack_elements(packed: np.ndarray[Any, Any], dtype: Any, count: int) -> np.ndarray[Any, Any]:
    """Unpack `count` elements of a sub-byte builtin type from bytes, the first element in the lowest bits."""
    bits, np_type = int(dtype.get_bitwidth()), types.nptype_from_builtin(dtype)
    found = np.empty(count, np_type)
    for start in range(0, count, _ELEMENTS_AT_ONCE):
        size = min(_ELEMENTS_AT_ONCE, count - start)
        codes = unpack_codes(packed[start * bits // 8 : -(-(start + size) * bits // 8)], bits, not dtype.is_unsigned())
        found[start : start + size] = codes[:size].view(found.dtype)
    return found


def unpack_codes(packed: np.ndarray[Any, Any], bits: int, signed: bool = False) -> np.ndarray[Any, Any]:
    """Unpack all numbers of `bits` bits each (at most 8) into one byte each, the first number from the lowest bits."""
    if 8 % bits == 0:
        return _make_code_table(bits, signed).take(packed).view(np.uint8)
    return _unpack_bits(packed, bits, signed)


@functools.cache
def _make_code_table(bits: int, signed: bool) -> np.ndarray[Any, Any]:
    """Make a table with one element for each byte value: the numbers packed in the byte, as one wide integer."""
    return _unpack_bits(np.arange(256, dtype=np.uint8), bits, signed).view(f"u{8 // bits}")


def _unpack_bits(packed: np.ndarray[Any, Any], bits: int, signed: bool) -> np.ndarray[Any, Any]:
    stream = np.unpackbits(packed, bitorder="little")
    codes = np.packbits(stream[: stream.size // bits * bits].reshape(-1, bits), axis=-1, bitorder="little").reshape(-1)
    sign = np.uint8(1 << (bits - 1) if signed else 0)
    return np.asarray((codes ^ sign) - sign)  # extends the sign


def make_const(
    value: np.ndarray[Any, Any] | np.generic | str | LazyValue, dtype: Any, name: str,
    before_op: Operation | None = None,
) -> Var:
    """Make a const of MIL builtin type `dtype` in the current block.

    `value` is an array or a scalar of that type; it is neither read nor copied.

    The const is not built by pymil's builder, which would infer the type from the value. The type is known here, and
    with thousands of weights inference and reading are most of the cost.
    """
    kind: Any = SSAOpRegistry._get_core_op_cls("const")
    op: Any = object.__new__(kind)
    op._input_types, op._type_domains = kind.input_spec.input_types, kind.type_domains
    op.name, op.blocks, op._weight_id = name, [], None
    op.enclosing_block, op.scopes = curr_block(), SCOPE_STACK.get_curr_scopes()
    sym_type = dtype if isinstance(value, (np.generic, str)) else types.tensor(dtype, value.shape)
    held: Any = value
    if not isinstance(value, LazyValue):
        held = sym_type()
        held.val = value
    inner = make_bare_var(InternalVar, f"{name}_val", types.unknown, held)
    inner._child_ops.append(op)
    op._input_vars, op.val = {"val": inner}, inner
    var = make_bare_var(Var, name, sym_type, held)
    var._op, var.op_output_idx, var.is_descendant_of_const = op, 0, True
    op._output_vars = [var]
    op.enclosing_block.add_internal_var(inner)
    if before_op is None and _BEFORE_OP_STACK:
        before_op = _BEFORE_OP_STACK[-1]
    op.enclosing_block._insert_op_before(op, before_op=before_op)
    return var


def make_bare_var(cls: Any, name: str, sym_type: Any, held: Any) -> Any:
    """Create a var without its initializer: the slots are set directly, and type and value are not inferred."""
    var = object.__new__(cls)
    var.name, var._sym_type, var._sym_val = name, sym_type, held
    var._op = var.op_output_idx = None
    var._child_ops, var.consuming_blocks = [], []
    var._nonreplaceable_vars_upstream, var.is_descendant_of_const = set(), False
    return var


def get_blob_ref(var: Var) -> BlobRef | None:
    """Return the location of a const's bytes, or None for a const that was made in memory."""
    blob = getattr(var.op, "blob", None)
    return blob if isinstance(blob, BlobRef) else None


def is_stored_alike(one: Var | None, other: Var | None) -> bool:
    """Return whether two constants are made by the same ops of equal numbers, so that they need not be computed."""
    if one is other:
        return True
    if one is None or other is None or one.op is None or other.op is None or one.op.op_type != other.op.op_type or (
            one.op.inputs.keys() != other.op.inputs.keys()):
        return False
    if one.op.op_type == "const":
        blob = get_blob_ref(one)
        alike = one.sym_type == other.sym_type
        return alike and (blob is not None and blob == get_blob_ref(other) or np.array_equal(one.val, other.val))
    return one.op.op_type.startswith("constexpr_") and one.op.outputs.index(one) == other.op.outputs.index(other) and (
        all(is_stored_alike(var, other.op.inputs[name]) for name, var in one.op.inputs.items()))


def make_reshaped_const(var: Var, shape: tuple[int, ...], name: str, before_op: Operation | None = None) -> Var:
    """Make a const with the elements of const `var` in `shape`; bytes and blob are shared, not copied."""
    held = var._sym_val
    value = held.reshaped(shape) if isinstance(held, LazyValue) else np.asarray(held.val).reshape(shape)
    view = make_const(value, var.dtype, name, before_op)
    blob = get_blob_ref(var)
    if blob is not None:
        view.op.blob = blob
    if var.op.weight_id is not None:
        view.op.weight_id = f"{var.op.weight_id}:{'x'.join(map(str, shape))}"
    return view
