"""Recognition of a decoder from its graph: token ids, a mask whose length states the position, and a cache in states.

A recurrent model has no attention, and therefore neither mask nor position: each step replaces its states.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from coremltools.converters.mil.mil import Function, Operation, Program, Var, types

from ..ir.query import get_const_value, get_consumers, get_flat_inputs, get_static_shape, is_compressed, is_const
from ..ir.shape_inference import Sizes, get_sizes
from ..package.interface import get_feature
from ..utils.errors import InputError
from ..utils.option_spelling import format_advised_option
from .pad_shape import reaches_softmax, read_ranges

__all__ = ["DecoderStructure", "check_constant_buffers", "describe_lost_rows", "find_caches", "find_lookup",
           "format_sizes", "has_cache",
           "has_states", "recognize_decoder"]

_MASK_RANK = 4
_UNBOUNDED = 1 << 30
"Sizes from this number on mean a range without an upper end; no tensor has an axis of 2**30 elements."
_LOOKUP_OPS = frozenset({"cast", "expand_dims", "squeeze", "reshape", "identity", "select", "greater_equal", "add"})
"Ops that may be between token ids and the lookup in a table."
_VIEWS = frozenset({"slice_by_index", "gather", "split", "squeeze", "cast", "identity", "transpose", "mul", "add"})
"""Ops that may be between a cache and the op that appends rows to it.

They select layers, or are unsupported; these are included so that an error can report them.
"""
_RESHAPED = frozenset({"expand_dims", "squeeze", "reshape", "cast", "identity"})
"Ops that may be between rows written into a slice of a buffer and the op that writes the slice into the buffer."
_UNNAMED = re.compile(r"var_\d+(_|$)")
"Names that coremltools derives from the numbers of values in a trace: never those of buffers."


@dataclass(frozen=True)
class DecoderStructure:
    """The names of a decoder's parts in the model, and its sizes.

    The cache is in `states`, or it is input and output: `caches` maps inputs to outputs, both with all rows. `fixed`
    are float inputs that are the same for all tokens, such as the result of an encoder. A recurrent model has neither
    `mask` nor `rows`.
    """

    function: str
    ids: str
    mask: str | None
    states: tuple[str, ...]
    logits: str
    rows: int | None
    vocabulary: int
    steps: int | None
    "The number of tokens per call; None if it is flexible."
    caches: dict[str, str] = field(default_factory=dict)
    least: int = 0
    "The smallest number of rows of input caches."
    fixed: tuple[str, ...] = ()
    lengths: dict[str, tuple[int, ...]] = field(default_factory=dict)
    "The flexible axes of `fixed`. They are padded to `longest`, and a mask among `fixed` hides the padding."
    shortest: int = 0
    longest: int = 0

    def get_fixed_shapes(self, function: Function) -> dict[str, tuple[int, ...]]:
        """Return the padded shapes of the inputs in `fixed` that have flexible axes."""
        return {name: tuple(self.longest if axis in axes else int(size or 1) for axis, size in enumerate(
            get_sizes(function.inputs[name].sym_type) or ())) for name, axes in self.lengths.items()}


def has_cache(program: Program) -> bool:
    return has_states(program) or any(find_caches(function) for function in program.functions.values())


def has_states(program: Program) -> bool:
    return any(types.is_state(var.sym_type) for function in program.functions.values()
               for var in function.inputs.values())


def check_constant_buffers(program: Program, where: str) -> None:
    """Raise InputError if a model of token ids writes rows at a computed position of constants.

    Without `states=`, the converter makes constants of a decoder's cache buffers, and the rows are lost after each
    call.
    """
    (function,) = program.functions.values()
    if not any(types.is_tensor(var.sym_type) and types.is_int(var.dtype) and find_lookup(var) is not None
               for var in function.inputs.values()):
        return
    lost = describe_lost_rows(function)
    if lost:
        raise InputError(f"{where}: the model has no states, but {lost}")


def describe_lost_rows(function: Function) -> str:
    """Describe the rows that are written at a computed position of constants, and the states that keep them.

    Returns "" if no rows are. The name and the shape of a buffer are stated only where the program has them.
    """
    writes = [op for op in function.operations if op.op_type == "slice_update" and is_const(op.x)
              and types.is_float(op.x.dtype) and not is_const(op.begin)]
    if not writes:
        return ""
    buffers = {var.name.removesuffix("_to_fp16"): tuple(map(int, var.shape)) for var in map(_find_buffer, writes)}
    name, shape = next(iter(buffers.items()))
    states = [each for each, var in function.inputs.items() if types.is_state(var.sym_type)]
    beside = f" besides {', '.join(map(repr, states))}" if states else ""
    several = ", ..." if len(buffers) > 1 else ""
    kind = "constant buffer"
    if any(map(_UNNAMED.match, buffers)):
        kind = "constant"
        advice = (f"states=[ct.StateType(wrapped_type=ct.TensorType(shape=SHAPE, dtype=np.float16), name=NAME), ...]"
                  f"{beside}, one for each cache buffer: NAME is the name of the buffer in the torch module (see "
                  "model.named_buffers()), and SHAPE is the shape of the buffer (see transforms/README.md)")
    else:
        advice = (f"states=[ct.StateType(wrapped_type=ct.TensorType(shape={shape}, dtype=np.float16), name='{name}')"
                  f"{several}]{beside}, one for each cache buffer: {', '.join(buffers)} (with names as in "
                  "model.named_buffers(), see transforms/README.md)")
    return (f"the op '{writes[0].outputs[0].name}' (slice_update) writes rows into the {kind} '{name}', and "
            "they are lost after each call; expected the cache in states: convert the source model again with "
            f"{advice}")


def _find_buffer(write: Operation) -> Var:
    """Return the constant of the entire buffer, if `write` changes a constant slice of it that is then written back.

    In a trace, `self.keys[layer][..., position:end] = rows` is a write into `self.keys[layer]`, which becomes a
    constant of its own, and a write of the result into `self.keys`.
    """
    pending, seen = list(write.outputs), set(write.outputs)
    while pending:
        var = pending.pop()
        for op in get_consumers(var):
            if op.op_type == "slice_update" and op.update is var and is_const(op.x):
                return op.x
            if op.op_type in _RESHAPED:
                pending += [each for each in op.outputs if each not in seen]
                seen.update(op.outputs)
    return write.x


def recognize_decoder(program: Program, where: str) -> DecoderStructure:
    """Return the structure of the decoder of one function.

    Raises InputError with the unsupported part that was found and the expected form.
    """
    (name, function), = program.functions.items()
    arrays = {each: var for each, var in function.inputs.items() if not types.is_state(var.sym_type)}
    caches = find_caches(function)
    ids, table = _find_ids(function, where)
    sizes = get_sizes(ids.sym_type) or ()
    if len(sizes) != 2 or sizes[0] != 1:
        raise InputError(f"{where}: the token ids '{ids.name}' are {format_sizes(sizes)}; expected (1, T): no batch, "
                         "and no beams")
    states = tuple(each for each in function.inputs if each not in arrays)
    mask = None if states and not _has_attention(function) else _find_mask(function, sizes[1], where)
    others = set(arrays) - {ids.name, *caches} - ({mask.name} if mask is not None else set())
    fixed = _check_fixed(function, sorted(others), where)
    lengths, shortest, longest = _find_fixed_lengths(function, fixed, where)
    if caches and states:
        raise InputError(f"{where}: the cache '{next(iter(caches))}' is an input, and '{states[0]}' is a state; "
                         "expected one form of cache")
    returned = {each: _find_returned(function, each, op, where) for each, op in caches.items()}
    rows: int | None = None
    least = 0
    if mask is not None:
        rows, least = _find_bounds(function, mask, returned, where) if caches else (
            _find_rows(function, states, where), 0)
    logits = _find_logits(function, set(returned.values()), where)
    width = (get_sizes(logits.sym_type) or (None,))[-1]
    if width is None:
        raise InputError(f"{where}: the size of the output '{logits.name}' is not fixed; expected logits of fixed "
                         "width")
    return DecoderStructure(name, ids.name, None if mask is None else mask.name, states, logits.name, rows,
                            int(table.x.shape[0]), sizes[1], returned, least, fixed, lengths, shortest, longest)


def _has_attention(function: Function) -> bool:
    return any(op.op_type in ("softmax", "scaled_dot_product_attention") for op in function.operations)


def _check_fixed(function: Function, names: Sequence[str], where: str) -> tuple[str, ...]:
    """Return inputs that are the same for all tokens. InputError for others than floats."""
    for name in names:
        var = function.inputs[name]
        if not types.is_float(var.dtype):
            raise InputError(f"{where}: '{name}' is an input of {types.builtin_to_string(var.dtype)} besides token ids "
                             "and a mask; expected these, the cache, and floats, such as the result of an encoder")
    return tuple(names)


def _find_fixed_lengths(
    function: Function, names: Sequence[str], where: str
) -> tuple[dict[str, tuple[int, ...]], int, int]:
    """Return the flexible axes of inputs that are the same for all tokens, and the ends of their common range.

    The caller pads a shorter input, so a mask must hide the padding. Raises InputError if no input can hide it.
    """
    lengths: dict[str, tuple[int, ...]] = {}
    low, high, hides = 1, _UNBOUNDED, False
    for name in names:
        var = function.inputs[name]
        sizes = get_sizes(var.sym_type) or ()
        axes = tuple(axis for axis, size in enumerate(sizes) if size is None)
        if not axes:
            continue
        ranges = read_ranges(get_feature(function, name), name, sizes)
        if len(axes) > 1 or axes == (0,) and len(sizes) > 2:
            raise InputError(f"{where}: '{name}' is {format_sizes(sizes)}, an input besides token ids and a mask; "
                             "expected one flexible axis, the length of an encoder's result, and no batch")
        lengths[name] = axes
        low, high = max(low, ranges[axes[0]][0]), min(high, ranges[axes[0]][1])
        hides = hides or axes[0] == len(sizes) - 1 and reaches_softmax(var)
    for name, axes in lengths.items():
        shape = f"'{name}' is {format_sizes(get_sizes(function.inputs[name].sym_type) or ())}, an input besides token "
        fixing = format_advised_option("fix_shape", f"{name}=...")
        if not hides:
            raise InputError(f"{where}: {shape}ids and a mask, and no input that is added to scores can hide its "
                             f"padding; expected a fixed shape: {fixing}, or a mask of floats (1, 1, 1, S) beside it")
        if not low <= high < _UNBOUNDED:
            raise InputError(f"{where}: {shape}ids and a mask, without a largest size; expected one in the range that "
                             f"it was converted with, or a fixed shape: {fixing}")
    return lengths, low if lengths else 0, high if lengths else 0


def _find_ids(function: Function, where: str) -> tuple[Var, Operation]:
    """Return the input of token ids, and the op that looks them up."""
    found = [(var, op) for var in function.inputs.values() if types.is_tensor(var.sym_type) and types.is_int(var.dtype)
             if (op := find_lookup(var)) is not None]
    if len(found) != 1:
        what = "no input of token ids is" if not found else f"{', '.join(repr(var.name) for var, _ in found)} are"
        raise InputError(f"{where}: {what} looked up in a table by a gather op; expected one input of integers")
    return found[0]


def find_lookup(start: Var) -> Operation | None:
    """Return the op that looks up integers in a table of floats; None if it is not found."""
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


def _find_mask(function: Function, steps: int | None, where: str) -> Var:
    found = [var for var in function.inputs.values() if types.is_tensor(var.sym_type) and types.is_float(var.dtype)
             and reaches_softmax(var)]
    flexible = [var for var in found if (get_sizes(var.sym_type) or (0,))[-1] is None]
    found = flexible if len(flexible) == 1 else found  # masks of fixed shape hide keys of an encoder
    if len(flexible) > 1:  # select masks with a row for each token, or whose length is read as the position
        own = [var for var in flexible if (get_sizes(var.sym_type) or ())[-2:-1] == (None,) or steps == 1 and any(
            op.op_type == "shape" for op in get_consumers(var))]
        found = own if len(own) == 1 else found
    if len(found) != 1:
        names = ", ".join(f"'{var.name}'" for var in found)
        several = ", such as one for a sliding window" if found else ""
        raise InputError(
            f"{where}: {names + ' are' if found else 'no input is'} added to what a softmax reads{several}; expected "
            "one mask of floats (1, 1, T, E), of T new tokens and E = those before plus T")
    sizes = get_sizes(found[0].sym_type) or ()
    if len(sizes) == _MASK_RANK and sizes[-2] == 1 and steps != 1:
        raise InputError(f"{where}: the mask '{found[0].name}' is {format_sizes(sizes)}, one row for all tokens of a "
                         "call, so that each token attends to later ones; expected a causal mask (1, 1, T, E)")
    if len(sizes) != _MASK_RANK or sizes[-1] is not None or any(size not in (1, None) for size in sizes[:2]):
        raise InputError(f"{where}: the mask '{found[0].name}' is {format_sizes(sizes)}; expected (1, 1, T, E) with "
                         "flexible E, which states the position")
    return found[0]


def _find_rows(function: Function, states: tuple[str, ...], where: str) -> int:
    """Return the number of rows of the cache."""
    for op in function.operations:
        wrapped = next(_iterate_wraps(op), None) if op.op_type == "slice_update" else None
        if wrapped is not None:
            raise InputError(f"{where}: the op '{op.outputs[0].name}' (slice_update) writes at a position modulo a "
                             "number "
                             f"('{wrapped.outputs[0].name}', {wrapped.op_type}), as the cache of a sliding window; "
                             "expected rows at an increasing position: convert the source model without a sliding "
                             "window")
        axis = _find_written_axis(op) if op.op_type == "slice_update" else None
        if axis is not None and axis != op.x.rank - 2:
            shape = format_sizes(get_sizes(op.x.sym_type) or ())
            raise InputError(f"{where}: the op '{op.outputs[0].name}' (slice_update) writes the rows of new tokens "
                             f"along axis {axis} of {shape}; expected a cache of (..., rows, width), with the heads in "
                             "front of the rows: convert the source model with keys and values that are transposed "
                             "before they are written")
    shapes = [get_static_shape(function.inputs[each]) for each in states]
    if not states:
        raise InputError(f"{where}: the model has no states; expected a cache of keys and values in states")
    rows = {shape[-2:] if shape is not None and len(shape) > 2 else None for shape in shapes}
    if None not in rows and len({each[0] for each in rows if each is not None}) > 1:
        counts = sorted({each[0] for each in rows if each is not None})
        raise InputError(f"{where}: caches of {' and '.join(map(str, counts))} rows, such as those of a sliding window "
                         "beside others; expected the same rows for all layers: convert the source model without a "
                         "sliding window")
    if len(rows) != 1 or None in rows:
        raise InputError(f"{where}: the states are {', '.join(map(str, shapes))}; expected a cache, (..., rows, width) "
                         "with the same rows and width")
    (found, _), = (each for each in rows if each is not None)
    return int(found)


def _find_written_axis(op: Operation) -> int | None:
    """Return the only axis on which a slice_update begins or ends at a computed place; None if it is not one axis."""
    axes: set[int] = set()
    for var, name in ((op.begin, "begin_mask"), (op.end, "end_mask")):
        values = list(var.op.values) if var.op is not None and var.op.op_type == "concat" else []
        if len(values) == op.x.rank:  # one number for each axis
            open_ends = get_const_value(op.inputs.get(name), [False] * len(values))
            axes.update(axis for axis, each in enumerate(values) if not is_const(each) and not open_ends[axis])
    return axes.pop() if len(axes) == 1 else None


def _iterate_wraps(op: Operation) -> Iterator[Operation]:
    """Yield the modulo ops that wrap the position at which rows are written."""
    pending, seen = [op.begin], {op.begin}
    while pending:
        made = pending.pop().op
        if made is not None and types.is_int(made.outputs[0].dtype):
            if made.op_type in ("mod", "floor_div"):
                yield made
            pending += [var for var in get_flat_inputs(made) if var not in seen]
            seen.update(get_flat_inputs(made))


def find_caches(function: Function) -> dict[str, Operation]:
    """Return the inputs to which new rows are appended, each with the first op that appends them."""
    found = {}
    for name, var in function.inputs.items():
        sizes = () if types.is_state(var.sym_type) else get_sizes(var.sym_type) or ()
        if len(sizes) < 3 or None not in sizes or not types.is_float(var.dtype) or reaches_softmax(var):
            continue  # a mask whose scores get a column for attention sinks is no cache
        pending = [var]
        while pending and name not in found:
            each = pending.pop()
            for op in get_consumers(each):
                axes = get_sizes(each.sym_type) or ()
                if op.op_type == "concat" and op.values[0] is each and len(op.values) == 2 and (
                        axes[int(op.axis.val) % each.rank] is None):
                    found[name] = op
                elif op.op_type in _VIEWS:
                    pending += op.outputs
    return found


def _find_returned(function: Function, name: str, op: Operation, where: str) -> str:
    """Return the output that has all rows of a cache, including the new ones."""
    pending, outputs, cut = [op.outputs[0]], list(function.outputs), []
    while pending:
        var = pending.pop()
        if var in outputs:
            return str(var.name)
        for user in get_consumers(var):
            if user.op_type in ("stack", "concat", "expand_dims", "identity", "cast"):
                pending += user.outputs
            elif user.op_type in ("slice_by_index", "slice_by_size"):
                cut.append(user)
    if cut:
        raise InputError(f"{where}: the op '{cut[0].outputs[0].name}' ({cut[0].op_type}) keeps some rows of the cache "
                         f"'{name}', as a sliding window does; expected a cache that keeps all rows: convert the "
                         "source model without a sliding window")
    raise InputError(f"{where}: no output returns the cache '{name}' with the new rows (op '{op.outputs[0].name}'); "
                     "expected one for each cache")


def _find_bounds(
    function: Function, mask: Var, caches: Mapping[str, str], where: str
) -> tuple[int, int]:
    """Return the largest number of rows including new ones, and the smallest number of rows of input caches."""
    most, least = [], []
    for name in caches:
        sizes = get_sizes(function.inputs[name].sym_type) or ()
        axes = [axis for axis, size in enumerate(sizes) if size is None]
        if axes != [len(sizes) - 2]:
            raise InputError(f"{where}: the cache '{name}' is {format_sizes(sizes)}; expected (..., rows, width) with "
                             "flexible rows alone: no batch, and no beams")
        low, high = read_ranges(get_feature(function, name), name, sizes)[-2]
        most.append(high + 1)
        least.append(low)
    most.append(read_ranges(get_feature(function, mask.name), mask.name, get_sizes(mask.sym_type) or ())[-1][1])
    return min(most), max(least)


def _find_logits(function: Function, caches: Collection[str], where: str) -> Var:
    others = [var for var in function.outputs if var.name not in caches]
    if len(others) != 1 or not types.is_tensor(others[0].sym_type) or not types.is_float(others[0].dtype):
        raise InputError(f"{where}: {len(others)} outputs ({', '.join(var.name for var in others)}); expected logits "
                         "alone" + (" beside the cache" if caches else ""))
    return others[0]


def format_sizes(sizes: Sizes) -> str:
    return f"({', '.join('?' if size is None else str(size) for size in sizes)})"
