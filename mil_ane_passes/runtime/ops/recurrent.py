"""Recurrent layers, step by step.

A layer of direction `reverse` returns its steps in the order it took them; only a bidirectional one puts the steps
of its backward half back in the order of time. That is what coremltools' own op tests expect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..registry import kernel
from .activation import by_name

Step = Callable[[torch.Tensor, Any], Any]


def _projected(ins: Any, suffix: str = "") -> torch.Tensor:
    """Every step's input times the input weights, plus the bias."""
    y = torch.matmul(ins["x"], ins["weight_ih" + suffix].mT)
    bias = ins.get("bias" + suffix)
    return y if bias is None else y + bias


def _unrolled(steps: torch.Tensor, state: Any, step: Step, backward: bool) -> tuple[torch.Tensor, Any]:
    """(hidden states in the order taken, final state); `state[0]` is the hidden state."""
    hidden = []
    for now in steps.flip(0) if backward else steps:
        state = step(now, state)
        hidden.append(state[0])
    return torch.stack(hidden), state


def _last(hidden: torch.Tensor, ins: Any) -> torch.Tensor:
    return hidden if ins.value("output_sequence") else hidden[-1:]


@kernel("rnn")
def rnn(op: Any, ins: Any) -> tuple[torch.Tensor, torch.Tensor]:
    activation, weight = by_name(ins.value("activation")), ins["weight_hh"].mT

    def step(now: torch.Tensor, state: Any) -> Any:
        return (activation(now + torch.matmul(state[0], weight)),)

    hidden, state = _unrolled(_projected(ins), (ins["initial_h"],), step, ins.value("direction") == "reverse")
    return _last(hidden, ins), state[0]


@kernel("gru")
def gru(op: Any, ins: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates in the order reset, output, update; with `reset_after`, the reset gate is applied behind the product."""
    gate, activation = by_name(ins.value("recurrent_activation")), by_name(ins.value("activation"))
    weight_r, weight_o, weight_z = ins["weight_hh"].mT.chunk(3, -1)
    size = weight_r.shape[0]
    bias = ins.get("bias")
    bias_r, bias_o, bias_z = (torch.zeros(3 * size, dtype=ins.compute) if bias is None else bias).chunk(3, -1)
    reset_after = bool(ins.value("reset_after")) if ins.accepts("reset_after") else False
    inputs = torch.matmul(ins["x"], ins["weight_ih"].mT)
    if ins.accepts("input_bias") and ins.has("input_bias"):
        inputs = inputs + ins["input_bias"]

    def step(now: torch.Tensor, state: Any) -> Any:
        hidden = state[0]
        in_r, in_o, in_z = now.chunk(3, -1)
        r = gate(in_r + torch.matmul(hidden, weight_r) + bias_r)
        z = gate(in_z + torch.matmul(hidden, weight_z) + bias_z)
        if reset_after:
            o = activation(in_o + r * (torch.matmul(hidden, weight_o) + bias_o))
        else:
            o = activation(in_o + torch.matmul(r * hidden, weight_o) + bias_o)
        return ((1.0 - z) * o + z * hidden,)

    hidden, state = _unrolled(inputs, (ins["initial_h"],), step, ins.value("direction") == "reverse")
    return _last(hidden, ins), state[0]


def _lstm_step(ins: Any, suffix: str) -> Step:
    gate, cell_gate, activation = (
        by_name(ins.value(name)) for name in ("recurrent_activation", "cell_activation", "activation")
    )
    weight = ins["weight_hh" + suffix].mT
    peephole, clip = ins.get("peephole" + suffix), ins.value("clip")
    peep_i, peep_f, peep_o = (0.0, 0.0, 0.0) if peephole is None else peephole.chunk(3)

    def step(now: torch.Tensor, state: Any) -> Any:
        hidden, cell = state
        in_i, in_f, in_o, in_z = (now + torch.matmul(hidden, weight)).chunk(4, -1)
        i, f = gate(in_i + cell * peep_i), gate(in_f + cell * peep_f)
        cell = f * cell + i * cell_gate(in_z)
        if clip is not None:
            cell = cell.clamp(-clip, clip)
        return gate(in_o + cell * peep_o) * activation(cell), cell

    return step


@kernel("lstm")
def lstm(op: Any, ins: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gates in the order input, forget, output, cell."""
    direction = ins.value("direction")
    initial_h, initial_c = ins["initial_h"], ins["initial_c"]
    if direction != "bidirectional":
        backward = direction == "reverse"
        hidden, (h, c) = _unrolled(_projected(ins), (initial_h, initial_c), _lstm_step(ins, ""), backward)
        return _last(hidden, ins), h, c
    (h_f, h_b), (c_f, c_b) = initial_h.chunk(2, -1), initial_c.chunk(2, -1)
    forward, (h_f, c_f) = _unrolled(_projected(ins), (h_f, c_f), _lstm_step(ins, ""), False)
    back, (h_b, c_b) = _unrolled(_projected(ins, "_back"), (h_b, c_b), _lstm_step(ins, "_back"), True)
    if ins.value("output_sequence"):
        hidden = torch.cat([forward, back.flip(0)], -1)
    else:
        hidden = torch.cat([forward[-1:], back[-1:]], -1)
    return hidden, torch.cat([h_f, h_b], -1), torch.cat([c_f, c_b], -1)
