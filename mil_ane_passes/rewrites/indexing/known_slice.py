"""Slice at constant indices where computed ones are equal to constants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var
from coremltools.converters.mil.mil.ops.defs._utils import solve_slice_by_index_shape

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_const, is_symbolic
from ...passes.contract import Exactness, Example, Hit, Miss, Rewrite
from ...passes.examples import build_program, make_example
from ...rules.runtime_slice import RuntimeSlice

_SLICE_INPUTS = {"slice_by_index": ("begin", "end"), "slice_by_size": ("begin", "size")}
_MAX_OPS_VISITED = 48
"Most ops that are visited for one list of numbers."
_Numbers = tuple["_Number | None", ...]


class KnownSlice(Rewrite):
    """Count from the end of an axis where a slice's place is worked out of the axis' own size.

    why     Of `x[:, :x.shape[1] - 1]` with a flexible axis coremltools makes a slice whose end is computed: shape,
            casts, gather, sub and concat of int32, all off the ANE, and the slice with them.
    when    slice_by_index (forwards) and slice_by_size whose begin, end and size are constants, the size of the axis
            that is sliced, or such a size and a constant; and the shape of the result stays as known as it was. Not
            where a short axis makes the computed number negative, which means another place or size: `size - 3` of
            an axis of 2 is -1. State the shortest length of the flexible axes as `shortest` to allow it.
    exact   bitwise for all axes of `shortest` or more: begin and end are the same places.
    cost    none: one slice as before; the ops that work its place out go where nothing else reads them.

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
            return Miss(op, "its place is constant", near=False)
        first, second = (_read_shape_numbers(op.inputs[name]) for name in names)
        if first is None or second is None:
            return Miss(op, "its place is not worked out of shapes")
        found = _fold_slice_parameters(op, first, second, self.shortest)
        if isinstance(found, str):
            return Miss(op, found)
        try:
            shape = solve_slice_by_index_shape(op.x.shape, found["begin"], found["end"], found["stride"],
                                               found["begin_mask"], found["end_mask"], found["squeeze_mask"])
        except ValueError:  # coremltools rejects a slice that ends before it begins
            return Miss(op, f"nothing lies from {found['begin']} to {found['end']}")
        if [is_symbolic(size) for size in shape] != [is_symbolic(size) for size in op.outputs[0].shape]:
            return Miss(op, "what it gives would be of known size, where its readers do not know it")
        return Hit(op, note=f"{' and '.join(names)} are known: from {found['begin']} to {found['end']}", found=found,
                   smallest_size=self.shortest)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        plain = {"stride": 1, "begin_mask": False, "end_mask": False, "squeeze_mask": False}
        given = {name: values for name, values in hit.found.items()
                 if name not in plain or any(each != plain[name] for each in values)}
        built: Var = mb.slice_by_index(x=hit.op.x, **given)
        return built

    def examples(self) -> Iterable[Example]:
        yield Example("all but the last", lambda: _build_slice_by_index(1, (4, None)))
        yield Example("to the end", lambda: _build_slice_by_index(0, (4, None)))
        yield Example("by size", lambda: _build_slice_by_size((None, None), 2))
        yield Example("by size, of a long axis", lambda: _build_slice_by_size((None, None), 3), options={"shortest": 3})
        yield Example("by size, of any axis", lambda: _build_slice_by_size((None, None), 3),
                      reason="at size 2 its size is -1, which means all that is left (shortest=1)")
        yield Example(
            "all but the last three of a long axis",
            lambda: _build_slice_by_index(3, (4, None)),
            options={"shortest": 3},
        )
        yield Example("all but the last three", lambda: _build_slice_by_index(3, (4, None)),
                      reason="at size 2 its end is below 0, which counts from the end again (shortest=1)")
        yield Example("another axis", lambda: _build_slice_by_index(1, (None, 6), axis=0))
        yield Example("of another size", lambda: _build_slice_by_index(1, (None, None), axis=0, of=1),
                      reason="the size of another axis is part of it")
        yield Example(
            "half",
            lambda: _build_slice_by_index(0, (4, None), half=True),
            reason="its place is not worked out of shapes",
        )
        yield make_example(
            "fixed",
            lambda x: Builder.slice_by_index(x=x, begin=[0, 0], end=[4, 2], name="y"),
            reason="its place is constant",
            x=(4, 6),
        )


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
        whole = values.dtype.kind in "iu"
        return (
            tuple(_Number(None, int(each)) if whole else None for each in values)
            if len(values) <= _MAX_OPS_VISITED
            else None
        )
    reading = _READERS.get(var.op.op_type) if var.op is not None else None
    return None if reading is None else reading(var.op, left)


def _read_shape(op: Operation, left: list[int]) -> _Numbers:
    return tuple(_Number(size, 0) if is_symbolic(size) else _Number(None, int(size)) for size in op.x.shape)


def _read_unchanged(op: Operation, left: list[int]) -> _Numbers | None:
    return _read_numbers(op.x, left)


def _read_gather(op: Operation, left: list[int]) -> _Numbers | None:
    given = _read_numbers(op.x, left)
    if given is None or not is_const(op.indices):
        return None
    places = np.asarray(op.indices.val).reshape(-1)
    if np.any(places < -len(given)) or np.any(places >= len(given)):
        return None
    return tuple(given[int(place)] for place in places)


def _read_slice(op: Operation, left: list[int]) -> _Numbers | None:
    given = _read_numbers(op.x, left)
    if given is None or not is_const(op.begin) or not is_const(op.end):
        return None
    begin, end, stride = int(op.begin.val[0]), int(op.end.val[0]), int(op.stride.val[0]) if op.stride else 1
    first, last = (bool(mask is not None and mask.val[0]) for mask in (op.begin_mask, op.end_mask))
    if op.squeeze_mask is not None and op.squeeze_mask.val[0]:
        return (given[begin],) if -len(given) <= begin < len(given) else None
    return given[slice(None if first else begin, None if last else end, stride)]


def _read_concat(op: Operation, left: list[int]) -> _Numbers | None:
    parts = [_read_numbers(var, left) for var in op.values]
    if any(part is None for part in parts) or op.interleave.val:
        return None
    return tuple(number for part in parts for number in part or ())


def _make_sum_reader(sign: int) -> Callable[[Operation, list[int]], _Numbers | None]:
    def added(op: Operation, left: list[int]) -> _Numbers | None:
        x, y = _read_numbers(op.x, left), _read_numbers(op.y, left)
        if x is None or y is None or not (len(x) == len(y) or 1 in (len(x), len(y))):
            return None
        many = max(len(x), len(y))
        return tuple(_add_numbers(one, other, sign) for one, other in zip(x * (many // len(x)), y * (many // len(y))))

    return added


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
    op: Operation, first: Sequence[_Number | None], second: Sequence[_Number | None], shortest: int = 1,
) -> dict[str, list[Any]] | str:
    """Return the parameters of the slice_by_index that `op` is equal to, or why it is not equal to one.

    Dimensions are at least `shortest`.
    """
    rank = op.x.rank
    plain: dict[str, list[Any]] = {"stride": [1] * rank, "begin_mask": [False] * rank, "end_mask": [False] * rank,
                                   "squeeze_mask": [False] * rank}
    found = {name: [*(get_const_value(op.inputs.get(name)) or default)] for name, default in plain.items()}
    found |= {"begin": [0] * rank, "end": [0] * rank}
    if any(step <= 0 for step in found["stride"]):
        return "it goes backwards"
    for axis, (begin, end) in enumerate(zip(first, second)):
        wrong = _find_negative_wraparound(op, axis, begin, end, shortest)
        if wrong:
            return wrong
        if op.op_type == "slice_by_size":
            end = _find_slice_end(begin, end)
        free, dropped = found["begin_mask"][axis], found["squeeze_mask"][axis]
        for side, number, ignored in (("begin", begin, free and not dropped),
                                      ("end", end, found["end_mask"][axis] or dropped)):
            if ignored:
                continue
            place = _resolve_axis_index(number, op.x.shape[axis])
            if isinstance(place, str):
                return place
            if place is None and side == "begin":
                return "it begins behind the end"
            found[side][axis] = place or 0
            found["end_mask"][axis] |= place is None
        if dropped:
            found["end"][axis] = found["begin"][axis] + 1 or -1
    return found


def _find_negative_wraparound(
    op: Operation, axis: int, begin: _Number | None, second: _Number | None, shortest: int
) -> str | None:
    """Return which short axis makes a computed number negative, so that it wraps around; None where no axis does.

    With n = size - k below 0, slice_by_index counts from the end again: it means 2 * size - k, where the constant -k
    means 0. These differ from size k / 2 to k. For slice_by_size, n = -1 means all that is left.
    """
    dropped = bool((get_const_value(op.inputs.get("squeeze_mask")) or [False] * (axis + 1))[axis])
    by_size = op.op_type == "slice_by_size"
    for number, name in ((begin, "begin"), (second, "size" if by_size else "end")):
        ignored = not by_size and bool((get_const_value(op.inputs.get(f"{name}_mask")) or [False] * (axis + 1))[axis])
        if number is None or number.size is None or (ignored and not dropped) or (name == "end" and dropped):
            continue
        less = -number.addend
        if less <= shortest or (less <= 2 and not dropped and not by_size):
            continue
        if name == "size":  # nothing is left after a begin at the end of the axis
            if begin is not None and begin.size is None and begin.addend >= less - 1:
                continue
            return f"at size {less - 1} its size is -1, which means all that is left (shortest={shortest})"
        return f"at size {max(shortest, less // 2 + 1)} its {name} is below 0, which counts from the end again " \
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
        return "its place is not worked out of shapes"
    if number.size == "all":
        return None
    if number.size is None:
        return number.addend
    if not is_symbolic(size) or number.size != size:
        return "the size of another axis is part of it"
    return "it reaches behind the end" if number.addend > 0 else number.addend or None


def _build_slice_by_index(
    less: int, shape: tuple[int | None, ...], axis: int = 1, of: int | None = None, half: bool = False
) -> Program:
    def body(x: Var) -> Var:
        size = Builder.gather(x=Builder.shape(x=x), indices=np.int32(axis if of is None else of), axis=0)
        end = Builder.floor_div(x=size, y=np.int32(2)) if half else Builder.sub(x=size, y=np.int32(less))
        ends = [end if each == axis else np.int32(shape[each] or 0) for each in range(2)]
        result: Var = Builder.slice_by_index(x=x, begin=[0, 0], end=Builder.concat(values=ends, axis=0),
                                             end_mask=[each != axis for each in range(2)], name="y")
        return result

    return build_program(body, x=shape)


def _build_slice_by_size(shape: tuple[int | None, ...], less: int) -> Program:
    def body(x: Var) -> Var:
        size = Builder.sub(x=Builder.shape(x=x), y=np.array([0, less], np.int32))
        result: Var = Builder.slice_by_size(x=x, begin=[0, 1], size=size, name="y")
        return result

    return build_program(body, x=shape)
