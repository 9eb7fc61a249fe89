"""The interface of functions as the model description declares it: read by transforms, written when it changed.

The loader sets `origin` (a `FunctionOrigin`) on each function; copies of a function keep it. Changes by a transform are
found by comparing the function with its origin: inputs, outputs and states that were added, removed, or got another
type. Two things that pymil cannot express are recorded on the function by this module: the name that a feature had in
the file, and feature descriptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from coremltools import proto
from coremltools.converters.mil.mil import Function, Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from .description import Feature, Section

__all__ = [
    "describe_feature",
    "find_changed_widths",
    "get_feature",
    "get_file_name",
    "get_predicted_names",
    "get_specification_version",
    "is_same_except_width",
    "iterate_renamed",
    "rename_features",
    "update_section",
]

_ARRAY = proto.FeatureTypes_pb2.ArrayFeatureType
_DATA_TYPES = {
    types.fp16: _ARRAY.FLOAT16,
    types.fp32: _ARRAY.FLOAT32,
    types.int32: _ARRAY.INT32,
    types.int8: 0x20008,
    types.fp64: _ARRAY.DOUBLE,
}
"Element types of model descriptions by pymil type. int8 is a number because coremltools 8.3 has no name for it."
_FLOATS = (types.fp16, types.fp32)


def get_file_name(function: Function, name: str) -> str:
    """Return the name that the input, output or state `name` has in the file: a transform may have renamed it."""
    return str(getattr(function, "renamed", {}).get(name, name))


def get_feature(function: Function, name: str) -> Any:
    """Return the FeatureDescription of an input, output or state; None if a transform added it without one."""
    described = getattr(function, "described", {})
    if name in described:
        return described[name]
    origin = getattr(function, "origin", None)
    return None if origin is None else origin.features.get(get_file_name(function, name))


def describe_feature(function: Function, feature: Any) -> None:
    """Set the FeatureDescription of an input, output or state that cannot be derived from the type (such as an image).

    `feature` has its name.
    """
    function.described = {**getattr(function, "described", {}), feature.name: feature}


def get_predicted_names(function: Function) -> tuple[str, ...]:
    """Return the names of a classifier's outputs: the label and the probabilities."""
    origin = getattr(function, "origin", None)
    predicted = () if origin is None else origin.predicted
    current = {old: new for new, old in getattr(function, "renamed", {}).items()}
    return tuple(current.get(name, name) for name in predicted)


def get_specification_version(function: Function) -> int:
    """Return the specification version of the model, or that of the function's opset if it was not loaded."""
    origin = getattr(function, "origin", None)
    return int(function.opset_version if origin is None else origin.member.spec.specificationVersion)


def rename_features(function: Function, names: Mapping[str, str]) -> None:
    """Record new names of inputs, outputs and states (old to new); their descriptions are kept."""
    ends = {*function.inputs, *(var.name for var in function.outputs)}
    before = {old: new for old, new in names.items() if new in ends}
    known = dict(getattr(function, "renamed", {}))
    moved = {new: known.get(old, old) for old, new in before.items()}
    function.renamed = {**{name: old for name, old in known.items() if name not in before}, **moved}
    described = {}
    for name, feature in getattr(function, "described", {}).items():
        described[names.get(name, name)] = Feature.of(feature).with_name(names.get(name, name)).message
    function.described = described
    function.images = frozenset(names.get(name, name) for name in getattr(function, "images", ()))


def is_same_except_width(now: Any, then: Any) -> bool:
    """Return whether two types are tensors of the same shape, each of dtype fp16 or fp32."""
    if not (types.is_tensor(now) and types.is_tensor(then)):
        return False
    floats = {kind.get_primitive() for kind in (now, then)} <= set(_FLOATS)
    return floats and len(now.get_shape()) == len(then.get_shape())


def find_changed_widths(function: Function) -> bool:
    """Return whether an input or output now has another float width (fp16 or fp32) than the file declares."""
    ends = [(function.inputs[name], then) for name, then in function.origin.inputs if name in function.inputs]
    ends += [(var, then) for var, (name, then) in zip(function.outputs, function.origin.outputs) if var.name == name]
    return any(is_same_except_width(var.sym_type, then) and var.dtype != then.get_primitive() for var, then in ends)


def update_section(section: Section, function: Function, shapes: bool) -> None:
    """Write the changes of the function's inputs, outputs and states into `section`; the rest keeps its bytes.

    With `shapes`, the fixed sizes of changed types are written, too; without it, only element types are written.
    """
    described = getattr(function, "described", {})
    for kind, (then, now) in _compare_interface(function).items():
        current = {get_file_name(function, name): name for name in now}
        features = []
        for feature in section.get_features(kind):
            if feature.name in then and feature.name not in current:
                continue
            name = current.get(feature.name, feature.name)
            declared = then.get(feature.name)
            if name in described:
                feature = Feature.of(described[name])
            if declared is not None and now[name].sym_type is not declared:
                feature = _update_type(feature, now[name], declared, shapes and name not in described)
            features.append(feature.with_name(name))
        features += [Feature.of(described.get(name) or _build_feature(now[name], kind))
                     for old, name in current.items() if old not in then]
        section.set_features(kind, features)
    _update_predicted(section, function)


def _compare_interface(function: Function) -> dict[str, tuple[dict[str, Any], dict[str, Var]]]:
    """Return, by kind of feature, the types that the file declares and the current vars, both by name."""
    inputs = dict(function.origin.inputs)
    split = {
        "input": ({name: kind for name, kind in inputs.items() if not types.is_state(kind)},
                  {name: var for name, var in function.inputs.items() if not types.is_state(var.sym_type)}),
        "state": ({name: kind for name, kind in inputs.items() if types.is_state(kind)},
                  {name: var for name, var in function.inputs.items() if types.is_state(var.sym_type)}),
    }
    return {**split, "output": (dict(function.origin.outputs), {var.name: var for var in function.outputs})}


def _update_predicted(section: Section, function: Function) -> None:
    outputs = {get_file_name(function, var.name): var.name for var in function.outputs}
    section.rename_predicted({name: outputs.get(name) for name, _ in function.origin.outputs})


def _update_type(feature: Feature, var: Var, then: Any, shapes: bool) -> Feature:
    """Return the description with the current type of `var`; images and dictionaries have no element type there."""
    made = type(feature.message)()
    made.CopyFrom(feature.message)
    sizes = get_fixed_sizes(var.sym_type) if shapes else None
    if sizes == get_fixed_sizes(then):
        sizes = None
    kind = made.type.WhichOneof("Type")
    if kind == "imageType" and sizes:
        made.type.imageType.height, made.type.imageType.width = sizes[-2:]
        made.type.imageType.ClearField("enumeratedSizes")
        made.type.imageType.ClearField("imageSizeRange")
    elif kind in ("multiArrayType", "stateType"):
        array = made.type.multiArrayType if kind == "multiArrayType" else made.type.stateType.arrayType
        now, before = (_get_tensor(each) for each in (var.sym_type, then))
        if now is not None and before is not None and now[0] != before[0]:
            array.dataType = _DATA_TYPES[now[0]]
        if sizes:
            array.shape[:] = sizes
            array.ClearField("enumeratedShapes")
            array.ClearField("shapeRange")
    return feature if made == feature.message else Feature.of(made)


def _build_feature(var: Var, kind: str) -> Any:
    """Build the description of a tensor or a state; as in coremltools, without a shape if a size is not fixed."""
    feature = proto.Model_pb2.FeatureDescription(name=var.name)
    array = feature.type.stateType.arrayType if kind == "state" else feature.type.multiArrayType
    tensor = _get_tensor(var.sym_type)
    if tensor is not None:
        array.dataType = _DATA_TYPES[tensor[0]]
        array.shape.extend(get_fixed_sizes(var.sym_type) or ())
    return feature


def get_fixed_sizes(sym_type: Any) -> tuple[int, ...] | None:
    """Return the sizes of a tensor, scalar or state; None if one is not fixed, and for other types."""
    tensor = _get_tensor(sym_type)
    if tensor is None or any(map(is_symbolic, tensor[1])):
        return None
    return tuple(map(int, tensor[1]))


def _get_tensor(sym_type: Any) -> tuple[Any, Iterable[Any]] | None:
    inner = sym_type.wrapped_type() if types.is_state(sym_type) else sym_type
    if types.is_tensor(inner):
        return inner.get_primitive(), inner.get_shape()
    return (inner, ()) if types.is_scalar(inner) else None


def iterate_renamed(function: Function) -> Iterator[tuple[str, str]]:
    """Yield the names in the file and the new names of the inputs, outputs and states that were renamed."""
    ends = {*function.inputs, *(var.name for var in function.outputs)}
    yield from ((old, new) for new, old in getattr(function, "renamed", {}).items() if new != old and new in ends)
