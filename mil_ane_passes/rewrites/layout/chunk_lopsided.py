"""Compute elementwise ops on a long axis in a shape that is supported on the ANE."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Program, Var

from ...ane.limits import collect_evidence
from ...ir.builder import RewriteBuilder
from ...ir.query import get_consumers, get_static_shape, is_const
from ...passes.contract import BlockRewrite, Exactness, Example, Hit, Miss
from ...passes.evidence import cite_surgery_tip
from ...passes.examples import build_program
from ...rules.dimension_limit import DimensionLimit
from ...utils.text_format import format_count
from .._target_gate import describe_supporting_targets
from ..convolution._conv_1d_lifting import rebuild_op
from ._long_axis_regions import (
    find_balanced_shape,
    get_elementwise_operands,
    is_shape_unsupported,
    iterate_long_axis_regions,
)


class ChunkLopsided(BlockRewrite):
    """Reshape [.., n] to [1, 1, a, b] around elementwise ops whose values are longer in one axis than the ANE holds.

    why     Core ML rejects a width of 240000: 16384 is the most up to M3, 65536 from the M4 on. Elementwise ops do not
            care where an element stands.
    when    Neighbouring elementwise ops on values of one shape, with scalars or constants of that shape, whose size is
            known and has a fitting divisor; every generation looked at rejects them. A reshape reads or makes the long
            value and is unsupported itself, so there must be fewer values that enter or leave than ops. Convs and other
            ops that look along the axis stay as they are.
    exact   bitwise: each element by itself.
    cost    a reshape for each value that enters or leaves.

    before
        %0: fp16[1, 70000] = relu(x=%x)
        %1: fp16[1, 70000] = mul(x=%0, y=0.5)
        %2: fp16[1, 70000] = abs(x=%1)
        %3: fp16[1, 70000] = sqrt(x=%2)
        %y: fp16[1, 70000] = add(x=%3, y=%x)
    after
        %0: fp16[1, 1, 10, 7000] = reshape(x=%x, shape=[1, 1, 10, 7000])
        %1: fp16[1, 1, 10, 7000] = relu(x=%0)
        %2: fp16[1, 1, 10, 7000] = mul(x=%1, y=0.5)
        %3: fp16[1, 1, 10, 7000] = abs(x=%2)
        %4: fp16[1, 1, 10, 7000] = sqrt(x=%3)
        %5: fp16[1, 1, 10, 7000] = add(x=%4, y=%0)
        %y: fp16[1, 70000] = reshape(x=%5, shape=[1, 70000])
    """

    fixes = (DimensionLimit,)
    stage = "decompose"
    exactness = Exactness.BITWISE
    preset = "full"
    evidence = (
        *collect_evidence("spatial"),
        cite_surgery_tip("tensors lopsided to a shape like (50000,): chunk or parallelise"),
    )

    always: bool = False
    "Rewrite also where a requested generation supports the values as they are."

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        for ops, shape in iterate_long_axis_regions(block, self.generations):
            inside, made = set(ops), [var for op in ops for var in op.outputs]
            entering = {
                var
                for op in ops
                for var in get_elementwise_operands(op)
                if var.op not in inside and not is_const(var) and get_static_shape(var) == shape
            }
            leaving = [var for var in made if var.consuming_blocks or any(
                reader not in inside for reader in get_consumers(var))]
            refused = [each for each in self.generations if is_shape_unsupported(shape, each)]
            chosen = find_balanced_shape(prod(shape), refused)
            if len(refused) < len(self.generations) and not self.always:
                yield Miss(ops[0], describe_supporting_targets(self.generations, refused))
            elif len(entering) + len(leaving) >= len(ops):
                yield Miss(
                    ops[0],
                    f"{len(entering) + len(leaving)} reshapes for {format_count(len(ops), 'op')}: no less is "
                    f"unsupported",
                )
            elif chosen is None:
                yield Miss(ops[0], f"{prod(shape)} elements have no divisor that leaves both axes short enough")
            else:
                yield Hit(ops[0], ops=ops, leaving=leaving, old=shape, new=chosen, covers=ops,
                          note=f"{format_count(len(ops), 'op')} on {'x'.join(map(str, shape))} as "
                               f"{'x'.join(map(str, chosen))}")

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        shown: dict[Var, Var] = {}

        def view(var: Var) -> Var:
            if var.rank == 0:
                return var
            shape = hit.new if get_static_shape(var) == hit.old else (1,) * len(hit.new)
            if is_const(var):
                return mb.reshaped(var, shape)
            if var not in shown:
                shown[var] = mb.reshape(x=var, shape=np.array(shape, dtype=np.int32))
            return shown[var]

        replaced: dict[Var, Var] = {}
        for op in hit.ops:
            with mb.at(op):
                shown[op.outputs[0]] = rebuild_op(mb, op, **{
                    name: view(op.inputs[name]) for name in ("cond", "a", "b", "x", "y") if name in op.inputs})
                if op.outputs[0] in hit.leaving:
                    replaced[op.outputs[0]] = mb.reshape(x=shown[op.outputs[0]], shape=np.array(hit.old, np.int32))
        return replaced

    def examples(self) -> Iterable[Example]:
        yield Example("a signal", lambda: _build_signal(70000))
        yield Example("a gain of each signal", lambda: _build_signal(70000, lambda x: Builder.mul(
            x=x, y=Builder.reduce_max(x=x, axes=[0, 1], keep_dims=True))))
        yield Example("one op", lambda: build_program(lambda x: Builder.relu(x=x), x=(70000,)),
                      reason="2 reshapes for 1 op: no less is unsupported")
        yield Example("a prime", lambda: _build_signal(70001),
                      reason="70001 elements have no divisor that leaves both axes short enough")
        yield Example("taken on M4", lambda: _build_signal(20000),
                      reason="taken on M4, A18, M5 and M6; name an older target, or always=true")
        yield Example("short", lambda: _build_signal(16384), reason="")


def _build_signal(length: int, first: object = None) -> Program:
    def body(x: Var) -> Var:
        value = first(x) if callable(first) else Builder.relu(x=x)
        value = Builder.mul(x=value, y=np.float16(0.5))
        result: Var = Builder.add(x=Builder.sqrt(x=Builder.abs(x=value)), y=x, name="y")
        return result

    return build_program(body, x=(1, length))
