"""Recognition of a decoder from its graph: token ids, a mask whose length carries the position, a cache in states."""

from __future__ import annotations

from dataclasses import dataclass

from coremltools.converters.mil.mil import Function, Operation, Program, Var, types

from ..ir.query import get_consumers, get_static_shape, is_compressed, is_const
from ..utils.errors import InputError
from .pad_shape import reaches_softmax
from .shape_inference import Sizes, get_sizes

__all__ = ["DecoderStructure", "find_lookup", "format_sizes", "has_states",
           "recognize_decoder"]

_MASK_RANK = 4
_LOOKUP_OPS = frozenset({"cast", "expand_dims", "squeeze", "reshape", "identity", "select", "greater_equal", "add"})
"Ops between token ids and the lookup in a table."


@dataclass(frozen=True)
class DecoderStructure:
    """The parts of a decoder by their names in the model, and its sizes."""

    function: str
    ids: str
    mask: str
    mask_sizes: Sizes
    states: tuple[str, ...]
    logits: str
    rows: int
    vocabulary: int
    steps: int | None
    "The number of tokens of a call, None if it is flexible."


def has_states(program: Program) -> bool:
    return any(types.is_state(var.sym_type) for function in program.functions.values()
               for var in function.inputs.values())


def recognize_decoder(program: Program, where: str) -> DecoderStructure:
    """Return the structure of the decoder of one function.

    Raises InputError that names what was found, and what it would need.
    """
    (name, function), = program.functions.items()
    arrays = {each: var for each, var in function.inputs.items() if not types.is_state(var.sym_type)}
    ids, table = _find_ids(function, where)
    sizes = get_sizes(ids.sym_type) or ()
    if len(sizes) != 2 or sizes[0] != 1:
        raise InputError(f"{where}: the token ids '{ids.name}' are {format_sizes(sizes)}; expected (1, T): no batch, "
                         "and no beams")
    mask = _find_mask(function, where)
    others = sorted(set(arrays) - {ids.name, mask.name})
    if others:
        raise InputError(f"{where}: '{others[0]}' is an input besides token ids and a mask; expected these, and the "
                         "cache in states")
    states = tuple(each for each in function.inputs if each not in arrays)
    rows = _find_rows(function, states, where)
    logits = _find_logits(function, where)
    width = (get_sizes(logits.sym_type) or (None,))[-1]
    if width is None:
        raise InputError(f"{where}: the size of the output '{logits.name}' is not fixed; expected logits")
    return DecoderStructure(name, ids.name, mask.name, get_sizes(mask.sym_type) or (), states, logits.name, rows,
                            int(table.x.shape[0]), sizes[1])


def _find_ids(function: Function, where: str) -> tuple[Var, Operation]:
    """Return the input of token ids, and the op that looks them up."""
    found = [(var, op) for var in function.inputs.values() if types.is_tensor(var.sym_type) and types.is_int(var.dtype)
             if (op := find_lookup(var)) is not None]
    if len(found) != 1:
        what = "no input of token ids is" if not found else f"{', '.join(repr(var.name) for var, _ in found)} are"
        raise InputError(f"{where}: {what} looked up in a table by a gather op; expected one input of integers")
    return found[0]


def find_lookup(start: Var) -> Operation | None:
    """Return the op that looks up integers in a table of floats, None if there is not one."""
    pending, seen = [start], {start}
    while pending:
        var = pending.pop()
        for op in get_consumers(var):
            if op.op_type == "gather" and op.indices is var and (is_const(op.x) or is_compressed(op.x)) and (
                    types.is_float(op.outputs[0].dtype) and op.x.rank == 2):
                return op
            if op.op_type in _LOOKUP_OPS:
                pending += [each for each in op.outputs if each not in seen]
                seen.update(op.outputs)
    return None


def _find_mask(function: Function, where: str) -> Var:
    found = [var for var in function.inputs.values() if types.is_tensor(var.sym_type) and types.is_float(var.dtype)
             and reaches_softmax(var)]
    if len(found) != 1:
        names = ", ".join(f"'{var.name}'" for var in found)
        raise InputError(
            f"{where}: {names + ' are' if found else 'no input is'} added to what a softmax reads; expected one mask "
            "of floats (1, 1, T, E), of T new tokens and E = those before plus T")
    sizes = get_sizes(found[0].sym_type) or ()
    if len(sizes) != _MASK_RANK or sizes[-1] is not None or any(size not in (1, None) for size in sizes[:2]):
        raise InputError(f"{where}: the mask '{found[0].name}' is {format_sizes(sizes)}; expected (1, 1, T, E) with "
                         "flexible E, which states the position")
    return found[0]


def _find_rows(function: Function, states: tuple[str, ...], where: str) -> int:
    """Return the number of rows of the cache."""
    shapes = [get_static_shape(function.inputs[each]) for each in states]
    if not states:
        raise InputError(f"{where}: the model has no states; expected a cache of keys and values in states")
    rows = {shape[-2:] if shape is not None and len(shape) > 2 else None for shape in shapes}
    if len(rows) != 1 or None in rows:
        raise InputError(f"{where}: the states are {', '.join(map(str, shapes))}; expected a cache, (..., rows, width) "
                         "with the same rows and width")
    (found, _), = (each for each in rows if each is not None)
    return int(found)


def _find_logits(function: Function, where: str) -> Var:
    outputs = [var for var in function.outputs if types.is_tensor(var.sym_type) and types.is_float(var.dtype)]
    if len(outputs) != 1 or len(function.outputs) != 1:
        raise InputError(f"{where}: {len(function.outputs)} outputs "
                         f"({', '.join(var.name for var in function.outputs)}); expected logits alone")
    return outputs[0]


def format_sizes(sizes: Sizes) -> str:
    return f"({', '.join('?' if size is None else str(size) for size in sizes)})"
