"""The flow of a state through a function: read once at the beginning, written once at the end.

Each write of a state returns the written value, so between the read and the final write, values replace the state. Rows
that are stored in a slice and loaded again from the same slice are used directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from coremltools.converters.mil.mil import Function, Operation, Var, types

from ..ir.block_editor import BlockEditor
from ..ir.builder import RewriteBuilder, UniqueNames
from ..ir.query import get_consumers, is_const
from .dead_ops import get_read_vars

__all__ = ["Window", "find_state_obstacle", "forward_stores", "get_window", "join_stores", "thread_state"]


@dataclass(frozen=True)
class Window:
    """The part of a value that a slice reads or writes: (begin, end) along each axis, and the axes that are dropped."""

    bounds: tuple[tuple[int, int], ...]
    dropped: tuple[int, ...] = ()

    def is_disjoint(self, other: Window) -> bool:
        return any(last <= begin or end <= first
                   for (first, last), (begin, end) in zip(self.bounds, other.bounds, strict=True))

    def find_partial_axes(self, shape: Sequence[int]) -> list[int]:
        """Return the axes along which the window does not contain all elements."""
        return [axis for axis, (bound, size) in enumerate(zip(self.bounds, shape, strict=True)) if bound != (0, size)]


def find_state_obstacle(function: Function, name: str) -> str:
    """Return the reason why a state cannot be replaced by values; "" if it can."""
    var = function.inputs[name]
    for op in function.operations:
        if op.blocks and var in get_read_vars(op):
            return f"a block of the {op.op_type} op '{op.outputs[0].name if op.outputs else op.name}' uses it"
    for op in get_consumers(var):
        if op.op_type not in ("read_state", "coreml_update_state"):
            return f"the op '{op.outputs[0].name if op.outputs else op.name}' ({op.op_type}) uses it"
    if var in function.outputs:
        return "it is returned as a state"
    return ""


def thread_state(function: Function, name: str, initial: Var) -> tuple[Var, bool]:
    """Replace reads of a state by `initial` or the last written value, and remove its writes.

    Returns the final value of the state, and whether it was written.
    """
    state = function.inputs[name]
    current, written = initial, False
    with BlockEditor() as editor:
        for op in list(function.operations):
            if state not in op.inputs.values():
                continue
            if op.op_type == "coreml_update_state":
                current, written = op.value, True
            _replace_output(function, editor, op, current)
            editor.remove([op])
    return current, written


def _replace_output(function: Function, editor: BlockEditor, op: Operation, new: Var) -> None:
    """Replace the output of an op; if the function returns the output, its name is kept."""
    old = op.outputs[0]
    if old in function.outputs:
        mb = RewriteBuilder(function, UniqueNames(function))
        with mb.at(op):
            new = mb.identity(x=new)
    editor.replace(old, new)


def get_window(op: Operation) -> Window | None:
    """Return the constant window of a slice_by_index or slice_update with strides of 1; None for other ops."""
    shape = op.x.shape
    parameters = [op.inputs.get(name) for name in ("begin", "end", "stride", "begin_mask", "end_mask", "squeeze_mask")]
    if any(var is not None and not is_const(var) for var in parameters) or not all(isinstance(size, (int, np.integer))
                                                                            for size in shape):
        return None
    begin, end, stride, begin_mask, end_mask, squeeze = (None if var is None or var.val is None else var.val
                                                         for var in parameters)
    if begin is None or end is None or (stride is not None and np.any(np.asarray(stride) != 1)):
        return None
    bounds = []
    for axis, size in enumerate(map(int, shape)):
        first = 0 if begin_mask is not None and begin_mask[axis] else _resolve(int(begin[axis]), size)
        last = size if end_mask is not None and end_mask[axis] else _resolve(int(end[axis]), size)
        bounds.append((first, first + 1 if squeeze is not None and squeeze[axis] else last))
    dropped = () if squeeze is None else tuple(axis for axis, flag in enumerate(squeeze) if flag)
    return Window(tuple(bounds), dropped)


def _resolve(index: int, size: int) -> int:
    return max(index + size, 0) if index < 0 else min(index, size)


def forward_stores(function: Function, mb: RewriteBuilder) -> int:
    """Replace loads of a slice by the value that was stored in it; return the number of changed ops.

    Loads and stores of an entire value, such as `cache[:, :heads]` with all heads, are replaced by the value. Loads and
    stores without users are not removed, because the caller may need their outputs.
    """
    changed = 0
    with BlockEditor() as editor:
        for op in list(function.operations):
            if _is_entire(op) and op.outputs[0] not in function.outputs:
                editor.replace(op.outputs[0], op.x if op.op_type == "slice_by_index" else op.update)
                changed += 1
                continue
            if op.op_type != "slice_by_index" or op.x.op is None or op.x.op.op_type != "slice_update":
                continue
            window, source = get_window(op), op.x
            while window is not None and source.op is not None and source.op.op_type == "slice_update":
                stored = get_window(source.op)
                if stored is None or not stored.is_disjoint(window):
                    break
                source = source.op.x
            if window is None:
                continue
            store = source.op
            if store is not None and store.op_type == "slice_update" and (stored := get_window(store)) is not None and (
                    stored.bounds == window.bounds):
                if op.outputs[0] in function.outputs:
                    continue
                with mb.at(op):
                    editor.replace(op.outputs[0], _drop_axes(mb, store.update, window.dropped))
                changed += 1
            elif source is not op.x:
                op.set_inputs(no_check_var_types=True, x=source)
                changed += 1
    return changed


def _is_entire(op: Operation) -> bool:
    """Return whether an op loads or stores all elements of a value."""
    window = get_window(op) if op.op_type in ("slice_by_index", "slice_update") else None
    return window is not None and not window.dropped and not window.find_partial_axes(op.x.shape)


def _drop_axes(mb: RewriteBuilder, var: Var, axes: tuple[int, ...]) -> Var:
    """Return `var` without axes of size 1: the operand of an expansion, if `var` is one, else a squeeze of it."""
    if not axes:
        return var
    op = var.op
    if op is not None and op.op_type == "expand_dims" and tuple(
            sorted(int(axis) % var.rank for axis in np.atleast_1d(op.axes.val))) == axes:
        return op.x
    return mb.squeeze(x=var, axes=list(axes))


def join_stores(mb: RewriteBuilder, final: Var) -> list[tuple[int, int, Var]] | None:
    """Return the parts (begin, end, value) of `final` if it consists of stores that cover all of one axis.

    Returns None if `final` still contains a part of the initial value.
    """
    parts: dict[tuple[int, int], Var] = {}
    axes: set[int] = set()
    var = final
    while var.op is not None and var.op.op_type == "slice_update" and types.is_tensor(var.sym_type):
        window = get_window(var.op)
        partial = [] if window is None else window.find_partial_axes(var.shape)
        if window is None or len(partial) != 1:
            return None
        bound = window.bounds[partial[0]]
        if any(first < bound[1] and bound[0] < last for first, last in parts):
            return None
        parts[bound] = var.op.update
        axes.add(partial[0])
        var = var.op.x
    ordered = sorted(parts)
    if len(axes) != 1 or axes != {0} or not ordered:
        return None
    ends = [0, *(last for _, last in ordered)]
    if [first for first, _ in ordered] != ends[:-1] or ends[-1] != int(final.shape[0]):
        return None
    return [(first, last, parts[first, last]) for first, last in ordered]
