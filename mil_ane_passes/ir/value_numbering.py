"""Value numbering: equal computations, in one function or in several, get the same number."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Function, Operation, Var, types

from .constants import LazyValue, get_blob_ref
from .coremltools_internals import get_typed_value
from .query import get_type_info

__all__ = ["ValueNumbering"]

Array = np.ndarray[Any, Any]

_MAX_BYTES_IN_KEY = 1 << 10
"""Most bytes of a constant that are used as its key.

Larger constants are compared by location, then by digest, so that a key never needs much memory.
"""
_SAMPLES = 64
"Elements of a large constant that are compared first: most different constants differ in them, so few are read fully."
_MAX_DEPTH = 100
"Deepest nesting of blocks that is compared. Blocks below it get new numbers, because each level uses Python's stack."
_PIECE_BYTES = 4 << 20


class ValueNumbering:
    """Assigns a number to each value, in `numbers`; values with equal numbers are equal.

    Inputs of the same name have equal numbers, and so do equal constants. Results of two ops have equal numbers if the
    ops have the same type, opset and result type, their inputs have equal numbers, and their nested blocks are equal
    except for names. All functions numbered by one object share the numbers.
    """

    def __init__(self) -> None:
        self.numbers: dict[Var, int] = {}
        self._known: dict[Hashable, int] = {}
        self._constants = _ConstantKeys()

    def number_function(self, function: Function) -> None:
        """Number the inputs of a function and the results of its ops."""
        self.number_inputs(function)
        for op in function.operations:
            self.number_op(op)

    def number_inputs(self, function: Function) -> None:
        for name, var in function.inputs.items():
            self.numbers[var] = self._get_number(("input", name, _get_kind(var)))

    def number_op(self, op: Operation, depth: int = 0) -> bool:
        """Number the results of an op; return whether an earlier op computes the same values."""
        count = len(self._known)
        if op.op_type == "const":
            key: Hashable = self._constants.make_key(op.outputs[0])
        else:
            key = (type(op), tuple((name, self._number_input(bound)) for name, bound in sorted(op.inputs.items())),
                   tuple(self._number_block(block, depth + 1) for block in op.blocks))
        for place, var in enumerate(op.outputs):
            self.numbers[var] = self._get_number((key, place, _get_kind(var)))
        return len(self._known) == count

    def assign_new_numbers(self, op: Operation) -> None:
        """Give the results of an op numbers that no other value has."""
        for var in op.outputs:
            self.numbers[var] = self._get_number(("new", len(self._known)))

    def _get_number(self, key: Hashable) -> int:
        return self._known.setdefault(key, len(self._known))

    def _number_input(self, bound: Any) -> Hashable:
        """Return the numbers of the values that one input reads; for a value without a number, its text."""
        found = bound if isinstance(bound, (list, tuple)) else () if bound is None else (bound,)
        return tuple(self.numbers[var] if var in self.numbers else str(getattr(var, "val", var)) for var in found)

    def _number_block(self, block: Block, depth: int) -> Hashable:
        if depth > _MAX_DEPTH:
            return ("deep", id(block))
        for place, var in enumerate(block.inputs):
            self.numbers[var] = self._get_number(("block input", depth, place, _get_kind(var)))
        for op in block.operations:
            self.number_op(op, depth)
        return (len(block.inputs), tuple(self.numbers[var] for var in block.outputs))


class _ConstantKeys:
    """Keys of constants, equal for equal dtypes, shapes and bits.

    A large constant is first identified by its location: the same array in memory, or the same bytes of a file. Only a
    constant at a new location is read, and compared with the constants of its dtype and shape.
    """

    def __init__(self) -> None:
        self._by_place: dict[Hashable, Hashable] = {}
        self._by_kind: dict[Hashable, list[_LargeConstant]] = {}

    def make_key(self, var: Var) -> Hashable:
        held = get_typed_value(var)
        if not isinstance(held, LazyValue):
            value = np.asarray(var.val)
            if value.dtype == object or value.nbytes <= _MAX_BYTES_IN_KEY:
                content = repr(value.tolist()) if value.dtype == object else value.tobytes()
                return ("const", str(value.dtype), value.shape, content)
            held = value
        kind = (_get_kind(var), tuple(held.shape))
        places = [*_list_places(var, held)]
        key = next((self._by_place[place] for place in places if place in self._by_place), None)
        if key is None:
            found = _LargeConstant(held, ("large", kind, len(self._by_place)))
            others = self._by_kind.setdefault(kind, [])
            same = next((each for each in others if found.has_equal_bytes(each)), None)
            if same is None:
                others.append(found)
            key = (same or found).key
        self._by_place.update(dict.fromkeys(places, key))
        return key


def _list_places(var: Var, held: Any) -> Iterator[Hashable]:
    """Yield the keys that identify a large constant by its location: in the weight file, and in memory."""
    blob = get_blob_ref(var)
    if blob is not None:
        yield (blob.file, blob.opened, blob.offset, _get_kind(var), tuple(held.shape))
    if isinstance(held, np.ndarray) and held.flags.c_contiguous:
        yield (held.__array_interface__["data"][0], held.dtype.str, held.shape)


class _LargeConstant:
    """A constant that is compared by samples, then by a digest of all its bytes, which is computed once."""

    def __init__(self, held: Any, key: Hashable) -> None:
        self.key = key
        self._held = held
        self._digest = b""

    def has_equal_bytes(self, other: _LargeConstant) -> bool:
        return self._take_samples() == other._take_samples() and self._get_digest() == other._get_digest()

    def _take_samples(self) -> bytes:
        """Return some elements; b"" for a value that would have to be unpacked first."""
        if isinstance(self._held, LazyValue):
            return b""
        flat = self._held.reshape(-1)
        return bytes(flat[:: max(1, flat.size // _SAMPLES)].tobytes())

    def _get_digest(self) -> bytes:
        if not self._digest:
            lazy = isinstance(self._held, LazyValue)
            value = np.frombuffer(self._held.read_packed(), np.uint8) if lazy else self._held
            flat, found = np.ascontiguousarray(value).reshape(-1), hashlib.blake2b(digest_size=32)
            step = max(1, _PIECE_BYTES // flat.itemsize)
            for start in range(0, flat.size, step):
                found.update(flat[start : start + step].view(np.uint8).data)
            self._digest = found.digest()
        return self._digest


def _get_kind(var: Var) -> Hashable:
    """Return a key of the type without the shape, which is determined by the op that computes the value."""
    kind = var.sym_type
    return get_type_info(var).dtype if types.is_tensor(kind) or types.is_scalar(kind) else str(kind.__name__)
