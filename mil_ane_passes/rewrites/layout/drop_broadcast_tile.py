"""Remove tiles before ops that broadcast by themselves."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var

from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import get_consumers
from ...passes.contract import Community, Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_m4_study
from ...passes.examples import build_program, make_example
from ...passes.targets import Gate
from ._broadcasts import BROADCASTING_OPS, iterate_repeated_operands


class DropBroadcastTile(Rewrite):
    """Let an op broadcast where a tile (or a concat of a value with itself) repeated its operand first.

    why     Every form of broadcast is supported on an M4, and a tile only writes to memory what the op would read
            anyway. A compiler of StableHLO that takes such tiles out got ops back on the ANE. Against it: with all
            units allowed its model became slower (24.6 to 31.8 ms), as it was cut in other places. Before the M4 nobody
            measured broadcasts: for a target that is older tiles stay, and `ane::tile_broadcast` puts them in.
    when    Arithmetic, comparisons and logic of two operands. The repeated axes had extent 1, the other operand has
            the full extent there, and nothing but such ops reads the repeated value. Not in front of select: shapes
            are reported not to be inferred through it in models with several functions.
    exact   bitwise: the same op on the same numbers.
    cost    none; what the tile wrote is no longer written.

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
    level, confidence = "note", "low"
    roots = BROADCASTING_OPS
    evidence = (
        cite_m4_study(
            "add, sub, mul, real_div, pow, floor_div, maximum, minimum, comparisons and select are accepted with "
            "every broadcast"
        ),
        Community(
            "a pass that takes tiles out, so that ops broadcast, gets them back on the ANE; the model with all "
            "units allowed became slower for it (24.6 to 31.8 ms)",
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
        found = list(iterate_repeated_operands(op))
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
        shown = "x".join(map(str, was.shape)) or "a scalar"
        return Hit(op, changes=changes, note=f"operand {name} of {op.op_type} is {shown} and broadcasts by itself")

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        return rebuild_op(mb, hit.op, **hit.changes)

    def examples(self) -> Iterable[Example]:
        yield Example("tile", lambda: _build_product(lambda z: Builder.tile(x=z, reps=[1, 3, 1])))
        yield Example("concat with itself", lambda: _build_product(lambda z: Builder.concat(values=[z] * 3, axis=1)))
        yield Example("tile of a tile", lambda: _build_product(lambda z: Builder.tile(
            x=Builder.tile(x=z, reps=[1, 3, 1]), reps=[1, 1, 1])))
        yield Example("comparison", lambda: _build_product(
            lambda z: Builder.tile(x=z, reps=[1, 3, 1]), lambda x, z: Builder.cast(
                x=Builder.greater(x=z, y=x), dtype="fp16", name="y")))
        yield Example("read elsewhere", lambda: _build_product(
            lambda z: Builder.tile(x=z, reps=[1, 3, 1]), lambda x, z: Builder.mul(x=x, y=Builder.add(
                x=Builder.reduce_sum(x=z, axes=[1], keep_dims=True), y=Builder.add(x=x, y=z)), name="y")),
            reason="the repeated value is read by reduce_sum, too, which does not broadcast")
        yield make_example(
            "two of one",
            lambda z: _build_square(Builder.tile(x=z, reps=[1, 3, 1])),
            reason="both operands repeat the same value: nothing is left to say the shape",
            z=(2, 1, 4),
        )
        yield Example("both are short", lambda: _build_product(
            lambda z: Builder.tile(x=z, reps=[1, 3, 1]), lambda x, z: Builder.mul(x=Builder.reduce_max(
                x=x, axes=[1], keep_dims=True), y=z, name="y")),
            reason="the other operand is no longer than the value was before it was repeated")
        yield Example("select", lambda: _build_product(
            lambda z: Builder.tile(x=z, reps=[1, 3, 1]), lambda x, z: Builder.select(
                cond=Builder.greater(x=x, y=np.float16(0)), a=x, b=z, name="y")),
            reason="no operand is repeated")


def _find_tile_use(var: Var) -> str:
    """Return why the repeated value is still needed, or ""."""
    if var.consuming_blocks:
        return "the repeated value is an output"
    for reader in get_consumers(var):
        if reader.op_type not in BROADCASTING_OPS:
            return f"the repeated value is read by {reader.op_type}, too, which does not broadcast"
        needed = [
            reason for name, _, reason in iterate_repeated_operands(reader) if reason and reader.inputs[name] is var
        ]
        if needed:
            return f"the repeated value is needed by {reader.op_type} '{reader.outputs[0].name}'"
    return ""


def _build_product(repeat: object, last: object = None) -> Program:
    def body(x: Var, z: Var) -> Var:
        assert callable(repeat)
        result: Var = last(x, repeat(z)) if callable(last) else Builder.mul(x=x, y=repeat(z), name="y")
        return result

    return build_program(body, x=(2, 3, 4), z=(2, 1, 4))


def _build_square(z: Var) -> Var:
    result: Var = Builder.mul(x=z, y=z, name="y")
    return result
