"""Find branches, loops and lists."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ..ane.op_support import M1_TO_M5
from ..ir.query import is_const
from ..passes.contract import Example, Hit, Miss, Rule
from ..passes.evidence import cite_m1_gpt_notes, cite_private_route
from ..passes.examples import build_program, make_example
from ..utils.text_format import format_count
from ._split_points import describe_split_points, find_split_points
from ._unsupported_ops import make_unsupported_hit

_LIST_OPS = ("make_list", "list_gather", "list_length", "list_read", "list_scatter", "list_write")


class ControlFlow(Rule):
    """Branches, loops and lists run on the CPU, and what stands inside them with them.

    why     cond was seen to leave the ANE in a GPT model; the ANE's compiler, asked without Core ML, has no form of
            cond, while_loop and the list ops on any generation.
    when    Any cond, while_loop, make_list or list op. The note counts the ops inside.
    fix     A loop whose number of steps is fixed: ane::unroll_while_loop. A branch that is always taken:
            ane::inline_constant_branch. Another branch: compute both sides and select (the same bits where neither
            side traps), or make two functions and choose outside. A loop that values end: cut the model before it and
            behind it with --split-at, at the values in the note. A list at known places: ane::lists_as_stack.
    """

    code, slug = "ANE218", "control-flow"
    roots = ("cond", "while_loop", *_LIST_OPS)
    refuses, confidence = True, "high"
    advice = ("Unroll fixed loops and select between both sides of a branch (same bits), choose outside the model, or "
              "cut it out (edit --split-at).")
    evidence = (
        cite_m1_gpt_notes("cond is not supported on the neural engine: the branch is supported on the CPU"),
        cite_private_route("cond and while_loop have no form of their own, the list ops none on any generation"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        inside = sum(_count_ops(block.operations) for block in op.blocks)
        what = f" with {format_count(inside, 'op')} inside" if op.blocks else ""
        known = ", decided by a constant" if op.op_type == "cond" and is_const(op.pred) else ""
        alone = bool(op.blocks) and not known
        where = describe_split_points(op) if alone else ""
        return make_unsupported_hit(
            self,
            op,
            f"{op.op_type} is unsupported on the ANE{what}{known}{where}",
            seen=M1_TO_M5,
            split_at=find_split_points(op) if alone else (),
        )

    def examples(self) -> Iterable[Example]:
        yield make_example("branch", _build_branch, x=(2, 3))
        yield Example("loop", _build_loop)
        yield make_example(
            "both sides",
            lambda x: Builder.select(cond=Builder.greater(x=x, y=np.float16(0)), a=x, b=Builder.exp(x=x), name="y"),
            reason="",
            x=(2, 3),
        )


def _count_ops(ops: Iterable[Operation]) -> int:
    return sum(1 for op in ops if op.op_type != "const")


def _build_branch(x: Var) -> Var:
    positive = Builder.greater(x=Builder.reduce_sum(x=x), y=np.float16(0))
    result: Var = Builder.cond(pred=positive, _true_fn=lambda: Builder.relu(x=x), _false_fn=lambda: Builder.exp(x=x),
                               name="y")
    return result


def _build_loop() -> Program:
    def body(x: Var) -> Var:
        outputs: tuple[Var, ...] = Builder.while_loop(
            _cond=lambda i, a: Builder.less(x=i, y=np.int32(3)),
            _body=lambda i, a: (Builder.add(x=i, y=np.int32(1)), Builder.relu(x=a)), loop_vars=(np.int32(0), x))
        return outputs[1]

    return build_program(body, dtype=types.fp16, x=(2, 3))
