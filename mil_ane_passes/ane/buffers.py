"""Bytes of values on the ANE, by the memory layout that Apple and the author of a driver describe.

Rows are padded to 64 bytes and whole buffers rounded up to 16 KiB. `passes.layout` names the sources, and the treatment
of shapes of other ranks than 4. Computed, not measured.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from coremltools.converters.mil.mil import Block, Function, Operation, Program, Var, types

from ..ir.query import get_itemsize, get_static_shape
from ..passes.layout import compute_buffer_bytes, compute_padded_bytes
from .sizes import iterate_inputs

__all__ = ["Buffer", "BufferSurvey", "compute_buffer", "compute_peak_bytes", "list_buffers", "survey_buffers"]


@dataclass(frozen=True)
class Buffer:
    """The bytes of one value: `dense` without padding, `rows` with each row padded, `padded` as laid out."""

    function: str
    value: str
    shape: tuple[int, ...]
    dense: int
    padded: int
    rows: int = 0

    @property
    def padding_ratio(self) -> float:
        """Ratio of the padded rows to the unpadded bytes; 1.0 means no padding. The rounding to 16 KiB is excluded."""
        return self.rows / self.dense if self.dense else 1.0

    def to_dict(self) -> dict[str, Any]:
        return {"function": self.function, "value": self.value, "shape": list(self.shape), "dense_bytes": self.dense,
                "padded_bytes": self.padded, "row_waste": round(self.padding_ratio, 4)}


@dataclass(frozen=True)
class BufferSurvey:
    """All values of a program: their buffers, and how many are left out because a dimension is symbolic."""

    buffers: list[Buffer]
    open: int


def survey_buffers(program: Program) -> BufferSurvey:
    """Compute one buffer for each input and each op output, nested ones included; weights are excluded."""
    found: list[Buffer] = []
    unsized = 0
    for name, function in program.functions.items():
        for var in [*function.inputs.values(), *_collect_values(function)]:
            if not _is_array(var):
                continue
            one = compute_buffer(name, var)
            if one is None:
                unsized += 1
            else:
                found.append(one)
    return BufferSurvey(found, unsized)


def list_buffers(program: Program) -> list[Buffer]:
    """Return the buffers of `survey_buffers`."""
    return survey_buffers(program).buffers


def compute_peak_bytes(program: Program) -> int:
    """Compute the largest number of padded bytes that are live at the same time in any function of `program`.

    Ops run in program order, and no op reuses the memory of what it reads: a compiler may do better on both. Inputs are
    live throughout; outputs, and what a nested block returns, from the op that makes them. Weights and values with
    symbolic dimensions are excluded.
    """
    return max((_compute_function_peak(name, function) for name, function in program.functions.items()), default=0)


def _compute_function_peak(name: str, function: Function) -> int:
    ops = _collect_ops(function)
    inputs = set(function.inputs.values())
    sizes = {var: buffer.padded for var in (*inputs, *(out for op in ops for out in op.outputs))
             if (buffer := compute_buffer(name, var)) is not None}
    never = inputs.union(function.outputs, *(inner.outputs for op in ops for inner in op.blocks))
    last = {var: place for place, op in enumerate(ops) for var in (*op.outputs, *iterate_inputs(op))}
    freed: dict[int, int] = {}
    for var, place in last.items():
        if var not in never:
            freed[place] = freed.get(place, 0) + sizes.get(var, 0)
    live = peak = sum(sizes.get(var, 0) for var in inputs)
    for place, op in enumerate(ops):
        live += sum(sizes.get(var, 0) for var in op.outputs)
        peak = max(peak, live)
        live -= freed.get(place, 0)
    return peak


def compute_buffer(function: str, var: Var) -> Buffer | None:
    """Compute the buffer of one value.

    Returns None if a dimension is symbolic, and for a value that is not an array of numbers.
    """
    shape = get_static_shape(var) if _is_array(var) else None
    if shape is None:
        return None
    size = get_itemsize(var)
    return Buffer(function, var.name, shape, math.prod(shape) * size, compute_buffer_bytes(shape, size),
                  compute_padded_bytes(shape, size))


def _collect_values(function: Block) -> list[Var]:
    """Collect the outputs of the ops of a block and of its nested blocks, in program order."""
    return [var for op in _collect_ops(function) for var in op.outputs]


def _collect_ops(function: Block) -> list[Operation]:
    """Collect the ops of a block and of its nested blocks in program order, without those that make weights."""
    found: list[Operation] = []
    pending = [iter(function.operations)]
    while pending:
        op = next(pending[-1], None)
        if op is None:
            pending.pop()
            continue
        if op.op_type != "const" and not op.op_type.startswith("constexpr_"):
            found.append(op)
        pending.extend(iter(inner.operations) for inner in reversed(op.blocks))
    return found


def _is_array(var: Var) -> bool:
    """Return whether `var` is an array or a single number; lists, texts and dictionaries are neither."""
    return _has_numeric_elements(var.sym_type)


@functools.lru_cache(maxsize=1 << 16)
def _has_numeric_elements(sym_type: Any) -> bool:
    kind = sym_type.wrapped_type() if types.is_state(sym_type) else sym_type
    if types.is_tensor(kind):
        return not types.is_str(kind.get_primitive())
    return bool(types.is_scalar(kind)) and not types.is_str(kind)
