"""Token ids replaced by what is looked up for them: rows of the table, which the caller reads, or one-hot rows.

The table is a const or compressed; `read_table` returns what it consists of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Function, Operation, Placeholder, Var, types

from ..ir.block_editor import BlockEditor
from ..ir.builder import RewriteBuilder, UniqueNames
from ..ir.coremltools_internals import add_function_input, remove_function_input
from ..ir.query import get_consumers, get_static_shape, is_const
from ..passes.interface_change import InterfaceChange
from ..utils.errors import InputError
from ..utils.option_spelling import format_option
from .contract import Draft, EditRecord, Transform
from .dead_ops import find_dead_ops, remove_dead_ops
from .decoder import find_lookup

__all__ = ["TokenInput", "read_table"]

Rows = Callable[[Any], Any]


@dataclass(frozen=True)
class TokenInput(Transform):
    """Replaces the input `ids` by `name`: rows of the table (1, T, width), or with `one_hot` rows (1, T, vocabulary).

    `rows` computes the rows of the table for integers (n,), as (n, width).
    """

    ids: str
    name: str
    rows: Rows
    one_hot: bool = False

    def apply(self, draft: Draft) -> list[Draft]:
        """Replace in place. InputError for ids that are read by other ops as well."""
        for name, function in draft.program.functions.items():
            self._replace(draft, name, function)
        return [draft]

    def _replace(self, draft: Draft, name: str, function: Function) -> None:
        var = function.inputs[self.ids]
        lookup = find_lookup(var)
        shape = get_static_shape(var)
        assert lookup is not None and shape is not None
        if self.name in {*function.inputs, *(each.name for each in function.outputs)}:
            raise InputError(f"{draft.where}: '{self.name}' is an input or output; expected this name to be free: give "
                             f"it another by {format_option('rename')} of edit")
        dead = set(find_dead_ops(function))
        table = lookup.x
        size = int(table.shape[0 if self.one_hot else 1])
        placeholder = Placeholder((*shape, size), table.dtype, name=self.name)
        made = placeholder.outputs[0]
        made.name = self.name
        with function, BlockEditor() as editor:
            mb = RewriteBuilder(function, UniqueNames(function))
            add_function_input(function, self.name, placeholder)
            found = made
            if self.one_hot:
                with mb.at(lookup):
                    found = mb.matmul(x=made, y=table)
                    mb.adopt_scopes(lookup.scopes)
            editor.replace(lookup.outputs[0], found)
        remove_dead_ops(function, dead)
        users = get_consumers(var)
        if users:
            raise InputError(f"{draft.where}: the op '{users[0].outputs[0].name}' ({users[0].op_type}) reads the token "
                             f"ids '{self.ids}' besides the lookup in a table; expected that alone")
        remove_function_input(function, self.ids)
        draft.change_interface(name, InterfaceChange("input", self.ids, None, "removed"), InterfaceChange(
            "input", None, self.name, "added", make=self._make_feed(table)))
        what = "one-hot rows, which are multiplied with the table" if self.one_hot else "rows of the table"
        held = ", ".join(map(str, (*shape, size)))
        draft.done.append(EditRecord("", name, self.name, f"input '{self.name}' ({held}) replaces '{self.ids}': "
                                     f"{what}"))

    def _make_feed(self, table: Var) -> Callable[[Any], Any]:
        count, kind = int(table.shape[0]), types.nptype_from_builtin(table.dtype)

        def make(feeds: Any) -> Any:
            ids = np.asarray(feeds[self.ids])
            flat = ids.reshape(-1)
            rows = np.eye(count, dtype=kind)[flat] if self.one_hot else np.asarray(self.rows(flat))
            return rows.reshape(*ids.shape, -1)

        return make


def read_table(table: Var) -> dict[str, Any]:
    """Return what a table consists of: `data` (rows, width) and, if it is compressed, `lut`, `scale` and `offset`.

    These have a number for each block of rows and columns, `lut` (blocks, blocks, entries) some. InputError for other
    compressions.
    """
    if is_const(table):
        return {"data": np.asarray(table.val)}
    op = table.op
    reader = _READERS.get(op.op_type)
    if reader is None or any(bound is not None and not is_const(bound) for bound in op.inputs.values()):
        raise InputError(f"the table '{table.name}' is compressed by {op.op_type}, or several times; expected one of "
                         f"{', '.join(_READERS)} to write it as a file")
    return reader(op)


def _read_affine(op: Operation) -> dict[str, Any]:
    shape = [1, 1]
    shape[int(op.axis.val)] = -1
    scale, zero = (np.asarray(each.val) for each in (op.scale, op.zero_point))
    return {"data": np.asarray(op.quantized_data.val), "scale": scale.reshape(shape if scale.size > 1 else (1, 1)),
            "offset": zero.reshape(shape if zero.size > 1 else (1, 1))}


def _read_blocks(op: Operation) -> dict[str, Any]:
    found = {"data": np.asarray(op.data.val), "scale": np.asarray(op.scale.val)}
    offset = op.inputs.get("offset")
    return {name: _widen(each) for name, each in {**found, **({} if offset is None else {
        "offset": np.asarray(offset.val)})}.items()}


def _read_palette(op: Operation) -> dict[str, Any]:
    lut = np.asarray(op.lut.val)
    if op.inputs.get("shape") is None:
        if lut.shape[-1] != 1:
            raise InputError(f"the table is compressed by palettes of vectors of {lut.shape[-1]}; expected numbers")
        return {"data": _widen(np.asarray(op.indices.val)), "lut": lut[..., 0]}
    shape = [int(each) for each in op.shape.val]
    bits = int(lut.size - 1).bit_length() or 1
    packed = np.unpackbits(np.asarray(op.indices.val).view(np.uint8), bitorder="little")
    codes = packed[:shape[0] * shape[1] * bits].reshape(-1, bits) @ (1 << np.arange(bits))
    return {"data": codes.astype(np.uint8).reshape(shape), "lut": lut.reshape(1, 1, -1)}


def _widen(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return integers below 8 bits as int8 or uint8, which files hold."""
    if array.dtype.kind == "f" or array.dtype in (np.int8, np.uint8):
        return array.view(np.dtype(array.dtype.str))  # a type of fewer bits is noted beside that of bytes
    return array.astype(np.uint8 if array.size == 0 or array.min() >= 0 else np.int8)


_READERS: dict[str, Callable[[Operation], dict[str, Any]]] = {
    "constexpr_affine_dequantize": _read_affine, "constexpr_blockwise_shift_scale": _read_blocks,
    "constexpr_lut_to_dense": _read_palette}
