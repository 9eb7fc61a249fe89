"""Count bools in fp16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Program, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.clone_op import clone_op, infer_outputs
from ...ir.query import is_const
from ...passes.contract import BlockRewrite, Exactness, Example, Hit, Miss
from ...passes.evidence import cite_m4_study
from ...passes.examples import build_program
from ...rules.int32_ops import Int32Ops
from ...utils.text_format import format_count
from ._int32_chains import COMPARISON_OPS, DATA_INPUTS, find_fp16_obstacle, find_int32_chains


class IntCasts(BlockRewrite):
    """Compute in fp16 what int32 is a detour for: truth values that are counted, added or cast on.

    why     int32 is unsupported on the ANE, not even a cast to it; truth values and fp16 it takes. A comparison that
            is cast to int32 and then to fp16, or a mask that is summed in int32, costs two transitions.
    when    A chain of ops on int32 in one block that begins at truth values and constants, moves, adds, multiplies,
            compares or sums them, and ends in floats or truth values, where no integer can be beyond 2048, up to which
            fp16 has all of them.
    exact   bitwise: fp16 holds each of these integers, and none of them is a negative zero.
    cost    none: half the bytes are moved.

    before
        %0: bool[2, 3] = greater(x=%x, y=0.0)
        %1: int32[2, 3] = cast(x=%0, dtype=int32)
        %y: fp16[2, 3] = cast(x=%1, dtype=fp16)
    after
        %0: bool[2, 3] = greater(x=%x, y=0.0)
        %y: fp16[2, 3] = cast(x=%0, dtype=fp16)
    """

    fixes = (Int32Ops,)
    stage = "precision"
    after = ("fp16_compute",)
    exactness = Exactness.BITWISE
    preset = "full"
    evidence = (
        cite_m4_study(
            "any arithmetic on int32 is unsupported, and so are casts between fp16 and int32; bool is accepted"
        ),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        for members in find_int32_chains(block):
            if len(members) < 2 or not any(op.op_type == "cast" and op.x.dtype == types.bool for op in members):
                continue
            wrong = find_fp16_obstacle(members)
            if wrong is not None:
                yield Miss(members[0], wrong)
                continue
            yield Hit(
                members[0],
                note=f"{format_count(len(members), 'op')} on integers that fp16 holds",
                members=members,
                covers=members,
            )

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        now, replaced = dict[Var, Var](), dict[Var, Var]()
        for op in hit.members:
            out = op.outputs[0]
            with mb.at(op):
                if op.op_type == "cast" and op.x.dtype == types.bool:
                    now[out] = mb.cast(x=now.get(op.x, op.x), dtype="fp16")
                elif op.op_type == "cast":
                    again = out.dtype == types.fp16 and out.consuming_blocks and now[op.x] in replaced.values()
                    now[out] = mb.identity(x=now[op.x]) if again else (
                        now[op.x] if out.dtype == types.fp16 else mb.cast(x=now[op.x], dtype=op.dtype.val))
                else:
                    now.update(
                        zip(op.outputs, mb.insert(infer_outputs(clone_op(op, _bind_fp16_inputs(mb, op, now)), op)))
                    )
            if op.op_type in COMPARISON_OPS or (op.op_type == "cast" and op.x.dtype != types.bool):
                replaced[out] = now[out]
        return replaced

    def examples(self) -> Iterable[Example]:
        yield Example("truth by way of int32", lambda: _build_counted_bools(lambda i: i))
        yield Example("a count", lambda: _build_counted_bools(lambda i: Builder.reduce_sum(x=i, axes=[0])))
        yield Example("the others", lambda: _build_counted_bools(lambda i: Builder.sub(x=np.int32(1), y=i)))
        yield Example("at least two", lambda: _build_counted_bools(lambda i: Builder.cast(x=Builder.greater_equal(
            x=Builder.reduce_sum(x=i, axes=[0], keep_dims=True), y=np.int32(2)), dtype="int32")))
        yield Example("far", lambda: _build_counted_bools(lambda i: Builder.mul(x=i, y=np.int32(3000), name="far")),
                      reason="'far' may reach 3000, and fp16 counts up to 2048")
        yield Example("negative", lambda: _build_counted_bools(lambda i: Builder.mul(x=i, y=np.int32(-1))),
                      reason="a product with negative numbers may be -0.0")
        yield Example("given integers", _build_integer_input, reason="'i' may be any integer")
        yield Example("returned", lambda: build_program(lambda x: Builder.cast(
            x=Builder.cast(x=Builder.greater(x=x, y=np.float16(0)), dtype="int32"), dtype="int16", name="y"), x=(2, 3)),
            reason="a cast in it")
        yield Example("plain", lambda: build_program(lambda x: Builder.relu(x=x, name="y"), x=(2, 3)), reason="")


def _bind_fp16_inputs(mb: RewriteBuilder, op: Operation, now: dict[Var, Var]) -> dict[str, Any]:
    """Return the numeric inputs of `op`, in fp16."""
    def half(var: Var) -> Var:
        if not is_const(var) or var.dtype != types.int32:
            return now.get(var, var)
        made: Var = mb.once(("half", var), lambda: mb.const(val=np.asarray(var.val).astype(np.float16)[()],
                                                            name=f"{var.name}_fp16"))
        return made

    given = {name: op.inputs[name] for name in (*DATA_INPUTS, "cond") if name in op.inputs}
    return {name: tuple(map(half, var)) if isinstance(var, (list, tuple)) else half(var) for name, var in given.items()}


def _build_counted_bools(middle: Any) -> Program:
    def body(x: Var) -> Var:
        whole = Builder.cast(x=Builder.greater(x=x, y=np.float16(0)), dtype="int32")
        result: Var = Builder.cast(x=middle(whole), dtype="fp16", name="y")
        return result

    return build_program(body, x=(2, 3))


def _build_integer_input() -> Program:
    def body(i: Var) -> Var:
        seen = Builder.cast(x=Builder.greater(x=i, y=np.int32(0)), dtype="int32")
        result: Var = Builder.cast(x=Builder.mul(x=i, y=seen), dtype="fp16", name="y")
        return result

    return build_program(body, dtype=types.int32, i=(2, 3))
