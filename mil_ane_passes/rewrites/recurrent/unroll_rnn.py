"""Unroll an rnn of known length step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ...ir.builder import RewriteBuilder
from ...passes.contract import FP32_UNSUPPORTED_REASON, Example
from ...passes.examples import build_program, make_weight
from ...rules.unsupported_ops import Recurrent
from ._recurrent_unrolling import (
    EVIDENCE,
    Direction,
    UnrollRecurrent,
    add_if_present,
    apply_activation,
    build_state_product,
)


class UnrollRnn(UnrollRecurrent):
    """Write an rnn of known length out into linear, split, add and tanh, which is supported on the ANE.

    why     An rnn runs on the CPU, and what stands around it changes processor twice.
    when    fp16; a sequence of known length up to `max_steps`, in either direction. Weights and bias may be compressed:
            they are read as they are, and each stays one const. A first state of constant zeros spares its product.
            hard_sigmoid is unsupported (its 0.2 is no fp16) and scaled_tanh (not documented); so are gates wider together
            than an axis may be (16384 up to M3). A first state of another batch than x must be constant, with equal
            rows.
    exact   rounding: at full precision nothing changes: h' = tanh(W x + b + R h). Every step rounds to fp16, where the
            reference runtime keeps fp32 inside an rnn: over 128 steps of 64 units results of up to 1 were off by 7e-4,
            and by 2e-4 before. Sums beyond fp16's range on the way are infinite.
    cost    W x is one product for all steps. Each step adds 3 ops. No new weights: a zero bias where there was none.

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
    step_ops = 3
    evidence = EVIDENCE
    bound = "each step rounds to fp16: over 128 steps of 64 units, 7e-4 for results of up to 1"
    ulps = 1.5  # measured by `bound`

    def step(self, mb: RewriteBuilder, op: Operation, way: Direction, now: Any, states: Sequence[Var]) -> Sequence[Var]:
        return [
            apply_activation(
                mb, op, "activation", add_if_present(mb, now, build_state_product(mb, states[0], op.weight_hh))
            )
        ]

    def examples(self) -> Iterable[Example]:
        yield Example("two steps", lambda: _build_rnn(2, output_sequence=True))
        yield Example("one step, its state kept outside", lambda: _build_rnn(1))
        yield Example("the last step", lambda: _build_rnn(3, bias=make_weight(8)))
        yield Example("reverse", lambda: _build_rnn(3, direction="reverse", output_sequence=True, bias=make_weight(8)))
        yield Example("from zeros", lambda: _build_from_state(0.0, activation="sigmoid"))
        yield Example("from constants", lambda: _build_from_state(0.5))
        yield Example("relu", lambda: _build_rnn(3, activation="relu", output_sequence=True), within=100.0)
        yield Example("linear", lambda: _build_rnn(2, activation="linear"), within=100.0)
        yield Example("flexible batch", lambda: _build_rnn(2, batch=None))
        yield Example(
            "flexible length",
            lambda: _build_rnn(None),
            reason="the number of steps is known only at run time; fix the length of the sequence",
        )
        yield Example("long", lambda: _build_rnn(4), options={"max_steps": 3}, reason="4 steps, above max_steps=3")
        yield Example("too long a chain", lambda: _build_rnn(4), options={"max_chain": 4},
                      reason="4 steps would make 5 products that depend on each other in the function, more than 4 "
                             "(max_chain)")
        yield Example("too many ops", lambda: _build_rnn(4), options={"max_ops": 9},
                      reason="4 steps would make a program of 13 ops, more than 9 (max_ops)")
        yield Example("fp32", lambda: _build_rnn(2, dtype=types.fp32), reason=FP32_UNSUPPORTED_REASON)
        yield Example("scaled_tanh", lambda: _build_rnn(2, activation="scaled_tanh"),
                      reason="activation is scaled_tanh, whose constants are not documented")


def _build_rnn(steps: int | None, *, batch: int | None = 1, dtype: Any = types.fp16, **parameters: Any) -> Program:
    held = make_weight(8, 8, dtype=types.nptype_from_builtin(dtype))
    given = {"weight_ih": held, "weight_hh": held[::-1], "name": "y", **parameters}
    return build_program(
        lambda x, h: Builder.rnn(x=x, initial_h=h, **given), dtype=dtype, x=(steps, batch, 8), h=(batch, 8)
    )


def _build_from_state(first: float, **parameters: Any) -> Program:
    return build_program(lambda x: Builder.rnn(
        x=x, initial_h=np.full((2, 8), first, np.float16), weight_ih=make_weight(8, 8), weight_hh=make_weight(8, 8),
        output_sequence=True, name="y", **parameters)[0], x=(3, 2, 8))
