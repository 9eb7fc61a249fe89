"""Recognition of an encoder from its graph, and transforms that let its main package read only floats of fixed size.

An encoder computes attention over all tokens of a call and keeps no state for the next call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Function, Operation, Program, Var, types

from ..ir.block_editor import BlockEditor
from ..ir.builder import RewriteBuilder, UniqueNames
from ..ir.coremltools_internals import set_stored_type
from ..ir.query import get_consumers, get_flat_inputs, is_compressed, is_const, wraps_negatives
from ..ir.shape_inference import get_sizes
from ..ir.type_inference import infer_types
from ..package.interface import get_feature
from ..utils.errors import InputError
from ..utils.option_spelling import format_option, format_option_values
from .contract import Draft, EditRecord, Transform, apply_transforms
from .decoder import find_lookup, format_sizes
from .expose import can_have_fp16_interface
from .fix_shape import Evaluate, FixShape, FoldSizes
from .io import Io
from .pad_shape import PadShape, read_ranges, spread_scalar_choices
from .padded_values import ImpossibleLength
from .padding import MASKED, find_count, skip_moves
from .split_inputs import SplitInputs

__all__ = ["AddMasks", "EncoderStructure", "NarrowMasks", "OneHotRows", "choose_context", "divide_encoder",
           "fold_encoder", "pad_encoder", "recognize_encoder"]

_UNBOUNDED = 1 << 30
"Sizes from this number on mean a range without an upper end; no tensor has an axis of 2**30 elements."
_MAX_LEAST_TRIED = 8
"""Number of lengths, from the shortest declared one on, that are tried until the model can run.

A model that computes differences or windows of a few tokens cannot run at the shortest declared lengths.
"""
_BETWEEN_SCORES = frozenset({"add", "cast", "mul", "real_div", "reshape", "transpose", "squeeze", "expand_dims",
                             "identity", "select", "slice_by_index"})
"Ops that may be between a softmax and the product with the values."


_BROADCASTING = frozenset({"add", "sub", "mul", "real_div", "cast", "equal", "not_equal", "logical_and", "logical_or",
                           "logical_not", "identity", "maximum", "minimum", "reduce_max", "reduce_min"})
"Elementwise ops that broadcast: an operand of size 1 along an axis gives the same result as a repeated one."


@dataclass(frozen=True)
class EncoderStructure:
    """The names of an encoder's parts in the model, and its sizes.

    `ids` are looked up in a table. `integers` are all integer inputs, including `ids`. `lengths` has the flexible axes
    of inputs, all of the same length between `least` and `most` (both 0 if all axes are fixed; `most` may be
    unbounded). Padded, a new input that states the length has `position` more than the length, such as rows that come
    before the tokens, and `results` has the padded axes of outputs, each with how many more elements than the length it
    has.
    """

    function: str
    ids: tuple[str, ...]
    integers: tuple[str, ...]
    vocabulary: int | None
    lengths: dict[str, tuple[int, ...]]
    least: int
    most: int
    position: int = 0
    results: dict[str, dict[int, int]] = field(default_factory=dict)

    @property
    def is_bounded(self) -> bool:
        return self.most < _UNBOUNDED


def recognize_encoder(program: Program, where: str) -> EncoderStructure:
    """Return the structure of the encoder. Raises InputError with the unsupported part and the expected form."""
    (name, function), = program.functions.items()
    attention = next(_iterate_attention(function), None)
    if attention is None:
        raise InputError(f"{where}: no op softmax whose result is multiplied with values, and no "
                         "scaled_dot_product_attention; expected a transformer: other models are for "
                         "`mil-ane-passes rewrite`")
    for var in function.outputs:
        if not types.is_tensor(var.sym_type):
            raise InputError(f"{where}: the output '{var.name}' is not an array (op {var.op.op_type}); expected "
                             "arrays: for a classifier, return the probabilities in place of the label")
    integers, ids, vocabulary = [], [], None
    for each, var in function.inputs.items():
        if not types.is_tensor(var.sym_type):
            raise InputError(f"{where}: the input '{each}' is not an array; expected arrays")
        if not types.is_float(var.dtype):
            integers.append(each)
            found = find_lookup(var)
            if found is not None:
                ids.append(each)
                vocabulary = int(found.x.shape[0]) if vocabulary is None else vocabulary
    lengths, least, most = _find_lengths(function, where)
    return EncoderStructure(name, tuple(ids), tuple(integers), vocabulary, lengths, least, most)


def _iterate_attention(function: Function) -> Iterator[Operation]:
    for op in function.operations:
        if op.op_type == "scaled_dot_product_attention":
            yield op
        elif op.op_type == "softmax":
            pending = [op.outputs[0]]
            while pending:
                for user in get_consumers(pending.pop()):
                    if user.op_type in ("matmul", "einsum"):
                        yield user
                    elif user.op_type in _BETWEEN_SCORES:
                        pending += user.outputs


def _find_lengths(function: Function, where: str) -> tuple[dict[str, tuple[int, ...]], int, int]:
    """Return the flexible axes of each input, and the smallest and largest length that all of them can have."""
    lengths: dict[str, tuple[int, ...]] = {}
    least, most = 0, 0
    for name, var in function.inputs.items():
        sizes = get_sizes(var.sym_type)
        if sizes is None:
            raise InputError(f"{where}: the rank of the input '{name}' is not known; expected a fixed one")
        axes = tuple(axis for axis, size in enumerate(sizes) if size is None)
        if len(sizes) > 1 and sizes[0] != 1 and not types.is_float(var.dtype):
            raise InputError(f"{where}: the token ids or mask '{name}' are {format_sizes(sizes)}; expected one "
                             "sequence, (1, S): no batch")
        if not axes:
            continue
        ranges = read_ranges(get_feature(function, name), name, sizes)
        low, high = max(ranges[axis][0] for axis in axes), min(ranges[axis][1] for axis in axes)
        if 0 in axes and len(sizes) > 1:
            raise InputError(f"{where}: '{name}' is {format_sizes(sizes)}, a flexible number of sequences; expected "
                             "one")
        least, most = (max(least, low), min(most, high)) if lengths else (low, high)
        lengths[name] = axes
    return lengths, least, most


def pad_encoder(draft: Draft, structure: EncoderStructure, context: int | None) -> tuple[Draft, EncoderStructure]:
    """Pad flexible lengths to `context`; return the draft, and the structure with the least length that can run."""
    if not structure.lengths or context is None:
        return draft, structure
    sizes = {name: get_sizes(draft.program.functions[structure.function].inputs[name].sym_type) or ()
             for name in structure.lengths}
    first = min(structure.least, context)
    if first == context:
        outputs = {var.name: get_sizes(var.sym_type) or ()
                   for var in draft.program.functions[structure.function].outputs}
        fixed, = apply_transforms(draft, [FixShape({name: tuple(
            context if axis in axes else int(sizes[name][axis] or 1) for axis in range(len(sizes[name])))
            for name, axes in structure.lengths.items()})])
        return fixed, replace(structure, results={
            var.name: {axis: 0 for axis, size in enumerate(outputs[var.name]) if size is None and (
                int(var.shape[axis]) == context)} for var in fixed.program.functions[structure.function].outputs})
    reason = ""
    for least in range(first, min(first + _MAX_LEAST_TRIED, context)):
        try:
            padded, = apply_transforms(draft.copy(), [PadShape({name: tuple(
                (least, context) if axis in axes else int(sizes[name][axis] or 1) for axis in range(len(sizes[name])))
                for name, axes in structure.lengths.items()})])
        except ImpossibleLength as error:
            reason = str(error).partition(": ")[2].partition("; expected real")[0]
            continue
        if least > first:
            padded.done.append(EditRecord("", structure.function, "", f"real lengths are {least} or more: shorter ones "
                                          "make a value of the source empty, or sizes of it that do not fit"))
        position, results = _find_extra_rows(padded, structure, context)
        return padded, replace(structure, least=least, position=position, results=results)
    raise InputError(f"{draft.where}: {reason}; expected a source that can run at its shortest lengths: convert it "
                     "again with a larger one")


def _find_extra_rows(
    padded: Draft, structure: EncoderStructure, context: int
) -> tuple[int, dict[str, dict[int, int]]]:
    """Return by how much the new input exceeds the length, and for each output its padded axes with their excess."""
    function = padded.program.functions[structure.function]

    def make_feeds(length: int) -> dict[str, Any]:
        return {name: np.empty(tuple(length if axis in axes else int(size) for axis, size in enumerate(
            function.inputs[name].shape)), np.bool_) for name, axes in structure.lengths.items()}

    longest, shorter = make_feeds(context), make_feeds(context - 1)
    position, results = 0, dict[str, dict[int, int]]()
    for change in padded.interfaces[structure.function].changes:
        if change.kind == "input" and change.old is None and change.make is not None:
            position = int(np.ravel(change.make(longest))[0]) - context
        elif change.kind == "output" and change.new is not None and change.unmap_with is not None:
            shape = tuple(map(int, next(var.shape for var in function.outputs if var.name == change.new)))
            cut = np.shape(change.unmap_with(np.empty(shape, np.bool_), shorter))
            results[change.new] = {axis: size - context for axis, size in enumerate(shape) if cut[axis] != size}
    return position, results


def fold_encoder(draft: Draft, evaluate: Evaluate | None = None) -> Draft:
    """Replace values that depend only on sizes by constants, which `evaluate` computes (see `FoldSizes`)."""
    folded, = apply_transforms(draft, [FoldSizes(evaluate)])
    return folded


def divide_encoder(draft: Draft, structure: EncoderStructure) -> list[Draft]:
    """Return the package for integers and the main package, which reads only floats; without integers, only the latter.

    Floats are fp16 where the function may have such inputs and outputs, which those for iOS15 may not.
    Raises InputError, with the op, if an op of the main package needs integers.
    """
    halves = [Io("fp16")] if can_have_fp16_interface(draft.program.functions[structure.function]) else []
    draft, = apply_transforms(draft, [OneHotRows(), AddMasks(), NarrowMasks(), *halves])
    function = draft.program.functions[structure.function]
    integers = [name for name, var in function.inputs.items() if not types.is_float(var.dtype)]
    integers = [name for name in integers if get_consumers(function.inputs[name])]
    drafts = apply_transforms(draft, [SplitInputs(integers, together=True)]) if integers else [draft]
    _check_floats(drafts[-1], structure.function)
    return drafts


def _check_floats(draft: Draft, name: str) -> None:
    """Raise InputError if the main package has an integer input."""
    function = draft.program.functions[name]
    for var in function.inputs.values():
        users = get_consumers(var)
        if users and not types.is_float(var.dtype):
            raise InputError(f"{draft.where}: the op '{users[0].outputs[0].name}' ({users[0].op_type}) reads "
                             f"the integers '{var.name}' and floats that do not depend on them alone; expected "
                             "integers that are only looked up in tables, compared, or used for masks")


@dataclass(frozen=True)
class AddMasks(Transform):
    """Replaces a select of a large negative value before a softmax by the addition of a mask.

    The softmax weight of a masked key is 0 in both forms, if at least one key of the query is not masked.
    """

    function: str | None = None

    def apply(self, draft: Draft) -> list[Draft]:
        for name, function in draft.select_functions(self.function).items():
            before = len(draft.done)
            draft.done += [EditRecord("--add-masks", name, each, f"'{each}', select: replaced by arithmetic on two "
                                      "numbers") for each in spread_scalar_choices(function)]
            with function, BlockEditor() as editor:
                mb = RewriteBuilder(function, UniqueNames(function))
                for op in list(function.operations):
                    if op.op_type == "select" and not is_const(op.cond) and self._replace(mb, op, editor):
                        draft.done.append(EditRecord("--add-masks", name, op.outputs[0].name, f"'{op.outputs[0].name}'"
                                                     ", select: a mask is added to scores"))
            _note_nothing(draft, before, "--add-masks", name, "no select between scores and a large negative number "
                          "is read only by softmaxes")
        return [draft]

    def _replace(self, mb: RewriteBuilder, op: Operation, editor: BlockEditor) -> bool:
        hidden, scores = (op.a, op.b) if is_const(op.a) else (op.b, op.a)
        old = op.outputs[0]
        if not types.is_float(old.dtype) or is_const(scores) or not is_const(hidden) or hidden.val is None or (
                np.size(hidden.val) != 1) or float(np.max(hidden.val)) > -1e4 or not all(
                user.op_type == "softmax" for user in get_consumers(old)) or old.consuming_blocks:
            return False
        kind = types.nptype_from_builtin(old.dtype)
        with mb.at(op):
            chosen = mb.cast(x=op.cond, dtype=types.builtin_to_string(old.dtype))
            shown = mb.sub(x=kind(1), y=chosen) if hidden is op.b else chosen
            made = mb.add(x=scores, y=mb.mul(x=shown, y=kind(MASKED)))
            mb.adopt_scopes(op.scopes)
        if tuple(made.shape) != tuple(old.shape):
            return False
        editor.replace(old, made)
        editor.remove_if_unused([op])
        return True


@dataclass(frozen=True)
class NarrowMasks(Transform):
    """Removes the repetition of a mask along an axis if all its users broadcast.

    A mask of keys that is repeated for each query, by a tile or by `and` with constants that are true, becomes
    (1, 1, 1, S) instead of (1, 1, S, S). The packages then pass each number only once.
    """

    function: str | None = None

    def apply(self, draft: Draft) -> list[Draft]:
        for name, function in draft.select_functions(self.function).items():
            before = len(draft.done)
            with function, BlockEditor() as editor:
                for op in list(function.operations):
                    narrow = _find_narrow(op)
                    if narrow is None or not _can_narrow(function, op, narrow):
                        continue
                    draft.done.append(EditRecord("--narrow-masks", name, narrow.name, f"'{op.outputs[0].name}', "
                                                 f"{op.op_type}: the repetition is removed"))
                    editor.replace(op.outputs[0], narrow)
                    editor.remove_if_unused([op])
            _note_nothing(draft, before, "--narrow-masks", name, "no value is repeated for ops that broadcast it")
        return [draft]


def _note_nothing(draft: Draft, before: int, option: str, function: str, note: str) -> None:
    """Record that nothing was done if `draft.done` still has `before` records."""
    if len(draft.done) == before:
        draft.done.append(EditRecord(option, function, "", f"nothing to do: {note}", changed=False))


def _find_narrow(op: Operation) -> Var | None:
    """Return the value that an op repeats along axes of size 1; None for other ops."""
    if op.op_type == "tile" and is_const(op.reps):
        narrow = op.x
        repeats = [int(each) for each in op.reps.val]
        return narrow if all(size == 1 or each == 1 for size, each in zip(narrow.shape, repeats)) and max(repeats) > 1 \
            else None
    if op.op_type == "logical_and":
        for narrow, other in ((op.x, op.y), (op.y, op.x)):
            if is_const(other) and np.all(other.val) and not is_const(narrow) and narrow.rank == op.outputs[0].rank:
                return narrow if tuple(narrow.shape) != tuple(op.outputs[0].shape) else None
    return None


def _can_narrow(function: Function, op: Operation, narrow: Var) -> bool:
    """Return whether `narrow` can replace the output of `op`: the types of all other values must stay the same.

    The types are inferred with `narrow` in place of the output.
    """
    before: dict[Var, object] = {op.outputs[0]: op.outputs[0].sym_type}
    set_stored_type(op.outputs[0], narrow.sym_type)
    for user in function.operations:
        if not any(var in before for var in get_flat_inputs(user)) or user is op:
            continue
        try:
            plain = user.op_type == "tile" and is_const(user.reps) and np.all(user.reps.val == 1)
            found = infer_types(user) if plain or user.op_type in _BROADCASTING else None
        except (TypeError, ValueError):
            found = None
        var = user.outputs[0]
        if found is None or isinstance(found, tuple) or found != var.sym_type and var in function.outputs:
            break
        if found != var.sym_type:
            before[var] = var.sym_type
            set_stored_type(var, found)
    else:
        if op.outputs[0] not in function.outputs:
            return True
    for var, sym_type in before.items():
        set_stored_type(var, sym_type)
    return False


@dataclass(frozen=True)
class OneHotRows(Transform):
    """Reads rows at computed positions by a product with a one-hot matrix: the same bits for finite values.

    It applies to rows of floats at few positions that are computed from integers, such as the last token's.
    """

    function: str | None = None
    most: int = 16
    "Most rows that are read in this way: the product reads the whole table, so its cost grows with the rows."

    def apply(self, draft: Draft) -> list[Draft]:
        for name, function in draft.select_functions(self.function).items():
            before = len(draft.done)
            with function, BlockEditor() as editor:
                mb = RewriteBuilder(function, UniqueNames(function))
                for op in list(function.operations):
                    reads = op.op_type in ("gather", "gather_along_axis", "gather_nd")
                    stored = reads and (is_const(op.x) or is_compressed(op.x))
                    if reads and not stored and self._replace(mb, op, editor):
                        draft.done.append(EditRecord("--one-hot-rows", name, op.outputs[0].name, "'"
                                                     f"{op.outputs[0].name}', {op.op_type}: rows are read by a product "
                                                     "with a one-hot matrix"))
            _note_nothing(draft, before, "--one-hot-rows", name, f"no rows of floats are read at 1 to {self.most} "
                          "computed positions")
        return [draft]

    def _replace(self, mb: RewriteBuilder, op: Operation, editor: BlockEditor) -> bool:
        found = _find_places(op)
        if found is None or not types.is_float(op.x.dtype) or op.outputs[0].rank < 1:
            return False
        axis, places = found
        sizes = get_sizes(places.sym_type)
        if sizes is None or None in sizes or None in (get_sizes(op.x.sym_type) or (None,)) or (
                int(np.prod([1, *(size or 1 for size in sizes)])) > self.most):
            return False
        with mb.at(op):
            made = _multiply_one_hot(mb, op, axis, places)
            mb.adopt_scopes(op.scopes)
        editor.replace(op.outputs[0], made)
        editor.remove_if_unused([op])
        return True


def _find_places(op: Operation) -> tuple[int, Var] | None:
    """Return the axis along which an op reads at computed positions, and the positions; None for other ops.

    For gather_nd, the indices along all other axes must be 0, and these axes must have size 1. For gather_along_axis,
    there is one position for all other axes.
    """
    if op.inputs.get("batch_dims") is not None and int(op.batch_dims.val):
        return None
    if op.op_type == "gather":
        return None if is_const(op.indices) else (int(op.axis.val) % op.x.rank, op.indices)
    if op.op_type == "gather_along_axis":
        axis, place = int(op.axis.val) % op.x.rank, skip_moves(op.indices)
        whole = [1 if each == axis else size for each, size in enumerate(op.x.shape)] == list(op.outputs[0].shape)
        single = get_sizes(place.sym_type) is not None and all(size == 1 for size in get_sizes(place.sym_type) or ())
        return (axis, place) if whole and single and not is_const(place) and _is_never_negative(place) else None
    var, wrapped = op.indices, False
    while var.op is not None and (var.op.op_type == "cast" or wraps_negatives(var.op)):
        wrapped |= var.op.op_type == "select"
        var = var.op.x if var.op.op_type == "cast" else var.op.a
    if var.op is None or var.op.op_type != "stack" or int(var.op.axis.val) % var.rank != var.rank - 1:
        return None
    columns = list(var.op.values)
    moving = [axis for axis, column in enumerate(columns) if not is_const(column)]
    others = [axis for axis in range(len(columns)) if axis not in moving]
    if len(moving) != 1 or any(int(op.x.shape[axis]) != 1 or np.any(columns[axis].val) for axis in others):
        return None
    if wrapped and not _is_never_negative(columns[moving[0]]):
        return None
    return moving[0], columns[moving[0]]


def _is_never_negative(var: Var) -> bool:
    """Return whether integers are positions of extremes (argmax or argmin), or of the last of counted elements."""
    op, count = skip_moves(var).op, find_count(var)
    return op is not None and op.op_type in ("reduce_argmax", "reduce_argmin") or (
        count is not None and count.op is not None and count.op.op_type == "reduce_sum")


def _multiply_one_hot(mb: RewriteBuilder, op: Operation, axis: int, places: Var) -> Var:
    """Build the product of a one-hot matrix (positions, size) and the data of `op`, in the shape of its output."""
    x, out = op.x, tuple(map(int, op.outputs[0].shape))
    size = int(x.shape[axis])
    count = int(np.prod([1, *map(int, places.shape)]))
    column = mb.reshape(x=mb.cast(x=places, dtype="int32"), shape=[count, 1])
    column = mb.select(cond=mb.less(x=column, y=0), a=mb.add(x=column, y=size), b=column)
    rows = mb.cast(x=mb.equal(x=np.arange(size, dtype=np.int32)[None], y=column),
                   dtype=types.builtin_to_string(x.dtype), name="one_hot_rows")
    order = [axis, *(place for place in range(x.rank) if place != axis)]
    matrix = mb.reshape(x=x if order == list(range(x.rank)) else mb.transpose(x=x, perm=order), shape=[size, -1])
    found = mb.matmul(x=rows, y=matrix)
    if op.op_type in ("gather_along_axis", "gather_nd"):
        return mb.reshape(x=found, shape=out)
    kept = [int(x.shape[place]) for place in order[1:]]
    parts = mb.reshape(x=found, shape=[*map(int, places.shape), *kept])
    many = len(places.shape)
    perm = [*range(many, many + axis), *range(many), *range(many + axis, many + len(kept))]
    return parts if perm == sorted(perm) else mb.transpose(x=parts, perm=perm)


def choose_context(structure: EncoderStructure, context: int | None, where: str) -> int | None:
    """Return the length to which inputs are padded; None if all sizes are fixed.

    Raises InputError for a `context` outside the range of the inputs.
    """
    given = format_option_values("context", context) if context is not None else format_option("context")
    if not structure.lengths:
        if context is not None:
            raise InputError(f"{given}: all inputs of {where} have fixed sizes; remove this option, or convert the "
                             "source model with a flexible length")
        return None
    if context is None:
        if not structure.is_bounded:
            raise InputError(f"{where}: the inputs {', '.join(structure.lengths)} have no largest size; expected "
                             f"{given}")
        return structure.most
    if not structure.least <= context <= structure.most or context < 2:
        end = str(structure.most) if structure.is_bounded else "any number"
        raise InputError(f"{given}: the inputs {', '.join(structure.lengths)} can be {structure.least} to {end} long; "
                         f"expected a length from {max(2, structure.least)} to {end}")
    return context
