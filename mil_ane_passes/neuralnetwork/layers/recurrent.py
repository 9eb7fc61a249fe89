"""Convert recurrent layers: simple RNN, GRU, LSTM in one or two directions.

Layers without a MIL op (other activations, parameters of activations, coupled gates) are unrolled if the sequence
length is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from ..layer_converter import LayerContext, register_layer
from .activation import apply_activation

Array = np.ndarray[Any, Any]
Step = Callable[[Var, "list[Var]"], "list[Var]"]

_MAX_UNROLLED_STEPS = 512
"Maximum number of steps of an unrolled layer: each step has about ten ops."

_NAMES = {"ReLU": "relu", "tanh": "tanh", "sigmoid": "sigmoid", "linear": "linear", "sigmoidHard": "hard_sigmoid"}
_FIXED = {"linear": (1.0, 0.0), "sigmoidHard": (0.2, 0.5)}
"Alpha and beta of the functions in MIL's recurrent ops, and in recurrent layers that store neither."


def _get_activation(params: Any) -> str | None:
    """Return the name of an activation in MIL's recurrent ops; None where they have no form of it."""
    kind = params.WhichOneof("NonlinearityType")
    if kind in _FIXED and not np.allclose(_read_alpha_and_beta(getattr(params, kind), kind), _FIXED[kind]):
        return None
    return "scaled_tanh" if _is_scaled_tanh_without_numbers(params) else _NAMES.get(kind)


def _is_scaled_tanh_without_numbers(params: Any) -> bool:
    """Return whether an activation is what coremltools writes for `scaled_tanh` of a recurrent op of MIL."""
    return params.HasField("scaledTanh") and not (params.scaledTanh.alpha or params.scaledTanh.beta)


def _read_alpha_and_beta(chosen: Any, kind: str) -> tuple[float, float]:
    """Return the parameters of an activation.

    coremltools' builder stores none in recurrent layers, which have been those of Keras, with its numbers, since.
    """
    return (chosen.alpha, chosen.beta) if chosen.alpha or chosen.beta else _FIXED[kind]


def _apply_activation(params: Any, x: Var, context: LayerContext) -> Var:
    """Apply an activation of an unrolled layer."""
    kind = params.WhichOneof("NonlinearityType")
    if kind in _FIXED:
        filled = type(params)()
        chosen = getattr(filled, kind)
        chosen.alpha, chosen.beta = _read_alpha_and_beta(getattr(params, kind), kind)
        return apply_activation(filled, x, context)
    if _is_scaled_tanh_without_numbers(params):
        raise context.refuse("a scaled tanh without parameters, and features that MIL's recurrent op does not support",
                             "expected its alpha and beta: set them in the layer")
    return apply_activation(params, x, context)


def _get_sequence(x: Var, context: LayerContext) -> tuple[Var, Callable[[Var], Var]]:
    """Return the input as [S, B, C], and the way back to the network's form: [S, B, C, 1, 1], or [S, C, 1, 1]."""
    if x.rank == 5:
        return mb.squeeze(x=x, axes=[3, 4]), lambda y: mb.expand_dims(x=y, axes=[3, 4])
    if x.rank == 4:
        return (mb.expand_dims(x=mb.squeeze(x=x, axes=[2, 3]), axes=[1]),
                lambda y: mb.expand_dims(x=mb.squeeze(x=y, axes=[1]), axes=[2, 3]))
    if x.rank == 3:
        return x, lambda y: y
    raise context.refuse(f"an input of rank {x.rank}", "expected [sequence, batch, channels, 1, 1]")


def _get_state(at: int, hidden: int, batch: Any, context: LayerContext) -> Var | Array:
    """Return the initial state that is input `at`, as [B, H]; zeros where there is none."""
    inputs = context.inputs()
    if at < len(inputs):
        return mb.reshape(x=inputs[at], shape=[-1, hidden])
    if not isinstance(batch, (int, np.integer)):
        raise context.refuse("a batch of flexible size without an initial state", "expected a fixed batch")
    return np.zeros((int(batch), hidden), np.float32)


def _make_state_result(state: Var, context: LayerContext) -> Var:
    """Return a final state [B, H] in the network's form: [1, B, H, 1, 1], or [1, H, 1, 1]."""
    return mb.expand_dims(x=state, axes=[2, 3] if context.x.rank == 4 else [0, 3, 4] if context.x.rank == 5 else [0])


def _unroll_layer(x: Var, states: list[Var], step: Step, reverse: bool, context: LayerContext) -> tuple[Var, list[Var]]:
    """Write a layer out; returns the hidden states of all steps as [S, B, H], and the last states."""
    count = x.shape[0]
    if not isinstance(count, (int, np.integer)) or count > _MAX_UNROLLED_STEPS:
        raise context.refuse(f"activations or gates that MIL's recurrent op does not support, over a sequence of "
                             f"length {count}",
                             f"expected the standard activations, or a fixed length of at most {_MAX_UNROLLED_STEPS}")
    rows = [mb.squeeze(x=mb.slice_by_size(x=x, begin=[at, 0, 0], size=[1, -1, -1]), axes=[0]) for at in range(count)]
    results = []
    for row in reversed(rows) if reverse else rows:
        states = step(row, states)
        results.append(states[0])
    return mb.stack(values=results, axis=0), states


@register_layer("simpleRecurrent")
def convert_simple_recurrent(params: Any, context: LayerContext) -> list[Var]:
    """Convert h = f(W x + R h + b)."""
    inner, hidden = int(params.inputVectorSize), int(params.outputVectorSize)
    read = context.weights.read
    w = read(params.weightMatrix, (hidden, inner), "weights")
    r = read(params.recursionMatrix, (hidden, hidden), "recursion weights")
    b = read(params.biasVector, (hidden,), "bias") if params.hasBiasVector else np.zeros(hidden, np.float32)
    x, restore = _get_sequence(context.x, context)
    state = _get_state(1, hidden, x.shape[1], context)
    activation = _get_activation(params.activation)
    if activation in ("relu", "tanh", "sigmoid"):
        y, last = mb.rnn(x=x, initial_h=state, weight_ih=w, weight_hh=r, bias=b, activation=activation,
                         direction="reverse" if params.reverseInput else "forward",
                         output_sequence=bool(params.sequenceOutput))
    else:
        def run_step(row: Var, states: list[Var]) -> list[Var]:
            total = mb.add(x=mb.linear(x=row, weight=w, bias=b), y=mb.linear(x=states[0], weight=r))
            return [_apply_activation(params.activation, total, context)]

        y, (last,) = _unroll_layer(x, [state], run_step, params.reverseInput, context)
        y = y if params.sequenceOutput else mb.expand_dims(x=last, axes=[0])
    return [restore(y), _make_state_result(last, context)]


@register_layer("gru")
def convert_gru(params: Any, context: LayerContext) -> list[Var]:
    """Convert a GRU, which resets the state before the recursion; MIL stacks its gates as reset, output, update."""
    inner, hidden = int(params.inputVectorSize), int(params.outputVectorSize)
    read = context.weights.read
    gates = ("reset", "output", "update")
    w = np.concatenate([read(getattr(params, f"{gate}GateWeightMatrix"), (hidden, inner), f"{gate} gate weights")
                        for gate in gates])
    r = np.concatenate([read(getattr(params, f"{gate}GateRecursionMatrix"), (hidden, hidden), f"{gate} gate recursion")
                        for gate in gates])
    b = np.concatenate([read(getattr(params, f"{gate}GateBiasVector"), (hidden,), f"{gate} gate bias")
                        for gate in gates]) if params.hasBiasVectors else np.zeros(3 * hidden, np.float32)
    x, restore = _get_sequence(context.x, context)
    state = _get_state(1, hidden, x.shape[1], context)
    if len(params.activations) != 2:
        raise context.refuse(f"{len(params.activations)} activations", "expected 2")
    inside, outside = (_get_activation(each) for each in params.activations)
    if inside and outside:
        y, last = mb.gru(x=x, initial_h=state, weight_ih=w, weight_hh=r, bias=b, recurrent_activation=inside,
                         activation=outside, direction="reverse" if params.reverseInput else "forward",
                         output_sequence=bool(params.sequenceOutput))
    else:
        def run_step(row: Var, states: list[Var]) -> list[Var]:
            return [_step_gru(row, states[0], (w, r, b), params.activations, context)]

        y, (last,) = _unroll_layer(x, [state], run_step, params.reverseInput, context)
        y = y if params.sequenceOutput else mb.expand_dims(x=last, axes=[0])
    return [restore(y), _make_state_result(last, context)]


def _step_gru(row: Var, h: Var, weights: Sequence[Array], activations: Any, context: LayerContext) -> Var:
    w, r, b = weights
    r_reset, r_output, r_update = np.split(r, 3)
    xs = mb.split(x=mb.linear(x=row, weight=w, bias=b), num_splits=3, axis=1)
    reset = _apply_activation(activations[0], mb.add(x=xs[0], y=mb.linear(x=h, weight=r_reset)), context)
    update = _apply_activation(activations[0], mb.add(x=xs[2], y=mb.linear(x=h, weight=r_update)), context)
    memory = mb.linear(x=mb.mul(x=reset, y=h), weight=r_output)
    new = _apply_activation(activations[1], mb.add(x=xs[1], y=memory), context)
    kept = mb.mul(x=update, y=h)
    result: Var = mb.add(x=kept, y=mb.mul(x=mb.sub(x=np.float32(1), y=update), y=new))
    return result


_LSTM_GATES = ("input", "forget", "output", "block")
"In the order in which MIL stacks them; `block` is the input of the cell."


def _read_lstm(params: Any, stored: Any, inner: int, hidden: int, context: LayerContext) -> dict[str, Any]:
    """Read the weights of one direction, stacked as MIL's op takes them."""
    def read_gate(gate: str, kind: str, shape: tuple[int, ...]) -> Array:
        name = "blockInput" if gate == "block" else f"{gate}Gate"
        return context.weights.read(getattr(stored, f"{name}{kind}"), shape, f"{gate} {kind}")

    w = np.concatenate([read_gate(gate, "WeightMatrix", (hidden, inner)) for gate in _LSTM_GATES])
    r = np.concatenate([read_gate(gate, "RecursionMatrix", (hidden, hidden)) for gate in _LSTM_GATES])
    b = np.zeros(4 * hidden, np.float32)
    if params.hasBiasVectors:
        b = np.concatenate([read_gate(gate, "BiasVector", (hidden,)) for gate in _LSTM_GATES])
    if params.forgetBias:
        b[hidden:2 * hidden] += 1
    found: dict[str, Any] = {"weight_ih": w, "weight_hh": r, "bias": b}
    if params.hasPeepholeVectors:
        found["peephole"] = np.concatenate([read_gate(gate, "PeepholeVector", (hidden,)) for gate in _LSTM_GATES[:3]])
    return found


def _read_lstm_activations(activations: Any, context: LayerContext) -> dict[str, str] | None:
    if len(activations) != 3:
        raise context.refuse(f"{len(activations)} activations for one direction", "expected 3")
    names = [_get_activation(each) for each in activations]
    if None in names:
        return None
    return dict(zip(("recurrent_activation", "cell_activation", "activation"), map(str, names)))


def _run_lstm(
    x: Var, states: list[Any], params: Any, weights: dict[str, Any], activations: Any, reverse: bool,
    context: LayerContext,
) -> tuple[Var, Var, Var]:
    """Run one direction; returns all or the last hidden states [S or 1, B, H], and the last states [B, H]."""
    names = _read_lstm_activations(activations, context)
    clip = float(params.cellClipThreshold)
    if names is not None and not params.coupledInputAndForgetGate:
        y, h, c = mb.lstm(x=x, initial_h=states[0], initial_c=states[1], **weights, **names,
                          direction="reverse" if reverse else "forward", output_sequence=bool(params.sequenceOutput),
                          **({"clip": clip} if 0 < clip < 1e30 else {}))
        return y, h, c

    def run_step(row: Var, now: list[Var]) -> list[Var]:
        return _step_lstm(row, now, params, weights, activations, context)

    y, (h, c) = _unroll_layer(x, states, run_step, reverse, context)
    return y if params.sequenceOutput else mb.expand_dims(x=h, axes=[0]), h, c


def _step_lstm(
    row: Var, states: list[Var], params: Any, weights: dict[str, Any], activations: Any, context: LayerContext
) -> list[Var]:
    h, c = states
    total = mb.add(x=mb.linear(x=row, weight=weights["weight_ih"], bias=weights["bias"]),
                   y=mb.linear(x=h, weight=weights["weight_hh"]))
    into, forget, out, block = mb.split(x=total, num_splits=4, axis=1)
    peepholes = np.split(weights["peephole"], 3) if "peephole" in weights else None
    if peepholes is not None:
        into = mb.add(x=into, y=mb.mul(x=c, y=peepholes[0]))
        forget = mb.add(x=forget, y=mb.mul(x=c, y=peepholes[1]))
    gate = _apply_activation(activations[0], into, context)
    kept = mb.sub(x=np.float32(1), y=gate) if params.coupledInputAndForgetGate else (
        _apply_activation(activations[0], forget, context))
    new = mb.mul(x=gate, y=_apply_activation(activations[1], block, context))
    cell = mb.add(x=mb.mul(x=kept, y=c), y=new)
    if 0 < params.cellClipThreshold < 1e30:
        cell = mb.clip(x=cell, alpha=-float(params.cellClipThreshold), beta=float(params.cellClipThreshold))
    if peepholes is not None:
        out = mb.add(x=out, y=mb.mul(x=cell, y=peepholes[2]))
    shown = _apply_activation(activations[2], cell, context)
    return [mb.mul(x=_apply_activation(activations[0], out, context), y=shown), cell]


@register_layer("uniDirectionalLSTM")
def convert_lstm(params: Any, context: LayerContext) -> list[Var]:
    """Convert an LSTM of one direction."""
    inner, hidden = int(params.inputVectorSize), int(params.outputVectorSize)
    if len(params.weightParams.ListFields()) == 0:
        raise context.refuse("no weights", "expected some: use a fresh copy of the model")
    weights = _read_lstm(params.params, params.weightParams, inner, hidden, context)
    x, restore = _get_sequence(context.x, context)
    states = [_get_state(at, hidden, x.shape[1], context) for at in (1, 2)]
    y, h, c = _run_lstm(x, states, params.params, weights, params.activations, bool(params.reverseInput), context)
    return [restore(y), _make_state_result(h, context), _make_state_result(c, context)]


@register_layer("biDirectionalLSTM")
def convert_bidirectional_lstm(params: Any, context: LayerContext) -> list[Var]:
    """Convert an LSTM of two directions to one op, or to two where the directions have other activations."""
    inner, hidden = int(params.inputVectorSize), int(params.outputVectorSize)
    if len(params.weightParams) != 2:
        raise context.refuse(f"weights of {len(params.weightParams)} directions", "expected 2")
    x, restore = _get_sequence(context.x, context)
    both = _run_both_directions(x, params, inner, hidden, context)
    if both is not None:
        y, *states = both
        return [restore(y), *(_make_state_result(each, context) for each in states)]
    results = []
    for at, activations in enumerate((params.activationsForwardLSTM, params.activationsBackwardLSTM)):
        weights = _read_lstm(params.params, params.weightParams[at], inner, hidden, context)
        states = [_get_state(1 + 2 * at + each, hidden, x.shape[1], context) for each in (0, 1)]
        y, h, c = _run_lstm(x, states, params.params, weights, activations, bool(at), context)
        if at and params.params.sequenceOutput:
            y = mb.reverse(x=y, axes=[0])  # in the order of the input
        results.append((y, h, c))
    (forward, h, c), (backward, h_back, c_back) = results
    joined = mb.concat(values=[forward, backward], axis=2)
    return [restore(joined), *(_make_state_result(each, context) for each in (h, c, h_back, c_back))]


def _run_both_directions(x: Var, params: Any, inner: int, hidden: int, context: LayerContext) -> list[Var] | None:
    """Run an LSTM of two directions as one op; None where MIL's op has no form of it.

    Returns the hidden states of both, and the last hidden states and cells: forward h and c, backward h and c.
    """
    names = [_read_lstm_activations(each, context)
             for each in (params.activationsForwardLSTM, params.activationsBackwardLSTM)]
    if names[0] is None or names[0] != names[1] or params.params.coupledInputAndForgetGate:
        return None
    there, back = (_read_lstm(params.params, each, inner, hidden, context) for each in params.weightParams)
    weights = there | {f"{name}_back": array for name, array in back.items()}
    states = [_get_state(at, hidden, x.shape[1], context) for at in (1, 2, 3, 4)]
    clip = float(params.params.cellClipThreshold)
    y, h, c = mb.lstm(x=x, initial_h=_concat_pair(states[0], states[2]),
                      initial_c=_concat_pair(states[1], states[3]), **weights, **names[0],
                      direction="bidirectional", output_sequence=bool(params.params.sequenceOutput),
                      **({"clip": clip} if 0 < clip < 1e30 else {}))
    (h, h_back), (c, c_back) = (mb.split(x=each, num_splits=2, axis=1) for each in (h, c))
    return [y, h, c, h_back, c_back]


def _concat_pair(one: Var | Array, other: Var | Array) -> Var | Array:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.concatenate([one, other], axis=1)
    result: Var = mb.concat(values=[one, other], axis=1)
    return result
