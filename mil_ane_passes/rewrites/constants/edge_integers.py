"""Move ops that depend only on integer inputs to the front."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import dropwhile

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Function, Operation, Program, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_flat_inputs, get_type_info, is_const_or_compressed, is_opaque
from ...passes.contract import BlockRewrite, Exactness, Example, Hit, Miss
from ...passes.evidence import cite_2020_layer_list, cite_m4_study
from ...passes.examples import make_example, make_weight
from ...utils.text_format import format_count

_GATHER_OPS = frozenset({"gather", "gather_nd", "gather_along_axis"})


class EdgeIntegers(BlockRewrite):
    """Move integer ops, and lookups that use them, to the front of the model.

    why     int32 is unsupported on the ANE. Ops run in program order: a few integer ops in the middle of the model cost
            two transitions and one more entry, at its front at most one transition.
    when    int32 ops that depend on inputs, constants and one another only, and lookups in constant tables with their
            results, if other ops precede them. Ops that depend on floats are not moved.
    exact   bitwise: the same ops in a different order.
    cost    none; their results stay live from the front on.

    before
        %0: fp16[2, 8] = tanh(x=%x)
        %1: int32[8] = add(x=%i, y=1)
        %2: fp16[8] = cast(x=%1, dtype=fp16)
        %3: fp16[2, 8] = mul(x=%0, y=%2)
        %y: fp16[2, 8] = relu(x=%3)
    after
        %0: int32[8] = add(x=%i, y=1)
        %1: fp16[8] = cast(x=%0, dtype=fp16)
        %2: fp16[2, 8] = tanh(x=%x)
        %3: fp16[2, 8] = mul(x=%2, y=%1)
        %y: fp16[2, 8] = relu(x=%3)
    """

    code, slug = "ANE264", "integers-in-the-middle"
    stage = "layout"
    after = ("cancel_lift_pairs", "carry_lift", "lift_conv_1d", "pad_last_axis")  # these put ops after inputs
    exactness = Exactness.BITWISE
    preset = "full"
    evidence = (
        cite_m4_study("any arithmetic on int32 is unsupported, and casts between fp16 and int32"),
        cite_2020_layer_list(
            "transitions ANE, CPU, ANE, CPU do happen, and each has an overhead; replace the one or two layers that "
            "cause them"
        ),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        early, late = set[Operation](), list[Operation]()
        first: Operation | None = None
        for op in block.operations:
            if op.op_type.startswith("const"):
                continue
            if _is_unsupported_integer_op(op) and all(
                _is_available_early(var, block, early) for var in get_flat_inputs(op)
            ):
                early.add(op)
                if first is not None:
                    late.append(op)
            elif first is None:
                first = op
        if late:
            yield Hit(late[0], note=f"{format_count(len(late), 'op')} on integers after '{_get_output_name(first)}'",
                      late=late, first=first, covers=late)

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        after_first = set(dropwhile(lambda op: op is not hit.first, mb.block.operations))
        with mb.at(hit.first):
            for op in hit.late:
                for const in _iterate_late_constants(op, after_first):
                    mb.moved(const)
                    after_first.discard(const)
                mb.moved(op)
        return {}

    def examples(self) -> Iterable[Example]:
        yield Example("prepared in the middle", lambda: _build_late_integers(
            lambda i: Builder.cast(x=Builder.add(x=i, y=np.int32(1)), dtype="fp16")))
        yield Example("looked up in the middle", lambda: _build_late_integers(
            lambda i: Builder.reduce_sum(x=Builder.gather(
                x=make_weight(8, 4), indices=Builder.maximum(x=i, y=np.int32(0)), axis=0), axes=[1])))
        yield make_example(
            "at the front",
            lambda i: Builder.relu(x=Builder.cast(x=Builder.add(x=i, y=np.int32(1)), dtype="fp16"), name="y"),
            reason="",
            dtype=types.int32,
            i=(3,),
        )
        yield make_example(
            "made of floats",
            lambda x: Builder.cast(x=Builder.cast(x=Builder.relu(x=x), dtype="int32"), dtype="fp16", name="y"),
            reason="",
            x=(2, 3),
        )


def _is_unsupported_integer_op(op: Operation) -> bool:
    """Return whether `op` is unsupported on the ANE because of int32, or of a lookup by it."""
    values = (*op.outputs, *get_flat_inputs(op))
    if op.blocks or is_opaque(op) or any(types.is_list(var.sym_type) or types.is_state(var.sym_type) for var in values):
        return False
    if op.op_type in _GATHER_OPS and is_const_or_compressed(op.x):
        return not is_const_or_compressed(op.indices)
    return op.op_type != "classify" and any(
        get_type_info(var).dtype == types.int32 and not is_const_or_compressed(var) for var in values
    )


def _is_available_early(var: Var, block: Block, early: set[Operation]) -> bool:
    return var.op is None or is_const_or_compressed(var) or var.op in early or var.op.enclosing_block is not block


def _get_output_name(op: Operation | None) -> str:
    return str(op.outputs[0].name) if op is not None and op.outputs else ""


def _iterate_late_constants(op: Operation, late: set[Operation]) -> Iterator[Operation]:
    """Yield the constants among `late` that `op` reads, each after the constants that it is computed from."""
    for var in dict.fromkeys(get_flat_inputs(op)):
        if is_const_or_compressed(var) and var.op in late:
            yield from _iterate_late_constants(var.op, late)
            yield var.op


def _build_late_integers(compute: Callable[[Var], Var]) -> Program:
    """Build `compute` of an integer input after an op on a floating-point input."""
    placeholders = {"x": Builder.placeholder(shape=(2, 8), dtype=types.fp16),
                    "i": Builder.placeholder(shape=(8,), dtype=types.int32)}
    with Function(placeholders, opset_version=ct.target.iOS17) as function:
        x, i = function.inputs.values()
        function.set_outputs([Builder.relu(x=Builder.mul(x=Builder.tanh(x=x), y=compute(i)), name="y")])
    program = Program()
    program.add_function("main", function)
    return program
