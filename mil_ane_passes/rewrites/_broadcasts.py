"""What the two rewrites about broadcasts share: which ops broadcast, and what a repeated value was before."""

from __future__ import annotations

from collections.abc import Iterator

from coremltools.converters.mil.mil import Operation, Var
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..core.query import is_opaque, value

__all__ = ["BROADCASTING", "placed", "repeated", "source"]

BROADCASTING = (
    "add", "sub", "mul", "real_div", "floor_div", "mod", "pow", "maximum", "minimum", "equal", "not_equal", "less",
    "less_equal", "greater", "greater_equal", "logical_and", "logical_or", "logical_xor",
)
"Ops of two operands that broadcast by themselves; select is none of them, as shapes are not inferred through it."


def placed(shape: tuple[object, ...], rank: int) -> tuple[object, ...]:
    """`shape` as a broadcast to `rank` reads it: ones in front."""
    return (*(1,) * (rank - len(shape)), *shape)


def source(var: Var) -> Var:
    """What `var` is a repetition of along axes of extent 1, by tile and by concat; `var` itself where it is none."""
    while (inner := _inner(var)) is not None:
        var = inner
    return var


def _inner(var: Var) -> Var | None:
    op = var.op
    if op is None or is_opaque(op):
        return None
    if op.op_type == "concat":
        first: Var = op.values[0]
        alike = len(op.values) > 1 and all(each is first for each in op.values) and not value(op.interleave, False)
        return first if alike and first.rank and first.shape[int(op.axis.val)] == 1 else None
    if op.op_type != "tile" or op.reps.val is None:
        return None
    x: Var = op.x
    return x if all(int(times) == 1 or extent == 1 for times, extent in zip(op.reps.val, x.shape)) else None


def repeated(op: Operation) -> Iterator[tuple[str, Var, str]]:
    """(operand, what it repeats, why that cannot stand in its place, or "") for the operands that are repetitions."""
    for name, other in (("x", op.y), ("y", op.x)):
        var = op.inputs[name]
        was = source(var)
        if was is var:
            continue
        if source(other) is not other and was is source(other):
            yield name, was, "both operands repeat the same value: nothing is left to say the shape"
            continue
        extents = placed(other.shape, op.outputs[0].rank)
        mine, less = (placed(each.shape, op.outputs[0].rank) for each in (var, was))
        short = [axis for axis, extent in enumerate(mine) if extent != less[axis] and extents[axis] != extent]
        unknown = any(is_symbolic(extents[axis]) for axis in short)
        yield name, was, "" if not short else (
            "the other operand's extent is not known" if unknown else "the other operand is no longer than the value "
            "was before it was repeated")
