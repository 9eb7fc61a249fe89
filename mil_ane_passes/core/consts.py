"""Constants whose bytes stay where they are: views of mapped blobs, and values that are unpacked only when read.

A const that was loaded from a weight file carries where its bytes live (`op.blob`, a `BlobRef`). A sub-byte
const (int4, uint1, ...) is stored packed, and pymil holds it unpacked, so its value is a `LazyValue`: nothing is
read until somebody asks for `.val`. A const that shows another one in a different shape shares both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, InternalVar, Operation, Var, types
from coremltools.converters.mil.mil.block import curr_block
from coremltools.converters.mil.mil.builder import _BEFORE_OP_STACK
from coremltools.converters.mil.mil.scope import SCOPE_STACK

__all__ = ["BlobRef", "LazyValue", "blob_of", "lazy_const", "reshaped_const"]


@dataclass(frozen=True)
class BlobRef:
    """Where a const's bytes live in a package.

    `file` is the weight file on disk, `name` its name as the program's proto spells it
    (`@model_path/weights/weight.bin`), `offset` the position of the blob's 64-byte metadata, `nbytes` its payload.
    """

    file: Path
    name: str
    offset: int
    nbytes: int


class LazyValue:
    """Stands where pymil keeps a const's value (`Var._sym_val`); reads it on the first access of `.val`.

    `read` returns the flat, unpacked elements; `shape` is the shape they are shown in.
    """

    def __init__(self, read: Callable[[], np.ndarray[Any, Any]], shape: tuple[int, ...]) -> None:
        self._read = read
        self.shape = shape
        self._value: np.ndarray[Any, Any] | None = None

    @property
    def val(self) -> np.ndarray[Any, Any]:
        if self._value is None:
            self._value = self._read().reshape(self.shape)
        return self._value

    def reshaped(self, shape: tuple[int, ...]) -> LazyValue:
        """The same elements in another shape, still unread."""
        return LazyValue(self._read, shape)


def lazy_const(value: LazyValue, dtype: Any, name: str, before_op: Operation | None = None) -> Var:
    """A const of MIL builtin type `dtype` (e.g. `types.int4`) that holds `value` without reading it.

    pymil looks at a value when it creates a const, so the const is created on a view of one zero that has the
    right shape and dtype, and `value` takes its place at once.
    """
    one = np.zeros((), dtype=types.nptype_from_builtin(dtype))
    var = Builder.const(val=np.broadcast_to(one, value.shape), name=name, before_op=before_op)
    var._sym_val = value
    var.op.val._sym_val = value
    return var


def blob_of(var: Var) -> BlobRef | None:
    """Where the bytes of a const live, or None for a const that was made in memory."""
    blob = getattr(var.op, "blob", None)
    return blob if isinstance(blob, BlobRef) else None


def reshaped_const(var: Var, shape: tuple[int, ...], name: str, before_op: Operation | None = None) -> Var:
    """A new const that shows const `var`, element for element, in `shape`; bytes and blob are shared, not copied.

    It is put into the current block. Built from the const it shows rather than by pymil's builder: the type is known,
    nothing is inferred or looked at, and with thousands of weights that is most of the cost.
    """
    source: Any = var.op
    op: Any = object.__new__(type(source))
    op._input_types, op._type_domains, op.blocks, op._weight_id = source._input_types, source._type_domains, [], None
    op.name, op.enclosing_block, op.scopes = name, curr_block(), SCOPE_STACK.get_curr_scopes()
    blob = blob_of(var)
    if blob is not None:
        op.blob = blob
    sym_type = types.tensor(var.dtype, shape)
    held = var._sym_val
    if isinstance(held, LazyValue):
        value: Any = held.reshaped(shape)
    else:
        value = sym_type()
        value.val = np.asarray(held.val).reshape(shape)
    inner = InternalVar(None, name=f"{name}_val")
    inner.add_child_op(op)
    op._input_vars, op.val = {"val": inner}, inner
    view = Var(name, sym_type, None, op=op, op_output_idx=0)
    op._output_vars = [view]
    inner._sym_val = view._sym_val = value
    view.is_descendant_of_const = True
    op.enclosing_block.add_internal_var(inner)
    if before_op is None and _BEFORE_OP_STACK:
        before_op = _BEFORE_OP_STACK[-1]
    op.enclosing_block._insert_op_before(op, before_op=before_op)
    if source.weight_id is not None:
        op.weight_id = f"{source.weight_id}:{'x'.join(map(str, shape))}"
    return view
