"""Unroll an rnn of static length."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from coremltools.converters.mil.mil import Operation

from ...ir.builder import RewriteBuilder
from ...passes.contract import Example
from ...passes.examples import make_weight
from ...rules.unsupported_ops import Recurrent
from ._recurrent_unrolling import (
    EVIDENCE,
    Direction,
    States,
    UnrollRecurrent,
    add_if_present,
    apply_activation,
    build_state_product,
)


class UnrollRnn(UnrollRecurrent):
    """Unroll an rnn of static length into linear, split, add and tanh, which are supported on the ANE.

    why     An rnn runs on the CPU, which costs two transitions.
    when    fp16; a sequence of static length up to `max_steps`, in either direction. Weights and bias may be
            compressed, and each stays one const. An initial state of constant zeros saves its product. Skipped:
            hard_sigmoid (fp16 does not represent its 0.2), scaled_tanh (not documented), and a hidden state whose width
            exceeds the axis limit (16384 up to M3). An initial state whose batch differs from that of x must be
            constant, with equal rows.
    exact   rounding: at full precision nothing changes: h' = tanh(W x + b + R h). Every step rounds to fp16, where the
            reference runtime keeps fp32 inside an rnn: over 128 steps of 64 units results of up to 1 were off by 7e-4,
            and by 2e-4 before. Intermediate sums beyond the range of fp16 are infinite.
    cost    W x is one product for all steps. Each step adds 3 ops. No new weights, except a zero bias if there was
            none.

    before
        %y_0: fp16[2, 1, 8], %y_1: fp16[1, 8] = rnn(x=%x, initial_h=%h, weight_ih=<fp16[8, 8]>, weight_hh=<fp16[8, 8]>, output_sequence=True)
    after
        %0: fp16[1, 1, 8] = expand_dims(x=%h, axes=[0])
        %1: fp16[2, 1, 8] = linear(x=%x, weight=<fp16[8, 8]>)
        %2: fp16[1, 1, 8], %3: fp16[1, 1, 8] = split(x=%1, num_splits=2, axis=0)
        %4: fp16[1, 1, 8] = linear(x=%0, weight=<fp16[8, 8]>)
        %5: fp16[1, 1, 8] = add(x=%2, y=%4)
        %6: fp16[1, 1, 8] = tanh(x=%5)
        %7: fp16[1, 1, 8] = linear(x=%6, weight=<fp16[8, 8]>)
        %8: fp16[1, 1, 8] = add(x=%3, y=%7)
        %9: fp16[1, 1, 8] = tanh(x=%8)
        %y_0: fp16[2, 1, 8] = concat(values=(%6, %9), axis=0)
        %y_1: fp16[1, 8] = squeeze(x=%9, axes=[0])
    """  # noqa: E501

    fixes = (Recurrent,)
    roots = ("rnn",)
    gates = 1
    step_ops = 3
    evidence = EVIDENCE
    bound = "each step rounds to fp16: over 128 steps of 64 units, 7e-4 for results of up to 1"
    ulps = 1.5  # measured by `bound`

    def step(self, mb: RewriteBuilder, op: Operation, direction: Direction, x: Any, states: States) -> States:
        total = add_if_present(mb, x, build_state_product(mb, states[0], op.weight_hh))
        return [apply_activation(mb, op, "activation", total)]

    def examples(self) -> Iterable[Example]:
        bias = make_weight(8)
        yield self.make_example("two steps", 2, output_sequence=True)
        yield self.make_example("one step, its state kept outside", 1)
        yield self.make_example("the last step", 3, bias=bias)
        yield self.make_example("reverse", 3, direction="reverse", output_sequence=True, bias=bias)
        yield self.make_constant_state_example("from zeros", 0.0, activation="sigmoid")
        yield self.make_constant_state_example("from constants", 0.5)
        yield self.make_example("relu", 3, activation="relu", output_sequence=True, within=100.0)
        yield self.make_example("linear", 2, activation="linear", within=100.0)
        yield self.make_example("flexible batch", 2, batch=None)
        yield from self.iterate_limit_examples(chain=5, ops=13)
        yield self.make_example("scaled_tanh", 2, activation="scaled_tanh",
                                reason="activation is scaled_tanh, whose constants are not documented")
