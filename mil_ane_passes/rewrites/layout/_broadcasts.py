"""Helpers of the two rewrites about broadcasts: the ops that broadcast, and the value before a repetition."""

from __future__ import annotations

from collections.abc import Iterator

from coremltools.converters.mil.mil import Operation, Var
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ...ir.query import get_const_value, is_opaque

__all__ = ["BROADCASTING_OPS", "iterate_repeated_operands", "pad_shape_to_rank"]

BROADCASTING_OPS = (
    "add", "sub", "mul", "real_div", "floor_div", "mod", "pow", "maximum", "minimum", "equal", "not_equal", "less",
    "less_equal", "greater", "greater_equal", "logical_and", "logical_or", "logical_xor",
)
"Ops of two operands that broadcast by themselves; select is excluded, as shapes are not inferred through it."


def pad_shape_to_rank(shape: tuple[object, ...], rank: int) -> tuple[object, ...]:
    """Return `shape` as a broadcast to `rank` reads it: with ones in front."""
    return (*(1,) * (rank - len(shape)), *shape)


def _find_unrepeated_value(var: Var) -> Var:
    """Return the value that `var` repeats along axes of extent 1, by tile or concat; else `var` itself."""
    while (inner := _find_repeated_input(var)) is not None:
        var = inner
    return var


def _find_repeated_input(var: Var) -> Var | None:
    op = var.op
    if op is None or is_opaque(op):
        return None
    if op.op_type == "concat":
        first: Var = op.values[0]
        alike = (
            len(op.values) > 1
            and all(each is first for each in op.values)
            and not get_const_value(op.interleave, False)
        )
        return first if alike and first.rank and first.shape[int(op.axis.val)] == 1 else None
    if op.op_type != "tile" or op.reps.val is None:
        return None
    x: Var = op.x
    return x if all(int(times) == 1 or extent == 1 for times, extent in zip(op.reps.val, x.shape)) else None


def iterate_repeated_operands(op: Operation) -> Iterator[tuple[str, Var, str]]:
    """Yield (operand, repeated value, obstacle) for each operand that is a repetition.

    The obstacle is why the repeated value cannot replace the operand, or "".
    """
    for name, other in (("x", op.y), ("y", op.x)):
        var = op.inputs[name]
        was = _find_unrepeated_value(var)
        if was is var:
            continue
        if _find_unrepeated_value(other) is not other and was is _find_unrepeated_value(other):
            yield name, was, "both operands repeat the same value: nothing is left to say the shape"
            continue
        extents = pad_shape_to_rank(other.shape, op.outputs[0].rank)
        mine, less = (pad_shape_to_rank(each.shape, op.outputs[0].rank) for each in (var, was))
        short = [axis for axis, extent in enumerate(mine) if extent != less[axis] and extents[axis] != extent]
        unknown = any(is_symbolic(extents[axis]) for axis in short)
        yield name, was, "" if not short else (
            "the other operand's extent is not known" if unknown else "the other operand is no longer than the value "
            "was before it was repeated")
