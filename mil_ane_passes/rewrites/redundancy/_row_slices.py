"""Row slices, and the ops before which they can move, so that those ops compute only the kept rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from coremltools.converters.mil.mil import Operation, Var

from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import get_const_value, is_const, is_opaque, is_symbolic

__all__ = [
    "EXACT_OPS",
    "MOVEMENT_OPS",
    "InputKey",
    "RowSlice",
    "Rows",
    "SLICE_OPS",
    "build_on_rows",
    "find_rows_of_inputs",
    "get_input",
    "iterate_inputs",
    "parse_row_slice",
    "slice_const",
    "slice_rows",
]

InputKey = tuple[str, int]
"The name of an op's input, and the position in it where it is a tuple."
InputAxes = dict[InputKey, int]
"The inputs of an op of which only rows are read, each with the axis of the rows."

SLICE_OPS = ("slice_by_index", "slice_by_size", "gather")
MOVEMENT_OPS = frozenset({
    "cast", "concat", "expand_dims", "gather", "identity", "reshape", "slice_by_index", "slice_by_size", "split",
    "squeeze", "stack", "tile", "transpose",
})
"Ops that only move elements: reducing them alone is no gain."
_EXACT_UNARY_OPS = ("abs", "cast", "ceil", "floor", "identity", "logical_not", "round", "sign", "sqrt", "square")
_UNARY_OPS = (
    *_EXACT_UNARY_OPS, "acos", "asin", "atan", "atanh", "clamped_relu", "clip", "cos", "cosh", "elu", "erf", "exp",
    "exp2", "gelu", "inverse", "leaky_relu", "linear_activation", "log", "relu", "relu6", "rsqrt", "scaled_tanh",
    "sigmoid", "sigmoid_hard", "silu", "sin", "sinh", "softplus", "softsign", "tan", "tanh", "threshold",
    "thresholded_relu",
)
_CHANNEL_OPS = ("batch_norm", "prelu", "softplus_parametric")
"Ops with parameters for each channel (axis 1)."
_EXACT_BROADCASTING_OPS = (
    "add", "equal", "greater", "greater_equal", "less", "less_equal", "logical_and", "logical_or", "logical_xor",
    "mul", "not_equal", "real_div", "select", "sub",
)
_BROADCASTING_OPS = (*_EXACT_BROADCASTING_OPS, "floor_div", "maximum", "minimum", "mod", "pow")
_REDUCTIONS = (
    "reduce_l1_norm", "reduce_l2_norm", "reduce_log_sum", "reduce_log_sum_exp", "reduce_max", "reduce_mean",
    "reduce_min", "reduce_prod", "reduce_sum", "reduce_sum_square",
)
_INDEX_REDUCTIONS = ("reduce_argmax", "reduce_argmin")
EXACT_OPS = MOVEMENT_OPS | {*_EXACT_UNARY_OPS, *_EXACT_BROADCASTING_OPS, "pad"}
"""Ops whose result for a row has the same bits in each implementation: moved, compared, or rounded correctly.

The order of a sum may depend on the number of rows, a vectorized exp may round differently from the scalar one for the
remaining elements, and the maximum of zeros of both signs may be either of them.
"""


class Rows(NamedTuple):
    """The rows kept of an axis of `extent`: from `start` to `stop` in steps of `stride`, or those of `indices`.

    `start` and `stop` count from the front, or, where the extent is symbolic, as they are stated; None is the end of
    the axis.
    """

    extent: object
    kept: int
    start: int | None = None
    stop: int | None = None
    stride: int = 1
    indices: tuple[int, ...] = ()

    @property
    def share(self) -> float | None:
        """The share of the rows that is kept; None where the extent is symbolic."""
        return None if is_symbolic(self.extent) else self.kept / int(str(self.extent))


class RowSlice(NamedTuple):
    """A slice `op` that keeps `rows` of one `axis` of its input, and then drops the `dropped` axes of one element."""

    op: Operation
    axis: int
    rows: Rows
    dropped: tuple[int, ...]


def parse_row_slice(op: Operation) -> RowSlice | str:
    """Parse an op of SLICE_OPS; returns why it does not keep constant rows of exactly one axis ("" if far from it)."""
    if op.op_type == "gather":
        return _parse_gather(op)
    begin, size_or_end = op.begin.val, (op.size if op.op_type == "slice_by_size" else op.end).val
    if begin is None or size_or_end is None:
        return "the bounds of the slice are computed"
    bounds = _read_bounds(op, begin, size_or_end)
    dropped = tuple(axis for axis, drops in enumerate(_read_flags(op, "squeeze_mask")) if drops)
    narrowed = [axis for axis, (start, stop, stride, extent) in enumerate(bounds)
                if not _is_whole(start, stop, stride, extent)]
    if len(narrowed) != 1 or any(axis not in narrowed and op.x.shape[axis] != 1 for axis in dropped):
        return ""
    (axis,) = narrowed
    start, stop, stride, extent = bounds[axis]
    if stride < 1:
        return "the slice runs backwards"
    kept = 1 if axis in dropped else _count_kept(op, axis, dropped)
    if kept is None:
        return "the number of kept rows depends on the length"
    if is_symbolic(extent):
        return RowSlice(op, axis, Rows(extent, kept, start, stop, stride), dropped)
    first, last, _ = slice(start, stop, stride).indices(int(extent))
    if len(range(first, last, stride)) != kept or not kept:
        return ""
    return RowSlice(op, axis, Rows(int(extent), kept, first, last, stride), dropped)


def _read_flags(op: Operation, name: str) -> list[bool]:
    flags = get_const_value(op.inputs.get(name))
    return [False] * op.x.rank if flags is None else [bool(flag) for flag in flags]


def _read_bounds(op: Operation, begin: Any, size_or_end: Any) -> list[tuple[int | None, int | None, int, Any]]:
    """Read (start, stop, stride, extent) of each axis, with None for an end of the axis."""
    starts = [int(number) for number in np.atleast_1d(begin)]
    numbers = [int(number) for number in np.atleast_1d(size_or_end)]
    extents = list(op.x.shape)
    if op.op_type == "slice_by_size":
        stops = [None if size == -1 else start + size for start, size in zip(starts, numbers, strict=True)]
        return [(start, stop, 1, extent) for start, stop, extent in zip(starts, stops, extents, strict=True)]
    strides = get_const_value(op.inputs.get("stride")) or [1] * len(starts)
    from_front, to_end, drops = (_read_flags(op, f"{name}_mask") for name in ("begin", "end", "squeeze"))
    found: list[tuple[int | None, int | None, int, Any]] = []
    for axis, extent in enumerate(extents):
        start, stop = (None if from_front[axis] else starts[axis]), (None if to_end[axis] else numbers[axis])
        if drops[axis]:  # the element at begin, whatever the end is
            start = 0 if start is None else start
            stop = None if start == -1 else start + 1
        found.append((start, stop, int(strides[axis]), extent))
    return found


def _is_whole(start: int | None, stop: int | None, stride: int, extent: Any) -> bool:
    """Return whether all elements of an axis are kept, in order."""
    if start not in (None, 0) and not (not is_symbolic(extent) and start == -int(extent)):
        return False
    return stride == 1 and (stop is None or (not is_symbolic(extent) and stop >= int(extent)))


def _count_kept(op: Operation, axis: int, dropped: tuple[int, ...]) -> int | None:
    extent = op.outputs[0].shape[axis - sum(each < axis for each in dropped)]
    return None if is_symbolic(extent) else int(extent)


def _parse_gather(op: Operation) -> RowSlice | str:
    if op.indices.val is None:
        return "the bounds of the slice are computed"
    indices = np.asarray(op.indices.val)
    axis = get_const_value(op.inputs.get("axis"), 0)
    if indices.ndim > 1 or not indices.size or get_const_value(op.inputs.get("batch_dims"), 0):
        return ""
    axis, numbers = int(axis) % op.x.rank, [int(number) for number in indices.reshape(-1)]
    dropped = (axis,) if not indices.ndim else ()
    extent = op.x.shape[axis]
    if not is_symbolic(extent):
        numbers = [number % int(extent) for number in numbers]
    if len(numbers) == 1:
        start = numbers[0]
        return RowSlice(op, axis, Rows(extent, 1, start, None if start == -1 else start + 1), dropped)
    return RowSlice(op, axis, Rows(extent, len(numbers), indices=tuple(numbers)), dropped)


def slice_rows(mb: RewriteBuilder, x: Var, axis: int, rows: Rows) -> Var:
    """Build the slice of `x` that keeps `rows` of `axis`."""
    if rows.indices:
        gathered: Var = mb.gather(x=x, indices=np.array(rows.indices, np.int32), axis=axis)
        return gathered
    begin, end = [0] * x.rank, [0 if is_symbolic(extent) else int(extent) for extent in x.shape]
    begin[axis], end[axis] = rows.start or 0, rows.stop or 0
    settings: dict[str, Any] = {}
    if rows.stride != 1:
        settings["stride"] = [rows.stride if at == axis else 1 for at in range(x.rank)]
    if any(map(is_symbolic, x.shape)):
        settings["end_mask"] = [(rows.stop is None) if at == axis else is_symbolic(extent)
                                for at, extent in enumerate(x.shape)]
    sliced: Var = mb.slice_by_index(x=x, begin=begin, end=end, **settings)
    return sliced


def slice_const(mb: RewriteBuilder, var: Var, axis: int, rows: Rows) -> Var:
    """Make a const of `rows` of const `var`."""
    kept = rows.indices or slice(rows.start, rows.stop, rows.stride)
    name = "_".join(map(str, rows.indices or (rows.start or 0, rows.stop or rows.extent, rows.stride)))
    where = (slice(None),) * axis
    return mb.weight(var, f"axis_{axis}_rows_{name}", lambda: np.asarray(var.val)[(*where, kept)])


def get_input(op: Operation, key: InputKey) -> Var:
    """Return the var at `key` of `op`."""
    name, position = key
    bound = op.inputs[name]
    var: Var = bound[position] if isinstance(bound, (list, tuple)) else bound
    return var


def iterate_inputs(op: Operation) -> Iterator[tuple[InputKey, Var]]:
    """Yield each var that `op` reads, with its key."""
    for name, bound in op.inputs.items():
        if isinstance(bound, (list, tuple)):
            yield from (((name, position), var) for position, var in enumerate(bound))
        elif bound is not None:
            yield (name, 0), bound


def find_rows_of_inputs(op: Operation, axis: int, rows: Rows) -> InputAxes | str:
    """Find the inputs of which `op` needs `rows` only, if `rows` of `axis` of its outputs are all that is read.

    All its outputs have that axis. Returns a reason where it needs other rows, or where that is not known.
    """
    mapper = _MAPPERS.get(op.op_type)
    if mapper is None or is_opaque(op) or op.blocks:
        return f"{op.op_type} is not known to compute row by row"
    found = mapper(op, axis, rows)
    if isinstance(found, str):
        return found
    for key, at in found.items():
        var = get_input(op, key)
        if var.shape[at] != rows.extent:
            return f"{op.op_type} reads a different number of rows"
        if at == var.rank - 1 != axis - op.outputs[0].rank + var.rank and not is_const(var):
            return "the rows would be sliced on the last axis"
        if var.op is not None and var.op.op_type.startswith("constexpr_"):
            return f"{op.op_type} reads rows of a compressed weight"
    return found if found else f"{op.op_type} reads no rows"


def _map_unary(op: Operation, axis: int, rows: Rows) -> InputAxes | str:
    return {("x", 0): axis}


def _map_per_channel(op: Operation, axis: int, rows: Rows) -> InputAxes | str:
    return f"{op.op_type} has parameters for each row" if axis == 1 else {("x", 0): axis}


def _map_broadcasting(op: Operation, axis: int, rows: Rows) -> InputAxes | str:
    names = ("cond", "a", "b") if op.op_type == "select" else ("x", "y")
    return _map_broadcast_inputs(op, names, axis, op.outputs[0].rank, rows)


def _map_broadcast_inputs(
    op: Operation, names: tuple[str, ...], axis: int, rank: int, rows: Rows, batch: int | None = None,
) -> InputAxes | str:
    """Map `axis` of a result of `rank` to inputs that are broadcast to it."""
    found: InputAxes = {}
    for name in names:
        var = op.inputs.get(name)
        at = -1 if var is None else axis - (rank - var.rank)
        if at < 0:
            continue
        if var.shape[at] == rows.extent:
            found[name, 0] = at
        elif is_symbolic(var.shape[at]) or int(var.shape[at]) != 1:
            return f"{op.op_type} broadcasts over lengths that may differ"
    return found


def _map_linear(op: Operation, axis: int, rows: Rows) -> InputAxes | str:
    return "linear mixes the last axis" if axis == op.outputs[0].rank - 1 else {("x", 0): axis}


def _map_matmul(op: Operation, axis: int, rows: Rows) -> InputAxes | str:
    rank = op.outputs[0].rank
    if min(op.x.rank, op.y.rank) < 2:
        return "matmul has a vector operand"
    if axis < rank - 2:
        return _map_broadcast_inputs(op, ("x", "y"), axis, rank, rows)
    name = "x" if axis == rank - 2 else "y"
    transposed = bool(get_const_value(op.inputs.get(f"transpose_{name}"), False))
    var = op.inputs[name]
    if is_const(var):
        return "the rows are those of the weight"
    return {(name, 0): var.rank - (2 if (name == "x") != transposed else 1)}


def _map_conv(op: Operation, axis: int, rows: Rows) -> InputAxes | str:
    if axis == 0:
        return {("x", 0): 0}
    spatial = axis - 2
    if axis == 1 or op.weight.shape[axis] != 1:
        return "conv mixes the rows"
    padded = get_const_value(op.inputs.get("pad_type"), "valid") == "custom"
    pad = (get_const_value(op.inputs.get("pad")) or []) if padded else []
    strides = get_const_value(op.inputs.get("strides")) or []
    if any(pad[2 * spatial:2 * spatial + 2]) or any(step != 1 for step in strides[spatial:spatial + 1]):
        return "conv pads or steps along the rows"
    return {("x", 0): axis}


def _map_softmax(op: Operation, axis: int, rows: Rows) -> InputAxes | str:
    at = get_const_value(op.inputs.get("axis"), -1)
    return f"{op.op_type} runs along the rows" if int(at) % op.x.rank == axis else {("x", 0): axis}


def _map_layer_norm(op: Operation, axis: int, rows: Rows) -> InputAxes | str:
    axes = get_const_value(op.inputs.get("axes"))
    mixed = range(op.x.rank) if axes is None else [int(each) % op.x.rank for each in axes]
    return "layer_norm runs along the rows" if axis in mixed else {("x", 0): axis}


def _map_reduction(op: Operation, axis: int, rows: Rows) -> InputAxes | str:
    if op.op_type in _INDEX_REDUCTIONS:
        axes = [int(get_const_value(op.inputs.get("axis"), -1)) % op.x.rank]
    else:
        named = get_const_value(op.inputs.get("axes"))
        axes = sorted(int(each) % op.x.rank for each in (range(op.x.rank) if named is None else named))
    at = axis
    if not get_const_value(op.inputs.get("keep_dims"), False):
        for each in axes:
            at += each <= at
    return f"{op.op_type} runs along the rows" if at in axes else {("x", 0): at}


def _map_transpose(op: Operation, axis: int, rows: Rows) -> InputAxes | str:
    return {("x", 0): int(get_const_value(op.perm)[axis]) % op.x.rank}


def _map_expand_dims(op: Operation, axis: int, rows: Rows) -> InputAxes | str:
    rank = op.outputs[0].rank
    axes = [int(each) % rank for each in np.atleast_1d(op.axes.val)]
    return "expand_dims creates the row axis" if axis in axes else {("x", 0): axis - sum(each < axis for each in axes)}


def _map_squeeze(op: Operation, axis: int, rows: Rows) -> InputAxes | str:
    if op.inputs.get("axes") is None:
        return "squeeze has no axes parameter"
    at = axis
    for each in sorted(int(each) % op.x.rank for each in np.atleast_1d(op.axes.val)):
        at += each <= at
    return {("x", 0): at}


def _map_reshape(op: Operation, axis: int, rows: Rows) -> InputAxes | str:
    """Map an axis that has the same number of elements before it and after it in the old and the new shape."""
    if op.inputs["shape"].val is None:
        return "reshape has a computed shape"
    if any(int(extent) == 0 for extent in op.inputs["shape"].val):
        return "reshape copies an extent"
    old, new = list(op.x.shape), list(op.outputs[0].shape)
    for at, extent in enumerate(old):
        if extent == new[axis] and _multiply_extents(old[:at]) == _multiply_extents(new[:axis]) \
                and _multiply_extents(old[at + 1:]) == _multiply_extents(new[axis + 1:]):
            return {("x", 0): at}
    return "reshape merges or splits the rows"


def _multiply_extents(extents: list[Any]) -> Any:
    product: Any = 1
    for extent in extents:
        product = product * extent
    return product


def _map_concat(op: Operation, axis: int, rows: Rows) -> InputAxes | str:
    joined = get_const_value(op.axis)
    if joined is None or int(joined) % op.outputs[0].rank == axis:
        return "concat joins the rows"
    return {("values", position): axis for position in range(len(op.values))}


def _map_stack(op: Operation, axis: int, rows: Rows) -> InputAxes | str:
    joined = get_const_value(op.axis)
    if joined is None or (at := int(joined) % op.outputs[0].rank) == axis:
        return "stack joins the rows"
    return {("values", position): axis - (at < axis) for position in range(len(op.values))}


def _map_split(op: Operation, axis: int, rows: Rows) -> InputAxes | str:
    at = get_const_value(op.axis)
    return "split cuts the rows" if at is None or int(at) % op.x.rank == axis else {("x", 0): axis}


def _map_tile(op: Operation, axis: int, rows: Rows) -> InputAxes | str:
    times = get_const_value(op.reps)
    return "tile repeats the rows" if times is None or int(times[axis]) != 1 else {("x", 0): axis}


def _map_pad(op: Operation, axis: int, rows: Rows) -> InputAxes | str:
    amounts = get_const_value(op.pad)
    if amounts is None:
        return "pad is computed"
    at = 2 * (axis - op.x.rank) + len(amounts)
    return "pad adds rows" if at >= 0 and any(amounts[at:at + 2]) else {("x", 0): axis}


def _map_slice(op: Operation, axis: int, rows: Rows) -> InputAxes | str:
    begin, size_or_end = op.begin.val, (op.size if op.op_type == "slice_by_size" else op.end).val
    if begin is None or size_or_end is None:
        return f"{op.op_type} with computed bounds"
    at = axis
    for each, drops in enumerate(_read_flags(op, "squeeze_mask")):
        at += drops and each <= at
    start, stop, stride, extent = _read_bounds(op, begin, size_or_end)[at]
    return {("x", 0): at} if _is_whole(start, stop, stride, extent) else f"{op.op_type} selects rows"


def _map_gather(op: Operation, axis: int, rows: Rows) -> InputAxes | str:
    if get_const_value(op.inputs.get("batch_dims"), 0):
        return "gather has batch dimensions"
    at = int(get_const_value(op.inputs.get("axis"), 0)) % op.x.rank
    if at <= axis < at + op.indices.rank:
        return "gather indexes the rows"
    return {("x", 0): axis if axis < at else axis - op.indices.rank + 1}


def _map_attention(op: Operation, axis: int, rows: Rows) -> InputAxes | str:
    rank = op.outputs[0].rank
    if axis == rank - 1:
        return "attention mixes the values"
    if axis == rank - 2:
        found: InputAxes = {("query", 0): axis}
        mask = _map_broadcast_inputs(op, ("attn_mask",), axis, rank, rows)
        return mask if isinstance(mask, str) else {**found, **mask}
    return _map_broadcast_inputs(op, ("query", "key", "value", "attn_mask"), axis, rank, rows)


def _map_einsum(op: Operation, axis: int, rows: Rows) -> InputAxes | str:
    equation = str(op.equation.val).replace(" ", "")
    terms, _, result = equation.partition("->")
    parts = terms.split(",")
    if not result or "." in equation or any(len(set(term)) != len(term) for term in parts):
        return "einsum has a form that is not parsed"
    letter = result[axis]
    return {("values", position): term.index(letter) for position, term in enumerate(parts) if letter in term}


_MAPPERS: Mapping[str, Callable[[Operation, int, Rows], InputAxes | str]] = {
    **dict.fromkeys(_UNARY_OPS, _map_unary),
    **dict.fromkeys(_CHANNEL_OPS, _map_per_channel),
    **dict.fromkeys(_BROADCASTING_OPS, _map_broadcasting),
    **dict.fromkeys((*_REDUCTIONS, *_INDEX_REDUCTIONS), _map_reduction),
    "softmax": _map_softmax, "cumsum": _map_softmax, "layer_norm": _map_layer_norm, "linear": _map_linear,
    "matmul": _map_matmul, "conv": _map_conv, "einsum": _map_einsum, "scaled_dot_product_attention": _map_attention,
    "transpose": _map_transpose, "expand_dims": _map_expand_dims, "squeeze": _map_squeeze, "reshape": _map_reshape,
    "concat": _map_concat, "stack": _map_stack, "split": _map_split, "tile": _map_tile, "pad": _map_pad,
    "slice_by_index": _map_slice, "slice_by_size": _map_slice, "gather": _map_gather,
}


def build_on_rows(
    mb: RewriteBuilder, op: Operation, inputs: Mapping[InputKey, Var], axes: InputAxes, axis: int, rows: Rows,
) -> list[Var]:
    """Build `op` on `inputs`, of which the `axes` have only `rows`; `axis` is that of its outputs."""
    changes: dict[str, Any] = {}
    for (name, position), var in inputs.items():
        bound = op.inputs[name]
        if isinstance(bound, (list, tuple)):
            changes.setdefault(name, list(bound))[position] = var
        else:
            changes[name] = var
    if op.op_type == "reshape":
        shape = [int(extent) for extent in op.inputs["shape"].val]
        if shape[axis] != -1:
            shape[axis] = rows.kept
        changes["shape"] = shape
    elif op.op_type in ("slice_by_index", "slice_by_size"):
        changes.update(_get_whole_axis_parameters(op, axes["x", 0]))
    if op.op_type == "split":
        return list(mb.split(**{**op.inputs, **changes}))
    return [rebuild_op(mb, op, **changes)]


def _get_whole_axis_parameters(op: Operation, axis: int) -> dict[str, Any]:
    """Return the parameters of a slice that keeps all of `axis`, whatever its extent."""
    if op.op_type == "slice_by_size":
        begin, size = (np.array(op.inputs[name].val) for name in ("begin", "size"))
        begin[axis], size[axis] = 0, -1
        return {"begin": begin, "size": size}
    changes: dict[str, Any] = {}
    for name in ("begin_mask", "end_mask"):
        changes[name] = [keeps or at == axis for at, keeps in enumerate(_read_flags(op, name))]
    return changes
