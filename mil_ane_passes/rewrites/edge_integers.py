"""Put what depends on integer inputs alone at the front."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Function, Operation, Program, Var, types

from ..core.build import RewriteBuilder
from ..core.contract import BlockRewrite, Exactness, Example, Hit, Miss
from ..core.evidence import in_2020, on_m4
from ..core.examples import program, weight
from ..core.query import flat_inputs, is_opaque, kind_of
from ..core.words import counted

_GATHERS = frozenset({"gather", "gather_nd", "gather_along_axis"})


class EdgeIntegers(BlockRewrite):
    """Move the preparation of integers, and the look-ups by them, to the front of the model.

    why     The ANE takes no int32. Ops run in the order in which they stand: in the middle of the model a few ops on
            integers cost two changes of processor and one more entry, at its front one change at most.
    when    Ops that read or make int32 and depend on inputs, constants and one another only, and look-ups in constant
            tables by them, where other ops stand before them. What depends on floats stays where it is.
    exact   bitwise: the ops are the same, only their order is another.
    cost    none; their results are held from the front on.

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
    after = ("cancel_lift_pairs", "carry_lift", "lift_conv_1d", "pad_last_axis")  # these put ops behind inputs
    exactness = Exactness.BITWISE
    preset = "full"
    evidence = (
        on_m4("any arithmetic on int32 is refused, and casts between fp16 and int32"),
        in_2020("changes ANE, CPU, ANE, CPU do happen, and each involves overhead; replace the one or two layers that "
                "cause them"),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        early, late, first = set[Operation](), list[Operation](), None
        for op in block.operations:
            if op.op_type.startswith("const"):
                continue
            if _on_integers(op) and all(_given(var, block, early) for var in flat_inputs(op)):
                early.add(op)
                late += [op] if first is not None else []
            elif first is None:
                first = op
        if late:
            yield Hit(late[0], note=f"{counted(len(late), 'op')} on integers behind '{_name(first)}'",
                      late=late, first=first, covers=late)

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        behind, before = set[Operation](), True
        for op in mb.block.operations:
            before = before and op is not hit.first
            behind |= set() if before else {op}
        with mb.at(hit.first):
            for op in hit.late:
                for const in _consts(op, behind):
                    mb.moved(const)
                    behind.discard(const)
                mb.moved(op)
        return {}

    def examples(self) -> Iterable[Example]:
        yield Example("prepared in the middle", _late)
        yield Example("looked up in the middle", _looked_up)
        yield Example("at the front", lambda: program(lambda i: Builder.relu(x=Builder.cast(
            x=Builder.add(x=i, y=np.int32(1)), dtype="fp16"), name="y"), dtype=types.int32, i=(3,)), reason="")
        yield Example("made of floats", lambda: program(lambda x: Builder.cast(x=Builder.cast(
            x=Builder.relu(x=x), dtype="int32"), dtype="fp16", name="y"), x=(2, 3)), reason="")


def _on_integers(op: Operation) -> bool:
    """Whether the ANE refuses `op` for int32, or for a look-up by it."""
    if op.blocks or is_opaque(op) or any(types.is_list(var.sym_type) or types.is_state(var.sym_type)
                                         for var in (*op.outputs, *flat_inputs(op))):
        return False
    if op.op_type in _GATHERS and _constant(op.x):
        return not _constant(op.indices)
    return op.op_type != "classify" and any(
        kind_of(var).dtype == types.int32 and not _constant(var) for var in (*op.outputs, *flat_inputs(op)))


def _given(var: Var, block: Block, early: set[Operation]) -> bool:
    return var.op is None or _constant(var) or var.op in early or var.op.enclosing_block is not block


def _constant(var: Var) -> bool:
    return var.op is not None and var.op.op_type.startswith("const")


def _name(op: Operation | None) -> str:
    return str(op.outputs[0].name) if op is not None and op.outputs else ""


def _consts(op: Operation, behind: set[Operation]) -> Iterator[Operation]:
    """The constants behind the front that `op` reads, each behind what it is made of itself."""
    for var in dict.fromkeys(flat_inputs(op)):
        if _constant(var) and var.op in behind:
            yield from _consts(var.op, behind)
            yield var.op


def _late() -> Program:
    return _with_integers(lambda i: Builder.cast(x=Builder.add(x=i, y=np.int32(1)), dtype="fp16"))


def _looked_up() -> Program:
    return _with_integers(lambda i: Builder.reduce_sum(x=Builder.gather(x=weight(8, 4), indices=Builder.maximum(
        x=i, y=np.int32(0)), axis=0), axes=[1]))


def _with_integers(made: Callable[[Var], Var]) -> Program:
    def body(x: Var, i: Var) -> Var:
        result: Var = Builder.relu(x=Builder.mul(x=Builder.tanh(x=x), y=made(i)), name="y")
        return result

    placeholders = {"x": Builder.placeholder(shape=(2, 8), dtype=types.fp16),
                    "i": Builder.placeholder(shape=(8,), dtype=types.int32)}
    with Function(placeholders, opset_version=ct.target.iOS17) as function:
        function.set_outputs([body(**function.inputs)])
    built = Program()
    built.add_function("main", function)
    return built
