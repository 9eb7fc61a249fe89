"""Take the branch that is always taken."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Program, Var

from ..core.build import RewriteBuilder
from ..core.contract import Exactness, Example, Hit, Miss, Rewrite
from ..core.evidence import private
from ..core.examples import program, weight
from ..rules.control_flow import ControlFlow
from ._inline import handed_over, same_sizes


class InlineConstantBranch(Rewrite):
    """Put the ops of a branch that is always taken in place of the cond.

    why     The ANE takes no cond: it runs on the CPU, and all that stands in its branches with it. Where the predicate
            is known when the model is made, there is nothing to decide.
    when    A cond whose predicate is a constant, or follows from constants and fixed shapes. The branch's sizes must be
            those that the cond declares.
    exact   bitwise: the same ops on the same values, under the same names. The other branch goes, with its weights.
    cost    none.

    before
        %y: fp16[2, 3] = cond(pred=True)
          () {
            %0: fp16[2, 3] = relu(x=%x)
          } -> (%0)
          () {
            %1: fp16[2, 3] = exp(x=%x)
          } -> (%1)
    after
        %y: fp16[2, 3] = relu(x=%x)
    """

    fixes = (ControlFlow,)
    stage = "structure"
    after = ("fold_constants",)
    exactness = Exactness.BITWISE
    preset = "full"
    roots = ("cond",)
    evidence = (
        private("cond and while_loop have no form of their own on any generation"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        known = op.pred.val
        if known is None:
            return Miss(op, f"the branch depends on '{op.pred.name}', which is known only at run time")
        taken = op.blocks[0 if known else 1]
        for made, old in zip(taken.outputs, op.outputs):
            if not same_sizes(made, old):
                return Miss(op, f"'{old.name}' is declared with other sizes than the branch that is taken gives it")
        return Hit(op, note=f"the predicate is always {'true' if known else 'false'}", taken=taken)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> list[Var]:
        taken: Block = hit.taken
        for op in list(taken.operations):
            mb.moved(op)
        return handed_over(mb, hit.op, taken.outputs)

    def examples(self) -> Iterable[Example]:
        yield Example("always", lambda: _branched(np.bool_(True)))
        yield Example("never", lambda: _branched(np.bool_(False)))
        yield Example("from a shape", lambda: program(
            lambda x: _chosen(x, Builder.greater(x=Builder.reduce_prod(x=Builder.shape(x=x)), y=np.int32(5))),
            x=(2, 3)))
        yield Example("weights and several outputs", _several)
        yield Example("passed through", lambda: program(
            lambda x: Builder.cond(pred=Builder.const(val=np.bool_(True)), _true_fn=lambda: (x, x),
                                   _false_fn=lambda: (Builder.relu(x=x), Builder.exp(x=x))), x=(2, 3)))
        yield Example("inside another", _inside)
        yield Example("decided by values", lambda: program(
            lambda x: _chosen(x, Builder.greater(x=Builder.reduce_sum(x=x), y=np.float16(0), name="positive")),
            x=(2, 3)), reason="the branch depends on 'positive', which is known only at run time")
        yield Example("plain", lambda: program(lambda x: Builder.relu(x=x, name="y"), x=(2, 3)), reason="")


def _chosen(x: Var, pred: Var) -> Var:
    result: Var = Builder.cond(pred=pred, _true_fn=lambda: Builder.relu(x=x), _false_fn=lambda: Builder.exp(x=x),
                               name="y")
    return result


def _branched(known: np.bool_) -> Program:
    return program(lambda x: _chosen(x, Builder.const(val=known)), x=(2, 3))


def _several() -> Program:
    def body(x: Var) -> list[Var]:
        def taken() -> tuple[Var, ...]:
            first = Builder.linear(x=x, weight=weight(4, 8))
            return Builder.tanh(x=first), first, first

        made = Builder.cond(pred=Builder.const(val=np.bool_(True)), _true_fn=taken,
                            _false_fn=lambda: tuple(Builder.linear(x=x, weight=weight(4, 8)) for _ in range(3)))
        return [*made, Builder.relu(x=made[2])]

    return program(body, x=(2, 8))


def _inside() -> Program:
    def body(x: Var) -> Var:
        known = Builder.const(val=np.bool_(False))
        result: Var = Builder.cond(pred=known, _true_fn=lambda: Builder.exp(x=x),
                                   _false_fn=lambda: Builder.abs(x=_chosen(x, known)), name="z")
        return result

    return program(body, x=(2, 3))
