"""Changes to a model file that know its format: fields taken away, doubled, swapped, set to what borders on too
much."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from coremltools import proto
from google.protobuf.descriptor import FieldDescriptor as Kind

INTEGERS = tuple(
    sign * (1 << power) + more for power in (0, 3, 6, 7, 8, 15, 16, 24, 31, 32, 33, 47, 62, 63, 64) for sign in (1, -1)
    for more in (-1, 0, 1)
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 6e4, 3e38, 1e300, math.inf, -math.inf, math.nan)
NAMES = (
    "", "x", "x_0", "_x", "self", "name", "name_", "before_op", "__init__", "__class__", "op_type", "blocks",
    "outputs", "inputs", "val", "a b", "a.b", "a/b", "\0", "é\U0001f600", "0", "class", "n" * 5000, "CoreML5",
    "CoreML9", "@model_path/weights/weight.bin", "@model_path/../x", "@model_path//x", "@model_path/weights",
    "@model_path/weights/\0", "/dev/zero",
)
OPS = (
    "const", "conv", "add", "cond", "while_loop", "reshape", "fill", "tile", "range_1d", "one_hot", "pad", "concat",
    "split", "stack", "gather", "expand_dims", "squeeze", "slice_by_index", "slice_by_size", "read_state",
    "write_state", "cast", "coreml_update_state", "constexpr_lut_to_dense", "constexpr_sparse_to_dense",
    "constexpr_affine_dequantize", "constexpr_blockwise_shift_scale", "constexpr_cast", "band_part", "resample",
    "crop_resize", "topk", "non_zero", "random_normal", "random_uniform", "lstm", "einsum", "matmul", "reduce_sum",
    "custom", "classify", "make_list", "list_gather", "fill_like", "reshape_like", "sliding_windows", "transpose",
    "depth_to_space", "non_maximum_suppression", "scaled_dot_product_attention", "quantize", "dequantize",
    "conv_transpose", "layer_norm", "shape", "identity",
)
_WIDTHS = {
    Kind.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1), Kind.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    Kind.CPPTYPE_UINT32: (0, (1 << 32) - 1), Kind.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


def is_map_field(field: Any) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def collect_fields(message: Any) -> list[tuple[Any, Any]]:
    """Every message in `message` with a field of it that is set, itself first."""
    found: list[tuple[Any, Any]] = []
    waiting = [message]
    while waiting:
        each = waiting.pop()
        for field, value in each.ListFields():
            found.append((each, field))
            if field.message_type is None:
                continue
            if is_map_field(field):
                if field.message_type.fields_by_name["value"].message_type is not None:
                    waiting.extend(value[key] for key in sorted(value))
            else:
                waiting.extend(value if field.is_repeated else [value])
    return found


class ProtoMutator:
    """Mutates model files; `models` are whole ones, whose pieces are put into others."""

    def __init__(self, models: Sequence[bytes]) -> None:
        self._models = [proto.Model_pb2.Model.FromString(data) for data in models]
        self._pieces: dict[str, list[Any]] = {}
        self._names: set[str] = set()
        for model in self._models:
            for message, field in collect_fields(model):
                self._pieces.setdefault(message.DESCRIPTOR.full_name, []).append(message)
                if field.cpp_type == Kind.CPPTYPE_STRING and field.type == Kind.TYPE_STRING and not field.is_repeated:
                    self._names.add(getattr(message, field.name))
        self._pool = sorted(self._names)

    def mutate(self, which: int, rng: random.Random) -> bytes:
        """The bytes of model `which` after one to four changes."""
        model = proto.Model_pb2.Model()
        model.CopyFrom(self._models[which])
        for _ in range(rng.choice((1, 1, 1, 2, 2, 4))):
            message, field = rng.choice(collect_fields(model))
            try:
                self._change(message, field, rng)
            except (ValueError, TypeError, UnicodeEncodeError):  # the proto library does not take it
                continue
        return bytes(model.SerializeToString())

    def _change(self, message: Any, field: Any, rng: random.Random) -> None:
        if rng.random() < 0.08:
            self._fill_other(message, rng)
        elif is_map_field(field):
            self._change_map(getattr(message, field.name), field, rng)
        elif field.is_repeated:
            self._change_list(message, field, rng)
        elif field.message_type is not None:
            self._change_message(message, field, rng)
        elif rng.random() < 0.1:
            message.ClearField(field.name)
        else:
            setattr(message, field.name, self._scalar(field, getattr(message, field.name), rng))

    def _fill_other(self, message: Any, rng: random.Random) -> None:
        """Sets a field that may not have been set."""
        field = rng.choice(message.DESCRIPTOR.fields)
        if field.is_repeated:
            if field.message_type is not None and not is_map_field(field):
                getattr(message, field.name).add()
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
        else:
            setattr(message, field.name, self._scalar(field, getattr(message, field.name), rng))

    def _piece(self, descriptor: Any, rng: random.Random) -> Any:
        return rng.choice(self._pieces.get(descriptor.full_name) or [None])

    def _change_message(self, message: Any, field: Any, rng: random.Random) -> None:
        piece = self._piece(field.message_type, rng)
        action = rng.randrange(4)
        if action == 0 or piece is None:
            message.ClearField(field.name)
        elif action == 1:
            getattr(message, field.name).Clear()
            getattr(message, field.name).SetInParent()
        elif action == 2:
            getattr(message, field.name).CopyFrom(piece)
        else:
            getattr(message, field.name).MergeFrom(piece)

    def _change_map(self, entries: Any, field: Any, rng: random.Random) -> None:
        keys = sorted(entries)
        key, new = rng.choice(keys), rng.choice((*keys, *self._pool, *NAMES))
        inner = field.message_type.fields_by_name["value"]
        if inner.message_type is None:
            entries[new] = self._scalar(inner, entries[key], rng)
            return
        action = rng.randrange(5)
        value = type(entries[key])()
        value.CopyFrom(entries[key])
        if action in (0, 1):
            del entries[key]
        if action in (1, 2):
            entries[new].CopyFrom(value)
        elif action == 3:
            entries[new].SetInParent()
        elif action == 4:
            entries[key].CopyFrom(self._piece(inner.message_type, rng) or value)

    def _change_list(self, message: Any, field: Any, rng: random.Random) -> None:
        held = getattr(message, field.name)
        old = list(held) if field.message_type is None else [_copy_message(each) for each in held]
        at, action = rng.randrange(len(old)), rng.randrange(7)
        if action == 0:
            del old[at]
        elif action == 1:
            old.insert(rng.randrange(len(old) + 1), old[at])
        elif action == 2:
            other = rng.randrange(len(old))
            old[at], old[other] = old[other], old[at]
        elif action == 3:
            old[at:at] = [old[at]] * rng.choice((2, 30, 1000))
        elif field.message_type is None:
            old[at] = self._scalar(field, old[at], rng)
        elif action == 4:
            old.insert(at, type(old[at])())
        else:
            piece = self._piece(field.message_type, rng)
            start = at if action == 5 else len(old)
            old[start:start + 1] = [] if piece is None else [_copy_message(piece)]
        message.ClearField(field.name)
        getattr(message, field.name).extend(old)

    def _scalar(self, field: Any, old: Any, rng: random.Random) -> Any:
        if field.cpp_type in _WIDTHS:
            low, high = _WIDTHS[field.cpp_type]
            near = old + rng.choice((-64, -1, 1, 64)) if rng.random() < 0.3 else rng.choice(INTEGERS)
            return min(max(near, low), high)
        if field.cpp_type == Kind.CPPTYPE_BOOL:
            return not old
        if field.cpp_type == Kind.CPPTYPE_ENUM:
            return rng.choice((*(value.number for value in field.enum_type.values), 99, -1))
        if field.cpp_type in (Kind.CPPTYPE_FLOAT, Kind.CPPTYPE_DOUBLE):
            return rng.choice(FLOATS)
        if field.type == Kind.TYPE_BYTES:
            return rng.choice((b"", old[:-1], old + b"\0", old * 3, bytes(len(old)), b"\xff" * len(old)))
        if field.name == "type" and rng.random() < 0.7:
            return rng.choice(OPS)
        return rng.choice((*self._pool, *NAMES))


def _copy_message(message: Any) -> Any:
    made = type(message)()
    made.CopyFrom(message)
    return made
