"""Cast ops: construction as coremltools writes them, and inspection of existing ones."""

from __future__ import annotations

from typing import Any

from coremltools import proto

from ..package.names import make_free_name
from .program_parts import Op

__all__ = ["ARRAY_DTYPES", "DTYPES", "get_cast_input", "get_dtype", "make_cast", "make_identity", "replace_dtype"]

MIL = proto.MIL_pb2
DTYPES = {"fp16": MIL.FLOAT16, "fp32": MIL.FLOAT32, "int32": MIL.INT32}
"Element types of the program, by the names that `cast` uses."
_ARRAY_FEATURE = proto.FeatureTypes_pb2.ArrayFeatureType
ARRAY_DTYPES = {
    MIL.FLOAT16: _ARRAY_FEATURE.FLOAT16,
    MIL.FLOAT32: _ARRAY_FEATURE.FLOAT32,
    MIL.INT32: _ARRAY_FEATURE.INT32,
    MIL.INT8: 0x20008,
    MIL.FLOAT64: _ARRAY_FEATURE.DOUBLE,
}
"Element types of model descriptions by those of the program; int8 by number, as only coremltools 9.0 names it."


def get_dtype(declared: Any) -> int | None:
    """Return the element type of a ValueType proto; None if it is not a tensor."""
    return int(declared.tensorType.dataType) if declared is not None and declared.HasField("tensorType") else None


def replace_dtype(declared: Any, dtype: str) -> Any:
    """Return a ValueType proto of the same shape with another element type."""
    made = MIL.ValueType()
    made.CopyFrom(declared)
    made.tensorType.dataType = DTYPES[dtype]
    return made


def make_cast(value: str, declared: Any, dtype: str, output: str, taken: set[str]) -> list[Op]:
    """Make the ops that cast `value` (of type `declared`) to `output`: the const with the dtype, and the cast."""
    said = make_free_name(f"{output}_dtype_0", taken)
    const = MIL.Operation(type="const")
    const.outputs.add(name=said, type=_make_string_value(said).type)
    const.attributes["val"].CopyFrom(_make_string_value(dtype))
    const.attributes["name"].CopyFrom(_make_string_value(said))
    return [Op.of(const), _make_unary_op("cast", value, replace_dtype(declared, dtype), output, dtype=said)]


def make_identity(value: str, declared: Any, output: str) -> Op:
    """Make the op that gives `value` another name."""
    return _make_unary_op("identity", value, declared, output)


def get_cast_input(op: Op) -> str:
    """Return the value that an op casts; empty if it is not a cast."""
    if op.type != "cast":
        return ""
    arguments = op.message.inputs["x"].arguments
    return str(arguments[0].name) if len(arguments) == 1 else ""


def _make_unary_op(kind: str, value: str, declared: Any, output: str, **further: str) -> Op:
    made = MIL.Operation(type=kind)
    for name, bound in {"x": value, **further}.items():
        made.inputs[name].arguments.add(name=bound)
    made.outputs.add(name=output, type=declared)
    made.attributes["name"].CopyFrom(_make_string_value(output))
    return Op.of(made)


def _make_string_value(words: str) -> Any:
    made = MIL.Value()
    made.type.tensorType.dataType = MIL.STRING
    made.immediateValue.tensor.strings.values.append(words)
    return made
