"""Inline branches with a constant condition."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Var

from ...ir.builder import RewriteBuilder
from ...passes.contract import Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_ane_compiler
from ...passes.examples import make_example, make_weight
from ...rules.control_flow import ControlFlow
from ._block_inlining import can_replace_value, make_replacement_outputs


class InlineConstantBranch(Rewrite):
    """Replace a cond with a constant condition by the ops of the executed branch.

    why     cond is unsupported on the ANE: it runs on the CPU, including all ops in its branches. A constant condition
            needs no cond.
    when    A cond whose condition is constant, or computed from constants and static shapes. The shapes of the branch
            must be those that the cond declares.
    exact   bitwise: the same ops on the same values, with the same names. The other branch is removed with its weights.
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
        cite_ane_compiler("cond and while_loop have no equivalent on any generation"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        pred = op.pred.val
        if pred is None:
            return Miss(op, f"the branch depends on '{op.pred.name}', which is dynamic")
        branch = op.blocks[0 if pred else 1]
        for new, old in zip(branch.outputs, op.outputs):
            if not can_replace_value(new, old):
                return Miss(op, f"'{old.name}' is declared with another shape than the executed branch returns")
        return Hit(op, note=f"the condition is always {'true' if pred else 'false'}", branch=branch)

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
            reason="the branch depends on 'positive', which is dynamic", x=(2, 3))
        yield make_example("plain", lambda x: Builder.relu(x=x, name="y"), reason="", x=(2, 3))


def _build_cond(x: Var, pred: Var) -> Var:
    result: Var = Builder.cond(pred=pred, _true_fn=lambda: Builder.relu(x=x), _false_fn=lambda: Builder.exp(x=x),
                               name="y")
    return result


def _build_several_outputs(x: Var) -> list[Var]:
    def build_linear() -> Var:
        result: Var = Builder.linear(x=x, weight=make_weight(4, 8))
        return result

    def build_branch() -> tuple[Var, ...]:
        first = build_linear()
        return Builder.tanh(x=first), first, first

    outputs = Builder.cond(pred=Builder.const(val=np.bool_(True)), _true_fn=build_branch,
                           _false_fn=lambda: (build_linear(), build_linear(), build_linear()))
    return [*outputs, Builder.relu(x=outputs[2])]


def _build_nested_cond(x: Var) -> Var:
    known = Builder.const(val=np.bool_(False))
    result: Var = Builder.cond(pred=known, _true_fn=lambda: Builder.exp(x=x),
                               _false_fn=lambda: Builder.abs(x=_build_cond(x, known)), name="z")
    return result
