"""Recurrent layers against the documented formulas, written out in numpy, and against torch's layers."""

from __future__ import annotations

from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime import helpers
from tests.runtime.helpers import Array, close, run
from tests.runtime.laws import law

STEPS, BATCH, INPUT, HIDDEN = 4, 2, 3, 5


def draw(seed: int, *shape: int) -> Array:
    """Small numbers: gates that do not saturate multiply from step to step."""
    return helpers.draw(seed, *shape) * np.float32(0.2)


X = draw(0, STEPS, BATCH, INPUT)

ACTIVATIONS: dict[str, Any] = {
    "tanh": np.tanh, "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "relu": lambda x: np.maximum(x, 0),
    "linear": lambda x: x, "hard_sigmoid": lambda x: np.clip(0.2 * x + 0.5, 0, 1),
}  # fmt: skip
NAMES = st.sampled_from([*ACTIVATIONS])
#: a recurrent layer of opset iOS15 knows no fp16, and one of iOS17 does
OPSETS = st.sampled_from([ct.target.iOS15, ct.target.iOS17])


def outputs(states: list[Array], sequence: bool) -> Array:
    return np.stack(states) if sequence else np.stack(states[-1:])


def lstm(x: Array, h: Array, c: Array, given: dict[str, Any], suffix: str = "") -> tuple[list[Array], Array, Array]:
    """All hidden states and the last cell state, by the formulas of the documentation (gates i, f, o, z)."""
    gate, cell, out = (ACTIVATIONS[given[f"{name}activation"]] for name in ("recurrent_", "cell_", ""))
    peep = given.get(f"peephole{suffix}")
    p_i, p_f, p_o = np.split(np.zeros(3 * HIDDEN) if peep is None else peep, 3)
    states = []
    for now in x.astype(np.float64):
        mixed = now @ given[f"weight_ih{suffix}"].T + h @ given[f"weight_hh{suffix}"].T
        bias = given.get(f"bias{suffix}")
        i, f, o, z = np.split(mixed + (0 if bias is None else bias), 4, -1)
        c = gate(f + p_f * c) * c + gate(i + p_i * c) * cell(z)
        c = c if given.get("clip") is None else np.clip(c, -given["clip"], given["clip"])
        h = gate(o + p_o * c) * out(c)
        states.append(h)
    return states, h, c


def lstm_weights(seed: int, suffix: str, bias: bool, peephole: bool) -> dict[str, Any]:
    made = {"weight_ih": draw(seed, 4 * HIDDEN, INPUT), "weight_hh": draw(seed + 1, 4 * HIDDEN, HIDDEN)}
    made |= {"bias": draw(seed + 2, 4 * HIDDEN)} if bias else {}
    made |= {"peephole": draw(seed + 3, 3 * HIDDEN)} if peephole else {}
    return {name + suffix: value for name, value in made.items()}


@law
@given(
    seed=st.integers(0, 99), direction=st.sampled_from(["forward", "reverse", "bidirectional"]), bias=st.booleans(),
    peephole=st.booleans(), clip=st.sampled_from([None, np.float32(0.3)]), sequence=st.booleans(), opset=OPSETS,
    names=st.tuples(NAMES, NAMES, NAMES), default=st.booleans(),
)  # fmt: skip
def test_lstm(
    seed: int, direction: str, bias: bool, peephole: bool, clip: Any, sequence: bool, opset: Any, names: Any,
    default: bool,
) -> None:
    """`clip` bounds the cell state, as coremltools' own op tests have it; peepholes of o see the new cell state."""
    both = direction == "bidirectional"
    given_ = lstm_weights(seed, "", bias, peephole) | (lstm_weights(seed + 50, "_back", bias, peephole) if both else {})
    kinds = ("recurrent_activation", "cell_activation", "activation")
    given_ |= {} if clip is None else {"clip": clip}
    explicit = {} if default else dict(zip(kinds, names))
    known = given_ | (dict(zip(kinds, ("sigmoid", "tanh", "tanh"))) if default else explicit)
    h, c = draw(seed + 7, BATCH, HIDDEN * (1 + both)), draw(seed + 8, BATCH, HIDDEN * (1 + both))
    steps = X[::-1] if direction == "reverse" else X
    states, last_h, last_c = lstm(steps, h[:, :HIDDEN], c[:, :HIDDEN], known)
    expected = outputs(states, sequence)
    if both:
        back, back_h, back_c = lstm(X[::-1], h[:, HIDDEN:], c[:, HIDDEN:], known, "_back")
        expected = np.concatenate([expected, outputs(back[::-1], True) if sequence else outputs(back, False)], -1)
        last_h, last_c = np.concatenate([last_h, back_h], -1), np.concatenate([last_c, back_c], -1)

    def build(x: Any, h: Any, c: Any) -> Any:
        options = given_ | explicit | {"direction": direction, "output_sequence": sequence}
        return mb.lstm(x=x, initial_h=h, initial_c=c, **options)

    for found, truth in zip(run(build, {"x": X, "h": h, "c": c}, opset=opset), (expected, last_h, last_c)):
        close(found, truth)


@law
@given(
    seed=st.integers(0, 99), direction=st.sampled_from(["forward", "reverse"]), bias=st.booleans(), opset=OPSETS,
    sequence=st.booleans(), name=st.sampled_from([*ACTIVATIONS, "sigmoid_hard"]), names=st.tuples(NAMES, NAMES),
)  # fmt: skip
def test_rnn_and_gru(
    seed: int, direction: str, bias: bool, opset: Any, sequence: bool, name: str, names: tuple[str, str]
) -> None:
    """Without `reset_after` the reset gate meets the state before the product, as in coremltools' own op tests."""
    h = draw(seed, BATCH, HIDDEN)
    w_i, w_h, b = draw(seed + 1, 3 * HIDDEN, INPUT), draw(seed + 2, 3 * HIDDEN, HIDDEN), draw(seed + 3, 3 * HIDDEN)
    options: dict[str, Any] = {"direction": direction, "output_sequence": sequence}

    def build(x: Any, h: Any) -> Any:
        plain = {"bias": b[:HIDDEN]} if bias else {}
        gated = {"bias": b} if bias else {}
        kinds = {"recurrent_activation": names[0], "activation": names[1]}
        rnn = mb.rnn(
            x=x, initial_h=h, weight_ih=w_i[:HIDDEN], weight_hh=w_h[:HIDDEN], activation=name, **plain, **options
        )
        return *rnn, *mb.gru(x=x, initial_h=h, weight_ih=w_i, weight_hh=w_h, **kinds, **gated, **options)

    b = b if bias else 0 * b
    act = ACTIVATIONS["hard_sigmoid" if name == "sigmoid_hard" else name]
    gate, out = (ACTIVATIONS[each] for each in names)
    rnn, gru = [h], [h]
    for now in X[::-1].astype(np.float64) if direction == "reverse" else X.astype(np.float64):
        rnn.append(act(now @ w_i[:HIDDEN].T + rnn[-1] @ w_h[:HIDDEN].T + b[:HIDDEN]))
        (i_r, i_o, i_z), (h_r, h_o, h_z) = np.split(now @ w_i.T + b, 3, -1), np.split(w_h, 3)
        r, z = gate(i_r + gru[-1] @ h_r.T), gate(i_z + gru[-1] @ h_z.T)
        gru.append((1 - z) * out(i_o + (r * gru[-1]) @ h_o.T) + z * gru[-1])
    expected = (outputs(rnn[1:], sequence), rnn[-1], outputs(gru[1:], sequence), gru[-1])
    for found, truth in zip(run(build, {"x": X, "h": h}, opset=opset), expected):
        close(found, truth)


@pytest.mark.parametrize("precision", ["float64", "float32", "float16"])
def test_half_precision_layers(precision: str) -> None:
    """Half precision operands at every precision, near torch's float64 layer."""
    torch.manual_seed(0)
    layer = torch.nn.LSTM(INPUT, HIDDEN).double()
    parameters = [each.detach().numpy().astype(np.float16) for each in layer.parameters()]
    with torch.no_grad():
        for own, half in zip(layer.parameters(), parameters):
            own.copy_(torch.from_numpy(half.astype(np.float64)))
    x, h = X.astype(np.float16), np.zeros((BATCH, HIDDEN), np.float16)
    w_i, w_h, b_i, b_h = (np.concatenate([np.split(each, 4)[k] for k in (0, 1, 3, 2)]) for each in parameters)
    expected = layer(torch.from_numpy(x.astype(np.float64)))[0].detach().numpy()

    def build(x: Any, h: Any) -> Any:
        bias = (b_i.astype(np.float32) + b_h).astype(np.float16)
        return mb.lstm(
            x=x, initial_h=h, initial_c=h, weight_ih=w_i, weight_hh=w_h, bias=bias, output_sequence=True
        )

    found = run(build, {"x": x, "h": h}, precision=precision, opset=ct.target.iOS17)[0]
    assert found.dtype == {"float64": np.float64, "float32": np.float32, "float16": np.float16}[precision]
    close(found, expected, 2e-3)
