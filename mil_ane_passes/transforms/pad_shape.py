"""`--pad-shape`: flexible inputs are fixed at their maximum size, and ops compute on padded values.

Real values come first, then the padding. A number that depends on the real length, such as the position of new rows in
a cache, becomes a new input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from coremltools.converters.mil.mil import Function, Operation, Placeholder, Var, types

from ..ir.block_editor import BlockEditor
from ..ir.builder import RewriteBuilder, UniqueNames
from ..ir.coremltools_internals import add_function_input, remove_function_input, set_stored_type
from ..ir.query import get_consumers, is_const, is_used
from ..ir.shape_inference import get_sizes
from ..package.interface import describe_feature, get_feature
from ..passes.interface_change import InterfaceChange
from ..utils.errors import InputError, suggest_nearest
from ..utils.option_spelling import choose_spelling, format_advised_option, format_option_values
from ..utils.text_format import format_count
from .contract import Draft, EditRecord, Transform
from .dead_ops import find_dead_ops, find_unread_updates, remove_dead_ops
from .fix_shape import fix_feature_shape, format_shape
from .names import strip_percent
from .padded_values import ImpossibleLength, LengthSamples, Refusal, choose_compared_deficits, sample_deficits
from .padding import MASKED, Pad, Padding, get_uniform
from .state_flow import get_window

__all__ = ["PadShape", "find_mask_values", "reaches_softmax", "read_ranges", "spread_scalar_choices"]

_OPTION = "--pad-shape"
_MAX_NOTES = 6
"Most ops with masks that a report lists: the masks of all layers are alike."
_TRANSPARENT = frozenset({"add", "cast", "concat", "expand_dims", "identity", "maximum", "minimum", "mul", "reshape",
                          "select", "slice_by_index", "split", "squeeze", "stack", "sub", "tile", "transpose"})
"Ops through which a mask is followed from an input to a softmax."
_CHOOSING = frozenset({"equal", "not_equal", "greater", "greater_equal", "less", "less_equal", "logical_and",
                       "logical_or", "logical_not", "gather", "gather_nd"})
"Further ops through which integer masks are followed."
_MIN_MASK_SCALE = 100.0
"The least factor by which a model scales a mask of 0 and 1; masks that are added may be scaled by less."
Size = int | tuple[int, int]
Sizes = tuple[Size, ...]


class PadShape(Transform):
    """Pads flexible inputs to a fixed size.

    `requested` maps names of inputs to sizes, or is a list of texts NAME=SIZES. A size is the padded size, or a pair of
    the smallest and the largest real size, written 2..64 in texts. Rows at positions that move with the length, such as
    the last one, are read and written by products with one-hot matrices: a NaN or infinity in another row spreads.
    Where the model's own mask hides the padding from a softmax, each query needs a key that is shown.
    """

    def __init__(self, requested: Any, function: str | None = None) -> None:
        self._sizes = parse_sizes(requested)
        self._function = function

    def apply(self, draft: Draft) -> list[Draft]:
        """Pad in place (see `Transform.apply`)."""
        functions = draft.select_functions(self._function)
        for name in self._sizes:
            known = {each for function in functions.values() for each in function.inputs}
            functions = {key: each for key, each in functions.items() if name in each.inputs}
            if not functions:
                raise _make_error(f"no input '{name}'; the model has {', '.join(sorted(known))}"
                                  f"{suggest_nearest(name, known - {name})}")
        for name, function in functions.items():
            _PaddedFunction(draft, name, function, self._sizes).apply()
        return [draft]


@dataclass(frozen=True)
class _Lengths:
    """The padded axes of the inputs: (name, axis) -> (smallest, largest real size).

    All axes become shorter together.
    """

    shapes: dict[str, tuple[int, ...]]
    axes: dict[tuple[str, int], tuple[int, int]]

    @property
    def span(self) -> int:
        return min(high - low for low, high in self.axes.values())

    def get_shapes(self, deficit: int) -> dict[str, tuple[int, ...]]:
        """Return the real shapes of the inputs if they are `deficit` elements shorter than the maximum."""
        return {name: tuple(size - deficit if (name, axis) in self.axes else size for axis, size in enumerate(shape))
                for name, shape in self.shapes.items()}

    def find_deficit(self, feeds: Mapping[str, Any]) -> int:
        """Return the number of elements by which the original feeds are shorter than the maximum."""
        name, axis = next(iter(self.axes))
        return self.axes[name, axis][1] - int(np.shape(feeds[name])[axis])


class _PaddedFunction:
    """The change of one function."""

    def __init__(self, draft: Draft, name: str, function: Function, sizes: Mapping[str, Sizes]) -> None:
        self._draft, self._name, self._function = draft, name, function
        self._lengths = _read_lengths(function, sizes)
        self._masks = {each for each, var in function.inputs.items() if types.is_tensor(var.sym_type) and (
            types.is_int(var.dtype) and reaches_softmax(var))}
        "Integer inputs that are masks or numbers of keys; at least one key of each query must not be masked."

    def apply(self) -> None:
        if not self._lengths.axes:
            self._done("", "nothing to pad: all of these sizes are fixed", changed=False)
            return
        function, lengths = self._function, self._lengths
        deficits = sample_deficits(lengths.span)
        spread_scalar_choices(function)
        self._check_shared_length()
        dead = {*find_dead_ops(function), *find_unread_updates(function)}
        try:
            samples = LengthSamples(function, deficits, [lengths.get_shapes(each) for each in deficits])
        except ImpossibleLength as error:
            raise ImpossibleLength(f"{format_option_values('pad_shape')}: {error}; expected real sizes that go "
                                   "together: give the smallest as well, such as NAME=1,1,64,64..1024") from error
        except InputError as error:
            raise _make_error(f"{error}; expected sizes that the model can have") from error
        with function:
            names = UniqueNames(function)
            mb = RewriteBuilder(function, names)
            kind, at_maximum = find_position(function, samples, lengths.axes)
            position = Placeholder((1,), types.int32, name=names.make_unique_name(kind))
            var = position.outputs[0]
            var.name = position.name
            add_function_input(function, position.name, position)
            padding = Padding(function, samples, mb, var, at_maximum)
            values = self._choose_padding(padding)
            outputs = {each.name: samples.find_padded_axes(each) for each in _iterate_padded_outputs(function, samples)}
            try:
                padding.apply()
            except Refusal as refusal:
                raise _make_error(_describe_refusal(refusal)) from refusal
            _drop_whole_slices(function)
            remove_dead_ops(function, dead)
            _remove_unread(function)
        self._finish(position.name, at_maximum, values, outputs, padding)

    def _check_shared_length(self) -> None:
        """Raise InputError if an input can have a length of its own, as all of them are padded by one length."""
        shapes, names = self._lengths.get_shapes(0), sorted({name for name, _ in self._lengths.axes})
        for name in names[1:]:
            shorter = {**shapes, name: tuple(
                size - ((name, axis) in self._lengths.axes) for axis, size in enumerate(shapes[name]))}
            if 1 not in [one for one, other in zip(shorter[name], shapes[name]) if one != other] and (
                    LengthSamples.are_possible(self._function, shorter)) and not (
                    LengthSamples.are_cut(self._function, shorter, self._lengths.get_shapes(1))):
                raise _make_error(f"'{name}' can have another length than '{names[0]}'; expected inputs of one length: "
                                  f"fix all but one of them with {format_advised_option('fix_shape')}")

    def _choose_padding(self, padding: Padding) -> dict[str, float]:
        """Choose the padding of each input: for a mask of floats, a value that hides; else 0."""
        values = {}
        for name in dict.fromkeys(name for name, _ in self._lengths.axes):
            var = self._function.inputs[name]
            axes = padding.samples.find_padded_axes(var)
            mask = find_mask_values(var)
            values[name] = 0.0 if mask is None else mask.padding
            pads: dict[int, Pad] = dict.fromkeys(axes, values[name])
            padding.pads[var] = pads
        return values

    def _finish(self, position: str, at_maximum: int, values: Mapping[str, float],
                outputs: Mapping[str, tuple[int, ...]], padding: Padding) -> None:
        """Record the changes, and declare the changes of the interface."""
        function, lengths = self._function, self._lengths
        reads = bool(get_consumers(function.inputs[position]))
        if not reads:
            remove_function_input(function, position)
        for name in lengths.shapes:
            feature = get_feature(function, name)
            if feature is not None:
                describe_feature(function, fix_feature_shape(feature, lengths.shapes))
        function.sizes_inferred = True
        self._declare(position if reads else None, at_maximum, values, outputs)
        for name, value in values.items():
            padded = lengths.shapes[name]
            self._done(name, f"'{name}' is padded to {format_shape(padded)} with {value:g} after the real values")
        for name, axes in outputs.items():
            self._done(name, f"output '{name}' has {format_shape(tuple(self._get_output(name).shape))}; behind the "
                             f"real length along axis {', '.join(map(str, axes))} it holds no results")
        if reads:
            what = "rows before the new ones" if position.startswith("position") else "elements that are real"
            self._done(position, f"input '{position}' is new: the number of {what} (int32)")
        notes = list(dict.fromkeys(note for var, note in padding.notes if is_used(var)))
        for note in notes[:_MAX_NOTES]:
            self._done("", note)
        if len(notes) > _MAX_NOTES:
            self._done("", f"and {format_count(len(notes) - _MAX_NOTES, 'op')} more with masks")

    def _get_output(self, name: str) -> Var:
        return next(var for var in self._function.outputs if var.name == name)

    def _declare(self, position: str | None, at_maximum: int, values: Mapping[str, float],
                 outputs: Mapping[str, tuple[int, ...]]) -> None:
        lengths = self._lengths
        shapes = tuple(lengths.get_shapes(each) for each in choose_compared_deficits(lengths.span))
        changes = [InterfaceChange(
            "input", name, name, "reshaped", map=_make_padder(shape, values.get(name, 0.0)),
            unmap_with=_make_input_cutter(name, name in self._masks),
            shapes=shapes if name == next(iter(values)) else ()) for name, shape in lengths.shapes.items()]
        changes += [InterfaceChange("input", name, name, "reshaped", map=np.asarray, unmap_with=_count_one_or_more)
                    for name in sorted(self._masks - {*lengths.shapes}) if self._function.inputs[name].rank <= 1]
        changes += [InterfaceChange("output", name, name, "reshaped", unmap_with=_make_output_cutter(
            tuple(map(int, self._get_output(name).shape)), axes, lengths.find_deficit))
            for name, axes in outputs.items()]
        if position is not None:
            changes.append(InterfaceChange("input", None, position, "added", make=lambda feeds: np.array(
                [at_maximum - lengths.find_deficit(feeds)], np.int32)))
        self._draft.change_interface(self._name, *changes)

    def _done(self, value: str, note: str, changed: bool = True) -> None:
        self._draft.done.append(EditRecord(_OPTION, self._name, value, note, changed, None if not changed else False))


def _make_padder(shape: tuple[int, ...], value: float) -> Callable[[Any], Any]:
    def pad(array: Any) -> Any:
        array = np.asarray(array)
        widths = [(0, size - held) for size, held in zip(shape, array.shape, strict=True)]
        return np.pad(array, widths, constant_values=value)

    return pad


def _make_input_cutter(name: str, is_mask: bool) -> Callable[[Any, Mapping[str, Any]], Any]:
    """Make the inverse of padding for an input; in an integer mask, every second one of consecutive masked keys is set.

    A query that attends to a window, or to all keys, then has at least one unmasked key, and therefore a result.
    """
    def cut(array: Any, feeds: Mapping[str, Any]) -> Any:
        found = np.array(np.asarray(array)[tuple(slice(0, size) for size in np.shape(feeds[name]))])
        if is_mask and found.ndim:
            for place in range(found.shape[-1]):
                hidden = found[..., place - 1] == 0 if place else found.shape[-1] == 1
                found[..., place] = np.where(hidden & (found[..., place] == 0), 1, found[..., place])
        return found

    return cut


def _count_one_or_more(array: Any, feeds: Mapping[str, Any]) -> Any:
    """Raise numbers of keys to 1 at least: a query that attends to no key has no defined result."""
    return np.maximum(array, 1).astype(np.asarray(array).dtype)


def _make_output_cutter(
    shape: tuple[int, ...], axes: tuple[int, ...], find_deficit: Callable[[Mapping[str, Any]], int]
) -> Callable[[Any, Mapping[str, Any]], Any]:
    def cut(array: Any, feeds: Mapping[str, Any]) -> Any:
        deficit = find_deficit(feeds)
        real = tuple(slice(0, size - deficit if axis in axes else size) for axis, size in enumerate(shape))
        return np.asarray(array)[real]

    return cut


def _iterate_padded_outputs(function: Function, samples: LengthSamples) -> Iterable[Var]:
    try:
        yield from (var for var in function.outputs if samples.find_padded_axes(var))
    except Refusal as refusal:
        raise _make_error(_describe_refusal(refusal)) from refusal


def find_position(
    function: Function, samples: LengthSamples, axes: Mapping[tuple[str, int], tuple[int, int]]
) -> tuple[str, int]:
    """Return the name of the new input that states the length, and its value at the maximum.

    If rows are appended, or written at a position that depends on the length, it is the position of new rows. Otherwise
    it is the length itself.
    """
    for op in function.operations:
        if op.op_type == "slice_update":
            for place in samples.get_values(op.begin) or ():
                steps = samples.fit_step(samples.get_values(op.begin) or ())
                if steps is not None and np.count_nonzero(steps) == 1 and steps.max() == 1:
                    return "position", int(place.reshape(-1)[int(np.argmax(steps))])
        if op.op_type == "concat" and len(op.values) == 2 and not types.is_int(op.outputs[0].dtype):
            axis = int(op.axis.val) % op.outputs[0].rank
            if _is_appended(samples, op, axis):
                return "position", int(op.values[0].shape[axis])
    return "length", next(iter(axes.values()))[1]


def _is_appended(samples: LengthSamples, op: Operation, axis: int) -> bool:
    """Return whether a concat appends new rows to the rows of the real length.

    Sizes that depend on the length in another way are not rows; `Padding` rejects them if they are needed.
    """
    try:
        return samples.is_padded(op.values[0], axis) and not samples.is_padded(op.values[1], axis)
    except Refusal:
        return False


def reaches_softmax(start: Var) -> bool:
    """Return whether an input is a mask: it is added before a softmax, or is the mask of an attention op.

    An integer input may first be compared, or be the condition of a select.
    """
    transparent = _TRANSPARENT if types.is_float(start.dtype) else _TRANSPARENT | _CHOOSING
    pending, seen = [start], set()
    while pending:
        var = pending.pop()
        for op in get_consumers(var):
            if op in seen:
                continue
            seen.add(op)
            if op.op_type == "softmax" or (
                    op.op_type == "scaled_dot_product_attention" and op.inputs.get("attn_mask") is var):
                return True
            if op.op_type in transparent and (op.op_type != "gather_nd" or op.x is var):
                pending += op.outputs
    return False


class MaskValues(NamedTuple):
    """The values of an input that is a mask of floats: for keys that are hidden, those that are shown, and padding."""

    hidden: float
    shown: float
    padding: float


def find_mask_values(start: Var) -> MaskValues | None:
    """Return the values of an input that is a mask of floats; None for other inputs.

    A mask that is added to scores hides with a large negative number, one that is subtracted with a positive
    one. One of 0 and 1 that the model scales, such as `(1 - mask) * -1e4`, hides with one of the two, and its padding
    is the number of which as large a negative one is made: padding is hidden more than any key.
    """
    if not types.is_float(start.dtype) or not reaches_softmax(start):
        return None
    scale, offset = _find_mask_scale(start)
    if abs(scale) < _MIN_MASK_SCALE:
        hidden = MASKED if scale > 0 else -MASKED
        return MaskValues(hidden, 0.0, hidden) if _is_added_only(start) else None
    padding = (MASKED - offset) / scale
    return MaskValues(0.0, 1.0, min(padding, 0.0)) if scale > 0 else MaskValues(1.0, 0.0, max(padding, 1.0))


def _is_added_only(start: Var) -> bool:
    """Return whether all that is computed from `start` ends in the scores of a softmax: features do not.

    The rows that allow no key, by a maximum over the keys that is compared with a number, may choose results, too.
    """
    pending, seen = [start], set[Operation]()
    while pending:
        for op in get_consumers(pending.pop()):
            if op in seen or op.op_type in ("scaled_dot_product_attention", "shape", "softmax") or _finds_rows(op):
                continue
            if op.op_type not in _TRANSPARENT:
                return False
            seen.add(op)
            pending += op.outputs
    return True


def _finds_rows(op: Operation) -> bool:
    """Return whether an op finds the rows of a mask that allow any key, by a comparison of their maximum."""
    compared = get_consumers(op.outputs[0]) if op.op_type == "reduce_max" else []
    return bool(compared) and all(each.op_type in ("greater", "greater_equal") and is_const(each.y)
                                  for each in compared)


def _find_mask_scale(start: Var) -> tuple[float, float]:
    """Return (a, b) if `a * mask + b` is what is added before a softmax for a mask `start`; (1, 0) if it is unknown."""
    pending, seen = [(start, 1.0, 0.0)], set[Operation]()
    while pending:
        var, scale, offset = pending.pop()
        for op in get_consumers(var):
            if op.op_type == "softmax":
                return scale, offset
            if op in seen or op.op_type not in _TRANSPARENT:
                continue
            seen.add(op)
            number = next((get_uniform(other) for other in op.inputs.values() if other is not var), None) if (
                op.op_type in ("add", "mul", "sub")) else None
            scaled: tuple[float, float] | None
            if number is None and op.op_type == "sub" and op.y is var:
                scaled = -scale, -offset
            elif number is None:
                scaled = (scale, offset) if op.op_type != "mul" else None
            elif op.op_type == "mul":
                scaled = scale * number, offset * number
            elif op.op_type == "add":
                scaled = scale, offset + number
            else:
                scaled = (scale, offset - number) if op.x is var else (-scale, number - offset)
            pending += [(each, *scaled) for each in op.outputs if scaled is not None]
    return 1.0, 0.0


def spread_scalar_choices(function: Function) -> list[str]:
    """Replace selects between two scalars by arithmetic, which gives equal values for finite numbers.

    In masks that are added to the scores of a softmax, minus infinity becomes a number that hides keys as well.

    For two scalars, coremltools infers a scalar result whatever the shape of the condition, so it infers no values.
    Returns the names of the replaced results.
    """
    done: list[str] = []
    with function, BlockEditor() as editor:
        mb = RewriteBuilder(function, UniqueNames(function))
        for op in list(function.operations):
            if op.op_type != "select" or not op.cond.rank or not types.is_float(op.a.dtype):
                continue
            first, second = (_get_choice(side, op.outputs[0]) for side in (op.a, op.b))
            scalars = not op.a.rank and not op.b.rank or tuple(op.cond.shape) == tuple(op.outputs[0].shape)
            if first is not None and second is not None and scalars:
                with mb.at(op):
                    made = _choose_scalar(mb, op, first, second)
                    mb.adopt_scopes(op.scopes)
                name, op.outputs[0].name = op.outputs[0].name, mb.make_unique_name("scalar")
                made.name = name
                set_stored_type(op.outputs[0], made.sym_type)  # users can only be rebound to values of the same type
                editor.replace(op.outputs[0], made)
                editor.remove_if_unused([op])
                done.append(name)
    return done


def _get_choice(side: Var, result: Var) -> float | None:
    """Return the number that a select chooses; that of a mask is finite, since arithmetic makes NaN of infinities."""
    value = side.val if is_const(side) else None
    if value is not None and np.size(value) and np.all(np.isneginf(value)) and _is_added_only(result):
        return MASKED
    return get_uniform(side)


def _choose_scalar(mb: RewriteBuilder, op: Operation, a: float, b: float) -> Var:
    """Return `a` for elements whose condition is true, `b` for the others."""
    kind = types.nptype_from_builtin(op.a.dtype)
    first, second = kind(a), kind(b)
    chosen = mb.cast(x=op.cond, dtype=types.builtin_to_string(op.a.dtype))
    if first == 0:
        return mb.mul(x=mb.sub(x=kind(1), y=chosen), y=second)
    made = mb.mul(x=chosen, y=first)
    return made if second == 0 else mb.add(x=made, y=mb.mul(x=mb.sub(x=kind(1), y=chosen), y=second))


def _drop_whole_slices(function: Function) -> None:
    """Remove slices that read an entire value, such as slices up to the (now maximal) length."""
    with BlockEditor() as editor:
        for op in list(function.operations):
            if op.op_type != "slice_by_index" or op.outputs[0] in function.outputs:
                continue
            window = get_window(op)
            if window is not None and not window.dropped and not window.find_partial_axes(op.x.shape):
                editor.replace(op.outputs[0], op.x)


def _remove_unread(function: Function) -> None:
    """Remove consts without users."""
    with BlockEditor() as editor:
        unread: list[Operation] = [op for op in function.operations if op.op_type == "const" and not any(
            var.child_ops or var.consuming_blocks for var in op.outputs) and not getattr(op, "synthetic", False)]
        editor.remove_if_unused(unread)


def _describe_refusal(refusal: Refusal) -> str:
    op = refusal.op
    name = op.outputs[0].name if op is not None and op.outputs else ""
    return f"the op '{name}' ({op.op_type if op is not None else 'input'}) cannot be padded: {refusal}"


def _read_lengths(function: Function, sizes: Mapping[str, Sizes]) -> _Lengths:
    """Check the requested sizes against the inputs. Raises InputError if they do not fit."""
    shapes: dict[str, tuple[int, ...]] = {}
    axes: dict[tuple[str, int], tuple[int, int]] = {}
    for name, requested in sizes.items():
        declared = get_sizes(function.inputs[name].sym_type)
        if types.is_state(function.inputs[name].sym_type):
            raise _make_error(f"'{name}' is a state, whose shape is fixed; expected inputs")
        if declared is None or len(declared) != len(requested):
            raise _make_error(f"{len(requested)} sizes for '{name}', which has "
                              f"{'unknown' if declared is None else len(declared)} dimensions")
        ranges = read_ranges(get_feature(function, name), name, declared)
        shapes[name] = tuple(each if isinstance(each, int) else each[1] for each in requested)
        for axis, (held, each, (least, most)) in enumerate(zip(declared, requested, ranges)):
            low, high = (each, each) if isinstance(each, int) and held is not None else (
                (least, each) if isinstance(each, int) else each)
            if (held is not None and (low, high) != (held, held)) or not least <= low <= high <= most:
                raise _make_error(
                    f"'{name}' cannot have {low if low == high else f'{low}..{high}'} elements along axis {axis}; "
                    f"expected {least if least == most else f'{least} to {most}'}")
            if low < high:
                axes[name, axis] = (low, high)
    open_inputs = [name for name, var in function.inputs.items()
                   if name not in sizes and None in (get_sizes(var.sym_type) or ())]
    if open_inputs:
        raise _make_error(f"'{open_inputs[0]}' is flexible as well; expected its sizes, too, or a fixed shape by "
                          f"{format_advised_option('fix_shape', f'{open_inputs[0]}=...')}")
    return _Lengths(shapes, axes)


def read_ranges(feature: Any, name: str, declared: tuple[int | None, ...]) -> list[tuple[int, int]]:
    """Return the smallest and largest size of each axis that the description allows."""
    largest = (1 << 31) - 1
    kind = feature.type.WhichOneof("Type") if feature is not None else "multiArrayType"
    if kind != "multiArrayType":
        raise _make_error(f"'{name}' is not an array; expected arrays")
    array = feature.type.multiArrayType if feature is not None else None
    if array is not None and array.HasField("enumeratedShapes"):
        raise _make_error(f"'{name}' has a list of shapes; expected a range: a function for each of the shapes is made "
                          f"by {format_advised_option('fix_shape')}")
    if array is None or not array.HasField("shapeRange"):
        return [(1, largest) if size is None else (size, size) for size in declared]
    return [(max(1, int(each.lowerBound)), int(each.upperBound) if each.upperBound > 0 else largest)
            for each in array.shapeRange.sizeRanges]


def parse_sizes(requested: Any) -> dict[str, Sizes]:
    """Parse the requested sizes. Raises InputError for anything but names with sizes."""
    if isinstance(requested, str):
        requested = [requested]
    if isinstance(requested, Mapping):
        found = {name: _parse_shape(name, sizes) for name, sizes in requested.items()}
    elif isinstance(requested, Sequence):
        found = {}
        for text in requested:
            name, equals, sizes = str(text).partition("=")
            name = strip_percent(name.strip())
            if not equals or not name:
                raise _make_error(f"found {text!r}; {_format_expected()}")
            if name in found:
                raise _make_error(f"'{name}' is named twice; expected its sizes once")
            found[name] = _parse_shape(name, sizes.split(","))
    else:
        found = {}
    if not found:
        raise _make_error(f"found {requested!r}; {_format_expected()}")
    return found


def _parse_shape(name: Any, sizes: Any) -> Sizes:
    if not isinstance(name, str) or isinstance(sizes, (str, bytes)) or not isinstance(sizes, Iterable):
        raise _make_error(f"found {name!r}: {sizes!r}; {_format_expected()}")
    return tuple(_parse_size(name, each) for each in sizes)


def _parse_size(name: str, size: Any) -> Size:
    low, dots, high = size.partition("..") if isinstance(size, str) else (size, "", size)
    try:
        pair = tuple(int(each) for each in ((low, high) if dots else size if isinstance(size, (tuple, list)) else
                                            (low, low)))
    except (TypeError, ValueError):
        pair = ()
    exact = not isinstance(size, float) or size == int(size)
    if not exact or len(pair) != 2 or not 0 < pair[0] <= pair[1] < 1 << 31:
        raise _make_error(f"'{name}' has the size {size!r}; expected a whole number of 1 or more, or a range such as "
                          "2..64")
    return pair if dots or isinstance(size, (tuple, list)) else pair[0]


def _format_expected() -> str:
    text = "NAME=1,1,1,1024 or NAME=1,1,64,64..1024"
    return f"expected {choose_spelling(text, 'a mapping from an input to its sizes, or texts ' + text)}"


def _make_error(words: str) -> InputError:
    return InputError(f"{format_option_values('pad_shape')}: {words}")
