"""Inline the branch that is always executed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Var

from ...ir.builder import RewriteBuilder
from ...passes.contract import Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_private_route
from ...passes.examples import make_example, make_weight
from ...rules.control_flow import ControlFlow
from ._block_inlining import can_replace_value, make_replacement_outputs


class InlineConstantBranch(Rewrite):
    """Put the ops of a branch that is always taken in place of the cond.

    why     cond is unsupported on the ANE: it runs on the CPU, and all that stands in its branches with it. Where the
            predicate is known when the model is made, there is nothing to decide.
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
        cite_private_route("cond and while_loop have no form of their own on any generation"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        pred = op.pred.val
        if pred is None:
            return Miss(op, f"the branch depends on '{op.pred.name}', which is known only at run time")
        branch = op.blocks[0 if pred else 1]
        for new, old in zip(branch.outputs, op.outputs):
            if not can_replace_value(new, old):
                return Miss(op, f"'{old.name}' is declared with other sizes than the branch that is taken gives it")
        return Hit(op, note=f"the predicate is always {'true' if pred else 'false'}", branch=branch)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> list[Var]:
        branch: Block = hit.branch
        for op in list(branch.operations):
            mb.moved(op)
        return make_replacement_outputs(mb, hit.op, branch.outputs)

    def examples(self) -> Iterable[Example]:
        yield make_example("always", lambda x: _build_cond(x, Builder.const(val=np.bool_(True))), x=(2, 3))
        yield make_example("never", lambda x: _build_cond(x, Builder.const(val=np.bool_(False))), x=(2, 3))
        yield make_example("from a shape", lambda x: _build_cond(
            x, Builder.greater(x=Builder.reduce_prod(x=Builder.shape(x=x)), y=np.int32(5))), x=(2, 3))
        yield make_example("weights and several outputs", _build_several_outputs, x=(2, 8))
        yield make_example("passed through", lambda x: Builder.cond(
            pred=Builder.const(val=np.bool_(True)), _true_fn=lambda: (x, x),
            _false_fn=lambda: (Builder.relu(x=x), Builder.exp(x=x))), x=(2, 3))
        yield make_example("inside another", _build_nested_cond, x=(2, 3))
        yield make_example("decided by values", lambda x: _build_cond(
            x, Builder.greater(x=Builder.reduce_sum(x=x), y=np.float16(0), name="positive")),
            reason="the branch depends on 'positive', which is known only at run time", x=(2, 3))
        yield make_example("plain", lambda x: Builder.relu(x=x, name="y"), reason="", x=(2, 3))


def _build_cond(x: Var, pred: Var) -> Var:
    result: Var = Builder.cond(pred=pred, _true_fn=lambda: Builder.relu(x=x), _false_fn=lambda: Builder.exp(x=x),
                               name="y")
    return result


def _build_several_outputs(x: Var) -> list[Var]:
    def linear() -> Var:
        result: Var = Builder.linear(x=x, weight=make_weight(4, 8))
        return result

    def branch() -> tuple[Var, ...]:
        first = linear()
        return Builder.tanh(x=first), first, first

    outputs = Builder.cond(pred=Builder.const(val=np.bool_(True)), _true_fn=branch,
                           _false_fn=lambda: (linear(), linear(), linear()))
    return [*outputs, Builder.relu(x=outputs[2])]


def _build_nested_cond(x: Var) -> Var:
    known = Builder.const(val=np.bool_(False))
    result: Var = Builder.cond(pred=known, _true_fn=lambda: Builder.exp(x=x),
                               _false_fn=lambda: Builder.abs(x=_build_cond(x, known)), name="z")
    return result
