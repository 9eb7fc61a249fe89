"""Recurrent layers, step by step.

A layer of direction `reverse` returns its steps in the order of computation. Only a bidirectional layer returns the
steps of its backward half in the order of time. coremltools' own op tests expect this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...utils.errors import InputError
from ..registry import register_kernel
from .activation import get_recurrent_activation

StepFunction = Callable[[torch.Tensor, Any], Any]


def _read_initial_state(ins: Any, name: str) -> torch.Tensor:
    """Return the initial state `name` with one row for each batch element of x.

    coremltools does not check the batch size of the state, and its own converter writes states with one row for each
    step. The documentation does not say which rows Core ML reads then. If all rows are equal, it makes no difference.
    Raises InputError if they differ.
    """
    state, batch = ins[name], ins["x"].shape[1]
    if state.shape[0] == batch:
        return state
    first = state[:1]
    if not torch.equal(state, first.expand_as(state)):
        raise InputError(f"{ins.op.op_type} '{ins.op.name}': {name} has {state.shape[0]} rows that differ, and the "
                         f"batch of x is {batch}; expected a row for each, or equal rows")
    return first.expand(batch, -1)


def _project_inputs(ins: Any, suffix: str = "") -> torch.Tensor:
    """Compute each step's input times the input weights, plus the bias."""
    y = torch.matmul(ins["x"], ins["weight_ih" + suffix].mT)
    bias = ins.get("bias" + suffix)
    return ins.rounded(y if bias is None else y + bias)


def _unroll_steps(steps: torch.Tensor, state: Any, step: StepFunction, backward: bool) -> tuple[torch.Tensor, Any]:
    """Run all steps; return (hidden states in order of computation, final state). `state[0]` is the hidden state."""
    hidden = []
    for now in steps.flip(0) if backward else steps:
        state = step(now, state)
        hidden.append(state[0])
    return torch.stack(hidden), state


def _select_output(hidden: torch.Tensor, ins: Any) -> torch.Tensor:
    return hidden if ins.value("output_sequence") else hidden[-1:]


@register_kernel("rnn")
def rnn(op: Any, ins: Any) -> tuple[torch.Tensor, torch.Tensor]:
    activation, weight, r = get_recurrent_activation(ins.value("activation")), ins["weight_hh"].mT, ins.rounded

    def step(now: torch.Tensor, state: Any) -> Any:
        return (r(activation(r(now + r(torch.matmul(state[0], weight))))),)

    hidden, state = _unroll_steps(
        _project_inputs(ins), (_read_initial_state(ins, "initial_h"),), step, ins.value("direction") == "reverse"
    )
    return _select_output(hidden, ins), state[0]


@register_kernel("gru")
def gru(op: Any, ins: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a GRU, with gates in the order reset, output, update.

    With `reset_after`, the reset gate is applied after the matrix product.
    """
    gate, activation = (
        get_recurrent_activation(ins.value("recurrent_activation")),
        get_recurrent_activation(ins.value("activation")),
    )
    weight_r, weight_o, weight_z = ins["weight_hh"].mT.chunk(3, -1)
    size = weight_r.shape[0]
    bias = ins.get("bias")
    bias_r, bias_o, bias_z = (torch.zeros(3 * size, dtype=ins.compute) if bias is None else bias).chunk(3, -1)
    reset_after = bool(ins.value("reset_after")) if ins.accepts("reset_after") else False
    inputs, rounded = torch.matmul(ins["x"], ins["weight_ih"].mT), ins.rounded
    if ins.accepts("input_bias") and ins.has("input_bias"):
        inputs = inputs + ins["input_bias"]
    inputs = rounded(inputs)

    def step(now: torch.Tensor, state: Any) -> Any:
        hidden = state[0]
        in_r, in_o, in_z = now.chunk(3, -1)
        r = rounded(gate(rounded(in_r + rounded(torch.matmul(hidden, weight_r) + bias_r))))
        z = rounded(gate(rounded(in_z + rounded(torch.matmul(hidden, weight_z) + bias_z))))
        if reset_after:
            o = in_o + rounded(r * rounded(torch.matmul(hidden, weight_o) + bias_o))
        else:
            o = in_o + rounded(torch.matmul(rounded(r * hidden), weight_o) + bias_o)
        o = rounded(activation(rounded(o)))
        return (rounded(rounded(rounded(1.0 - z) * o) + rounded(z * hidden)),)

    hidden, state = _unroll_steps(
        inputs, (_read_initial_state(ins, "initial_h"),), step, ins.value("direction") == "reverse"
    )
    return _select_output(hidden, ins), state[0]


def _make_lstm_step(ins: Any, suffix: str) -> StepFunction:
    gate, cell_gate, activation = (
        get_recurrent_activation(ins.value(name)) for name in ("recurrent_activation", "cell_activation", "activation")
    )
    weight = ins["weight_hh" + suffix].mT
    peephole, clip = ins.get("peephole" + suffix), ins.value("clip")
    peep_i, peep_f, peep_o = (0.0, 0.0, 0.0) if peephole is None else peephole.chunk(3)
    r = ins.rounded

    def step(now: torch.Tensor, state: Any) -> Any:
        hidden, cell = state
        in_i, in_f, in_o, in_z = r(now + r(torch.matmul(hidden, weight))).chunk(4, -1)
        i, f = r(gate(r(in_i + r(cell * peep_i)))), r(gate(r(in_f + r(cell * peep_f))))
        cell = r(r(f * cell) + r(i * r(cell_gate(in_z))))
        if clip is not None:
            cell = cell.clamp(-clip, clip)
        return r(r(gate(r(in_o + r(cell * peep_o)))) * r(activation(cell))), cell

    return step


@register_kernel("lstm")
def lstm(op: Any, ins: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run an LSTM, with gates in the order input, forget, output, cell."""
    direction = ins.value("direction")
    initial_h, initial_c = _read_initial_state(ins, "initial_h"), _read_initial_state(ins, "initial_c")
    if direction != "bidirectional":
        backward = direction == "reverse"
        hidden, (h, c) = _unroll_steps(_project_inputs(ins), (initial_h, initial_c), _make_lstm_step(ins, ""), backward)
        return _select_output(hidden, ins), h, c
    (h_f, h_b), (c_f, c_b) = initial_h.chunk(2, -1), initial_c.chunk(2, -1)
    forward, (h_f, c_f) = _unroll_steps(_project_inputs(ins), (h_f, c_f), _make_lstm_step(ins, ""), False)
    back, (h_b, c_b) = _unroll_steps(_project_inputs(ins, "_back"), (h_b, c_b), _make_lstm_step(ins, "_back"), True)
    if ins.value("output_sequence"):
        hidden = torch.cat([forward, back.flip(0)], -1)
    else:
        hidden = torch.cat([forward[-1:], back[-1:]], -1)
    return hidden, torch.cat([h_f, h_b], -1), torch.cat([c_f, c_b], -1)
