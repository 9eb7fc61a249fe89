"""Exposure of inner values as outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coremltools import proto

from ..package.names import make_free_name
from ..utils.errors import InputError
from ..utils.option_spelling import format_option_values
from .casts import ARRAY_DTYPES, MIL, get_dtype, make_cast, replace_dtype
from .contract import EditRecord
from .description import Feature
from .document import Document
from .names import make_unknown_name_error
from .program_parts import Function

__all__ = ["Expose", "can_have_fp16_interface"]

_OPTION = "--expose"
_MIN_VERSION_FP16, _MIN_VERSION_INT8 = 7, 10
"The specification versions (iOS16, iOS26) from which outputs may be arrays of fp16 and of int8."
_OPSETS_BEFORE_IOS16 = ("CoreML3", "CoreML4", "CoreML5")
_EXACT_CAST_TYPES = {MIL.FLOAT16: "fp32", MIL.BOOL: "int32", MIL.INT8: "int32", MIL.UINT8: "int32", MIL.INT16: "int32",
                     MIL.UINT16: "int32"}
"For types that outputs may not have: a type that holds all of their values."
_CAST_TYPES_FROM_IOS17 = {MIL.INT8, MIL.UINT8, MIL.INT16, MIL.UINT16}
"Types that `cast` accepts only from iOS17 on."


@dataclass(frozen=True)
class Expose:
    """Makes values additional outputs, after the existing ones, in each function that has them or in `function`."""

    values: Sequence[str]
    function: str | None = None

    def apply(self, document: Document) -> list[Document]:
        """Add the outputs in place. InputError for an unknown value, or one that cannot be an output."""
        functions = document.chosen(self.function)
        for value in dict.fromkeys(self.values):
            having = [function for function in functions if function.has(value)]
            if not having:
                raise _make_absent_error(value, functions)
            for function in having:
                _expose_value(document, function, value)
        return [document]


def can_have_fp16_interface(document: Document, function: Function) -> bool:
    """Return whether inputs and outputs of a function may be fp16: from iOS16 on."""
    return document.version >= _MIN_VERSION_FP16 and function.opset not in _OPSETS_BEFORE_IOS16


def _make_absent_error(value: str, functions: Sequence[Function]) -> InputError:
    names = set().union(*(function.names() for function in functions))
    if value in names:
        return InputError(
            f"{format_option_values('expose', value)}: '{value}' is made inside a nested block, of a condition or a "
            "loop; only values at the top of a function can be outputs"
        )
    return make_unknown_name_error(value, format_option_values("expose", value), names)


def _expose_value(document: Document, function: Function, value: str) -> None:
    if value in function.block.outputs:
        document.done.append(
            EditRecord(_OPTION, function.name, value, f"'{value}' is an output already", changed=False)
        )
        return
    declared, who = function.get_type(value), format_option_values("expose", value)
    _check_value(function, value, declared, who)
    name, cast = value, _choose_cast(document, function, declared, who)
    if cast:
        taken = function.names()
        name = make_free_name(f"{value}_{cast}", taken)
        function.block.ops += make_cast(value, declared, cast, name, taken)
        declared = replace_dtype(declared, cast)
    function.block.outputs.append(name)
    feature = Feature.of(_build_feature(name, declared))
    for section in document.description.of(function.name):
        section.put("output", [*section.features("output"), feature])
    note = f"'{value}' is an output" + (f", cast to {cast} and called '{name}': {_explain_cast(cast)}" if cast else "")
    document.done.append(EditRecord(_OPTION, function.name, name, note))


def _check_value(function: Function, value: str, declared: Any, who: str) -> None:
    """Raise InputError for an existing value that cannot be an output."""
    if any(value == each.name for each in function.inputs):
        raise InputError(f"{who}: '{value}' is an input of function '{function.name}' already: whoever runs it has it")
    maker = next(op for op in function.block.ops if value in op.outputs)
    if maker.type == "const" or maker.type.startswith("constexpr_"):
        raise InputError(f"{who}: '{value}' is a constant of function '{function.name}', the same in each run; it "
                         "is in the package to be read")
    if get_dtype(declared) is None:
        kind = str(declared.WhichOneof("type") or "nothing").removesuffix("Type")
        raise InputError(f"{who}: '{value}' is a {kind}; only tensors can be made outputs")


def _choose_cast(document: Document, function: Function, declared: Any, who: str) -> str:
    """Return the type a value has to be cast to before it may be an output, empty when it may be one as it is."""
    dtype = get_dtype(declared)
    if dtype in (MIL.FLOAT32, MIL.INT32) or (dtype == MIL.FLOAT16 and can_have_fp16_interface(document, function)):
        return ""
    if dtype == MIL.INT8 and document.version >= _MIN_VERSION_INT8:
        return ""
    late = dtype in _CAST_TYPES_FROM_IOS17 and function.opset in (*_OPSETS_BEFORE_IOS16, "CoreML6")
    if dtype not in _EXACT_CAST_TYPES or late:
        raise InputError(f"{who}: the value is {MIL.DataType.Name(dtype or 0).lower()}, which Core ML has no outputs "
                         f"of, and which cannot be cast in function '{function.name}' (for {function.opset})")
    return _EXACT_CAST_TYPES[dtype]


def _explain_cast(cast: str) -> str:
    return "fp16 outputs need iOS16" if cast == "fp32" else "there are no outputs of its type"


def _build_feature(name: str, declared: Any) -> Any:
    """Build the FeatureDescription of a tensor; as in coremltools, without a shape if a dimension is unknown."""
    feature = proto.Model_pb2.FeatureDescription(name=name)
    array = feature.type.multiArrayType
    array.dataType = ARRAY_DTYPES[declared.tensorType.dataType]
    dimensions = declared.tensorType.dimensions
    if all(each.WhichOneof("dimension") == "constant" for each in dimensions):
        array.shape.extend(each.constant.size for each in dimensions)
    return feature
