"""Remove tiles before ops that broadcast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var

from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import get_const_value, get_consumers, is_opaque, is_symbolic
from ...passes.contract import Community, Exactness, Example, Hit, Miss, Rewrite, Severity
from ...passes.evidence import cite_m4_study
from ...passes.examples import make_example
from ...passes.targets import Gate
from ._broadcasts import BROADCASTING_OPS, pad_shape_to_rank


class DropBroadcastTile(Rewrite):
    """Remove a tile (or a concat of a value with itself) before an op that broadcasts its operand.

    why     Every form of broadcast is supported on an M4, and a tile only writes redundant data to memory. A StableHLO
            compiler that removes such tiles got ops back to the ANE. However, with all units allowed its model became
            slower (24.6 to 31.8 ms), because it was partitioned differently. Broadcasts were not measured before M4:
            for older targets tiles stay, and `ane::tile_broadcast` adds them.
    when    Arithmetic, comparisons and logic of two operands. The repeated axes had extent 1, the other operand has the
            full extent there, and all users of the repeated value are such ops. Not before select: reportedly shapes
            are not inferred through it in models with several functions.
    exact   bitwise: the same op on the same numbers.
    cost    none; the output of the tile is no longer written.

    before
        %0: fp16[2, 3, 4] = tile(x=%z, reps=[1, 3, 1])
        %y: fp16[2, 3, 4] = mul(x=%x, y=%0)
    after
        %y: fp16[2, 3, 4] = mul(x=%x, y=%z)
    """

    code, slug = "ANE106", "tile-before-broadcast"
    stage = "decompose"
    exactness = Exactness.BITWISE
    preset = "full"
    targets = Gate(first="m4")
    severity, confidence = Severity.SUGGESTION, "low"
    roots = BROADCASTING_OPS
    evidence = (
        cite_m4_study(
            "add, sub, mul, real_div, pow, floor_div, maximum, minimum, comparisons and select are accepted with "
            "every broadcast"
        ),
        Community(
            "a pass that removes tiles, so that ops broadcast, moves them back to the ANE; with all compute "
            "units allowed the model became slower (24.6 to 31.8 ms)",
            chip="M4",
            source="https://github.com/kasper0406/stablehlo-coreml/issues/105",
        ),
        Community(
            "contradicts it for the NeuralNetwork format: a product with channel broadcast leaves the ANE",
            source="https://github.com/hollance/neural-engine/issues/2",
            date="2020-07-14",
        ),
    )

    def match(self, op: Operation) -> Hit | Miss:
        found = list(_iterate_repeated_operands(op))
        if not found:
            return Miss(op, "no operand is repeated", near=False)
        changes: dict[str, Var] = {}
        reasons: list[str] = []
        for name, was, reason in found:
            reason = reason or _find_tile_use(op.inputs[name])
            if reason:
                reasons.append(reason)
            elif not changes:  # with one tile removed, the other operand may have to stay repeated
                changes[name] = was
        if not changes:
            return Miss(op, reasons[0])
        ((name, was),) = changes.items()
        shape = "x".join(map(str, was.shape)) or "a scalar"
        return Hit(op, changes=changes, note=f"operand {name} of {op.op_type} is {shape} and broadcasts by itself")

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        return rebuild_op(mb, hit.op, **hit.changes)

    def examples(self) -> Iterable[Example]:
        tile = partial(Builder.tile, reps=[1, 3, 1])
        scaled = _make_scaling_example
        yield scaled("tile", lambda z: tile(x=z))
        yield scaled("concat with itself", lambda z: Builder.concat(values=[z] * 3, axis=1))
        yield scaled("tile of a tile", lambda z: Builder.tile(x=tile(x=z), reps=[1, 1, 1]))
        yield scaled("comparison", lambda z: tile(x=z), lambda x, z: Builder.cast(
            x=Builder.greater(x=z, y=x), dtype="fp16", name="y"))
        yield scaled("read elsewhere", lambda z: tile(x=z), lambda x, z: Builder.mul(x=x, y=Builder.add(
            x=Builder.reduce_sum(x=z, axes=[1], keep_dims=True), y=Builder.add(x=x, y=z)), name="y"),
            reason="the repeated value is also read by reduce_sum, which does not broadcast")
        yield make_example("two of one", lambda z: _build_square(tile(x=z)), z=(2, 1, 4),
                           reason="both operands repeat the same value: the shape would be lost")
        yield scaled("both are short", lambda z: tile(x=z), lambda x, z: Builder.mul(
            x=Builder.reduce_max(x=x, axes=[1], keep_dims=True), y=z, name="y"),
            reason="the other operand is not longer than the value before repetition")
        yield scaled("select", lambda z: tile(x=z), lambda x, z: Builder.select(
            cond=Builder.greater(x=x, y=np.float16(0)), a=x, b=z, name="y"), reason="no operand is repeated")


def _iterate_repeated_operands(op: Operation) -> Iterator[tuple[str, Var, str]]:
    """Yield (operand, repeated value, obstacle) for each operand that is a repetition.

    The obstacle is why the repeated value cannot replace the operand, or "".
    """
    for name, other in (("x", op.y), ("y", op.x)):
        var = op.inputs[name]
        was = _find_unrepeated_value(var)
        if was is var:
            continue
        if _find_unrepeated_value(other) is not other and was is _find_unrepeated_value(other):
            yield name, was, "both operands repeat the same value: the shape would be lost"
            continue
        repeated, single, extents = (pad_shape_to_rank(each.shape, op.outputs[0].rank) for each in (var, was, other))
        short = [axis for axis, extent in enumerate(repeated) if extent != single[axis] and extents[axis] != extent]
        if not short:
            yield name, was, ""
        elif any(is_symbolic(extents[axis]) for axis in short):
            yield name, was, "the other operand's extent is dynamic"
        else:
            yield name, was, "the other operand is not longer than the value before repetition"


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


def _find_tile_use(var: Var) -> str:
    """Return why the repeated value is still needed, or ""."""
    if var.consuming_blocks:
        return "the repeated value is an output"
    for reader in get_consumers(var):
        if reader.op_type not in BROADCASTING_OPS:
            return f"the repeated value is also read by {reader.op_type}, which does not broadcast"
        needed = [
            reason for name, _, reason in _iterate_repeated_operands(reader) if reason and reader.inputs[name] is var
        ]
        if needed:
            return f"the repeated value is needed by {reader.op_type} '{reader.outputs[0].name}'"
    return ""


def _make_scaling_example(
    name: str, repeat: Callable[[Var], Var], last: Callable[[Var, Var], Var] | None = None, reason: str | None = None
) -> Example:
    """Make an example of `last` (a product) of x and a repeated value."""

    def build_body(x: Var, z: Var) -> Var:
        built: Var = last(x, repeat(z)) if last is not None else Builder.mul(x=x, y=repeat(z), name="y")
        return built

    return make_example(name, build_body, reason=reason, x=(2, 3, 4), z=(2, 1, 4))


def _build_square(z: Var) -> Var:
    result: Var = Builder.mul(x=z, y=z, name="y")
    return result
