"""Unroll an lstm of static length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_const
from ...passes.contract import Example, Hit, Miss
from ...passes.examples import make_example, make_weight
from ...rules.unsupported_ops import Recurrent
from ._recurrent_unrolling import (
    EVIDENCE,
    Direction,
    States,
    UnrollRecurrent,
    add_if_present,
    apply_activation,
    build_state_product,
    split_equally,
)

_GATE_ACTIVATION = "recurrent_activation"


class UnrollLstm(UnrollRecurrent):
    """Unroll an lstm of static length into linear, split, sigmoid, tanh, mul and add, which are supported on the ANE.

    why     An lstm runs on the CPU, which costs two transitions.
    when    fp16; a sequence of static length up to `max_steps`. Any direction, peepholes, clipping; weights and biases
            may be compressed, and each stays one const. An initial hidden state of constant zeros saves its product.
            Skipped: hard_sigmoid (fp16 does not represent its 0.2), scaled_tanh (not documented), and gates whose total
            width exceeds the axis limit (16384 up to M3). An initial state whose batch differs from that of x must be
            constant, with equal rows.
    exact   rounding: at full precision nothing changes. i, f, o = sigmoid(W x + b + R h), z = tanh(W x + b + R h) with
            the gates' rows of W and R in the order i, f, o, z; c' = f c + i z, h' = o tanh(c'). Every step rounds to
            fp16, where the reference runtime keeps fp32 inside an lstm: over 128 steps of 64 units results of up to 0.5
            were off by 6e-4, and by 1e-4 before. With `exact_cell` c' is computed as c - (1 - f) c + i z, with the
            rounding error added at the next step: this reduced the error of three trained layers over 160 steps from
            1e-3 to 2e-4, and an infinite c becomes NaN. Intermediate sums beyond the range of fp16 are infinite.
    cost    W x is one product for all steps. Each step adds 16 ops, 11 without `exact_cell`. No new weights, except a
            zero bias if there was none, and a constant of signs.

    before
        %y_0: fp16[1, 1, 8], %y_1: fp16[1, 8], %y_2: fp16[1, 8] = lstm(x=%x, initial_h=%h, initial_c=%c, weight_ih=<fp16[32, 8]>, weight_hh=<fp16[32, 8]>)
    after
        %0: fp16[1, 1, 8] = expand_dims(x=%h, axes=[0])
        %1: fp16[1, 1, 8] = expand_dims(x=%c, axes=[0])
        %2: fp16[1, 1, 32] = linear(x=%x, weight=<fp16[32, 8]>, bias=<fp16[32]>)
        %3: fp16[1, 1, 32] = linear(x=%0, weight=<fp16[32, 8]>, bias=<fp16[32]>)
        %4: fp16[1, 1, 32] = add(x=%2, y=%3)
        %5: fp16[1, 1, 24], %6: fp16[1, 1, 8] = split(x=%4, split_sizes=[24, 8], axis=-1)
        %7: fp16[1, 1, 24] = mul(x=%5, y=<fp16[24]>)
        %8: fp16[1, 1, 24] = sigmoid(x=%7)
        %9: fp16[1, 1, 8], %10: fp16[1, 1, 8], %11: fp16[1, 1, 8] = split(x=%8, num_splits=3, axis=-1)
        %12: fp16[1, 1, 8] = tanh(x=%6)
        %13: fp16[1, 1, 8] = mul(x=%9, y=%12)
        %14: fp16[1, 1, 8] = mul(x=%10, y=%1)
        %15: fp16[1, 1, 8] = sub(x=%13, y=%14)
        %16: fp16[1, 1, 8] = add(x=%1, y=%15)
        %17: fp16[1, 1, 8] = tanh(x=%16)
        %y_0: fp16[1, 1, 8] = mul(x=%11, y=%17)
        %y_1: fp16[1, 8] = squeeze(x=%y_0, axes=[0])
        %y_2: fp16[1, 8] = squeeze(x=%16, axes=[0])
    """  # noqa: E501

    fixes = (Recurrent,)
    roots = ("lstm",)
    gates = 4
    step_ops = 16
    states = ("initial_h", "initial_c")
    activations = ("recurrent_activation", "cell_activation", "activation")
    evidence = EVIDENCE
    bound = "each step rounds to fp16: over 128 steps of 64 units, 6e-4 for results of up to 0.5"
    keeps_nonfinite = False  # an infinite cell becomes NaN
    ulps = 2.5  # measured by `bound`

    exact_cell: bool = True
    """Keep a sigmoid-gated cell more accurate than fp16: the forgotten part is subtracted, and the rounding error of a
    sum is added at the next step. Five more ops per step; the error over long sequences is several times smaller."""

    def match(self, op: Operation) -> Hit | Miss:
        answer = super().match(op)
        peepholes = [var for name, var in op.inputs.items() if name.startswith("peephole")]
        if isinstance(answer, Hit) and not all(map(is_const, peepholes)):
            return Miss(op, "its peephole is compressed")
        return answer

    def step(self, mb: RewriteBuilder, op: Operation, direction: Direction, x: Any, states: States) -> States:
        hidden, cell, *compensation = states
        exact = self.exact_cell and get_const_value(op.recurrent_activation).lower() == "sigmoid"
        total = add_if_present(mb, x, build_state_product(mb, hidden, op.inputs[f"weight_hh{direction.suffix}"]))
        peephole = op.inputs.get(f"peephole{direction.suffix}")
        if peephole is None:
            i, f, o, z = _build_gates(mb, op, total, exact)
        else:
            i, f, o, z = _build_peephole_gates(mb, op, total, exact, cell, peephole)
        if exact:  # f is the forgotten part, 1 - f
            change = mb.sub(x=mb.mul(x=i, y=z), y=mb.mul(x=f, y=cell))
            new, compensation = _add_with_compensation(mb, cell, change, *compensation)
        else:
            new = mb.add(x=mb.mul(x=f, y=cell), y=mb.mul(x=i, y=z))
        if op.inputs.get("clip") is not None:
            most = op.clip.val
            new, compensation = mb.clip(x=new, alpha=-most, beta=most), []
        if peephole is not None:
            o = _build_peephole_output_gate(mb, op, o, new, peephole)
        return [mb.mul(x=o, y=apply_activation(mb, op, "activation", new)), new, *compensation]

    def examples(self) -> Iterable[Example]:
        plain = {"exact_cell": False}
        bias = make_weight(32)
        yield self.make_example("one step, its states kept outside", 1, within=2.0)
        yield self.make_example("two steps", 2, output_sequence=True, options=plain)
        yield self.make_example("the last step", 3, bias=bias, within=2.0)
        yield self.make_example("reverse", 3, direction="reverse", output_sequence=True, bias=bias, options=plain)
        yield make_example("bidirectional", partial(_build_bidirectional, output_sequence=True, bias=bias), within=2.0,
                           x=(3, 1, 8), h=(1, 8))
        yield make_example("bidirectional, the last step", partial(_build_bidirectional, bias_back=bias),
                           options=plain, x=(3, 1, 8), h=(1, 8))
        yield make_example("bidirectional, from other constants each way", _build_from_two_states, options=plain,
                           x=(3, 2, 8))
        yield self.make_constant_state_example("from zeros", 0.0)
        yield self.make_constant_state_example("peepholes, clipped", 0.0, peephole=make_weight(24),
                                               clip=np.float16(0.25))
        yield self.make_constant_state_example("from constants", 0.5)
        yield self.make_example("other activations", 2, recurrent_activation="tanh", cell_activation="relu",
                                activation="linear", bias=bias, within=100.0)
        yield self.make_example("flexible batch", 2, batch=None, within=2.0)
        yield from self.iterate_limit_examples(chain=5, ops=65)
        yield self.make_example("hard_sigmoid", 2, recurrent_activation="hard_sigmoid", reason=(
            "recurrent_activation is hard_sigmoid, which multiplies by 0.2, which fp16 does not represent"))
        yield self.make_example("scaled_tanh", 2, activation="scaled_tanh",
                                reason="activation is scaled_tanh, whose constants are not documented")


def _build_gates(mb: RewriteBuilder, op: Operation, total: Var, complement: bool) -> Sequence[Var]:
    """Build the input, forget and output gate, which have one activation, and the new cell.

    With `complement` the forget gate f is returned as 1 - f = sigmoid(-x): fp16 has few numbers near 1, many near 0.
    """
    size = int(total.shape[-1]) // 4
    ifo, z = mb.split(x=total, split_sizes=[3 * size, size], axis=-1)
    if complement:
        kind = types.nptype_from_builtin(total.dtype)
        signs = mb.weight(op.weight_hh, "signs", lambda: np.repeat([1, -1, 1], size).astype(kind))
        ifo = mb.mul(x=ifo, y=signs)
    i, f, o = split_equally(mb, apply_activation(mb, op, _GATE_ACTIVATION, ifo), 3, -1)
    return i, f, o, apply_activation(mb, op, "cell_activation", z)


def _build_peephole_gates(
    mb: RewriteBuilder, op: Operation, total: Var, complement: bool, cell: Var, peephole: Var,
) -> Sequence[Var]:
    """Build the same gates with peepholes to the cell.

    The output gate is returned before its peephole and activation, as its peephole reads the new cell.
    """
    i, f, o, z = split_equally(mb, total, 4, -1)
    i, f = (
        mb.add(x=gate, y=mb.mul(x=cell, y=_slice_peephole(mb, peephole, number))) for number, gate in enumerate((i, f))
    )
    if complement:
        f = mb.mul(x=f, y=types.nptype_from_builtin(f.dtype)(-1))
    return (
        apply_activation(mb, op, _GATE_ACTIVATION, i),
        apply_activation(mb, op, _GATE_ACTIVATION, f),
        o,
        apply_activation(mb, op, "cell_activation", z),
    )


def _slice_peephole(mb: RewriteBuilder, peephole: Var, number: int) -> Var:
    third: Var = mb.weight(peephole, f"gate_{number}", lambda: np.split(peephole.val, 3)[number])
    return third


def _add_with_compensation(
    mb: RewriteBuilder, cell: Var, change: Var, old_cell: Var | None = None, old_change: Var | None = None,
) -> tuple[Var, list[Var]]:
    """Add `change` to the cell; return the new cell and what the next step needs to compensate for the rounding.

    That is the old cell and the exact change. The rounded change is the difference of the two cells, exactly.
    """
    if old_cell is not None:
        change = mb.add(x=change, y=mb.sub(x=old_change, y=mb.sub(x=cell, y=old_cell)))
    return mb.add(x=cell, y=change), [cell, change]


def _build_peephole_output_gate(mb: RewriteBuilder, op: Operation, before: Var, cell: Var, peephole: Var) -> Var:
    """Build the output gate with its peephole to the new cell."""
    total = mb.add(x=before, y=mb.mul(x=cell, y=_slice_peephole(mb, peephole, 2)))
    return apply_activation(mb, op, _GATE_ACTIVATION, total)


def _build_bidirectional(x: Var, h: Var, **parameters: Any) -> Any:
    both = Builder.concat(values=[h, Builder.relu(x=h)], axis=-1)
    return _build_both_directions(x, make_weight(32, 8), initial_h=both, initial_c=both, **parameters)


def _build_both_directions(x: Var, weight_ih_back: Any, **parameters: Any) -> Any:
    weight = make_weight(32, 8)
    return Builder.lstm(x=x, weight_ih=weight, weight_hh=weight, weight_ih_back=weight_ih_back,
                        weight_hh_back=weight[::-1], direction="bidirectional", name="y", **parameters)


def _build_from_two_states(x: Var) -> Any:
    states = {name: np.concatenate([np.full((2, 8), first), np.full((2, 8), second)], -1).astype(np.float16)
              for name, first, second in (("initial_h", 0.5, -0.25), ("initial_c", 0.75, -1.0))}
    return _build_both_directions(x, make_weight(32, 8)[::-1], output_sequence=True, **states)[0]
