"""Tile the smaller operand of a broadcast, for chips before M4."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import is_compressed, is_const, is_symbolic
from ...passes.contract import Community, Exactness, Example, Hit, Miss, Rewrite, Severity
from ...passes.evidence import cite_m4_study
from ...passes.examples import make_example, make_weight
from ...passes.targets import get_generations_between
from ...rules.shapes import OldBroadcast
from ._broadcasts import pad_shape_to_rank

_SUPPORTED_REASON = "supported on M4 and later; choose an older target, or always=true"


class TileBroadcast(Rewrite):
    """Tile the smaller operand of an op on two computed values, so that both have the shape of the result.

    why     In the NeuralNetwork format of 2020 a product of two computed values of different shapes left the ANE, and
            lists of that time advise to repeat the smaller one. In contrast, in an ML Program every broadcast is
            supported on an M4, and removing tiles from a model moved its ops back to the ANE
            (`ane::drop_broadcast_tile`). M1 to M3 were not measured: try it if a device shows that such an op leaves
            the ANE.
    when    add, sub, mul, real_div, maximum, minimum, pow and floor_div of computed floats whose shapes differ; every
            generation of the target is older than M4. Constants are skipped: their tile would be folded to a constant
            of full size. The number of repeats must be static. Never for select.
    exact   bitwise: the same op on the same numbers.
    cost    the repeated operand is written to memory, once for all users of that shape.

    before
        %y: fp16[2, 3, 4] = mul(x=%x, y=%z)
    after
        %0: fp16[2, 3, 4] = tile(x=%z, reps=[1, 3, 1])
        %y: fp16[2, 3, 4] = mul(x=%x, y=%0)
    """

    fixes = (OldBroadcast,)
    stage = "decompose"
    after = ("drop_broadcast_tile",)
    exactness = Exactness.BITWISE
    preset = "named"
    severity, confidence = Severity.SUGGESTION, "low"
    roots = ("add", "sub", "mul", "real_div", "maximum", "minimum", "pow", "floor_div")
    evidence = (
        cite_m4_study("contradicts it for ML Programs: every broadcast is accepted"),
        Community("contradicts it: a pass that removes tiles, so that ops broadcast, moves them back to the ANE; with "
                  "all compute units allowed the model became slower (24.6 to 31.8 ms)", chip="M4",
                  source="https://github.com/kasper0406/stablehlo-coreml/issues/105"),
    )

    always: bool = False
    "Rewrite even if a generation of the target is known to support broadcasts."

    def match(self, op: Operation) -> Hit | Miss:
        if any(is_const(var) or is_compressed(var) for var in (op.x, op.y)):
            return Miss(op, "an operand is constant", near=False)
        if not types.is_float(op.x.dtype):
            return Miss(op, "no floating-point numbers", near=False)
        shape = tuple(op.outputs[0].shape)
        wanted = {"x": _compute_repeats(op.x, op.y, shape), "y": _compute_repeats(op.y, op.x, shape)}
        if not any(repeats is None or any(times != 1 for times in repeats) for repeats in wanted.values()):
            return Miss(op, "both operands have the shape of the result", near=False)
        if not self.always and set(self.generations).intersection(get_generations_between("m4")):
            return Miss(op, _SUPPORTED_REASON)
        if any(repeats is None for repeats in wanted.values()):
            return Miss(op, "the number of repeats is dynamic")
        changes = {name: repeats for name, repeats in wanted.items() if any(times != 1 for times in repeats or ())}
        return Hit(op, changes=changes, note=" and ".join(
            f"operand {name} repeated {'x'.join(map(str, repeats or ()))}" for name, repeats in changes.items()))

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        tiled = {name: _tile_operand(mb, hit.op.inputs[name], repeats) for name, repeats in hit.changes.items()}
        return rebuild_op(mb, hit.op, **tiled)

    def examples(self) -> Iterable[Example]:
        always = {"always": True}
        yield _make_product_example("channels", (2, 3, 4), (2, 1, 4), options=always)
        yield _make_product_example("of lower rank", (2, 8, 4), (8, 4), options=always)
        yield _make_product_example("each way", (2, 3, 1, 4), (2, 1, 3, 4), options=always)
        yield _make_product_example("on any chip", (2, 3, 4), (2, 1, 4), reason=_SUPPORTED_REASON)
        yield _make_product_example("one shape", (2, 3), (2, 3), reason="both operands have the shape of the result")
        yield make_example("constant", lambda x: Builder.mul(x=x, y=make_weight(3, 1)), x=(2, 3, 4),
                           reason="an operand is constant")
        yield _make_product_example("open", (2, None, 4), (2, 1, 4), options=always,
                                    reason="the number of repeats is dynamic")


def _compute_repeats(var: Var, other: Var, shape: Sequence[Any]) -> list[int] | None:
    """Compute how often `var` is repeated in `shape` along each axis; None where that is unknown."""
    repeats: list[int] = []
    own_shape, other_shape = (pad_shape_to_rank(each.shape, len(shape)) for each in (var, other))
    for own, beside, result in zip(own_shape, other_shape, shape):
        if own == 1 and is_symbolic(beside):
            return None
        is_open = is_symbolic(own) or is_symbolic(beside)  # a symbol paired with an extent is the same size
        repeats.append(int(result) if own == 1 and not is_open else 1)
    return repeats


def _tile_operand(mb: RewriteBuilder, var: Var, repeats: list[int]) -> Var:
    def build_tile() -> Any:
        with mb.at(mb.find_insertion_point(var), var.name):
            front = len(repeats) - var.rank
            wide = mb.expand_dims(x=var, axes=list(range(front))) if front else var
            return mb.tile(x=wide, reps=np.array(repeats, dtype=np.int32))

    tiled: Var = mb.once(("tile", var, tuple(repeats)), build_tile)
    return tiled


def _make_product_example(name: str, x: tuple[int | None, ...], z: tuple[int | None, ...], **expected: Any) -> Example:
    return make_example(name, lambda x, z: Builder.mul(x=x, y=z, name="y"), x=x, z=z, **expected)
