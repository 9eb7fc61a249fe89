"""Values of a function at several real lengths, from which the dependence of each value on the length is determined.

Types and values that depend on the shapes of inputs are inferred for each of a few lengths. A size that becomes one
smaller if the inputs are one element shorter is a padded axis. An integer that does so is a position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Function, Operation, Var, types

from ..ir.clone import clone_function
from ..ir.query import describe_constant_sizes, get_flat_inputs, is_const, is_opaque
from ..ir.shape_inference import ShapeInference, get_sizes, set_input_shape
from ..utils.errors import InputError
from .dead_ops import get_read_vars

__all__ = ["LengthSamples", "Refusal", "choose_compared_deficits", "sample_deficits"]

_MAX_SAMPLES = 7
_OPS_BY_ELEMENT = frozenset({"add", "cast", "equal", "expand_dims", "greater", "greater_equal", "identity", "less",
                             "less_equal", "logical_and", "logical_not", "logical_or", "maximum", "minimum", "mul",
                             "not_equal", "real_div", "select", "squeeze", "sub", "transpose"})
"Ops that compute each element from those at the same places of their operands, apart from axes of size 1."


class Refusal(Exception):
    """The reason why an op cannot be computed on padded values."""

    def __init__(self, op: Operation, reason: str) -> None:
        super().__init__(reason)
        self.op = op


def sample_deficits(span: int) -> tuple[int, ...]:
    """Return for each sample the number of elements by which the inputs are shorter than the maximum.

    The samples are both ends, the lengths next to them, and the middle.
    """
    found = (0, 1, 2, span // 2, span - 2, span - 1, span)
    return tuple(sorted({each for each in found if 0 <= each <= span}))[:_MAX_SAMPLES]


def choose_compared_deficits(span: int) -> tuple[int, ...]:
    """Return the lengths at which results are compared, shortest first: both ends, and lengths that are not samples."""
    known = set(sample_deficits(span))
    others = [each for each in range(span) if each not in known]
    chosen = {others[len(others) * part // 4] for part in range(4)} if others else known
    return tuple(sorted({0, span, *chosen}, reverse=True))


class ImpossibleLength(InputError):
    """A length below the maximum at which the model cannot run."""


@dataclass(frozen=True)
class _Sample:
    """The shape of a value at one length, and the value itself if it is known."""

    shape: tuple[int | None, ...] | None
    value: Any


def _has_fitting_operands(op: Operation) -> bool:
    """Return whether a select's operands fit, and known indices are in range, which coremltools does not check."""
    if op.op_type in ("gather", "gather_nd") and op.indices.val is not None and np.size(op.indices.val):
        places = np.asarray(op.indices.val)
        columns = {int(op.axis.val): places} if op.op_type == "gather" else dict(enumerate(np.moveaxis(places, -1, 0)))
        batched = op.inputs.get("batch_dims") is not None and int(op.batch_dims.val)
        held = get_sizes(op.x.sym_type)
        return bool(batched or held is None or all(
            int(np.max(column)) < (held[axis] or np.inf) for axis, column in columns.items()))
    if op.op_type != "select":
        return True
    sizes = [get_sizes(operand.sym_type) or () for operand in (op.cond, op.a, op.b)]
    known = [tuple(1 if size is None else size for size in each) for each in sizes]
    try:
        np.broadcast_shapes(*known)
    except ValueError:
        return False
    return True


class LengthSamples:
    """The inferred shape and value of each value of `function`, at the lengths `deficits` below the maximum.

    `shapes` are the shapes of inputs for each deficit, the first of which is 0. The function gets the shapes of the
    maximum, with all types inferred. Raises InputError if an op is impossible at the maximum, ImpossibleLength if an op
    is impossible at another length.
    """

    def __init__(self, function: Function, deficits: Sequence[int], shapes: Sequence[Mapping[str, Any]]) -> None:
        self.deficits = tuple(deficits)
        clones = [clone_function(function) for _ in deficits[1:]]
        self._samples: dict[Var, list[_Sample]] = {}
        for each, sizes in zip([function, *clones], shapes, strict=True):
            reason = _infer(each, sizes)
            if reason:
                raise (InputError if each is function else ImpossibleLength)(reason)
            for var, other in zip(_list_vars(function), _list_vars(each), strict=True):
                self._samples.setdefault(var, []).append(_Sample(get_sizes(other.sym_type), _get_value(other)))

    @staticmethod
    def are_possible(function: Function, shapes: Mapping[str, Any]) -> bool:
        """Return whether no op is known to be impossible for these shapes of inputs; `function` is not changed."""
        clone = clone_function(function)
        return not _infer(clone, shapes) and all(map(_has_fitting_operands, clone.operations))

    @staticmethod
    def are_cut(function: Function, shapes: Mapping[str, Any], cut: Mapping[str, Any]) -> bool:
        """Return whether no element of the inputs of `shapes` is used that those of the shapes `cut` do not have.

        An example is a mask of which only the elements at the positions of tokens are read. `function` is not changed.
        """
        clone, other = clone_function(function), clone_function(function)
        if _infer(clone, shapes) or _infer(other, cut) or not all(map(_has_fitting_operands, other.operations)):
            return False
        longer = {var: same for var, same in zip(_list_vars(clone), _list_vars(other), strict=True)
                  if get_sizes(var.sym_type) != get_sizes(same.sym_type)
                  or not _have_equal_values(_get_value(var), _get_value(same))}
        return longer.keys().isdisjoint(clone.outputs) and all(
            _keeps_first_elements(op, longer) for op in clone.operations
            if op.op_type != "const" and not longer.keys().isdisjoint(get_read_vars(op)))

    def get_values(self, var: Var) -> list[Any] | None:
        """Return the value at each length; None if it is unknown at any of them."""
        found = [] if var not in self._samples else [each.value for each in self._samples[var]]
        return None if not found or any(each is None for each in found) else found

    def get_value(self, var: Var) -> Any:
        """Return the value if it is the same at all lengths; None otherwise."""
        values = self.get_values(var)
        if values is None:
            return np.asarray(var.val) if var.val is not None and var not in self._samples else None
        same = all(each.shape == values[0].shape and np.array_equal(each, values[0], equal_nan=_is_float(each))
                   for each in values)
        return values[0] if same else None

    def is_padded(self, var: Var, axis: int) -> bool:
        """Return whether the size of an axis depends on the length."""
        return axis in self.find_padded_axes(var)

    def find_padded_axes(self, var: Var, op: Operation | None = None) -> tuple[int, ...]:
        """Return the axes whose size becomes one smaller if the length does.

        Raises Refusal for sizes that depend on the length in another way, or are unknown.
        """
        shapes = [each.shape for each in self._samples.get(var, ())]
        if not shapes:
            return ()
        found = []
        if any(shape is None or None in shape or len(shape) != len(shapes[0] or ()) for shape in shapes):
            raise Refusal(op or var.op, f"the size of '{var.name}' depends on data")
        for axis, sizes in enumerate(zip(*(shape for shape in shapes if shape is not None), strict=True)):
            if all(size == sizes[0] - deficit for size, deficit in zip(sizes, self.deficits)):
                found.append(axis)
            elif len(set(sizes)) > 1:
                listed = ", ".join(map(str, sorted({size for size in sizes if size is not None})[:4]))
                raise Refusal(op or var.op, f"axis {axis} of '{var.name}' has {listed}, ... elements at successive "
                                            "lengths; expected one more for each element of the inputs")
        return tuple(found) if len(self.deficits) > 1 else ()

    def get_shape(self, var: Var, place: int = 0) -> tuple[int, ...]:
        """Return the shape at the length of index `place` in `deficits`."""
        shape = self._samples[var][place].shape if var in self._samples else get_sizes(var.sym_type)
        assert shape is not None
        return tuple(size for size in shape if size is not None)

    def fit_step(self, values: Sequence[Any]) -> np.ndarray[Any, Any] | None:
        """Return the increase of each integer element if the length increases by one; None if it is not constant.

        If the shapes differ along one axis, the increase must be the same for all elements.
        """
        first = np.asarray(values[0])
        if first.dtype.kind not in "iu":
            return None
        one = np.asarray(values[1]).astype(np.int64)
        try:
            start = _cut(first, one.shape).astype(np.int64)
            steps = (start - one) // self.deficits[1]
            if one.shape != first.shape:
                if np.unique(steps).size != 1:
                    return None
                steps = np.full(first.shape, steps.reshape(-1)[0])
            good = all(np.array_equal(np.asarray(value).astype(np.int64), _cut(first.astype(np.int64) - steps * deficit,
                                                                               np.shape(value)))
                       for value, deficit in zip(values, self.deficits))
        except ValueError:
            return None
        return steps if good else None


def _have_equal_values(value: Any, other: Any) -> bool:
    if value is None or other is None:
        return value is other
    return np.array_equal(value, other, equal_nan=_is_float(value))


def _keeps_first_elements(op: Operation, longer: Mapping[Var, Var]) -> bool:
    """Return whether the first elements of an op's outputs depend on the first elements of its operands alone.

    `longer` maps each value that differs to the one of the shorter inputs: it has more elements, or is a number that is
    computed from a size.
    """
    if op.blocks or is_opaque(op):
        return False
    if all(_get_value(var) is not None for var in op.outputs):
        return True
    operands = [var for var in get_flat_inputs(op) if var in longer]
    differs = [get_sizes(var.sym_type) != get_sizes(longer[var].sym_type) if var in longer else False
               for var in op.outputs]
    if all(differs):
        return op.op_type in _OPS_BY_ELEMENT and all(map(_is_longer, operands, map(longer.get, operands)))
    if any(differs) or operands != [op.inputs.get("x")]:
        return False
    if op.op_type in ("gather", "gather_nd"):
        return op.indices.val is not None and bool(np.min(op.indices.val, initial=0) >= 0)
    return op.op_type in ("slice_by_index", "slice_by_size") and _begins_alike(op)


def _is_longer(var: Var, shorter: Var) -> bool:
    """Return whether a value has the elements of the shorter one, and more."""
    value, other = _get_value(var), _get_value(shorter)
    try:
        return value is None and other is None or np.array_equal(_cut(value, np.shape(other)), other)
    except ValueError:
        return False


def _begins_alike(op: Operation) -> bool:
    """Return whether a slice begins at places that are counted from the first element, and steps forward."""
    if op.begin.val is None or op.inputs.get("stride") is not None and (
            op.stride.val is None or np.min(op.stride.val) < 1):
        return False
    free = op.inputs.get("begin_mask")
    return bool(np.all((np.asarray(op.begin.val) >= 0) | (False if free is None else np.asarray(free.val))))


def _cut(value: np.ndarray[Any, Any], shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the leading part of a value with the given shape."""
    if value.ndim != len(shape) or any(size > held for size, held in zip(shape, value.shape)):
        raise ValueError
    return value[tuple(slice(0, size) for size in shape)]


def _infer(function: Function, shapes: Mapping[str, Any]) -> str:
    """Infer all types for shapes of inputs; return a description of the first impossible op, or ""."""
    inferred = ShapeInference(function, [set_input_shape(function, name, shape) for name, shape in shapes.items()])
    for op, why in inferred.rejected.items():
        if why and op.outputs:
            listed = ", ".join(f"{name} = {','.join(map(str, shape))}" for name, shape in shapes.items())
            return (f"with {listed} the op '{op.outputs[0].name}' ({op.op_type}) is impossible: {why.rstrip('.')}"
                    f"{describe_constant_sizes(op)}")
    return ""


def _list_vars(function: Function) -> list[Var]:
    """List the inputs of a function and the values computed in its outermost block, except consts."""
    return [*function.inputs.values(),
            *(var for op in function.operations if op.op_type != "const" for var in op.outputs)]


def _get_value(var: Var) -> Any:
    """Return the value of a tensor or scalar as an array; None if it is unknown."""
    if is_const(var) or not (types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type)) or var.val is None:
        return None
    value = np.asarray(var.val)
    return value if value.dtype.kind in "biuf" else None


def _is_float(value: np.ndarray[Any, Any]) -> bool:
    return bool(value.dtype.kind == "f")
