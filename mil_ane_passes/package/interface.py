"""Inputs and outputs whose numbers got another width: what the file says of them, in the program and beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coremltools import proto
from coremltools.converters.mil.mil import Function, Var, types

from . import wire

__all__ = ["Widths", "described", "same_but_for_width", "widths"]

Widths = dict[str, Any]
"What inputs and outputs of one function hold now (a MIL type), by name, where they held a float of another width."
Signature = tuple[tuple[str, Any], ...]

_FEATURE, _DESCRIPTION = proto.Model_pb2.FeatureDescription, proto.Model_pb2.ModelDescription
_OF_MODEL = {_DESCRIPTION.DESCRIPTOR.fields_by_name[name].number for name in ("input", "output")}
_OF_FUNCTION = {proto.Model_pb2.FunctionDescription.DESCRIPTOR.fields_by_name[name].number
                for name in ("input", "output")}
_DESCRIPTION_AT, _FUNCTIONS, _NAME = 2, 20, 1
_ARRAYS = proto.FeatureTypes_pb2.ArrayFeatureType
_DATA_TYPES = {types.fp16: _ARRAYS.FLOAT16, types.fp32: _ARRAYS.FLOAT32}


def same_but_for_width(now: Any, then: Any) -> bool:
    """Whether two types are tensors of one shape, each of fp16 or fp32."""
    if not (types.is_tensor(now) and types.is_tensor(then)):
        return False
    floats = {kind.get_primitive() for kind in (now, then)} <= set(_DATA_TYPES)
    return floats and len(now.get_shape()) == len(then.get_shape())


def widths(function: Function, inputs: Signature, outputs: Signature) -> Widths:
    """Which of the inputs and outputs that the file declares hold floats of another width now."""
    ends: list[tuple[Var, Any]] = [(function.inputs[name], then) for name, then in inputs if name in function.inputs]
    ends += [(var, then) for var, (name, then) in zip(function.outputs, outputs) if var.name == name]
    return {var.name: var.dtype for var, then in ends
            if same_but_for_width(var.sym_type, then) and var.dtype != then.get_primitive()}


def described(raw: bytes, changed: Mapping[str, Widths]) -> bytes:
    """Model file `raw` with the descriptions of the functions' inputs and outputs as `changed` says; the rest as it is.

    Images and what a classifier gives are described by what they are and stay.
    """
    if not any(changed.values()):
        return raw
    alone = next(iter(changed.values())) if len(changed) == 1 else {}

    def of_model(f: wire.Field, payload: bytes) -> bytes | None:
        if f.number == _FUNCTIONS:
            of_one = changed.get(wire.entry_key(payload), {})
            return wire.edit(payload, lambda g, inner: _feature(inner, of_one) if g.number in _OF_FUNCTION else None)
        return _feature(payload, alone) if f.number in _OF_MODEL else None

    return wire.edit(raw, lambda f, payload: wire.edit(payload, of_model) if f.number == _DESCRIPTION_AT else None)


def _feature(data: bytes, changed: Widths) -> bytes | None:
    """A feature's description with the dtype it has now; None where nothing changes."""
    names = wire.payloads(data, _NAME)
    name = names[-1].decode() if names else ""
    feature = _FEATURE.FromString(data)
    if name not in changed or not feature.type.HasField("multiArrayType"):
        return None
    feature.type.multiArrayType.dataType = _DATA_TYPES[changed[name]]
    return bytes(feature.SerializeToString(deterministic=True))
