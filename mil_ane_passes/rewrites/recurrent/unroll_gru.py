"""Unroll a gru of known length step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_const
from ...passes.contract import FP32_UNSUPPORTED_REASON, Example, Vendor
from ...passes.examples import build_program, make_weight
from ...rules.unsupported_ops import Recurrent
from ._recurrent_unrolling import (
    EVIDENCE,
    Direction,
    UnrollRecurrent,
    add_if_present,
    apply_activation,
    build_linear,
    build_state_product,
    split_equally,
)


class UnrollGru(UnrollRecurrent):
    """Write a gru of known length out into linear, split, sigmoid, tanh, mul, add and sub, which is supported on the ANE.

    why     A gru runs on the CPU, and what stands around it changes processor twice. (PyTorch's GRU arrives as a loop,
            not as this op.)
    when    fp16; a sequence of known length up to `max_steps`, in either direction. Biases may be compressed, and
            weights, too. A first state of constant zeros spares the product of the gates. hard_sigmoid is unsupported (its
            0.2 is no fp16) and scaled_tanh (not documented); so are gates wider together than an axis may be. A first
            state of another batch than x must be constant, with equal rows.
    exact   rounding: at full precision nothing changes. r, z = sigmoid(W x + b + R h),
            o = tanh(W x + b + R (r h)), with reset_after o = tanh(W x + b' + r (R h + b)); h' = (1 - z) o + z h; the
            gates' rows in the order r, o, z. coremltools' page writes r (R h), its op tests R (r h): so it is here.
            Every step rounds to fp16, where the reference runtime keeps fp32 inside a gru: over 128 steps of 64 units
            results of up to 0.8 were off by 8e-4, and by 2e-4 before. Sums beyond fp16's range on the way are infinite.
    cost    W x is one product for all steps. Each step adds 14 ops. R is cut in two consts, one for r and z and one for
            o, of as many bytes together; a compressed one stays whole and is multiplied twice a step.

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

    def inputs(self, mb: RewriteBuilder, op: Operation, way: Direction) -> Sequence[Any]:
        """Build the inputs of each gate separately, so that no step has to split them."""
        after, bias = _is_reset_after(op), op.inputs.get("bias")
        first = op.inputs.get("input_bias") or (None if after else bias)
        made = build_linear(mb, op.x, op.weight_ih, first)
        if bias is not None and not after and first is not bias:
            made = mb.add(x=made, y=bias)
        steps = [split_equally(mb, gate, int(op.x.shape[0])) for gate in split_equally(mb, made, 3, -1)]
        return list(zip(*steps, strict=True))

    def step(self, mb: RewriteBuilder, op: Operation, way: Direction, now: Any, states: Sequence[Var]) -> Sequence[Var]:
        (hidden,), (in_r, in_o, in_z) = states, now
        from_r, from_o, from_z = _build_state_gates(mb, op, hidden)
        r, z = (apply_activation(mb, op, "recurrent_activation", add_if_present(mb, gate, more))
                for gate, more in ((in_r, from_r), (in_z, from_z)))
        from_o = (
            (from_o and mb.mul(x=r, y=from_o))
            if _is_reset_after(op)
            else _build_output_product(mb, op, mb.mul(x=r, y=hidden))
        )
        o = apply_activation(mb, op, "activation", add_if_present(mb, in_o, from_o))
        rest = mb.sub(x=types.nptype_from_builtin(z.dtype)(1), y=z)
        return [mb.add(x=mb.mul(x=rest, y=o), y=mb.mul(x=z, y=hidden))]

    def examples(self) -> Iterable[Example]:
        yield Example("one step, its state kept outside", lambda: _build_gru(1))
        yield Example("two steps", lambda: _build_gru(2, output_sequence=True))
        yield Example("the last step", lambda: _build_gru(3, bias=make_weight(24)))
        yield Example("reverse", lambda: _build_gru(3, direction="reverse", output_sequence=True, bias=make_weight(24)))
        yield Example(
            "reset after",
            lambda: _build_gru(
                3, opset=ct.target.iOS18, reset_after=True, bias=make_weight(24), input_bias=make_weight(24)[::-1]
            ),
            within=100.0,
        )
        yield Example(
            "two biases",
            lambda: _build_gru(2, opset=ct.target.iOS18, bias=make_weight(24), input_bias=make_weight(24)),
            within=100.0,
        )
        yield Example("reset after, no bias", lambda: _build_from_state(0.0, opset=ct.target.iOS18, reset_after=True))
        yield Example("from zeros", lambda: _build_from_state(0.0, bias=make_weight(24)))
        yield Example("other activations", lambda: _build_gru(
            2, recurrent_activation="tanh", activation="sigmoid", output_sequence=True))
        yield Example("flexible batch", lambda: _build_gru(2, batch=None), within=100.0)
        yield Example(
            "flexible length",
            lambda: _build_gru(None),
            reason="the number of steps is known only at run time; fix the length of the sequence",
        )
        yield Example("long", lambda: _build_gru(4), options={"max_steps": 3}, reason="4 steps, above max_steps=3")
        yield Example("too long a chain", lambda: _build_gru(4), options={"max_chain": 4},
                      reason="4 steps would make 9 products that depend on each other in the function, more than 4 "
                             "(max_chain)")
        yield Example("too many ops", lambda: _build_gru(4), options={"max_ops": 9},
                      reason="4 steps would make a program of 57 ops, more than 9 (max_ops)")
        yield Example("fp32", lambda: _build_gru(2, dtype=types.fp32), reason=FP32_UNSUPPORTED_REASON)
        yield Example("hard_sigmoid", lambda: _build_gru(2, recurrent_activation="hard_sigmoid"),
                      reason="recurrent_activation is hard_sigmoid, which multiplies by 0.2, no number of fp16")


def _is_reset_after(op: Operation) -> bool:
    return bool(get_const_value(op.inputs.get("reset_after"), False))


def _build_state_gates(mb: RewriteBuilder, op: Operation, hidden: Var) -> Sequence[Var | None]:
    """Build the state's terms of the gates r, o and z; None is a zero term, or that of o reset before its product."""
    held = op.weight_hh
    if _is_reset_after(op):
        made = build_state_product(mb, hidden, held, op.inputs.get("bias"))
        return [None] * 3 if made is None else split_equally(mb, made, 3, -1)
    if is_const(held):
        made = build_state_product(
            mb, hidden, mb.weight(held, "reset_update", lambda: np.concatenate(np.split(held.val, 3)[::2]))
        )
        r, z = (None, None) if made is None else split_equally(mb, made, 2, -1)
    else:
        r, _, z = split_equally(mb, build_linear(mb, hidden, held, None), 3, -1)
    return r, None, z


def _build_output_product(mb: RewriteBuilder, op: Operation, kept: Var) -> Var:
    """Build the kept part of the state times the weights of o."""
    held = op.weight_hh
    if is_const(held):
        return build_linear(mb, kept, mb.weight(held, "output", lambda: np.split(held.val, 3)[1]), None)
    return split_equally(mb, build_linear(mb, kept, held, None), 3, -1)[1]


def _build_gru(steps: int | None, batch: int | None = 1, dtype: Any = types.fp16, opset: Any = ct.target.iOS17,
               **parameters: Any) -> Program:
    held = make_weight(24, 8, dtype=types.nptype_from_builtin(dtype))
    given = {"weight_ih": held, "weight_hh": held[::-1], "name": "y", **parameters}
    return build_program(lambda x, h: Builder.gru(x=x, initial_h=h, **given), dtype=dtype, opset=opset,
                         x=(steps, batch, 8), h=(batch, 8))


def _build_from_state(first: float, opset: Any = ct.target.iOS17, **parameters: Any) -> Program:
    return build_program(lambda x: Builder.gru(
        x=x, initial_h=np.full((2, 8), first, np.float16), weight_ih=make_weight(24, 8), weight_hh=make_weight(24, 8),
        output_sequence=True, name="y", **parameters)[0], opset=opset, x=(3, 2, 8))
