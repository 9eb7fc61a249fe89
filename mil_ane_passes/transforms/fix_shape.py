"""`--fix-shape`: flexible inputs get a fixed shape, and the types of all other values are inferred and written.

coremltools infers the types of all values again. Ops that only compute shapes become consts with the same names, and
unneeded ops are removed. For several shapes, the function is replaced by several functions that share the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from coremltools.converters.mil.backend.mil.load import should_use_weight_file
from coremltools.converters.mil.mil import Block, Function, Operation, Var, types

from ..ir.block_editor import BlockEditor
from ..ir.builder import RewriteBuilder, UniqueNames
from ..ir.clone import clone_function
from ..ir.compressed_weights import explain_axis_obstacle, insert_unit_axis
from ..ir.constants import make_const
from ..ir.coremltools_internals import set_stored_type
from ..ir.query import (
    describe_constant_sizes,
    get_flat_inputs,
    get_itemsize,
    is_compressed,
    is_const,
    iterate_nested_ops,
    plain_type,
)
from ..ir.shape_inference import ShapeInference, Sizes, get_sizes, set_input_shape
from ..package.interface import describe_feature, get_feature, get_predicted_names, get_specification_version
from ..package.names import rename_var
from ..package.origin import get_file_inputs
from ..passes.interface_change import InterfaceChange
from ..utils.errors import InputError, suggest_nearest
from ..utils.option_spelling import choose_spelling, format_option, format_option_values
from ..utils.text_format import format_count
from .contract import Draft, EditRecord, RoundedConstant, Transform
from .dead_ops import has_effects
from .names import check_identifier, strip_percent

__all__ = ["EXACT_OPS", "FixShape", "FoldSizes", "fix_feature_shape", "format_shape"]


_OPTION = "--fix-shape"
_MIN_VERSION_FUNCTIONS = 9
"The specification version (iOS 18) from which a model may have several functions."
_MAX_NAMES_LISTED = 3
Shape = tuple[int, ...]
_MAX_INLINE_BYTES = 1 << 20
"Largest value in bytes written into the model file, for dtypes that weight files lack: a mask of 1024 x 1024."
_MAX_BLOB_BYTES = 32 << 20
"Largest value in bytes written to a weight file: larger ones would grow the package, and ops compute them quickly."
EXACT_OPS = frozenset((
    "abs", "add", "broadcast_to", "cast", "ceil", "clip", "concat", "cond", "const", "equal", "expand_dims", "fill",
    "fill_like", "floor", "gather", "gather_along_axis", "gather_nd", "identity", "maximum", "minimum", "mul",
    "one_hot", "pad", "real_div", "relu", "reshape", "reverse", "round", "select", "sign", "slice_by_index",
    "slice_by_size", "slice_update", "split", "sqrt", "squeeze", "stack", "sub", "tile", "transpose", "while_loop"))
"Ops that compute the same floats on every machine: they move elements, or round the exact result once."
_ROUNDING_OPS = frozenset(("add", "cast", "mul", "real_div", "sqrt", "sub"))
"The `EXACT_OPS` that round floats."


Evaluate = Callable[[Function, Sequence[Var], str, Mapping[str, Any]], Sequence[Any]]
"""Computes values of a function that depend only on constants and shapes, at a precision of the runtime, from the given
values of constants before they were rounded, by name."""


class FixShape(Transform):
    """Fixes the shapes of inputs.

    `given` is in the format of `parse_variants`; `function` names a function of the source. `evaluate` is called with
    a function, values, a precision and no values of constants; it computes the exact values of constants that
    coremltools rounds, for the comparison with the source.
    """

    def __init__(self, given: Any, function: str | None = None, evaluate: Evaluate | None = None) -> None:
        self._variants = parse_variants(given)
        self._function, self._evaluate = function, evaluate

    def apply(self, draft: Draft) -> list[Draft]:
        """Fix the shapes (see `Transform.apply`).

        The functions made of one replace it; the first becomes the default if it was.
        """
        functions = self._select_functions(draft)
        several = len(self._variants) > 1 or self._variants[0].name is not None
        if several and len(functions) > 1:
            raise make_request_error(
                f"several functions have these inputs ({_format_names(list(functions))}); "
                f"expected {format_option('function')} with the one from which the new functions are made"
            )
        for name, function in functions.items():
            if several and not (len(self._variants) == 1 and self._variants[0].name == name):
                self._make_several(draft, name, function)
            else:
                self._fix_one(draft, name, function)
        return [draft]

    def _select_functions(self, draft: Draft) -> dict[str, Function]:
        """Return the functions that have all the named inputs."""
        functions = draft.select_functions(self._function)
        for name in dict.fromkeys(name for variant in self._variants for name in variant.shapes):
            known = {each for function in functions.values() for each in function.inputs}
            functions = {key: each for key, each in functions.items() if name in each.inputs}
            if not functions:
                beside = " beside the others" if name in known else ""
                raise make_request_error(
                    f"no input or state '{name}'{beside}; the model has {_format_names(sorted(known))}"
                    f"{suggest_nearest(name, known - {name})}"
                )
        return functions

    def _fix_one(self, draft: Draft, name: str, function: Function) -> None:
        shapes = _select_shapes_to_fix(function, self._variants[0])
        if shapes:
            _fix_function(draft, name, function, shapes, self._evaluate)
            return
        note = f"fixed already: {_format_shapes(self._variants[0].shapes)}"
        draft.done.append(EditRecord(_OPTION, name, "", note, changed=False))

    def _make_several(self, draft: Draft, source: str, function: Function) -> None:
        _check_several_functions(source, function)
        program = draft.program
        names = name_variants(self._variants, source, program.functions.keys() - {source})
        made = {name: clone_function(function) for name in names}
        was_default = program.default_function_name == source
        draft.replace_function(source, made)
        for variant, (name, each) in zip(self._variants, made.items(), strict=True):
            shapes = _select_shapes_to_fix(each, variant)
            if shapes:
                _fix_function(draft, name, each, shapes, self._evaluate)
        if was_default:
            program.default_function_name = names[0]


@dataclass(frozen=True)
class FoldSizes(Transform):
    """Replaces values that depend only on sizes by constants: shapes, indices, masks and tables of positions.

    Values that depend on floats which machines round differently, such as positions on a logarithmic scale, are not
    folded to coremltools' values. If `evaluate` is given, they are folded to its results: it is called with a function,
    values, "float64" and the values of constants that were rounded before, and returns arrays. Functions with flexible
    inputs are not changed.

    Compressed weights stay compressed, and so do their rows at consecutive positions, such as those of a table of
    positions. Rows at other positions are stored unpacked, and the actions report this.
    """

    evaluate: Evaluate | None = None
    function: str | None = None

    def apply(self, draft: Draft) -> list[Draft]:
        """Fold in place."""
        for name, function in draft.select_functions(self.function).items():
            flexible = next((each for each, var in function.inputs.items() if _is_flexible(var)), None)
            if flexible is not None:
                self._record(draft, name, "", f"nothing to fold: the input '{flexible}' has a flexible shape",
                             changed=False)
                continue
            consts = [var for op in function.operations if op.op_type == "const" for var in op.outputs]
            ShapeInference(function, [*function.inputs.values(), *consts])
            # Angles of positions that are rounded before the sine is computed would be a large error of the table.
            exact_ops = EXACT_OPS if self.evaluate is None else EXACT_OPS - _ROUNDING_OPS
            plan = plan_folding(function, get_specification_version(function), of_consts=True, exact_ops=exact_ops)
            folded, dropped = fold_constants(function, plan)
            kept = _cut_compressed_rows(function)
            unpacked: dict[str, int] = {}
            if self.evaluate is not None:
                folded += _fold_evaluated(function, self.evaluate, unpacked, draft.rounded.setdefault(name, {}))
            if folded:
                self._record(draft, name, "", f"folded to constants: {_format_op_count(folded)}; removed: "
                             f"{_format_op_count(dropped)}", exact=self.evaluate is None)
            for table in kept:
                self._record(draft, name, table, f"rows of the compressed '{table}' stay compressed")
            for table, nbytes in unpacked.items():
                self._record(draft, name, table, f"rows of the compressed '{table}' are stored unpacked, {nbytes:,} "
                             "bytes: they are read at constant positions that are not consecutive")
            if not folded and not kept:
                self._record(draft, name, "", "nothing to fold: no value depends only on sizes", changed=False)
        return [draft]

    def _record(self, draft: Draft, function: str, value: str, note: str, *, exact: bool = True, changed: bool = True
                ) -> None:
        draft.done.append(EditRecord("--fold-sizes", function, value, note, changed, exact))


def _cut_compressed_rows(function: Function) -> list[str]:
    """Replace lookups of compressed rows at consecutive constant positions by slices; return the tables' names."""
    found = []
    with function, BlockEditor() as editor:
        mb = RewriteBuilder(function, UniqueNames(function))
        for op in list(function.operations):
            first = _find_first_row(op)
            if first is None:
                continue
            old, rows = op.outputs[0], op.x
            leading, count = op.indices.rank - 1, int(op.indices.shape[-1])
            for _ in range(leading):
                rows = insert_unit_axis(mb, rows, 0)
            if count < int(op.x.shape[0]):
                begin, end = [0] * rows.rank, [int(size) for size in rows.shape]
                begin[leading], end[leading] = first, first + count
                with mb.at(op):
                    rows = mb.slice_by_index(x=rows, begin=begin, end=end)
                    mb.adopt_scopes(op.scopes)
            found.append(op.x.name)
            editor.replace(old, rows)
            editor.remove_if_unused([op])
    return found


def _find_first_row(op: Operation) -> int | None:
    """Return the first row that an op looks up in a compressed table if the rows are consecutive; None otherwise."""
    if op.op_type != "gather" or not is_compressed(op.x) or not is_const(op.indices) or op.indices.val is None or (
            int(op.axis.val) % op.x.rank) or op.outputs[0] in op.enclosing_block.outputs or (
            explain_axis_obstacle(op.x) is not None):
        return None
    batch = op.inputs.get("batch_dims")
    places = np.asarray(op.indices.val)
    if batch is not None and int(batch.val) or places.ndim == 0 or places.size != places.shape[-1]:
        return None
    flat = places.reshape(-1)
    in_order = flat.size > 0 and flat[0] >= 0 and np.array_equal(flat, flat[0] + np.arange(flat.size))
    return int(flat[0]) if in_order and flat[-1] < int(op.x.shape[0]) else None


def _find_compressed(function: Function) -> set[Var]:
    """Return compressed weights, and values of their full size that are computed from them (not selected rows)."""
    found: set[Var] = set()
    for op in function.operations:
        moved = not op.op_type.startswith("gather") and any(var in found for var in get_flat_inputs(op))
        if op.op_type.startswith("constexpr_") or moved:
            found.update(op.outputs)
    return found


def _list_compressed_sources(var: Var) -> list[str]:
    """Return the names of the compressed weights on which a value depends."""
    pending, seen, found = [var], {var}, []
    while pending:
        each = pending.pop()
        if is_compressed(each):
            found.append(each.name)
        elif each.op is not None:
            more = [read for read in get_flat_inputs(each.op) if read not in seen]
            seen.update(more)
            pending += more
    return found


def _fold_evaluated(
    function: Function, evaluate: Evaluate, unpacked: dict[str, int], rounded: dict[str, RoundedConstant]
) -> list[str]:
    """Replace values that depend only on consts, and are read by other ops, by constants; return their ops' types.

    The bytes of unpacked rows of compressed weights are added to `unpacked`, by the names of the weights, and the exact
    values of floats that their dtype rounds to `rounded`.
    """
    moving = _find_dependent_vars(function, lambda op: False, *function.inputs.values())
    computed = [op for op in function.operations if op.op_type != "const" and not op.op_type.startswith("constexpr_")
                and not op.blocks and not has_effects(plain_type(op)) and not _has_state(op)]
    read = {var for op in function.operations if any(each in moving for each in op.outputs)
            for now in get_file_inputs(op).values() for var in now}
    compressed = _find_compressed(function)
    values = [var for op in computed for var in op.outputs if var in read and var not in moving and (
        var not in compressed and _count_bytes(var) <= _MAX_BLOB_BYTES)]
    if not values:
        return []
    for var in values:
        for name in _list_compressed_sources(var):
            unpacked[name] = unpacked.get(name, 0) + _count_bytes(var)
    arrays = evaluate(function, values, "float64", {name: each.exact for name, each in rounded.items()})
    folded: list[Operation] = []
    with function, BlockEditor() as editor:
        for var, array in zip(values, arrays, strict=True):
            made = np.asarray(array).astype(types.nptype_from_builtin(var.dtype))
            # coremltools types a select of two numbers as a number, whatever the shape of its condition.
            is_declared = made.size == np.prod([1, *var.shape])
            if not is_declared and var.shape:
                continue  # its users are declared for other sizes
            folded.append(var.op)
            made = made.reshape(tuple(var.shape)) if is_declared else made
            if types.is_float(var.dtype) and not np.array_equal(made.reshape(-1), np.ravel(array), equal_nan=True):
                rounded[var.name] = RoundedConstant(np.asarray(array).reshape(made.shape), 0.0)
            const = make_const(made if types.is_tensor(var.sym_type) or not is_declared else made[()], var.dtype,
                               var.name, var.op)
            rename_var(const.op, const, var.name)
            if not is_declared:
                set_stored_type(var, const.sym_type)  # users can only be rebound to values of the same type
            editor.replace(var, const)
        editor.remove_if_unused(folded)
    return [op.op_type for op in folded]


def _count_bytes(var: Var) -> int:
    sizes = get_sizes(var.sym_type)
    if sizes is None or None in sizes or types.is_sub_byte(var.dtype) or var.dtype == types.str:
        return _MAX_BLOB_BYTES + 1
    return int(np.prod([1, *(size or 0 for size in sizes)])) * get_itemsize(var)


def _check_several_functions(name: str, function: Function) -> None:
    """Raise InputError if the model cannot have several functions, or if this function cannot be one of several."""
    version = get_specification_version(function)
    if version < _MIN_VERSION_FUNCTIONS:
        raise make_request_error(
            f"several functions, or one with a name of its own, need a model for iOS 18 or later "
            f"(specification version {_MIN_VERSION_FUNCTIONS}; this one has {version}); convert the source "
            f"model with "
            "minimum_deployment_target=ct.target.iOS18, or make a package for each shape"
        )
    if get_predicted_names(function):
        raise make_request_error(f"'{name}' is a classifier, which coremltools does not support in a model with "
                                 "several functions; make a package for each shape")


def _select_shapes_to_fix(function: Function, variant: Variant) -> dict[str, Shape]:
    """Return the shapes of a variant that differ from the current ones. Raises InputError for an impossible shape."""
    return {name: shape for name, shape in variant.shapes.items()
            if check_shape(name, shape, get_sizes(function.inputs[name].sym_type), get_feature(function, name))}


def _fix_function(
    draft: Draft, name: str, function: Function, shapes: dict[str, Shape], evaluate: Evaluate | None
) -> None:
    """Fix inputs of `function`, infer all other values, and fold the values that are now constant."""
    inferred = ShapeInference(function, [set_input_shape(function, each, shape) for each, shape in shapes.items()])
    _check_inferred(inferred, shapes)
    for each in shapes:
        feature = get_feature(function, each)
        if feature is not None:
            describe_feature(function, fix_feature_shape(feature, shapes))
    plan = plan_folding(function, get_specification_version(function))
    if evaluate is not None:
        draft.rounded.setdefault(name, {}).update(_evaluate_rounded(function, plan, evaluate))
    folded, dropped = fold_constants(function, plan)
    folded += _fold_choices(function)
    function.sizes_inferred = True
    draft.change_interface(name, *(
        InterfaceChange("state" if types.is_state(function.inputs[each].sym_type) else "input", each, each, "reshaped",
                        shape=shape) for each, shape in shapes.items()))
    done = partial(_record, draft, name)
    for each, shape in shapes.items():
        done(each, f"'{each}' fixed to {format_shape(shape)}")
    _record_changes(done, function, inferred, plan, folded, dropped)


def _fold_choices(function: Function) -> list[str]:
    """Replace selects of two numbers by a constant condition by constants; return their types.

    coremltools types such a select as a number, whatever the shape of its condition, and cannot read it then.
    """
    found: list[str] = []
    with function, BlockEditor() as editor:
        for op in [op for op in function.operations if op.op_type == "select"]:
            known = all(is_const(each) and each.val is not None for each in (op.cond, op.a, op.b))
            if not known or op.a.rank or op.b.rank or not op.cond.rank or op.outputs[0] in function.outputs or (
                    op.cond.val.size * get_itemsize(op.outputs[0]) > _MAX_BLOB_BYTES):
                continue
            old = op.outputs[0]
            const = make_const(np.where(op.cond.val, op.a.val, op.b.val).astype(
                types.nptype_from_builtin(old.dtype)), old.dtype, old.name, op)
            rename_var(const.op, const, old.name)
            set_stored_type(old, const.sym_type)  # users can only be rebound to values of the same type
            editor.replace(old, const)
            editor.remove_if_unused([op])
            found.append("select")
    return found


def _evaluate_rounded(function: Function, plan: FoldPlan, evaluate: Evaluate) -> dict[str, RoundedConstant]:
    """Compute the exact values of floats that become constants, outside of nested blocks.

    coremltools computes them in the declared dtypes, as a device does. Each rounding may be different there, so that
    twice the difference between that arithmetic and the exact value is allowed.
    """
    values = [var for op in plan.values for var in op.outputs
              if _is_float(var) and op.enclosing_block is function]
    if not values:
        return {}
    exact, declared = (evaluate(function, values, precision, {}) for precision in ("float64", "float16"))
    return {var.name: RoundedConstant(np.asarray(best), 2 * _find_largest_difference(best, near))
            for var, best, near in zip(values, exact, declared, strict=True)
            if not np.array_equal(np.asarray(var.val, np.float64), best, equal_nan=True)}


def _find_largest_difference(one: Any, other: Any) -> float:
    """Return the largest difference between elements that are finite in both."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(np.asarray(one, np.float64) - np.asarray(other, np.float64))
    return float(apart[np.isfinite(apart)].max(initial=0.0))


def _check_inferred(inferred: ShapeInference, shapes: dict[str, Shape]) -> None:
    """Raise InputError if an op cannot have inputs of these shapes."""
    for op, why in inferred.rejected.items():
        if why:
            raise make_request_error(f"with {_format_shapes(shapes)} the op '{op.outputs[0].name}' ({op.op_type}) is "
                                     f"impossible: {why.rstrip('.')}"
                                     f"{describe_constant_sizes(op) or '; expected consistent shapes'}")


def _record(
    draft: Draft, function: str, value: str, note: str, exact: bool | None = True, changed: bool = True
) -> None:
    draft.done.append(EditRecord(_OPTION, function, value, note, changed=changed, exact=exact))


def _record_changes(
    done: Callable[..., None], function: Function, inferred: ShapeInference, plan: FoldPlan, folded: Sequence[str],
    dropped: Sequence[str],
) -> None:
    current = set(_iterate_vars(function))
    sizes = {var: (get_sizes(then), get_sizes(var.sym_type)) for var, then in inferred.declared.items()
             if var in current}
    sized = sum(then != now for then, now in sizes.values())
    if folded:
        done("", f"folded to constants: {_format_op_count(folded)}; removed: {_format_op_count(dropped)}; "
                 f"{sized} values got their sizes")
    else:
        done("", f"{sized} values got their sizes")
    if plan.rounded:
        done("", f"{len(plan.rounded)} constants hold floats as coremltools computes them here; a device may round "
             "them otherwise in the last bit", exact=False)
    flexible = [name for name, var in function.inputs.items() if _is_flexible(var)]
    if flexible:
        done("", f"still flexible: {_format_names(flexible)}, for which no shape was given", changed=False)
    names = list(dict.fromkeys(var.name for var in _iterate_vars(function) if _is_flexible(var)))
    if names:
        done("", f"{len(names)} values keep a flexible shape, which depends on data, on a flexible input or on "
             f"an op that coremltools cannot follow: {_format_names(names)}", changed=False)
    contradicted = [op.outputs[0].name for op in inferred.rejected if op.outputs]
    if contradicted:
        done("", f"coremltools contradicts the file on {len(contradicted)} values, which keep their declared types: "
             f"{_format_names(contradicted)}", changed=False)


def _iterate_vars(function: Function) -> Iterable[Var]:
    """Yield the values computed by the ops of a function, and the inputs of nested blocks."""
    ops: list[Operation] = [op for op in iterate_nested_ops(function) if not getattr(op, "synthetic", False)]
    for op in ops:
        yield from op.outputs
        yield from (var for block in op.blocks for var in block.inputs)


def _is_flexible(var: Var) -> bool:
    sizes = get_sizes(var.sym_type)
    return types.is_tensor(var.sym_type) and (sizes is None or None in sizes)


def _format_op_count(kinds: Sequence[str]) -> str:
    return f"{format_count(len(kinds), 'op')}"


def _format_names(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_NAMES_LISTED]) + (
        f" and {len(names) - _MAX_NAMES_LISTED} more" if len(names) > _MAX_NAMES_LISTED else ""
    )


def _format_shapes(shapes: dict[str, Shape]) -> str:
    return ", ".join(f"{name} = {format_shape(shape)}" for name, shape in shapes.items())


def check_shape(name: str, shape: Shape, sizes: Sizes | None, feature: Any) -> bool:
    """Return whether the input is flexible, so that its shape must be fixed.

    `sizes` are the sizes that the program declares for the input; `feature` is its FeatureDescription or None. Raises
    InputError if the input cannot have the shape.
    """
    if sizes is None:
        raise make_request_error(f"'{name}' is not an array of known rank; its shape cannot be fixed")
    if feature is not None and not sizes and shape == (1,):
        return False  # Core ML presents a scalar as an array of one element
    if len(shape) != len(sizes):
        raise make_request_error(f"{format_shape(shape)} has {len(shape)} dimensions; '{name}' has {len(sizes)}: "
                                 f"{_describe_allowed(sizes, feature)}")
    allowed = _read_flexibility(feature, sizes)
    fits = all(size is None or size == wanted for size, wanted in zip(sizes, shape))
    if None not in sizes and allowed is None:
        if fits:
            return False
        raise make_request_error(
            f"the shape of '{name}' is fixed to {format_shape(sizes)}; expected this shape, or an input that is "
            "flexible; convert the source model again for another shape"
        )
    if not fits or (allowed is not None and not allowed.holds(shape)):
        raise make_request_error(f"{format_shape(shape)} is not among the shapes of '{name}'; expected one of "
                                 f"{_describe_allowed(sizes, feature)}; convert the source model again for others")
    return True


class _EnumeratedShapes:
    """The enumerated shapes of an input."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.shapes = list(dict.fromkeys(shapes))

    def holds(self, shape: Shape) -> bool:
        return shape in self.shapes

    def __str__(self) -> str:
        more = f" and {len(self.shapes) - 8} more" if len(self.shapes) > 8 else ""
        return ", ".join(map(format_shape, self.shapes[:8])) + more


class _ShapeRange:
    """A range for each dimension; a negative upper bound means unbounded."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self.ranges = ranges

    def holds(self, shape: Shape) -> bool:
        return len(shape) == len(self.ranges) and all(
            low <= size and (high < 0 or size <= high) for size, (low, high) in zip(shape, self.ranges))

    def __str__(self) -> str:
        each = [str(low) if low == high else f"{low}..{high if high >= 0 else ''}" for low, high in self.ranges]
        return f"({', '.join(each)})"


def _describe_allowed(sizes: Sizes, feature: Any) -> str:
    return str(_read_flexibility(feature, sizes) or format_shape(sizes))


def _read_flexibility(feature: Any, sizes: Sizes) -> _EnumeratedShapes | _ShapeRange | None:
    """Return the shapes that the description allows; None if it adds nothing to the program's declaration."""
    kind = feature.type.WhichOneof("Type") if feature is not None else None
    if kind == "multiArrayType":
        return _read_array_flexibility(feature.type.multiArrayType, sizes)
    if kind == "stateType":
        return _read_array_flexibility(feature.type.stateType.arrayType, sizes)
    if kind == "imageType" and len(sizes) >= 2:
        return _read_image_flexibility(feature.type.imageType, sizes)
    return None


def _read_array_flexibility(array: Any, sizes: Sizes) -> _EnumeratedShapes | _ShapeRange | None:
    kind = array.WhichOneof("ShapeFlexibility")
    if kind == "enumeratedShapes":
        return _EnumeratedShapes([tuple(map(int, one.shape)) for one in array.enumeratedShapes.shapes])
    if kind == "shapeRange":
        return _ShapeRange([_read_bounds(one) for one in array.shapeRange.sizeRanges])
    return _EnumeratedShapes([tuple(map(int, array.shape))]) if array.shape and None in sizes else None


def _read_image_flexibility(image: Any, sizes: Sizes) -> _EnumeratedShapes | _ShapeRange | None:
    kind = image.WhichOneof("SizeFlexibility")
    before = tuple(size or 1 for size in sizes[:-2])
    if kind == "enumeratedSizes":
        return _EnumeratedShapes([(*before, int(one.height), int(one.width)) for one in image.enumeratedSizes.sizes])
    if kind == "imageSizeRange":
        sides = (_read_bounds(image.imageSizeRange.heightRange), _read_bounds(image.imageSizeRange.widthRange))
        return _ShapeRange([*((size, size) for size in before), *sides])
    return _EnumeratedShapes([(*before, int(image.height), int(image.width))]) if None in sizes else None


def _read_bounds(one: Any) -> tuple[int, int]:
    return int(one.lowerBound), int(one.upperBound)


def fix_feature_shape(feature: Any, shapes: Mapping[str, Sequence[int]]) -> Any:
    """Return a FeatureDescription fixed to its shape in `shapes`; the same object if nothing changes."""
    shape = shapes.get(feature.name)
    kind = feature.type.WhichOneof("Type")
    if not shape or kind not in ("multiArrayType", "stateType", "imageType"):
        return feature
    made = type(feature)()
    made.CopyFrom(feature)
    if kind == "imageType":
        made.type.imageType.height, made.type.imageType.width = shape[-2:]
        made.type.imageType.ClearField("enumeratedSizes")
        made.type.imageType.ClearField("imageSizeRange")
    else:
        array = made.type.multiArrayType if kind == "multiArrayType" else made.type.stateType.arrayType
        array.shape[:] = list(shape)
        array.ClearField("enumeratedShapes")
        array.ClearField("shapeRange")
    return feature if made == feature else made


def make_request_error(words: str) -> InputError:
    """Make the error for a request that cannot be fulfilled."""
    return InputError(f"{format_option_values('fix_shape')}: {words}")


@dataclass
class Variant:
    """One function to make: its name, None if the user gave none, and the shapes of inputs by name."""

    name: str | None = None
    shapes: dict[str, Shape] = field(default_factory=dict)


def parse_variants(given: Any) -> list[Variant]:
    """Parse the requested functions, in order.

    `given` is a list of texts in the command's format, a mapping from input to shape, a list of such mappings (one
    function for each), or a mapping from a function's name to such a mapping. Raises InputError for anything else, and
    if it is ambiguous which inputs of a function are fixed.
    """
    if isinstance(given, str):
        given = [given]
    if isinstance(given, Mapping):
        inner = [value for value in given.values() if isinstance(value, Mapping)]
        if not inner:
            return [Variant(None, _parse_shapes(given))]
        return [Variant(_check_function_name(name), _parse_shapes(shapes)) for name, shapes in given.items()]
    if not isinstance(given, Sequence) or not given:
        raise make_request_error(f"found {given!r}; {_format_expected()}")
    if all(isinstance(each, Mapping) for each in given):
        return [Variant(None, _parse_shapes(each)) for each in given]
    return _group_variants([_parse_text(text) for text in given])


def _group_variants(parsed: Sequence[tuple[str | None, str, Shape]]) -> list[Variant]:
    """Group shapes by function: a repeated input, or another function's name, starts a new function."""
    if any(name is None for name, _, _ in parsed) and any(name is not None for name, _, _ in parsed):
        raise make_request_error("some shapes are given with a function's name and some without; "
                                 "expected all of them as FUNCTION:NAME=SHAPE, or none")
    found: list[Variant] = []
    for function, name, shape in parsed:
        if function is not None:
            variant = next((each for each in found if each.name == function), None)
            if variant is not None and name in variant.shapes:
                raise make_request_error(f"input '{name}' of function '{function}' is given twice; expected one "
                                         "shape; give the other function a name of its own")
        else:
            variant = found[-1] if found and name not in found[-1].shapes else None
        if variant is None:
            variant = Variant(function)
            found.append(variant)
        variant.shapes[name] = shape
    _check_same_inputs(found)
    return found


def _check_same_inputs(variants: Sequence[Variant]) -> None:
    """Check that functions without names fix the same inputs: otherwise a typing error would leave an input flexible.
    """
    first = variants[0]
    for other in variants[1:]:
        lacking = sorted(first.shapes.keys() ^ other.shapes.keys())
        if first.name is None and lacking:
            raise make_request_error(
                f"input '{lacking[0]}' has a shape for some of the {len(variants)} functions "
                "requested and none for others; expected one for each, or FUNCTION:NAME=SHAPE for all, "
                "which may leave inputs flexible"
            )


def _parse_text(text: Any) -> tuple[str | None, str, Shape]:
    if not isinstance(text, str) or "=" not in text:
        raise make_request_error(f"found {text!r}; {_format_expected()}")
    who, _, sizes = text.rpartition("=")
    function, colon, name = who.rpartition(":")
    if not name.strip():
        raise make_request_error(f"'{text}' names no input; {_format_expected()}")
    name = strip_percent(name.strip())
    return (_check_function_name(function) if colon else None), name, _parse_shape(name, sizes.split(","))


def _format_expected() -> str:
    texts = "NAME=1,3,224,224 or FUNCTION:NAME=1,3,224,224"
    return f"expected {choose_spelling(texts, 'a mapping from an input to its shape, or texts ' + texts)}"


def _check_function_name(name: Any) -> str:
    text = name.strip() if isinstance(name, str) else repr(name)
    check_identifier(text, f"{format_option_values('fix_shape')}: function")
    return text


def _parse_shapes(given: Any) -> dict[str, Shape]:
    if not isinstance(given, Mapping) or not given:
        raise make_request_error(f"found {given!r}; expected a mapping from an input's name to its shape")
    found = {}
    for name, sizes in given.items():
        if not isinstance(name, str) or isinstance(sizes, (str, bytes)) or not hasattr(sizes, "__iter__"):
            raise make_request_error(f"found {name!r}: {sizes!r}; expected a name and a shape as (1, 3, 8, 8)")
        found[name] = _parse_shape(name, list(sizes))
    return found


def _parse_shape(name: str, sizes: Sequence[Any]) -> Shape:
    try:
        shape = tuple(int(size) for size in sizes)
        whole = all(isinstance(size, str) or size == number for size, number in zip(sizes, shape, strict=True))
    except (TypeError, ValueError):
        shape, whole = (), False
    if not whole or not shape or any(not 0 < size < 1 << 31 for size in shape):
        raise make_request_error(f"the shape of '{name}' is {','.join(map(str, sizes)) or 'empty'}; expected whole "
                                 "numbers of 1 or more, such as 1,3,224,224")
    return shape


def name_variants(variants: Sequence[Variant], source: str, taken: set[str]) -> list[str]:
    """Return a name for each function derived from `source`: the user's name, or one that contains the shapes.

    Raises InputError if two functions get the same name, or the name of another function (`taken`).
    """
    if len(variants) == 1:
        names = [variants[0].name or source]
    else:
        differing = [name for name in variants[0].shapes
                     if len({variant.shapes.get(name) for variant in variants}) > 1]
        names = [variant.name or "_".join([source, *("x".join(map(str, variant.shapes[name])) for name in differing)])
                 for variant in variants]
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise make_request_error(f"two functions of the same shapes would be called '{twice}'; expected shapes "
                                 "that differ")
    held = next((name for name in names if name in taken), None)
    if held is not None:
        raise make_request_error(f"the model has another function '{held}'; expected a free name: give one as "
                                 "FUNCTION:NAME=SHAPE")
    return names


def format_shape(shape: Sequence[int | None]) -> str:
    """Format a shape; `?` for flexible sizes."""
    return f"({', '.join('?' if size is None else str(size) for size in shape)})"


@dataclass
class FoldPlan:
    """The plan for the ops of a function: `values` become consts, `kept` ops stay, the others in `known` are removed.

    `rounded` are the values for which another machine may compute other bits.
    """

    values: dict[Operation, list[Var]] = field(default_factory=dict)
    kept: set[Operation] = field(default_factory=set)
    known: set[Operation] = field(default_factory=set)
    rounded: set[Var] = field(default_factory=set)


def plan_folding(
    function: Function, version: int, of_consts: bool = False, exact_ops: frozenset[str] = EXACT_OPS
) -> FoldPlan:
    """Plan the folding of ops of `function` whose values are known.

    These are ops that depend on inputs, and with `of_consts` also ops that depend only on consts, if no float of these
    is made by another op than `exact_ops`.

    An op stays if it was already unneeded, has side effects, or computes an output of the function. Compressed weights
    stay compressed.
    """
    before = _classify_ops(function, lambda var: False, set())
    inexact = _find_dependent_vars(
        function, lambda op: op.op_type not in exact_ops and any(map(_is_float, op.outputs))
    )
    moving, outputs = _find_dependent_vars(function, lambda op: False, *function.inputs.values()), set(function.outputs)

    def is_value(var: Var) -> bool:
        computed = var in moving or of_consts and var.op is not None and var.op.op_type != "const" and (
            not var.op.op_type.startswith("constexpr_"))
        return computed and var not in outputs and not (of_consts and var in inexact) and _can_be_written(var, version)

    known = _collect_file_ops(function)
    fates = _classify_ops(function, is_value, known - before.kept)
    fates.known = known
    fates.rounded = {var for values in fates.values.values() for var in values if var in inexact}
    return fates


def fold_constants(function: Function, plan: FoldPlan) -> tuple[list[str], list[str]]:
    """Apply a plan: values become consts with the same names, and unneeded ops are removed.

    Returns the types of the ops that became consts, and the types of the removed ops.
    """
    folded, dropped = [op.op_type for op in plan.values], []
    with BlockEditor() as editor:
        for op, values in plan.values.items():
            with op.enclosing_block:
                for var in values:
                    editor.replace(var, _make_const_of(var, op))
        for op in _list_unneeded_ops(function, plan):
            if op.enclosing_block is None:
                continue  # inside an op that was removed
            if op.op_type != "const" and op not in plan.values:
                dropped.append(op.op_type)
            editor.remove([op])
    return folded, dropped


def _list_unneeded_ops(block: Block, plan: FoldPlan) -> list[Operation]:
    """List the ops that a plan does not keep, users first, including those inside kept ops."""
    found = []
    for op in reversed(list(block.operations)):
        if op in plan.kept:
            for inner in op.blocks:
                found += _list_unneeded_ops(inner, plan)
        elif op in plan.known and not getattr(op, "synthetic", False):
            found.append(op)
    return found


def _make_const_of(var: Var, before: Operation) -> Var:
    """Make a const with the value that coremltools inferred for `var`, and its name."""
    # coremltools' `select` holds a scalar as an array without dimensions, which its exporter rejects.
    value = np.asarray(var.val) if types.is_tensor(var.sym_type) else np.asarray(var.val)[()]
    const = make_const(value, var.dtype, var.name, before)
    rename_var(const.op, const, var.name)
    return const


def _collect_file_ops(block: Block) -> set[Operation]:
    return {op for op in iterate_nested_ops(block) if not getattr(op, "synthetic", False)}


def _classify_ops(function: Function, is_value: Callable[[Var], bool], always: set[Operation]) -> FoldPlan:
    fates, needed = FoldPlan(), set(function.outputs)

    def visit(block: Block) -> None:
        for op in reversed(list(block.operations)):
            wanted = [var for var in op.outputs if var in needed]
            if wanted and op not in always and all(map(is_value, wanted)):
                fates.values[op] = wanted
            elif wanted or op in always or has_effects(plain_type(op)) or _has_state(op):
                keep(op)

    def keep(op: Operation) -> None:
        fates.kept.add(op)
        for inner in op.blocks:
            needed.update(inner.outputs)
            visit(inner)
        for now in get_file_inputs(op).values():
            needed.update(now)

    visit(function)
    return fates


def _has_state(op: Operation) -> bool:
    return any(types.is_state(var.sym_type) for now in get_file_inputs(op).values() for var in now)


def _find_dependent_vars(function: Function, begins: Callable[[Operation], bool], *given: Var) -> set[Var]:
    """Return the values that depend on `given`, in value or in shape, or on an op for which `begins` is true."""
    found: set[Var] = set(given)

    def visit(block: Block) -> bool:
        any_found = False
        for op in block.operations:
            inner = begins(op) and any(var.val is not None for var in op.outputs)
            for nested in op.blocks:
                if given:
                    found.update(nested.inputs)
                inner |= visit(nested)
            if inner or any(var in found for now in get_file_inputs(op).values() for var in now):
                found.update(op.outputs)
                any_found = True
        return any_found

    visit(function)
    return found


def _is_float(var: Var) -> bool:
    return bool(types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type)) and bool(types.is_float(var.dtype))


def _can_be_written(var: Var, version: int) -> bool:
    """Return whether coremltools inferred a value of `var` that fits its type and is small enough to write."""
    value: Any = var.val if types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type) else None
    if value is None or types.is_sub_byte(var.dtype) or var.dtype == types.str:
        return False
    array = np.asarray(value)
    if array.shape != tuple(var.shape) or array.dtype != np.dtype(types.nptype_from_builtin(var.dtype)):
        return False
    return bool(array.nbytes <= (_MAX_BLOB_BYTES if should_use_weight_file(array, version) else _MAX_INLINE_BYTES))
