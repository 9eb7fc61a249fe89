"""Inputs and outputs whose float width changed: their declarations in the program and in the model description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coremltools import proto
from coremltools.converters.mil.mil import Function, Var, types

from . import wire

__all__ = ["Widths", "find_changed_widths", "is_same_except_width", "update_description"]

Widths = dict[str, Any]
"New MIL dtypes of inputs and outputs of one function, by name, where they held a float of another width."
Signature = tuple[tuple[str, Any], ...]

_FEATURE, _DESCRIPTION = proto.Model_pb2.FeatureDescription, proto.Model_pb2.ModelDescription
_MODEL_FEATURE_FIELDS = {_DESCRIPTION.DESCRIPTOR.fields_by_name[name].number for name in ("input", "output")}
_FUNCTION_FEATURE_FIELDS = {proto.Model_pb2.FunctionDescription.DESCRIPTOR.fields_by_name[name].number
                            for name in ("input", "output")}
_DESCRIPTION_FIELD, _FUNCTIONS_FIELD, _NAME_FIELD = 2, 20, 1
_ARRAY_TYPE = proto.FeatureTypes_pb2.ArrayFeatureType
_DATA_TYPES = {types.fp16: _ARRAY_TYPE.FLOAT16, types.fp32: _ARRAY_TYPE.FLOAT32}


def is_same_except_width(now: Any, then: Any) -> bool:
    """Return whether two types are tensors of one shape, each of fp16 or fp32."""
    if not (types.is_tensor(now) and types.is_tensor(then)):
        return False
    floats = {kind.get_primitive() for kind in (now, then)} <= set(_DATA_TYPES)
    return floats and len(now.get_shape()) == len(then.get_shape())


def find_changed_widths(function: Function, inputs: Signature, outputs: Signature) -> Widths:
    """Find the inputs and outputs declared in the file that now hold floats of another width."""
    ends: list[tuple[Var, Any]] = [(function.inputs[name], then) for name, then in inputs if name in function.inputs]
    ends += [(var, then) for var, (name, then) in zip(function.outputs, outputs) if var.name == name]
    return {var.name: var.dtype for var, then in ends
            if is_same_except_width(var.sym_type, then) and var.dtype != then.get_primitive()}


def update_description(raw: bytes, changed: Mapping[str, Widths]) -> bytes:
    """Return model file `raw` with the dtypes in `changed` written into the functions' feature descriptions.

    Everything else stays as it is, also images and classifier outputs, whose descriptions carry no array dtype.
    """
    if not any(changed.values()):
        return raw
    alone = next(iter(changed.values())) if len(changed) == 1 else {}

    def of_model(f: wire.Field, payload: bytes) -> bytes | None:
        if f.number == _FUNCTIONS_FIELD:
            of_one = changed.get(wire.get_entry_key(payload), {})
            return wire.edit_payloads(
                payload,
                lambda g, inner: _update_feature(inner, of_one) if g.number in _FUNCTION_FEATURE_FIELDS else None,
            )
        return _update_feature(payload, alone) if f.number in _MODEL_FEATURE_FIELDS else None

    return wire.edit_payloads(
        raw, lambda f, payload: wire.edit_payloads(payload, of_model) if f.number == _DESCRIPTION_FIELD else None
    )


def _update_feature(data: bytes, changed: Widths) -> bytes | None:
    """Return a feature's description with its new dtype; None if nothing changes."""
    names = wire.get_payloads(data, _NAME_FIELD)
    name = names[-1].decode() if names else ""
    feature = _FEATURE.FromString(data)
    if name not in changed or not feature.type.HasField("multiArrayType"):
        return None
    feature.type.multiArrayType.dataType = _DATA_TYPES[changed[name]]
    return bytes(feature.SerializeToString(deterministic=True))
