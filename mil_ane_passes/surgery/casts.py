"""Casts: new ones as coremltools writes them, and what is said of those that are there."""

from __future__ import annotations

from typing import Any

from coremltools import proto

from ..package.names import fresh
from .parts import Op

__all__ = ["ARRAYS", "DTYPES", "cast_of", "dtype_of", "make_cast", "make_identity", "with_dtype"]

MIL = proto.MIL_pb2
DTYPES = {"fp16": MIL.FLOAT16, "fp32": MIL.FLOAT32, "int32": MIL.INT32}
"Types as `cast` is told them, in the program."
_FEATURES = proto.FeatureTypes_pb2.ArrayFeatureType
ARRAYS = {MIL.FLOAT16: _FEATURES.FLOAT16, MIL.FLOAT32: _FEATURES.FLOAT32, MIL.INT32: _FEATURES.INT32,
          MIL.INT8: 0x20008, MIL.FLOAT64: _FEATURES.DOUBLE}
"Types in the program and as a model describes arrays; int8 by its number, which has a name from coremltools 9.0 on."


def dtype_of(declared: Any) -> int | None:
    """The element type of a ValueType proto; None for what is no tensor."""
    return int(declared.tensorType.dataType) if declared is not None and declared.HasField("tensorType") else None


def with_dtype(declared: Any, dtype: str) -> Any:
    """A ValueType proto of the same shape with other elements."""
    made = MIL.ValueType()
    made.CopyFrom(declared)
    made.tensorType.dataType = DTYPES[dtype]
    return made


def make_cast(value: str, declared: Any, dtype: str, output: str, taken: set[str]) -> list[Op]:
    """The ops that make `output` of `value` (of type `declared`): the const that says the type, and the cast."""
    said = fresh(f"{output}_dtype_0", taken)
    const = MIL.Operation(type="const")
    const.outputs.add(name=said, type=_text(said).type)
    const.attributes["val"].CopyFrom(_text(dtype))
    const.attributes["name"].CopyFrom(_text(said))
    return [Op.of(const), _unary("cast", value, with_dtype(declared, dtype), output, dtype=said)]


def make_identity(value: str, declared: Any, output: str) -> Op:
    """The op that gives `value` another name."""
    return _unary("identity", value, declared, output)


def cast_of(op: Op) -> str:
    """The value that an op casts; empty when it is no cast."""
    if op.type != "cast":
        return ""
    arguments = op.message.inputs["x"].arguments
    return str(arguments[0].name) if len(arguments) == 1 else ""


def _unary(kind: str, value: str, declared: Any, output: str, **further: str) -> Op:
    made = MIL.Operation(type=kind)
    for name, bound in {"x": value, **further}.items():
        made.inputs[name].arguments.add(name=bound)
    made.outputs.add(name=output, type=declared)
    made.attributes["name"].CopyFrom(_text(output))
    return Op.of(made)


def _text(words: str) -> Any:
    made = MIL.Value()
    made.type.tensorType.dataType = MIL.STRING
    made.immediateValue.tensor.strings.values.append(words)
    return made
