"""Find hard swishes of rank 2 behind a linear layer."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var

from ..ir.query import get_const_value, get_consumers, is_const
from ..passes.contract import Community, Example, Hit, Miss, Rule
from ..passes.examples import build_program, make_example, make_weight

_SCALE_OPS = ("mul", "real_div")


class HardswishRank2(Rule):
    """A linear layer of rank 2 that feeds a hard swish came out wrong on the ANE.

    why     One report with a script: the classifier of MobileNetV3 differs by 0.2 on the Neural Engine (4 % of the
            norm), that of MobileNetV2, with a ReLU in that place, by 0.003; the matrix brought to rank 4, (1, 1, m, n),
            was right. Reported for Core AI, the same engine behind another front end; that Core ML is struck is
            predicted. Another report finds MobileNetV3 by Core ML off on an M4, by the ANE or the GPU, which it cannot
            tell, and names no op.
    when    linear or matmul in fp16 with a result of rank 2, and x * clip(x + 3, 0, 6) / 6 of it, in any of the forms
            that coremltools writes.
    fix     Bring x to rank 4 before the layer and back behind the hard swish (expand_dims and squeeze; the same
            numbers), or write the layer as a 1x1 conv at rank 4.
    """

    code, slug = "ANE321", "hardswish-rank-2"
    roots = ("sigmoid_hard", "relu6", "clip")
    confidence = "medium"
    advice = "Compute the linear layer and the hard swish at rank 4: expand_dims before, squeeze behind."
    evidence = (
        Community("rank-2 matmul into hard swish, fp16 on the Neural Engine: 0.199 off; as (1, 1, m, n) it is right "
                  "(Core AI)", source="https://github.com/apple/coreai-torch/issues/51", date="2026-07-23"),
        Community("MobileNetV3 is 0.19 to 0.26 off with all units allowed (ANE or GPU), 0.064 to 0.086 on the CPU",
                  source="https://github.com/apple/coremltools/issues/2625", chip="M4", date="2026-07-27"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        source = _find_hard_swish_input(op)
        if source is None:
            return Miss(op, "no hard swish", near=False)
        layer = source.op
        if layer is not None and layer.op_type == "add" and (is_const(layer.x) or is_const(layer.y)):
            layer = (layer.y if is_const(layer.x) else layer.x).op
        if layer is None or layer.op_type not in ("linear", "matmul"):
            return Miss(op, "a hard swish of no linear layer", near=False)
        if source.rank != 2:
            return Miss(op, f"a hard swish of a linear layer at rank {source.rank}; rank 2 was wrong")
        return Hit(op, note=f"the hard swish of a {layer.op_type} of rank 2 ({'x'.join(map(str, source.shape))})",
                   covers=(layer, op))

    def examples(self) -> Iterable[Example]:
        yield Example("a classifier", lambda: _build_hard_swish(2, True))
        yield Example("written out", lambda: _build_hard_swish(2, False))
        yield Example("rank 4", lambda: _build_hard_swish(4, True),
                      reason="a hard swish of a linear layer at rank 4; rank 2 was wrong")
        yield make_example(
            "hard sigmoid",
            lambda x: Builder.sigmoid_hard(
                x=Builder.linear(x=x, weight=make_weight(4, 8)), alpha=np.float16(1 / 6), beta=np.float16(0.5), name="y"
            ),
            reason="no hard swish",
            x=(2, 8),
        )
        yield make_example("another clip", _build_other_clip, reason="no hard swish", x=(2, 8))


def _find_hard_swish_input(op: Operation) -> Var | None:
    """Return x where `op` is the gate in x * gate(x), else None."""
    if op.op_type == "sigmoid_hard":
        x = op.x
        source = x.op.x if x.op is not None and x.op.op_type == "thresholded_relu" else x
    else:
        added = op.x.op
        if added is None or added.op_type != "add" or (
                op.op_type == "clip" and (get_const_value(op.alpha), get_const_value(op.beta)) != (0.0, 6.0)):
            return None
        source = x = added.y if _is_three(added.x) else added.x if _is_three(added.y) else None
        if x is None:
            return None
    gates = {op.outputs[0], *(each.outputs[0] for each in get_consumers(op.outputs[0]) if each.op_type in _SCALE_OPS)}
    products = [each for var in {x, source} for each in get_consumers(var) if each.op_type == "mul"]
    return source if any(each.x in gates or each.y in gates for each in products) else None


def _is_three(var: Var) -> bool:
    return bool(is_const(var) and np.size(var.val) == 1 and float(np.reshape(var.val, ())) == 3.0)


def _build_other_clip(x: Var) -> Var:
    made = Builder.linear(x=x, weight=make_weight(4, 8))
    gate = Builder.clip(x=Builder.add(x=made, y=np.float16(3)), alpha=np.float16(-6), beta=np.float16(6))
    result: Var = Builder.mul(x=made, y=gate, name="y")
    return result


def _build_hard_swish(rank: int, fused: bool) -> Program:
    def body(x: Var) -> Var:
        made = Builder.linear(x=x, weight=make_weight(4, 8)) if rank == 2 else \
            Builder.matmul(x=x, y=make_weight(8, 4))
        if fused:
            kept = Builder.thresholded_relu(x=made, alpha=np.float16(-3))
            gate = Builder.sigmoid_hard(x=kept, alpha=np.float16(1 / 6), beta=np.float16(0.5))
            result: Var = Builder.mul(x=kept, y=gate, name="y")
            return result
        gate = Builder.relu6(x=Builder.add(x=made, y=np.float16(3)))
        result = Builder.mul(x=made, y=Builder.mul(x=gate, y=np.float16(1 / 6)), name="y")
        return result

    return build_program(body, x=(2, 8) if rank == 2 else (1, 1, 2, 8))
