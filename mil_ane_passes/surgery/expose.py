"""Inner values as outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coremltools import proto

from ..core.errors import InputError
from ..core.spelling import asked
from ..package.names import fresh
from .casts import ARRAYS, MIL, dtype_of, make_cast, with_dtype
from .contract import Done
from .description import Feature
from .document import Document
from .names import unknown
from .parts import Function

__all__ = ["Expose", "holds_halves"]

_OPTION = "--expose"
_HALVES_FROM, _BYTES_FROM = 7, 10
"The specification versions (iOS16, iOS26) from which arrays of fp16 and of int8 may leave a model."
_OLD = ("CoreML3", "CoreML4", "CoreML5")
_AS = {MIL.FLOAT16: "fp32", MIL.BOOL: "int32", MIL.INT8: "int32", MIL.UINT8: "int32", MIL.INT16: "int32",
       MIL.UINT16: "int32"}
"What holds all values of a type that may not leave a model."
_CAST_LATE = {MIL.INT8, MIL.UINT8, MIL.INT16, MIL.UINT16}
"What `cast` takes from iOS17 on."


@dataclass(frozen=True)
class Expose:
    """Makes values outputs as well, behind those there are, in each function that has them or in `function`."""

    values: Sequence[str]
    function: str | None = None

    def apply(self, document: Document) -> list[Document]:
        """Add the outputs in place. InputError for a value that is not there, or that cannot leave a model."""
        functions = document.chosen(self.function)
        for value in dict.fromkeys(self.values):
            having = [function for function in functions if function.has(value)]
            if not having:
                raise _absent(value, functions)
            for function in having:
                _expose(document, function, value)
        return [document]


def holds_halves(document: Document, function: Function) -> bool:
    """Whether inputs and outputs of a function may be fp16: from iOS16 on."""
    return document.version >= _HALVES_FROM and function.opset not in _OLD


def _absent(value: str, functions: Sequence[Function]) -> InputError:
    names = set().union(*(function.names() for function in functions))
    if value in names:
        return InputError(f"{asked('expose', value)}: '{value}' is made inside a nested block, of a condition or a "
                          "loop; only values at the top of a function can be outputs")
    return unknown(value, asked("expose", value), names)


def _expose(document: Document, function: Function, value: str) -> None:
    if value in function.block.outputs:
        document.done.append(Done(_OPTION, function.name, value, f"'{value}' is an output already", changed=False))
        return
    declared, who = function.type_of(value), asked("expose", value)
    _check(function, value, declared, who)
    name, cast = value, _cast_to(document, function, declared, who)
    if cast:
        taken = function.names()
        name = fresh(f"{value}_{cast}", taken)
        function.block.ops += make_cast(value, declared, cast, name, taken)
        declared = with_dtype(declared, cast)
    function.block.outputs.append(name)
    feature = Feature.of(_described(name, declared))
    for section in document.description.of(function.name):
        section.put("output", [*section.features("output"), feature])
    note = f"'{value}' is an output" + (f", cast to {cast} and called '{name}': {_why(cast)}" if cast else "")
    document.done.append(Done(_OPTION, function.name, name, note))


def _check(function: Function, value: str, declared: Any, who: str) -> None:
    """Raises InputError for a value that is there and cannot be an output."""
    if any(value == each.name for each in function.inputs):
        raise InputError(f"{who}: '{value}' is an input of function '{function.name}' already: whoever runs it has it")
    maker = next(op for op in function.block.ops if value in op.outputs)
    if maker.type == "const" or maker.type.startswith("constexpr_"):
        raise InputError(f"{who}: '{value}' is a constant of function '{function.name}', the same in each run; it "
                         "is in the package to be read")
    if dtype_of(declared) is None:
        kind = str(declared.WhichOneof("type") or "nothing").removesuffix("Type")
        raise InputError(f"{who}: '{value}' is a {kind}; only tensors can be made outputs")


def _cast_to(document: Document, function: Function, declared: Any, who: str) -> str:
    """The type a value has to be cast to before it may leave the model, empty when it may as it is."""
    dtype = dtype_of(declared)
    if dtype in (MIL.FLOAT32, MIL.INT32) or (dtype == MIL.FLOAT16 and holds_halves(document, function)):
        return ""
    if dtype == MIL.INT8 and document.version >= _BYTES_FROM:
        return ""
    late = dtype in _CAST_LATE and function.opset in (*_OLD, "CoreML6")
    if dtype not in _AS or late:
        raise InputError(f"{who}: the value is {MIL.DataType.Name(dtype or 0).lower()}, which Core ML has no outputs "
                         f"of, and which cannot be cast in function '{function.name}' (for {function.opset})")
    return _AS[dtype]


def _why(cast: str) -> str:
    return "fp16 outputs need iOS16" if cast == "fp32" else "there are no outputs of its type"


def _described(name: str, declared: Any) -> Any:
    """The FeatureDescription of a tensor; as coremltools does, without a shape where a dimension is unknown."""
    feature = proto.Model_pb2.FeatureDescription(name=name)
    array = feature.type.multiArrayType
    array.dataType = ARRAYS[declared.tensorType.dataType]
    dimensions = declared.tensorType.dimensions
    if all(each.WhichOneof("dimension") == "constant" for each in dimensions):
        array.shape.extend(each.constant.size for each in dimensions)
    return feature
