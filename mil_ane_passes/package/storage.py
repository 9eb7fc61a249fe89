"""The weights of a program as they are stored: by format, by size, and those that are stored several times."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from coremltools.converters.mil.mil import Program, Var, types

from ..ir.constants import get_blob_ref
from ..ir.query import count_stored_bytes, get_flat_inputs, get_type_info, is_compressed, is_const, iterate_ops
from ..utils.errors import InputError
from .blob_refs import find_refs
from .duplicates import find_duplicates
from .model import Package

__all__ = ["FormatTotal", "Storage", "StoredWeight", "survey_storage"]

_MIN_ELEMENTS = 10
"Constants of fewer elements are parameters: coremltools writes those of as many elements to the weight file."

_MAX_STEPS = 4
"The most `constexpr` ops from stored bytes to a weight that are followed: MIL's joint formats have up to three."


@dataclass(frozen=True)
class StoredWeight:
    """A weight: a constant, or the result of the `constexpr` ops that unpack it. Sizes are in bytes.

    `stored` counts all that the result is unpacked from, such as tables, scales and masks; `dense` is its own size.
    """

    function: str
    value: str
    shape: tuple[int, ...]
    format: str
    stored: int
    dense: int
    reader: str
    "The type of the first op that reads it; empty if none does."

    def to_dict(self) -> dict[str, Any]:
        return {"function": self.function, "value": self.value, "shape": list(self.shape), "format": self.format,
                "stored_bytes": self.stored, "dense_bytes": self.dense, "reader": self.reader}


@dataclass(frozen=True)
class FormatTotal:
    """The weights of one format: their number, and their bytes as stored and as unpacked."""

    format: str
    count: int
    stored: int
    dense: int

    def to_dict(self) -> dict[str, Any]:
        return {"format": self.format, "weights": self.count, "stored_bytes": self.stored, "dense_bytes": self.dense}


@dataclass(frozen=True)
class EqualWeights:
    """A value that the weight files hold `copies` times, of `nbytes` bytes each; `values` are names of consts."""

    nbytes: int
    copies: int
    values: tuple[str, ...]

    @property
    def saved_bytes(self) -> int:
        return self.nbytes * (self.copies - 1)

    def to_dict(self) -> dict[str, Any]:
        return {"bytes": self.nbytes, "copies": self.copies, "values": list(self.values)}


@dataclass(frozen=True)
class Storage:
    """The weights of a program, the largest first; one that several ops or functions share counts once.

    `duplicates` are values that are stored several times, None where that was not searched.
    """

    weights: list[StoredWeight]
    duplicates: list[EqualWeights] | None = None

    @property
    def formats(self) -> list[FormatTotal]:
        """The totals by format, the largest first."""
        by_format: dict[str, list[StoredWeight]] = {}
        for each in self.weights:
            by_format.setdefault(each.format, []).append(each)
        totals = [FormatTotal(name, len(found), sum(each.stored for each in found), sum(each.dense for each in found))
                  for name, found in by_format.items()]
        return sorted(totals, key=lambda total: (-total.stored, total.format))

    @property
    def saved_by_dedup(self) -> int:
        """Bytes that duplicates take in addition."""
        return sum(each.saved_bytes for each in self.duplicates or ())

    @property
    def stored(self) -> int:
        return sum(each.stored for each in self.weights)

    @property
    def dense(self) -> int:
        return sum(each.dense for each in self.weights)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of all weights, and of duplicates: null where they were not searched."""
        return {"stored_bytes": self.stored, "dense_bytes": self.dense,
                "formats": [each.to_dict() for each in self.formats],
                "weights": [each.to_dict() for each in self.weights],
                "duplicates": None if self.duplicates is None else [each.to_dict() for each in self.duplicates]}


def survey_storage(program: Program, package: Package | None = None) -> Storage:
    """Survey the weights of a program; in a `package`, also search duplicates, which reads its weights.

    Raises InputError if a weight file cannot be read.
    """
    found: dict[Hashable, StoredWeight] = {}
    names: dict[tuple[str, int], list[str]] = {}
    for function, op in iterate_ops(program):
        for var in op.outputs if any(is_const(var) or is_compressed(var) for var in op.outputs[:1]) else ():
            ref = get_blob_ref(var)
            if ref is not None:
                names.setdefault((ref.name, ref.offset), []).append(var.name)
            weight = None if _is_part_only(var) else _describe_weight(function, var)
            if weight is not None:
                found.setdefault(_make_key(var), weight)
    weights = sorted(found.values(), key=lambda weight: (-weight.stored, weight.function, weight.value))
    searched = None if package is None or package.upgraded is not None else _find_duplicates(package, names)
    return Storage(weights, searched)


def _is_part_only(var: Var) -> bool:
    """Return whether `var` is read by nothing but ops that unpack a weight, which is then the one to describe.

    Also true for a result of such an op that nothing reads, such as the mask of a sparse weight.
    """
    return not var.consuming_blocks and (bool(var.child_ops) or is_compressed(var)) and all(
        op.op_type.startswith("constexpr_") for op in var.child_ops)


def _describe_weight(function: str, var: Var) -> StoredWeight | None:
    """Describe a weight; None for a value that is not numeric, and for one of few elements."""
    shape, dense = get_type_info(var).shape, count_stored_bytes(var)
    if shape is None or not dense or math.prod(shape) < _MIN_ELEMENTS:
        return None
    parts = {_make_key(part): count_stored_bytes(part) for part in _collect_parts(var)}
    reader = var.child_ops[0].op_type if var.child_ops else ""
    return StoredWeight(function, var.name, tuple(shape), _name_format(var), sum(parts.values()), dense, reader)


def _collect_parts(var: Var) -> list[Var]:
    """Collect the constants from which a weight is unpacked in at most `_MAX_STEPS` steps; a constant itself."""
    parts = {var: None}
    for _ in range(_MAX_STEPS):
        parts = {part: None for each in parts
                 for part in (get_flat_inputs(each.op) if is_compressed(each) else [each])}
    return list(parts)


def _make_key(var: Var) -> Hashable:
    """Return a key that is equal for weights that are stored once."""
    ref = get_blob_ref(var)
    if ref is not None:
        return ref.name, ref.offset
    if not is_compressed(var):
        return id(var)
    return var.op.op_type, var.op.outputs.index(var), *map(_make_key, _collect_parts(var))


def _name_format(var: Var, steps: int = 0) -> str:
    """Name the format in which a weight is stored, such as "fp16", "int4 in blocks" or "sparse, palette of 4 bits"."""
    op, kind = var.op, str(var.op.op_type)
    if steps == _MAX_STEPS:
        return kind.removeprefix("constexpr_")
    if kind == "constexpr_affine_dequantize":
        return f"{_name_dtype(op.quantized_data)} affine"
    if kind in ("constexpr_lut_to_dense", "constexpr_lut_to_sparse"):
        indices = op.inputs["indices" if kind == "constexpr_lut_to_dense" else "indices_nonzero_data"]
        return _name_palette(op.lut, indices)
    if kind in ("constexpr_blockwise_shift_scale", "constexpr_sparse_blockwise_shift_scale"):
        data = op.inputs["data" if kind == "constexpr_blockwise_shift_scale" else "nonzero_data"]
        return f"{_name_format(data, steps + 1)} {_name_granularity(op.scale)}"
    if kind == "constexpr_sparse_to_dense":
        values = op.inputs["nonzero_data"]
        return f"sparse, {_name_format(values, steps + 1)}"
    if kind == "constexpr_cast":
        return f"{_name_format(op.source_val, steps + 1)}, cast to {_name_dtype(var)}"
    return kind.removeprefix("constexpr_") if is_compressed(var) else _name_dtype(var)


def _name_dtype(var: Var) -> str:
    return str(types.builtin_to_string(get_type_info(var).dtype))


def _name_palette(table: Var, indices: Var) -> str:
    """Name a palette by the bits of its indices; iOS 16 packs them into uint8 and has one table of 2^bits entries."""
    shape = get_type_info(table).shape or (1,)
    if len(shape) == 1:
        return f"palette of {max(1, math.ceil(math.log2(max(2, shape[0]))))} bits"
    *groups, _, vector = shape
    bits = int(get_type_info(indices).dtype.get_bitwidth())
    return (f"palette of {bits} bits" + " in groups" * any(extent > 1 for extent in groups)
            + " of vectors" * (vector > 1))


def _name_granularity(scale: Var) -> str:
    """Say what has a scale of its own: the tensor, each channel of one axis, or blocks."""
    shape = get_type_info(scale).shape or ()
    many = sum(extent > 1 for extent in shape)
    return "per tensor" if not many else "per channel" if many == 1 else "in blocks"


def _find_duplicates(package: Package, names: dict[tuple[str, int], list[str]]) -> list[EqualWeights]:
    """Find values that the weight files of `package` hold several times, those that cost most first."""
    try:
        found = find_duplicates(package.files, find_refs(package.raw))
    except OSError as error:
        raise InputError(f"{package.path}: the weights cannot be read ({error.strerror or error})") from error
    equal = [EqualWeights(group.nbytes, len(group.places), tuple(
        name for place in group.places for name in dict.fromkeys(names.get(place, [])))) for group in found.equal]
    return sorted(equal, key=lambda each: (-each.saved_bytes, each.values))
