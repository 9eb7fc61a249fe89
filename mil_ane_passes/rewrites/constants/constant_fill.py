"""Replace a tensor that is filled with one number by a constant."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import get_consumers, is_symbolic
from ...passes.contract import BlockRewrite, Exactness, Example, Hit, Miss
from ...passes.examples import make_example
from ...passes.targets import Gate
from ...rules.unsupported_ops import Fills
from ._generated_constants import (
    AxisSize,
    ShapeSource,
    build_shared_const,
    describe_size_excess,
    extract_axis_line,
    trace_shape_sources,
)

_BEFORE_M4 = Gate(last="m3")
_FILL_OPS = ("fill", "fill_like")
_BINARY_OPS = frozenset({
    "add", "sub", "mul", "real_div", "floor_div", "mod", "pow", "maximum", "minimum", "equal", "not_equal", "less",
    "less_equal", "greater", "greater_equal", "logical_and", "logical_or", "logical_xor",
})
"Elementwise ops that broadcast x and y."
_MAX_READERS = 64
"Most readers of a fill that are examined."
_MAX_FILLS = 16
"Most fills of which each has the size of the one before it."


class ConstantFill(BlockRewrite):
    """Replace fill and fill_like by a constant: of one element if its users broadcast, otherwise of full size.

    why     fill and fill_like were reported to run on the CPU only. Sizes that are computed from shapes are integers,
            which are unsupported on the ANE in any case. An M4 supports fill_like; fill was not tried on it.
    when    If every user is elementwise and gets its shape from its other operand: one element, for any size. Static
            size: a constant. Dynamic size from the shapes of other values (fp16, fp32 or bool): a slice of such a
            value, compared with itself by greater, which gives false, cast to zeros, plus the fill value. fill_like is
            skipped if all chips of the target are M4 or newer, and in the dynamic form if one of them is; always=true
            rewrites it for any target.
    exact   bitwise for any elements of the value that provides the size: infinities and NaN are not greater than
            themselves.
    cost    lower with one element; the constant's bytes, up to max_bytes; for dynamic sizes four ops on a slice per
            axis, and one that writes the result; a cast if the size is that of an integer value.

    before
        %0: fp16[2, s0] = fill_like(ref_tensor=%x, value=0.5)
        %y: fp16[2, s0] = add(x=%x, y=%0)
    after
        %y: fp16[2, s0] = add(x=%x, y=[[0.5]])
    """

    fixes = (Fills,)
    stage = "decompose"
    exactness = Exactness.BITWISE
    preset = "full"
    roots = _FILL_OPS

    max_bytes: int = 1 << 20
    "Maximum bytes of one constant."
    always: bool = False
    "Replace fill_like even if a generation of the target supports it."

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        for op in block.operations:
            if op.op_type in _FILL_OPS:
                yield self._match_op(op)

    def _match_op(self, op: Operation) -> Hit | Miss:
        before_m4 = [_BEFORE_M4.includes(generation) for generation in self.generations]
        if op.op_type == "fill_like" and not any(before_m4) and not self.always:
            return Miss(op, "fill_like is accepted on M4", near=False)
        output = op.outputs[0]
        if op.value.val is None or any(extent == 0 for extent in output.shape):
            return Miss(op, "it has no value or no elements", near=False)
        extents = _read_extents(op)
        number: Any = np.asarray(op.value.val).astype(types.nptype_from_builtin(output.dtype))[()]
        if _can_all_readers_broadcast(op, extents):
            return Hit(op, note="one element, which its users broadcast", scalar=True, extents=extents, number=number)
        nbytes = math.prod(extent for extent in extents if isinstance(extent, int)) * number.itemsize
        if nbytes > self.max_bytes:
            return Miss(op, describe_size_excess(nbytes, self.max_bytes))
        note = f"a constant of {nbytes} bytes"
        if not all(isinstance(extent, int) for extent in extents):
            reason = self._find_dynamic_fill_obstacle(op, extents, all(before_m4))
            if reason:
                return Miss(op, reason)
            note = "zeros of dynamic size, plus the value"
        return Hit(op, note=note, scalar=False, extents=extents, number=number)

    def _find_dynamic_fill_obstacle(self, op: Operation, extents: list[ShapeSource], before_m4: bool) -> str:
        """Return why a fill of dynamic size is not rewritten, or ""."""
        if None in extents:
            return "its shape is computed, but not from the shapes of other values"
        if types.is_int(op.outputs[0].dtype):
            return "integers of dynamic size, which is unsupported on the ANE"
        if op.op_type == "fill_like" and not before_m4 and not self.always:
            return "supported on M4; choose an older target, or always=true"
        return ""

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        if hit.scalar:
            return _rebuild_readers_with_scalar(mb, hit.op, hit.number)
        output = hit.op.outputs[0]
        if not all(isinstance(extent, int) for extent in hit.extents):
            return {output: _build_dynamic_fill(mb, hit.extents, hit.number)}
        const = _build_filled_const(mb, tuple(hit.extents), hit.number)
        return {output: mb.identity(x=const) if output.consuming_blocks else const}

    def examples(self) -> Iterable[Example]:
        taken_on_m4 = "supported on M4; choose an older target, or always=true"
        yield make_example(
            "added", lambda x: Builder.add(x=x, y=Builder.fill_like(ref_tensor=x, value=np.float16(0.5)), name="y"),
            x=(2, None))
        yield make_example(
            "read as it is", lambda x: _transpose_filled(x, Builder.fill(shape=[2, 3], value=np.float16(1))), x=(2, 3))
        yield make_example(
            "as large as another",
            lambda x: _transpose_filled(x, Builder.fill_like(ref_tensor=x, value=np.float16(-2))), x=(2, 3))
        yield make_example("rows of another", _build_row_fill, x=(None, 4))
        yield make_example("as large as another at run time", _build_fill_like, options={"always": True}, x=(2, None))
        yield make_example("supported on M4", _build_fill_like, reason=taken_on_m4, x=(2, None))
        yield make_example(
            "large",
            lambda x: _transpose_filled(x, Builder.fill(shape=[2, 64], value=np.float16(1))),
            options={"max_bytes": 200},
            reason="the constant is 256 bytes, above max_bytes=200",
            x=(2, 3),
        )
        yield make_example("constant", lambda x: Builder.add(x=x, y=np.float16(1), name="y"), reason="", x=(2, 3))


def _read_extents(op: Operation, depth: int = 0) -> list[ShapeSource]:
    """Return the source of each extent of the fill: a number, the extent of another value, or None if unknown.

    The extent of another fill is that of the value which this one reads: both may be replaced.
    """
    return [_read_extents(each.var.op, depth + 1)[each.axis] or each if depth < _MAX_FILLS and isinstance(
        each, AxisSize) and each.var.op is not None and each.var.op.op_type in _FILL_OPS else each
            for each in _read_own_extents(op)]


def _read_own_extents(op: Operation) -> list[ShapeSource]:
    shape = op.outputs[0].shape
    if op.op_type == "fill_like":
        return [
            AxisSize(op.ref_tensor, axis) if is_symbolic(extent) else int(extent) for axis, extent in enumerate(shape)
        ]
    sources = trace_shape_sources(op.shape)
    if sources is None or len(sources) != len(shape):
        sources = [None] * len(shape)
    return [source if is_symbolic(extent) else int(extent) for extent, source in zip(shape, sources)]


def _can_all_readers_broadcast(op: Operation, sources: Sequence[ShapeSource]) -> bool:
    """Return whether all readers of the fill keep shape and values when the fill is a single element."""
    output = op.outputs[0]
    readers = get_consumers(output)
    if output.consuming_blocks or not 0 < len(readers) <= _MAX_READERS:
        return False
    # An axis may have several symbols: its own, and that of the axis which its extent comes from.
    extents = [{extent, source.var.shape[source.axis] if isinstance(source, AxisSize) else extent}
               for extent, source in zip(output.shape, sources)]
    return all(
        reader.enclosing_block is op.enclosing_block and _has_full_extents(reader, output, extents)
        for reader in readers
    )


def _has_full_extents(reader: Operation, filled: Var, extents: Sequence[set[Any]]) -> bool:
    """Return whether the other operands alone have every extent that the fill has."""
    if reader.op_type not in _BINARY_OPS and reader.op_type != "select":
        return False
    names = ("a", "b") if reader.op_type == "select" else ("x", "y")
    others = [reader.inputs[name] for name in names if reader.inputs[name] is not filled]
    others = [other for other in others if other.op is None or other.op.op_type not in _FILL_OPS]
    return all(
        1 in possible or any(other.rank >= position and other.shape[-position] in possible for other in others)
        for position, possible in enumerate(reversed(extents), start=1))


def _rebuild_readers_with_scalar(mb: RewriteBuilder, op: Operation, number: np.generic) -> dict[Var, Var]:
    """Rebuild the fill's readers, each with a single element in place of the fill."""
    filled = op.outputs[0]
    element = _build_filled_const(mb, (1,) * filled.rank, number)
    replacements = {}
    for reader in get_consumers(filled):
        with mb.at(reader):
            changes = {name: element for name, var in reader.inputs.items() if var is filled}
            replacements[reader.outputs[0]] = rebuild_op(mb, reader, **changes)
    return replacements


def _build_filled_const(mb: RewriteBuilder, shape: tuple[int, ...], number: np.generic) -> Var:
    return build_shared_const(mb, ("filled", *shape, number.dtype.name, number.tobytes()),
                              lambda: np.full(shape, number) if shape else number)


def _build_dynamic_fill(mb: RewriteBuilder, extents: Sequence[ShapeSource], number: np.generic) -> Var:
    """Build a fill of dynamic size without reading the elements of the values that its size comes from.

    Nothing is greater than itself, neither a number nor an infinity nor NaN. Thus greater(x, x), cast, is 0 everywhere.
    """
    is_bool = number.dtype == np.bool_
    value = np.float16(bool(number)) if is_bool else number
    dtype = {"float16": "fp16", "float32": "fp32"}[value.dtype.name]
    filled = _build_filled_const(mb, tuple(extent if isinstance(extent, int) else 1 for extent in extents), value)
    for axis, size in enumerate(extents):
        if isinstance(size, AxisSize):
            line = extract_axis_line(mb, size, len(extents), axis)
            zeros = mb.cast(x=mb.greater(x=line, y=line), dtype=dtype)
            # 0 * 0 keeps the sign of the other 0, and 0 + x is x for what is not 0.
            filled = mb.mul(x=zeros, y=filled) if value == 0 else mb.add(x=zeros, y=filled)
    return mb.greater(x=filled, y=np.float16(0.5)) if is_bool else filled


def _transpose_filled(x: Var, filled: Var) -> list[Var]:
    return [Builder.relu(x=x), Builder.transpose(x=filled, perm=[1, 0], name="y")]


def _build_fill_like(x: Var) -> list[Var]:
    return [Builder.relu(x=x), Builder.fill_like(ref_tensor=x, value=np.float16(3), name="y")]


def _build_row_fill(x: Var) -> list[Var]:
    """Build the ops that torch.full((x.shape[0], 3), -1) is converted to."""
    rows = Builder.gather(x=Builder.shape(x=x), indices=np.array([0], np.int32), axis=0)
    shape = Builder.concat(values=[rows, np.array([3], np.int32)], axis=0)
    return [Builder.relu(x=x), Builder.fill(shape=shape, value=np.float16(-1), name="y")]
