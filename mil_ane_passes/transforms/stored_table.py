"""Tables of embeddings as they are stored: read from a package without decompressing them, to be written as files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ..ir.query import is_const
from ..utils.errors import InputError

__all__ = ["describe_table", "list_table_arrays", "read_table"]


def read_table(table: Var) -> dict[str, Any]:
    """Return the stored parts of a table (rows, width) by name.

    - `width`: the width of a row.
    - `data`: the values (rows, width). Integers of fewer than 8 `bits`, `signed` or not, are packed, lowest bits first;
      each row begins at a byte.
    - `mask` and `starts` of a sparse table: `data` has only the values at which the packed bits of `mask` are set, and
      row n is `data[starts[n]:starts[n + 1]]`.
    - `scale`, `offset` and `lut` if `data` are codes: one number for each block of rows and columns; `lut` (blocks,
      blocks, entries) has several.

    Raises InputError for other compressions.
    """
    found = _read_values(table)
    return {"width": int(table.shape[1]), **(_pack_sparse if "mask" in found else _pack_dense)(found)}


def list_table_arrays(table: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays that a table consists of, by the names of `read_table`."""
    return {name: each for name, each in table.items() if isinstance(each, np.ndarray)}


def describe_table(table: Mapping[str, Any], stem: str) -> dict[str, Any]:
    """Return the numbers of `read_table`, and as `files` the names of the files for its arrays.

    STEM.npy has the data, STEM_scale.npy the scale, and so on.
    """
    arrays = list_table_arrays(table)
    return {**{name: each for name, each in table.items() if name not in arrays},
            "files": {name: f"{stem}{'' if name == 'data' else f'_{name}'}.npy" for name in arrays}}


def _read_values(var: Var) -> dict[str, Any]:
    """Return data (rows, width) or, beside a mask (rows, width), those of a sparse table alone, and its parameters."""
    if is_const(var):
        data = np.asarray(var.val)
        if not types.is_sub_byte(var.dtype):
            return {"data": data}
        return {"data": _widen(data), "bits": var.dtype.get_bitwidth(), "signed": not var.dtype.is_unsigned()}
    reader = _READERS.get(var.op.op_type)
    if reader is None:
        raise _make_refusal(var)
    return reader(var.op)


def _make_refusal(var: Var) -> InputError:
    return InputError(f"the table '{var.name}' is compressed by {var.op.op_type}, or several times; expected one of "
                      f"{', '.join(_READERS)} to write it as a file")


def _read_parameter(var: Var) -> np.ndarray[Any, Any]:
    """Return the values of a parameter of a compression, which may be compressed itself: it is small."""
    found = var.val if is_const(var) else var.op.materialized_val_inference()
    return _widen(np.asarray(found))


def _read_affine(op: Operation) -> dict[str, Any]:
    shape = [1, 1]
    shape[int(op.axis.val)] = -1
    scale, zero = (np.asarray(each.val) for each in (op.scale, op.zero_point))
    return {"data": np.asarray(op.quantized_data.val), "scale": scale.reshape(shape if scale.size > 1 else (1, 1)),
            "offset": zero.reshape(shape if zero.size > 1 else (1, 1))}


def _read_blocks(op: Operation) -> dict[str, Any]:
    """Read what is shifted and scaled by blocks: integers, entries of palettes, or those values that are not 0."""
    found = _read_values(op.inputs["data" if "data" in op.inputs else "nonzero_data"])
    if "scale" in found:
        raise _make_refusal(op.outputs[0])
    offset = op.inputs.get("offset")
    return {**found, "scale": _read_parameter(op.scale), **(
        {} if offset is None else {"offset": _read_parameter(offset)})}


def _read_palette(op: Operation) -> dict[str, Any]:
    lut = _read_parameter(op.lut)
    indices = op.inputs["indices" if "indices" in op.inputs else "indices_nonzero_data"]
    if op.inputs.get("shape") is None:
        if lut.shape[-1] != 1:
            raise InputError(f"the table is compressed by palettes of vectors of {lut.shape[-1]}; expected numbers")
        return {**_read_values(indices), "lut": lut[..., 0]}
    shape = [int(each) for each in op.shape.val]
    bits = int(lut.size - 1).bit_length() or 1
    packed = np.unpackbits(np.asarray(indices.val).view(np.uint8), bitorder="little")
    codes = packed[:shape[0] * shape[1] * bits].reshape(-1, bits) @ (1 << np.arange(bits))
    found = {"data": codes.astype(np.uint8).reshape(shape), "lut": lut.reshape(1, 1, -1)}
    return found if bits == _BYTE else {**found, "bits": bits, "signed": False}


def _read_sparse(op: Operation) -> dict[str, Any]:
    mask = op.mask
    while not is_const(mask):  # each op of a chain returns the mask that it reads
        mask = mask.op.inputs["data_mask" if "data_mask" in mask.op.inputs else "indices_mask"]
    shape = tuple(int(size) for size in op.outputs[0].shape)
    values = np.asarray(mask.val)
    if op.inputs.get("shape") is not None:
        values = np.unpackbits(values.view(np.uint8), bitorder="little")[:shape[0] * shape[1]]
    return {**_read_values(op.nonzero_data), "mask": values.reshape(shape).astype(bool)}


def _pack_dense(found: Mapping[str, Any]) -> dict[str, Any]:
    if "bits" not in found:
        return dict(found)
    rows = found["data"]
    parts = [_pack_bits(rows[start:start + _PACKED_AT_ONCE], found["bits"])
             for start in range(0, len(rows), _PACKED_AT_ONCE)]
    return {**found, "data": np.concatenate(parts)}


def _pack_sparse(found: Mapping[str, Any]) -> dict[str, Any]:
    mask = found["mask"]
    starts = np.concatenate([[0], np.cumsum(mask.sum(1))])
    data = found["data"].reshape(-1)
    if "bits" in found:
        rows = [_pack_bits(data[begin:end], found["bits"]) for begin, end in pairwise(starts)]
        data, starts = np.concatenate(rows), np.concatenate([[0], np.cumsum([len(each) for each in rows])])
    kind = np.uint32 if starts[-1] <= np.iinfo(np.uint32).max else np.uint64
    return {**found, "data": data, "mask": np.packbits(mask, axis=1, bitorder="little"), "starts": starts.astype(kind)}


def _pack_bits(codes: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Pack integers of the last axis into bytes, the lowest bits first."""
    found = np.unpackbits(codes.view(np.uint8)[..., None], axis=-1, bitorder="little")[..., :bits]
    return np.packbits(found.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")


def _widen(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return integers below 8 bits as int8 or uint8, which files hold."""
    if array.dtype.kind == "f" or array.dtype in (np.int8, np.uint8):
        return array.view(np.dtype(array.dtype.str))  # a type of fewer bits is noted beside that of bytes
    return array.astype(np.uint8 if array.size == 0 or array.min() >= 0 else np.int8)


_BYTE = 8
_PACKED_AT_ONCE = 1024
"Rows that are packed at a time: eight bytes are held for each number."
_READERS: dict[str, Callable[[Operation], dict[str, Any]]] = {
    "constexpr_affine_dequantize": _read_affine, "constexpr_blockwise_shift_scale": _read_blocks,
    "constexpr_lut_to_dense": _read_palette, "constexpr_sparse_to_dense": _read_sparse,
    "constexpr_lut_to_sparse": _read_palette, "constexpr_sparse_blockwise_shift_scale": _read_blocks}
