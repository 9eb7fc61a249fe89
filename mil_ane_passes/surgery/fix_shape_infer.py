"""The shapes of all values of a function, inferred anew by the host from its inputs' shapes.

What a loop carries has its type declared in the file; where what goes in has a known size, and the body gives back the
same size for it, that size is what the loop carries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from coremltools import proto
from coremltools.converters.mil.mil import Block as HostBlock
from coremltools.converters.mil.mil import Function as HostFunction
from coremltools.converters.mil.mil import Operation, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..core.collector import collector_off
from ..core.errors import InputError
from ..package import wire
from ..package.limits import Budget
from ..package.members import ML_PROGRAM, Member
from ..package.origin import Origin, origin_of
from ..package.read import FUNCTIONS, ProgramReader
from .document import Document
from .fix_shape_inputs import fixed_type
from .parts import Block, Declared, Function

__all__ = ["Sizes", "failing", "in_file", "infer", "sizes_of"]

Path = tuple[int, ...]
"Where a loop is: the place of an op in its block, of a block in that op, and so on."
Sizes = tuple[int | None, ...]
_ROUNDS = 8
_BUDGET = 1 << 22, 1 << 25
"Elements of one op's outputs, and of all, that are evaluated: masks of 2048 x 2048, and what they are made of."


@dataclass(frozen=True)
class _Guess:
    """That the loop at `path` carries a value (its `place`) whose dimension `axis` is always `size`."""

    path: Path
    place: int
    axis: int
    size: int


def infer(document: Document, function: Function) -> HostFunction:
    """`function` as it is now as a pymil program's, each op with its origin; sizes are known where the host can tell.

    The file is right where the host's answer contradicts it.
    """
    guesses: set[_Guess] = set()
    wrong: set[_Guess] = set()
    for _ in range(_ROUNDS):
        found = _read(document, function, guesses)
        failed = {guess for guess in guesses if not _holds(found, guess)}
        more = _guesses(found) - guesses - wrong - failed
        if not failed and not more:
            return found
        wrong |= failed
        guesses = (guesses - failed) | more
    return _read(document, function, set())


def _read(document: Document, function: Function, guesses: set[_Guess]) -> HostFunction:
    data = function.emit()
    if guesses:
        twin = function.copy(function.name)
        _put(twin.block, (), guesses)
        data = twin.emit()
    raw = document.emit()
    program = wire.replace(wire.payloads(raw, ML_PROGRAM)[0], FUNCTIONS, [wire.entry(function.name, data)])
    raw = wire.replace(raw, ML_PROGRAM, [program])
    spec = proto.Model_pb2.Model.FromString(raw)
    try:
        with collector_off():
            reader = ProgramReader(document.files, document.where, Budget(*_BUDGET))
            _, origins = reader.read([Member((), "", raw, spec)])
    except (ValueError, UnicodeDecodeError) as error:
        if isinstance(error, InputError):
            raise
        model = document.layout.model
        raise InputError(f"{document.where}: {model} is damaged ({error}); take a fresh copy") from error
    return origins[function.name].function


def _put(block: Block, at: Path, guesses: set[_Guess]) -> None:
    """Declares what the loops of `block` carry as `guesses` say."""
    for place in sorted({guess.path[len(at)] for guess in guesses if guess.path[: len(at)] == at}):
        path = (*at, place)
        blocks = block.ops[place].blocks
        for index, inner in enumerate(blocks):
            for guess in guesses:
                if guess.path == path:
                    inner.inputs[guess.place] = _with_size(inner.inputs[guess.place], guess)
            deeper = {guess for guess in guesses if guess.path[: len(path) + 1] == (*path, index)}
            _put(inner, (*path, index), deeper)
        block.ops[place] = block.ops[place].with_blocks(blocks)


def _with_size(declared: Declared, guess: _Guess) -> Declared:
    rank = len(declared.message.type.tensorType.dimensions)
    sizes = [guess.size if axis == guess.axis else None for axis in range(rank)]
    return Declared.of_type(declared.name, fixed_type(declared.message.type, sizes))


def in_file(block: HostBlock) -> list[tuple[int, Operation, Origin]]:
    """The ops of `block` that the file has, each with the place of its first part among the file's ops."""
    found, place = [], 0
    for op in block.operations:
        origin = origin_of(op)
        if origin is not None:
            found.append((place, op, origin))
            place += len(origin.parts)
    return found


def _loops(block: HostBlock, at: Path = ()) -> Iterator[tuple[Path, Operation]]:
    for place, op, _ in in_file(block):
        if op.op_type == "while_loop" and hasattr(op, "loop_vars"):
            yield (*at, place), op
        for index, inner in enumerate(op.blocks):
            yield from _loops(inner, (*at, place, index))


def _guesses(function: HostFunction) -> set[_Guess]:
    """What loops would carry if nothing changed in them that goes in with a known size."""
    found = set()
    for path, op in _loops(function):
        for place, (given, carried) in enumerate(zip(op.loop_vars, op.blocks[1].inputs)):
            now, then = sizes_of(carried.sym_type), sizes_of(given.sym_type)
            if now is not None and then is not None and len(now) == len(then):
                found |= {_Guess(path, place, axis, size)
                          for axis, size in enumerate(then) if size is not None and now[axis] is None}
    return found


def _holds(function: HostFunction, guess: _Guess) -> bool:
    op = next((op for path, op in _loops(function) if path == guess.path), None)
    if op is None:
        return False
    ends = (op.loop_vars[guess.place], op.blocks[1].outputs[guess.place])
    sizes = [sizes_of(var.sym_type) for var in ends]
    return all(each is not None and guess.axis < len(each) and each[guess.axis] == guess.size for each in sizes)


def sizes_of(sym_type: Any) -> Sizes | None:
    """The sizes of a pymil type, None for those not known; None for what is no tensor or of unknown rank."""
    if types.is_state(sym_type):
        return sizes_of(sym_type.wrapped_type())
    if not types.is_tensor(sym_type):
        return () if types.is_scalar(sym_type) else None
    shape = sym_type.get_shape()
    if any(is_symbolic(size) and str(size).startswith("*") for size in shape):
        return None
    return tuple(None if is_symbolic(size) else int(size) for size in shape)


def failing(block: HostBlock) -> Iterator[tuple[Operation, str]]:
    """The ops that the host's class for them does not take: what it says of their inputs, if it is those."""
    for _, op, _ in in_file(block):
        if getattr(op, "rejected", None) is not None:
            yield op, op.rejected
        for inner in op.blocks:
            yield from failing(inner)
