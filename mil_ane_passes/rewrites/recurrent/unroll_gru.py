"""Unroll a gru of static length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_const
from ...passes.contract import Example, Vendor
from ...passes.examples import make_weight
from ...rules.unsupported_ops import Recurrent
from ._recurrent_unrolling import (
    EVIDENCE,
    Direction,
    States,
    UnrollRecurrent,
    add_if_present,
    apply_activation,
    build_linear,
    build_state_product,
    split_equally,
)


class UnrollGru(UnrollRecurrent):
    """Unroll a gru of static length into linear, split, sigmoid, tanh, mul, add and sub, all supported on the ANE.

    why     A gru runs on the CPU, which costs two transitions. (PyTorch's GRU is converted to a loop, not to this op.)
    when    fp16; a sequence of static length up to `max_steps`, in either direction. Biases may be compressed, and
            weights, too. An initial state of constant zeros saves the product of the gates. Skipped: hard_sigmoid (fp16
            does not represent its 0.2), scaled_tanh (not documented), and gates whose total width exceeds the axis
            limit. An initial state whose batch differs from that of x must be constant, with equal rows.
    exact   rounding: at full precision nothing changes. r, z = sigmoid(W x + b + R h), o = tanh(W x + b + R (r h)),
            with reset_after o = tanh(W x + b' + r (R h + b)); h' = (1 - z) o + z h; the gates' rows in the order r, o,
            z. coremltools' documentation has r (R h), its op tests R (r h), which is used here. Every step rounds to
            fp16, where the reference runtime keeps fp32 inside a gru: over 128 steps of 64 units results of up to 0.8
            were off by 8e-4, and by 2e-4 before. Intermediate sums beyond the range of fp16 are infinite.
    cost    W x is one product for all steps. Each step adds 14 ops. R is split into two consts, one for r and z and one
            for o, with the same total size; a compressed one is not split, and is multiplied twice per step.

    before
        %y_0: fp16[1, 1, 8], %y_1: fp16[1, 8] = gru(x=%x, initial_h=%h, weight_ih=<fp16[24, 8]>, weight_hh=<fp16[24, 8]>)
    after
        %0: fp16[1, 1, 8] = expand_dims(x=%h, axes=[0])
        %1: fp16[1, 1, 24] = linear(x=%x, weight=<fp16[24, 8]>, bias=<fp16[24]>)
        %2: fp16[1, 1, 8], %3: fp16[1, 1, 8], %4: fp16[1, 1, 8] = split(x=%1, num_splits=3, axis=-1)
        %5: fp16[1, 1, 16] = linear(x=%0, weight=<fp16[16, 8]>)
        %6: fp16[1, 1, 8], %7: fp16[1, 1, 8] = split(x=%5, num_splits=2, axis=-1)
        %8: fp16[1, 1, 8] = add(x=%2, y=%6)
        %9: fp16[1, 1, 8] = sigmoid(x=%8)
        %10: fp16[1, 1, 8] = add(x=%4, y=%7)
        %11: fp16[1, 1, 8] = sigmoid(x=%10)
        %12: fp16[1, 1, 8] = mul(x=%9, y=%0)
        %13: fp16[1, 1, 8] = linear(x=%12, weight=<fp16[8, 8]>)
        %14: fp16[1, 1, 8] = add(x=%3, y=%13)
        %15: fp16[1, 1, 8] = tanh(x=%14)
        %16: fp16[1, 1, 8] = sub(x=1.0, y=%11)
        %17: fp16[1, 1, 8] = mul(x=%16, y=%15)
        %18: fp16[1, 1, 8] = mul(x=%11, y=%0)
        %y_0: fp16[1, 1, 8] = add(x=%17, y=%18)
        %y_1: fp16[1, 8] = squeeze(x=%y_0, axes=[0])
    """  # noqa: E501

    fixes = (Recurrent,)
    roots = ("gru",)
    gates = 3
    step_ops = 14
    activations = ("recurrent_activation", "activation")
    evidence = (
        *EVIDENCE,
        Vendor("the reset gate is applied before the product, in the numbers that the op's tests expect",
               source="https://github.com/apple/coremltools/blob/8.0/coremltools/converters/mil/mil/ops/tests/iOS14/"
                      "test_recurrent.py"),
        Vendor("against it, the formula of its documentation: o = activation(W x + b + r * (R h))",
               source="https://apple.github.io/coremltools/source/coremltools.converters.mil.mil.ops.defs.html"),
    )
    bound = "each step rounds to fp16: over 128 steps of 64 units, 8e-4 for results of up to 0.8"
    ulps = 1.7  # measured by `bound`

    def count_products_per_step(self, op: Operation) -> int:
        """Count the dependent products of a step: two where the reset gate is applied before the output's product."""
        return 1 if _is_reset_after(op) else 2

    def inputs(self, mb: RewriteBuilder, op: Operation, direction: Direction) -> Sequence[Any]:
        """Build the inputs of each gate separately, so that no step has to split them."""
        after, bias = _is_reset_after(op), op.inputs.get("bias")
        first = op.inputs.get("input_bias") or (None if after else bias)
        made = build_linear(mb, op.x, op.weight_ih, first)
        if bias is not None and not after and first is not bias:
            made = mb.add(x=made, y=bias)
        steps = [split_equally(mb, gate, int(op.x.shape[0])) for gate in split_equally(mb, made, 3, -1)]
        return list(zip(*steps, strict=True))

    def step(self, mb: RewriteBuilder, op: Operation, direction: Direction, x: Any, states: States) -> States:
        (hidden,), (in_r, in_o, in_z) = states, x
        from_r, from_o, from_z = _build_state_gates(mb, op, hidden)
        r, z = (apply_activation(mb, op, "recurrent_activation", add_if_present(mb, gate, more))
                for gate, more in ((in_r, from_r), (in_z, from_z)))
        if not _is_reset_after(op):
            from_o = _build_output_product(mb, op, mb.mul(x=r, y=hidden))
        elif from_o is not None:
            from_o = mb.mul(x=r, y=from_o)
        o = apply_activation(mb, op, "activation", add_if_present(mb, in_o, from_o))
        rest = mb.sub(x=types.nptype_from_builtin(z.dtype)(1), y=z)
        return [mb.add(x=mb.mul(x=rest, y=o), y=mb.mul(x=z, y=hidden))]

    def examples(self) -> Iterable[Example]:
        bias = make_weight(24)
        yield self.make_example("one step, its state kept outside", 1)
        yield self.make_example("two steps", 2, output_sequence=True)
        yield self.make_example("the last step", 3, bias=bias)
        yield self.make_example("reverse", 3, direction="reverse", output_sequence=True, bias=bias)
        yield self.make_example("reset after", 3, opset=ct.target.iOS18, reset_after=True, bias=bias,
                                input_bias=bias[::-1], within=100.0)
        yield self.make_example("two biases", 2, opset=ct.target.iOS18, bias=bias, input_bias=bias, within=100.0)
        yield self.make_constant_state_example("reset after, no bias", 0.0, opset=ct.target.iOS18, reset_after=True)
        yield self.make_constant_state_example("from zeros", 0.0, bias=bias)
        yield self.make_example("other activations", 2, recurrent_activation="tanh", activation="sigmoid",
                                output_sequence=True)
        yield self.make_example("flexible batch", 2, batch=None, within=100.0)
        yield from self.iterate_limit_examples(chain=9, ops=57)
        yield self.make_example("hard_sigmoid", 2, recurrent_activation="hard_sigmoid", reason=(
            "recurrent_activation is hard_sigmoid, which multiplies by 0.2, which fp16 does not represent"))


def _is_reset_after(op: Operation) -> bool:
    return bool(get_const_value(op.inputs.get("reset_after"), False))


def _build_state_gates(mb: RewriteBuilder, op: Operation, hidden: Var) -> Sequence[Var | None]:
    """Build the state's terms of the gates r, o and z; None is a zero term, or that of o reset before its product."""
    weight = op.weight_hh
    if _is_reset_after(op):
        product = build_state_product(mb, hidden, weight, op.inputs.get("bias"))
        return [None] * 3 if product is None else split_equally(mb, product, 3, -1)
    if not is_const(weight):
        r, _, z = split_equally(mb, build_linear(mb, hidden, weight, None), 3, -1)
        return r, None, z
    rows = mb.weight(weight, "reset_update", lambda: np.concatenate(np.split(weight.val, 3)[::2]))
    product = build_state_product(mb, hidden, rows)
    if product is None:
        return [None] * 3
    r, z = split_equally(mb, product, 2, -1)
    return r, None, z


def _build_output_product(mb: RewriteBuilder, op: Operation, kept: Var) -> Var:
    """Build the kept part of the state times the weights of o."""
    weight = op.weight_hh
    if is_const(weight):
        return build_linear(mb, kept, mb.weight(weight, "output", lambda: np.split(weight.val, 3)[1]), None)
    return split_equally(mb, build_linear(mb, kept, weight, None), 3, -1)[1]
