"""Slice at constant indices if the computed ones are equal to constants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var
from coremltools.converters.mil.mil.ops.defs._utils import solve_slice_by_index_shape

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_const, is_symbolic
from ...passes.contract import Exactness, Example, Hit, Miss, Rewrite
from ...passes.examples import make_example
from ...rules.indexing import RuntimeSlice

_SLICE_INPUTS = {"slice_by_index": ("begin", "end"), "slice_by_size": ("begin", "size")}
_MAX_OPS_VISITED = 48
"Maximum number of ops to visit for one list of numbers."
_DEFAULT_PARAMETERS: dict[str, Any] = {"stride": 1, "begin_mask": False, "end_mask": False, "squeeze_mask": False}
"Parameters of slice_by_index that may be left out, with the value for each axis."
_Numbers = tuple["_Number | None", ...]


class KnownSlice(Rewrite):
    """Replace slice bounds that are computed from the size of the sliced axis by constants counted from its end.

    why     coremltools converts `x[:, :x.shape[1] - 1]` with a flexible axis to a slice with a computed end: shape,
            casts, gather, sub and concat on int32, all off the ANE, together with the slice.
    when    slice_by_index (forwards) and slice_by_size whose begin, end and size are constants, the size of the sliced
            axis, or that size plus a constant; static dimensions of the result must stay static. Not if a short axis
            makes the computed number negative, which has a different meaning: `size - 3` of an axis of 2 is -1. Set
            `shortest` to the minimum length of the flexible axes to allow it.
    exact   bitwise for all axes of length `shortest` or more: begin and end are the same.
    cost    none: one slice as before; the ops that compute its bounds are removed if they have no other users.

    before
        %0: int32[2] = shape(x=%x)
        %1: int32 = gather(x=%0, indices=1)
        %2: int32 = sub(x=%1, y=1)
        %3: int32[2] = concat(values=(4, %2), axis=0)
        %y: fp16[4, s0] = slice_by_index(x=%x, begin=[0, 0], end=%3, end_mask=[True, False])
    after
        %y: fp16[4, s0] = slice_by_index(x=%x, begin=[0, 0], end=[0, -1], end_mask=[True, False])
    """

    fixes = (RuntimeSlice,)
    stage = "decompose"
    exactness = Exactness.BITWISE
    preset = "full"
    confidence = "high"
    roots = tuple(_SLICE_INPUTS)

    shortest: int = 1
    "The smallest extent of a flexible axis."

    def match(self, op: Operation) -> Hit | Miss:
        names = _SLICE_INPUTS[op.op_type]
        if all(is_const(op.inputs[name]) for name in names):
            return Miss(op, "its bounds are constant", near=False)
        first, second = (_read_shape_numbers(op.inputs[name]) for name in names)
        if first is None or second is None:
            return Miss(op, "its bounds are not computed from shapes")
        found = _fold_slice_parameters(op, first, second, self.shortest)
        if isinstance(found, str):
            return Miss(op, found)
        try:
            shape = solve_slice_by_index_shape(op.x.shape, found["begin"], found["end"], found["stride"],
                                               found["begin_mask"], found["end_mask"], found["squeeze_mask"])
        except ValueError:  # coremltools rejects a slice that ends before it begins
            return Miss(op, f"the slice from {found['begin']} to {found['end']} is empty")
        if [is_symbolic(size) for size in shape] != [is_symbolic(size) for size in op.outputs[0].shape]:
            return Miss(op, "its result would become static, but its users expect a dynamic size")
        return Hit(op, note=f"{' and '.join(names)} are constant: from {found['begin']} to {found['end']}", found=found,
                   smallest_size=self.shortest)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        parameters = {name: values for name, values in hit.found.items()
                      if any(each != _DEFAULT_PARAMETERS.get(name) for each in values)}
        built: Var = mb.slice_by_index(x=hit.op.x, **parameters)
        return built

    def examples(self) -> Iterable[Example]:
        yield _make_end_example("all but the last", 1)
        yield _make_end_example("to the end", 0)
        yield make_example("by size", partial(_build_slice_by_size, less=2), x=(None, None))
        yield make_example("by size, of a long axis", partial(_build_slice_by_size, less=3), options={"shortest": 3},
                           x=(None, None))
        yield make_example("by size, of any axis", partial(_build_slice_by_size, less=3), x=(None, None),
                           reason="at size 2 its size is -1, which means all remaining elements (shortest=1)")
        yield _make_end_example("all but the last three of a long axis", 3, options={"shortest": 3})
        yield _make_end_example("all but the last three", 3, reason=(
            "at size 2 its end is below 0, which counts from the end (shortest=1)"))
        yield _make_end_example("another axis", 1, (None, 6), axis=0)
        yield _make_end_example("of another size", 1, (None, None), axis=0, size_axis=1,
                                reason="it depends on the size of another axis")
        yield _make_end_example("half", 0, half=True, reason="its bounds are not computed from shapes")
        yield make_example("fixed", lambda x: Builder.slice_by_index(x=x, begin=[0, 0], end=[4, 2], name="y"),
                           reason="its bounds are constant", x=(4, 6))


def _read_shape_numbers(var: Var) -> list[_Number | None] | None:
    """Return the numbers in `var`, of one axis or none, each None where it is not known; None for a long list."""
    left = [_MAX_OPS_VISITED]
    found = _read_numbers(var, left)
    return None if found is None or left[0] < 0 else list(found)


@dataclass(frozen=True)
class _Number:
    """The dimension `size`, a symbol, plus `addend`; `addend` alone where `size` is None."""

    size: Any
    addend: int


def _read_numbers(var: Var, left: list[int]) -> _Numbers | None:
    left[0] -= 1
    if left[0] < 0 or var.rank > 1:
        return None
    if is_const(var):
        values = np.asarray(var.val).reshape(-1)
        if len(values) > _MAX_OPS_VISITED:
            return None
        return tuple(_Number(None, int(each)) if values.dtype.kind in "iu" else None for each in values)
    read = _READERS.get(var.op.op_type) if var.op is not None else None
    return None if read is None else read(var.op, left)


def _read_shape(op: Operation, left: list[int]) -> _Numbers:
    return tuple(_Number(size, 0) if is_symbolic(size) else _Number(None, int(size)) for size in op.x.shape)


def _read_unchanged(op: Operation, left: list[int]) -> _Numbers | None:
    return _read_numbers(op.x, left)


def _read_gather(op: Operation, left: list[int]) -> _Numbers | None:
    numbers = _read_numbers(op.x, left)
    if numbers is None or not is_const(op.indices):
        return None
    places = np.asarray(op.indices.val).reshape(-1)
    if np.any(places < -len(numbers)) or np.any(places >= len(numbers)):
        return None
    return tuple(numbers[int(place)] for place in places)


def _read_slice(op: Operation, left: list[int]) -> _Numbers | None:
    numbers = _read_numbers(op.x, left)
    if numbers is None or not is_const(op.begin) or not is_const(op.end):
        return None
    begin, end = int(op.begin.val[0]), int(op.end.val[0])
    stride = int(op.stride.val[0]) if op.stride else 1
    from_front, to_end = (bool(mask is not None and mask.val[0]) for mask in (op.begin_mask, op.end_mask))
    if op.squeeze_mask is not None and op.squeeze_mask.val[0]:
        return (numbers[begin],) if -len(numbers) <= begin < len(numbers) else None
    return numbers[slice(None if from_front else begin, None if to_end else end, stride)]


def _read_concat(op: Operation, left: list[int]) -> _Numbers | None:
    parts = [_read_numbers(var, left) for var in op.values]
    if any(part is None for part in parts) or op.interleave.val:
        return None
    return tuple(number for part in parts for number in part or ())


def _make_sum_reader(sign: int) -> Callable[[Operation, list[int]], _Numbers | None]:
    """Return the reader of an add (`sign` 1) or a sub (-1)."""

    def read_sum(op: Operation, left: list[int]) -> _Numbers | None:
        x, y = _read_numbers(op.x, left), _read_numbers(op.y, left)
        if x is None or y is None or not (len(x) == len(y) or 1 in (len(x), len(y))):
            return None
        if len(x) != len(y):  # one of them broadcasts
            count = max(len(x), len(y))
            x, y = x * (count // len(x)), y * (count // len(y))
        return tuple(_add_numbers(one, other, sign) for one, other in zip(x, y))

    return read_sum


def _add_numbers(x: _Number | None, y: _Number | None, sign: int) -> _Number | None:
    if x is None or y is None:
        return None
    if y.size is None:
        return _Number(x.size, x.addend + sign * y.addend)
    if sign == -1 and x.size is not None and bool(x.size == y.size):
        return _Number(None, x.addend - y.addend)
    return _Number(y.size, x.addend + y.addend) if sign == 1 and x.size is None else None


_READERS: dict[str, Callable[[Operation, list[int]], _Numbers | None]] = {
    "shape": _read_shape,
    "cast": _read_unchanged,
    "identity": _read_unchanged,
    "expand_dims": _read_unchanged,
    "squeeze": _read_unchanged,
    "reshape": _read_unchanged,
    "gather": _read_gather,
    "slice_by_index": _read_slice,
    "concat": _read_concat,
    "add": _make_sum_reader(1),
    "sub": _make_sum_reader(-1),
}


def _fold_slice_parameters(
    op: Operation, first: Sequence[_Number | None], second: Sequence[_Number | None], shortest: int
) -> dict[str, list[Any]] | str:
    """Return the parameters of the slice_by_index that `op` is equal to, or why it is not equal to one.

    Dimensions are at least `shortest`.
    """
    rank = op.x.rank
    found: dict[str, list[Any]] = {name: [*(get_const_value(op.inputs.get(name)) or [default] * rank)]
                                   for name, default in _DEFAULT_PARAMETERS.items()}
    found |= {"begin": [0] * rank, "end": [0] * rank}
    if any(step <= 0 for step in found["stride"]):
        return "it goes backwards"
    for axis, (begin, end) in enumerate(zip(first, second)):
        reason = _find_negative_wraparound(op, axis, begin, end, shortest)
        if reason:
            return reason
        if op.op_type == "slice_by_size":
            end = _find_slice_end(begin, end)
        squeezed = found["squeeze_mask"][axis]
        if squeezed or not found["begin_mask"][axis]:
            index = _resolve_axis_index(begin, op.x.shape[axis])
            if isinstance(index, str):
                return index
            if index is None:
                return "it begins after the end"
            found["begin"][axis] = index
        if not squeezed and not found["end_mask"][axis]:
            index = _resolve_axis_index(end, op.x.shape[axis])
            if isinstance(index, str):
                return index
            found["end"][axis] = index or 0
            found["end_mask"][axis] = index is None
        if squeezed:
            found["end"][axis] = found["begin"][axis] + 1 or -1
    return found


def _find_negative_wraparound(
    op: Operation, axis: int, begin: _Number | None, second: _Number | None, shortest: int
) -> str | None:
    """Return which short axis makes a computed number negative, so that it wraps around; None where no axis does.

    With n = size - k below 0, slice_by_index counts from the end again: it means 2 * size - k, where the constant -k
    means 0. These differ from size k / 2 to k. For slice_by_size, n = -1 means all that is left.
    """
    def is_masked(name: str) -> bool:
        mask = get_const_value(op.inputs.get(name))
        return bool(mask and mask[axis])

    by_size, squeezed = op.op_type == "slice_by_size", is_masked("squeeze_mask")
    for number, name in ((begin, "begin"), (second, "size" if by_size else "end")):
        ignored = not by_size and is_masked(f"{name}_mask")
        if number is None or number.size is None or (ignored and not squeezed) or (name == "end" and squeezed):
            continue
        less = -number.addend
        if less <= shortest or (less <= 2 and not squeezed and not by_size):
            continue
        if name == "size":  # nothing is left after a begin at the end of the axis
            if begin is not None and begin.size is None and begin.addend >= less - 1:
                continue
            return f"at size {less - 1} its size is -1, which means all remaining elements (shortest={shortest})"
        return f"at size {max(shortest, less // 2 + 1)} its {name} is below 0, which counts from the end " \
               f"(shortest={shortest})"
    return None


def _find_slice_end(begin: _Number | None, size: _Number | None) -> _Number | None:
    """Return the end of a slice of a size; -1 is all that is left."""
    if begin is None or size is None:
        return None
    if size == _Number(None, -1):
        return _Number("all", 0)
    if begin.size is not None and size.size is not None:
        return None
    if begin.size is None and begin.addend < 0:  # counted from the end, after which there are no elements
        end = begin.addend + size.addend
        return None if size.size is not None or end > 0 else _Number(None, end) if end else _Number("all", 0)
    return _Number(begin.size or size.size, begin.addend + size.addend)


def _resolve_axis_index(number: _Number | None, size: Any) -> int | str | None:
    """Return an index of an axis, negative from its end, None for the end itself; or why it is not a constant index."""
    if number is None:
        return "its bounds are not computed from shapes"
    if number.size == "all":
        return None
    if number.size is None:
        return number.addend
    if not is_symbolic(size) or number.size != size:
        return "it depends on the size of another axis"
    return "it reaches beyond the end" if number.addend > 0 else number.addend or None


def _make_end_example(
    name: str,
    less: int,
    x: tuple[int | None, ...] = (4, None),
    *,
    axis: int = 1,
    size_axis: int | None = None,
    half: bool = False,
    **expected: Any,
) -> Example:
    """Make an example of a slice of `axis` that ends `less` before the size of `size_axis`, or at its half."""

    def build_body(x: Var) -> Var:
        size = Builder.gather(x=Builder.shape(x=x), indices=np.int32(axis if size_axis is None else size_axis), axis=0)
        end = Builder.floor_div(x=size, y=np.int32(2)) if half else Builder.sub(x=size, y=np.int32(less))
        ends = [end if each == axis else np.int32(0 if is_symbolic(x.shape[each]) else x.shape[each])
                for each in range(2)]
        result: Var = Builder.slice_by_index(x=x, begin=[0, 0], end=Builder.concat(values=ends, axis=0),
                                             end_mask=[each != axis for each in range(2)], name="y")
        return result

    return make_example(name, build_body, x=x, **expected)


def _build_slice_by_size(x: Var, less: int) -> Var:
    size = Builder.sub(x=Builder.shape(x=x), y=np.array([0, less], np.int32))
    result: Var = Builder.slice_by_size(x=x, begin=[0, 1], size=size, name="y")
    return result
