"""Functions, blocks and ops of a model file, each with its own bytes: unchanged ones are written as they were read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from coremltools import proto

from ..package import wire
from ..utils.errors import InputError
from .piece import Named, Piece

__all__ = ["Block", "Function", "Op", "ValueDeclaration"]

MIL = proto.MIL_pb2
FUNCTION_INPUTS, OPSET, SPECIALIZATIONS = 1, 2, 3
BLOCK_INPUTS, BLOCK_OUTPUTS, OPERATIONS = 1, 2, 3
OP_INPUTS, OP_OUTPUTS, OP_BLOCKS = 2, 3, 4
ARGUMENTS, BINDING_NAME = 1, 1


class ValueDeclaration(Named):
    """The declaration of an input: a name and a type."""

    __slots__ = ()
    KIND = MIL.NamedValueType

    @classmethod
    def of_type(cls, name: str, declared_type: Any) -> ValueDeclaration:
        """Make a declaration of `name` with the type `declared_type` (a ValueType proto)."""
        return cls.of(MIL.NamedValueType(name=name, type=declared_type))


class Op(Piece):
    """One op of a block."""

    __slots__ = ()
    KIND = MIL.Operation

    @property
    def type(self) -> str:
        return str(self.message.type)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of its outputs."""
        return tuple(output.name for output in self.message.outputs)

    @property
    def arguments(self) -> Iterator[str]:
        """The names that it reads itself, without those its blocks read, in the order of its inputs' names."""
        inputs = self.message.inputs
        for key in sorted(inputs):
            for binding in inputs[key].arguments:
                if binding.WhichOneof("binding") == "name":
                    yield binding.name

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Its nested blocks as copies: pass changed ones to `with_blocks`."""
        if not self.message.blocks:
            return ()
        return tuple(map(Block, wire.get_payloads(self.data, OP_BLOCKS), self.message.blocks))

    def with_blocks(self, blocks: Sequence[Block]) -> Op:
        """Return the op with these nested blocks; the same object when they are its own."""
        data = wire.replace_fields(self.data, OP_BLOCKS, [block.emit() for block in blocks])
        return self if data is self.data else Op(data)

    def with_outputs(self, names: Mapping[str, str]) -> Op:
        """Return the op with its outputs renamed by `names` (old to new), the rest byte for byte."""
        if names.keys().isdisjoint(self.outputs):
            return self
        outputs = [ValueDeclaration(data) for data in wire.get_payloads(self.data, OP_OUTPUTS)]
        data = wire.replace_fields(self.data, OP_OUTPUTS, [each.named(names.get(each.name, each.name)).data
                                                           for each in outputs])
        return self if data is self.data else Op(data)

    def with_arguments(self, names: Mapping[str, str]) -> Op:
        """Return the op with the names that it reads replaced by `names` (old to new).

        Its blocks and the rest stay byte for byte.
        """
        if names.keys().isdisjoint(self.arguments):
            return self

        def in_binding(f: wire.Field, payload: bytes) -> bytes | None:
            new = names.get(payload.decode()) if f.number == BINDING_NAME else None
            return None if new is None else new.encode()

        def in_argument(f: wire.Field, payload: bytes) -> bytes | None:
            return wire.edit_payloads(payload, in_binding) if f.number == ARGUMENTS else None

        def in_op(f: wire.Field, payload: bytes) -> bytes | None:
            if f.number != OP_INPUTS:
                return None
            argument = wire.get_entry_value(payload)
            return wire.replace_fields(payload, wire.VALUE, [wire.edit_payloads(argument, in_argument)])

        return Op(wire.edit_payloads(self.data, in_op))


class Block:
    """A block of ops. `inputs`, `outputs` (names) and `ops` are lists to edit; `emit` returns the bytes."""

    def __init__(self, data: bytes, message: Any = None) -> None:
        self._data = data
        # The block is parsed at once: parsing op by op takes several times as long.
        message = MIL.Block.FromString(data) if message is None else message
        found: dict[int, list[bytes]] = {BLOCK_INPUTS: [], BLOCK_OUTPUTS: [], OPERATIONS: []}
        for f in wire.iterate_fields(data):
            if f.number in found and f.wire_type == wire.BYTES:
                found[f.number].append(data[f.body : f.end])
        self.inputs = [ValueDeclaration(each) for each in found[BLOCK_INPUTS]]
        self.outputs = [each.decode() for each in found[BLOCK_OUTPUTS]]
        self.ops = list(map(Op, found[OPERATIONS], message.operations))
        self._original = list(self.inputs), list(self.outputs), list(self.ops)

    def emit(self) -> bytes:
        """Return the block's bytes; the original ones when nothing was changed."""
        data, (inputs, outputs, ops) = self._data, self._original
        if self.inputs != inputs:
            data = wire.replace_fields(data, BLOCK_INPUTS, [each.data for each in self.inputs])
        if self.outputs != outputs:
            data = wire.replace_fields(data, BLOCK_OUTPUTS, [name.encode() for name in self.outputs])
        if self.ops != ops:
            data = wire.replace_fields(data, OPERATIONS, [op.data for op in self.ops])
        return data

    def walk(self) -> Iterator[Op]:
        """Yield all ops of this block and of its nested blocks."""
        for op in self.ops:
            yield op
            for block in op.blocks:
                yield from block.walk()


class Function:
    """A function. `inputs` (including states) and `block` may be edited; `source` is its name in the file."""

    def __init__(self, name: str, data: bytes, where: str, source: str | None = None) -> None:
        self.name, self.source = name, source if source is not None else name
        self._data, self._where = data, where
        self.opset = b"".join(wire.get_payloads(data, OPSET)[-1:]).decode()
        entries = wire.get_payloads(data, SPECIALIZATIONS)
        if [wire.get_entry_key(entry) for entry in entries] != [self.opset]:
            found = ", ".join(sorted(map(wire.get_entry_key, entries))) or "none"
            raise InputError(
                f"{where}: function {name!r} is for opset {self.opset!r} and has blocks for {found}; expected one "
                "block, for its opset: others would not be edited with it"
            )
        self.inputs = [ValueDeclaration(each) for each in wire.get_payloads(data, FUNCTION_INPUTS)]
        self.block = Block(wire.get_entry_value(entries[0]))
        self._original = list(self.inputs)

    def emit(self) -> bytes:
        """Return the function's bytes; the original ones when nothing was changed."""
        data = self._data
        if self.inputs != self._original:
            data = wire.replace_fields(data, FUNCTION_INPUTS, [each.data for each in self.inputs])
        entry = wire.get_payloads(data, SPECIALIZATIONS)[0]
        return wire.replace_fields(data, SPECIALIZATIONS, [wire.replace_fields(entry, wire.VALUE, [self.block.emit()])])

    def copy(self, name: str) -> Function:
        """Return a copy of the function in its current form, to be put in a document under another name."""
        return Function(name, self.emit(), self._where, self.source)

    def get_type(self, value: str) -> Any:
        """Return the declared type (a ValueType proto) of an input or of an op's output at the top of the function.

        None when there is no such value; nested blocks are not searched.
        """
        for declared in self.inputs:
            if declared.name == value:
                return declared.message.type
        mark = value.encode()
        for op in self.block.ops:
            if mark in op.data:
                for output in op.message.outputs:
                    if output.name == value:
                        return output.type
        return None

    def has(self, value: str) -> bool:
        """Return whether an input or an op's output at the top of the function is called `value`."""
        return self.get_type(value) is not None

    def names(self) -> set[str]:
        """Return the names of all values, including those inside nested blocks."""
        found = {declared.name for declared in self.inputs}
        _collect_names(self.block, found)
        return found


def _collect_names(block: Block, found: set[str]) -> None:
    found.update(declared.name for declared in block.inputs)
    for op in block.ops:
        message = op.message
        for output in message.outputs:
            found.add(output.name)
        if message.blocks:
            for inner in op.blocks:
                _collect_names(inner, found)
