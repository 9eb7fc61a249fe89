"""Transfer of a value from the first part to the second: unchanged, or in a form that an input can hold exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from coremltools import proto
from coremltools.converters.mil.backend.mil import helper

from ..package.names import make_free_name
from .program_parts import Op, ValueDeclaration

__all__ = ["CrossingValue", "describe_crossing", "plan_crossing"]

MIL = proto.MIL_pb2
_DTYPE_NAMES = {MIL.FLOAT16: "fp16", MIL.FLOAT32: "fp32", MIL.INT32: "int32", MIL.BOOL: "bool", MIL.INT8: "int8",
                MIL.UINT8: "uint8", MIL.INT16: "int16", MIL.UINT16: "uint16"}
_INTERFACE_DTYPES = {MIL.FLOAT32: "FLOAT32", MIL.INT32: "INT32", MIL.FLOAT16: "FLOAT16"}
_DTYPES_AS_INT32 = {MIL.BOOL, MIL.INT8, MIL.UINT8, MIL.INT16, MIL.UINT16}
_DTYPES_CAST_FROM_IOS17 = _DTYPES_AS_INT32 - {MIL.BOOL}
_OPSETS_BEFORE_IOS17 = ("CoreML3", "CoreML4", "CoreML5", "CoreML6")


@dataclass(frozen=True)
class CrossingValue:
    """A value that crosses: its name in the program, and the output and input (`feature`) that carry it.

    `leaving` are the ops that compute the feature from the value in the first part, `arriving` those that compute the
    value from the feature in the second; both are empty where the value crosses unchanged. `shape` has None for
    flexible sizes.
    """

    value: str
    declared: ValueDeclaration
    shape: tuple[int | None, ...]
    dtype: str
    leaving: tuple[Op, ...] = ()
    arriving: tuple[Op, ...] = ()
    conversion: str = ""

    @property
    def feature(self) -> str:
        """The name of the value in both parts' dictionaries of features."""
        return self.declared.name

    @property
    def nbytes(self) -> int | None:
        """Bytes per prediction; None if the shape is flexible."""
        if None in self.shape:
            return None
        return math.prod(size for size in self.shape if size is not None) * (2 if self.dtype == "fp16" else 4)

    def array(self) -> Any:
        """Return the ArrayFeatureType that describes the feature, without flexible sizes."""
        names = {"fp16": "FLOAT16", "fp32": "FLOAT32", "int32": "INT32"}
        kind = proto.FeatureTypes_pb2.ArrayFeatureType
        shape = () if None in self.shape else self.shape
        return kind(shape=shape, dataType=kind.ArrayDataType.Value(names[self.dtype]))


def plan_crossing(
    value: str, declared_type: Any, opset: str, halves: bool, taken: set[str], image: bool = False
) -> CrossingValue | str:
    """Plan how `value` of type `declared_type` (a ValueType) crosses, or return the reason why it cannot.

    `opset` is that of both parts; `halves` means that their inputs and outputs may be fp16. `taken` are the names in
    use: new ones are added. `image`: the value is already an output as an image, which holds less than the value.
    """
    kind = declared_type.WhichOneof("type")
    if kind != "tensorType":
        return f"it is a {(kind or 'value of unknown type').removesuffix('Type')}, which no input or output can hold"
    tensor = declared_type.tensorType
    if tensor.rank < 0 or any(size.unknown.variadic for size in tensor.dimensions):
        return "its rank is not known"
    dtype = _choose_interface_dtype(tensor.dataType, opset, halves)
    if dtype is None:
        return f"an input cannot hold its type ({_get_type_name(tensor.dataType)}), nor another that holds it exactly"
    return _CrossingBuilder(value, declared_type, taken).carry(dtype, image)


def _choose_interface_dtype(dtype: int, opset: str, halves: bool) -> int | None:
    """Return the interface dtype that holds a `dtype` exactly; None if there is none."""
    if dtype in _DTYPES_CAST_FROM_IOS17 and opset in _OPSETS_BEFORE_IOS17:
        return None
    if dtype in _DTYPES_AS_INT32:
        return int(MIL.INT32)
    if dtype == MIL.FLOAT16 and not halves:
        return int(MIL.FLOAT32)
    return dtype if dtype in _INTERFACE_DTYPES else None


@dataclass
class _CrossingBuilder:
    """Builds the ops on both sides, each from the result of the previous one."""

    value: str
    declared_type: Any
    taken: set[str]
    leaving: list[Op] = field(default_factory=list)
    arriving: list[Op] = field(default_factory=list)
    conversion: list[str] = field(default_factory=list)

    def carry(self, dtype: int, image: bool) -> CrossingValue:
        inner = self.declared_type.tensorType.dataType
        steps: list[tuple[str, str, Any]] = []
        current = self.declared_type
        if dtype != inner:
            current = _make_tensor_type(dtype, current.tensorType.dimensions)
            steps.append(("cast", _DTYPE_NAMES[dtype], current))
            self.conversion.append(f"{_DTYPE_NAMES[inner]} as {_DTYPE_NAMES[dtype]}, which holds it exactly")
        if not current.tensorType.dimensions:
            current = _make_tensor_type(dtype, [MIL.Dimension(constant={"size": 1})])
            steps.append(("expand_dims", "array", current))
            self.conversion.append("a scalar as an array of one")
        if image and not steps:
            steps.append(("identity", "values", current))
            self.conversion.append("its values beside the image")
        names = [self.value, *(make_free_name(f"{self.value}_{suffix}", self.taken) for _, suffix, _ in steps)]
        kinds = [self.declared_type, *(kind for _, _, kind in steps)]
        for place, (op, _, _) in enumerate(steps):
            self._add_op_pair(op, (names[place], kinds[place]), (names[place + 1], kinds[place + 1]))
        shape = tuple(int(each.constant.size) if each.WhichOneof("dimension") == "constant" else None
                      for each in current.tensorType.dimensions)
        return CrossingValue(
            self.value,
            ValueDeclaration.of_type(names[-1], current),
            shape,
            _DTYPE_NAMES[dtype],
            tuple(self.leaving),
            tuple(self.arriving),
            "; ".join(self.conversion),
        )

    def _add_op_pair(self, op: str, inside: tuple[str, Any], outside: tuple[str, Any]) -> None:
        """Add the op that computes `outside` from `inside`, and its inverse after the cut."""
        if op == "cast":
            there = {"dtype": _DTYPE_NAMES[outside[1].tensorType.dataType]}
            back: dict[str, Any] = {"dtype": _DTYPE_NAMES[inside[1].tensorType.dataType]}
        else:
            there = back = {} if op == "identity" else {"axes": np.array([0], np.int32)}
        undo = "squeeze" if op == "expand_dims" else op
        self.leaving += self._op(op, inside[0], outside, there)
        self.arriving = [*self._op(undo, outside[0], inside, back), *self.arriving]

    def _op(self, kind: str, read: str, made: tuple[str, Any], constants: dict[str, Any]) -> list[Op]:
        """Make an op preceded by its consts, named as coremltools names them."""
        ops: list[Op] = []
        inputs = {"x": MIL.Argument(arguments=[{"name": read}])}
        for param, value in constants.items():
            name = make_free_name(f"{made[0]}_{kind}_{param}", self.taken)
            stored = helper.create_scalar_value(value) if isinstance(value, str) else helper.create_tensor_value(value)
            ops.append(_make_op("const", name, [(name, stored.type)], {}, {"val": stored}))
            inputs[param] = MIL.Argument(arguments=[{"name": name}])
        return [*ops, _make_op(kind, made[0], [made], inputs, {})]


def _make_op(
    kind: str, name: str, made: list[tuple[str, Any]], inputs: dict[str, Any], attributes: dict[str, Any]
) -> Op:
    outputs = [MIL.NamedValueType(name=each, type=declared) for each, declared in made]
    attributes = {"name": helper.create_scalar_value(name), **attributes}
    return Op.of(MIL.Operation(type=kind, inputs=inputs, outputs=outputs, attributes=attributes))


def _make_tensor_type(dtype: int, dimensions: Any) -> Any:
    return MIL.ValueType(tensorType=MIL.TensorType(dataType=dtype, rank=len(dimensions), dimensions=dimensions))


def _get_type_name(dtype: int) -> str:
    return str(MIL.DataType.Name(dtype)).lower() if dtype in MIL.DataType.values() else f"number {dtype}"


def describe_crossing(each: CrossingValue) -> str:
    """Describe one value that crosses."""
    shape = " x ".join("?" if size is None else str(size) for size in each.shape)
    size = "flexible" if each.nbytes is None else f"{each.nbytes:,} bytes"
    note = f" ('{each.value}': {each.conversion})" if each.conversion else ""
    return f"'{each.feature}'{note}: {each.dtype} {shape}, {size} per prediction"
