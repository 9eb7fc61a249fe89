"""Shape inference for all values of a function, by coremltools from its inputs' shapes.

The file declares the types of loop variables; if the initial value has a known size, and the body returns the same size
for it, that is the size of the loop variable.
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

from ..package import wire
from ..package.limits import EvaluationBudget
from ..package.members import ML_PROGRAM_FIELD, Member
from ..package.origin import Origin, get_origin
from ..package.program_reader import FUNCTIONS, ProgramReader
from ..utils.errors import InputError
from ..utils.garbage_collection import pause_garbage_collection
from .document import Document
from .fix_shape_inputs import fix_type_sizes
from .program_parts import Block, Function, ValueDeclaration

__all__ = ["Sizes", "get_sizes", "infer_function", "iterate_rejected_ops", "list_file_ops"]

LoopPath = tuple[int, ...]
"The path of a loop: the index of an op in its block, of a block in that op, and so on."
Sizes = tuple[int | None, ...]
_MAX_ROUNDS = 8
"The most rounds of guesses about loop sizes; afterwards the declared types are used without guesses."
_EVALUATION_LIMITS = 1 << 22, 1 << 25
"The most elements of one op's outputs, and of all, that are evaluated: masks of 2048 x 2048, and their operands."


@dataclass(frozen=True)
class _SizeGuess:
    """The assumption that dimension `axis` of variable `place` of the loop at `path` always has `size`."""

    path: LoopPath
    place: int
    axis: int
    size: int


def infer_function(document: Document, function: Function) -> HostFunction:
    """Load `function` in its current form into a pymil program, each op with its origin and inferred sizes.

    Where coremltools' inference contradicts the file, the file's types are used.
    """
    guesses: set[_SizeGuess] = set()
    wrong: set[_SizeGuess] = set()
    for _ in range(_MAX_ROUNDS):
        found = _read_function(document, function, guesses)
        failed = {guess for guess in guesses if not _is_guess_valid(found, guess)}
        more = _collect_guesses(found) - guesses - wrong - failed
        if not failed and not more:
            return found
        wrong |= failed
        guesses = (guesses - failed) | more
    return _read_function(document, function, set())


def _read_function(document: Document, function: Function, guesses: set[_SizeGuess]) -> HostFunction:
    data = function.emit()
    if guesses:
        twin = function.copy(function.name)
        _declare_guesses(twin.block, (), guesses)
        data = twin.emit()
    raw = document.emit()
    program = wire.replace_fields(
        wire.get_payloads(raw, ML_PROGRAM_FIELD)[0], FUNCTIONS, [wire.encode_entry(function.name, data)]
    )
    raw = wire.replace_fields(raw, ML_PROGRAM_FIELD, [program])
    spec = proto.Model_pb2.Model.FromString(raw)
    try:
        with pause_garbage_collection():
            reader = ProgramReader(document.files, document.where, EvaluationBudget(*_EVALUATION_LIMITS))
            _, origins = reader.read([Member((), "", raw, spec)])
    except (ValueError, UnicodeDecodeError) as error:
        if isinstance(error, InputError):
            raise
        model = document.layout.model
        raise InputError(f"{document.where}: {model} is damaged ({error}); take a fresh copy") from error
    return origins[function.name].function


def _declare_guesses(block: Block, at: LoopPath, guesses: set[_SizeGuess]) -> None:
    """Declare the sizes of loop variables in `block` according to `guesses`."""
    for place in sorted({guess.path[len(at)] for guess in guesses if guess.path[: len(at)] == at}):
        path = (*at, place)
        blocks = block.ops[place].blocks
        for index, inner in enumerate(blocks):
            for guess in guesses:
                if guess.path == path:
                    inner.inputs[guess.place] = _declare_size(inner.inputs[guess.place], guess)
            deeper = {guess for guess in guesses if guess.path[: len(path) + 1] == (*path, index)}
            _declare_guesses(inner, (*path, index), deeper)
        block.ops[place] = block.ops[place].with_blocks(blocks)


def _declare_size(declared: ValueDeclaration, guess: _SizeGuess) -> ValueDeclaration:
    rank = len(declared.message.type.tensorType.dimensions)
    sizes = [guess.size if axis == guess.axis else None for axis in range(rank)]
    return ValueDeclaration.of_type(declared.name, fix_type_sizes(declared.message.type, sizes))


def list_file_ops(block: HostBlock) -> list[tuple[int, Operation, Origin]]:
    """List the ops of `block` that the file has, each with the index of its first part among the file's ops."""
    found, place = [], 0
    for op in block.operations:
        origin = get_origin(op)
        if origin is not None:
            found.append((place, op, origin))
            place += len(origin.parts)
    return found


def _iterate_loops(block: HostBlock, at: LoopPath = ()) -> Iterator[tuple[LoopPath, Operation]]:
    for place, op, _ in list_file_ops(block):
        if op.op_type == "while_loop" and hasattr(op, "loop_vars"):
            yield (*at, place), op
        for index, inner in enumerate(op.blocks):
            yield from _iterate_loops(inner, (*at, place, index))


def _collect_guesses(function: HostFunction) -> set[_SizeGuess]:
    """Collect the sizes that loop variables would have if they kept the known sizes of their initial values."""
    found = set()
    for path, op in _iterate_loops(function):
        for place, (given, carried) in enumerate(zip(op.loop_vars, op.blocks[1].inputs)):
            now, then = get_sizes(carried.sym_type), get_sizes(given.sym_type)
            if now is not None and then is not None and len(now) == len(then):
                found |= {_SizeGuess(path, place, axis, size)
                          for axis, size in enumerate(then) if size is not None and now[axis] is None}
    return found


def _is_guess_valid(function: HostFunction, guess: _SizeGuess) -> bool:
    op = next((op for path, op in _iterate_loops(function) if path == guess.path), None)
    if op is None:
        return False
    ends = (op.loop_vars[guess.place], op.blocks[1].outputs[guess.place])
    sizes = [get_sizes(var.sym_type) for var in ends]
    return all(each is not None and guess.axis < len(each) and each[guess.axis] == guess.size for each in sizes)


def get_sizes(sym_type: Any) -> Sizes | None:
    """Return the sizes of a pymil type, None for unknown ones; None for what is not a tensor or has unknown rank."""
    if types.is_state(sym_type):
        return get_sizes(sym_type.wrapped_type())
    if not types.is_tensor(sym_type):
        return () if types.is_scalar(sym_type) else None
    shape = sym_type.get_shape()
    if any(is_symbolic(size) and str(size).startswith("*") for size in shape):
        return None
    return tuple(None if is_symbolic(size) else int(size) for size in shape)


def iterate_rejected_ops(block: HostBlock) -> Iterator[tuple[Operation, str]]:
    """Yield the ops that coremltools' class rejects, with its error on their inputs, or "" for other outputs."""
    for _, op, _ in list_file_ops(block):
        if getattr(op, "rejected", None) is not None:
            yield op, op.rejected
        for inner in op.blocks:
            yield from iterate_rejected_ops(inner)
