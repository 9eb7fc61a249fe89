"""Unrolling of recurrent layers: one product for the inputs of all steps, and then one step after the other.

All values keep the rank 3 of the layer's input: a step is [1, batch, features]. Thus the steps are one split and the
results one concat, without squeezes or stacks between.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
from coremltools.converters.mil.mil import Operation, Var, types

from ...ane.limits import find_exceeded_limit
from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_all_zero, is_const, is_symbolic, is_used
from ...passes.contract import FP32_UNSUPPORTED_REASON, Community, Evidence, Exactness, Hit, Miss, Rewrite, Vendor
from ...passes.evidence import cite_m4_study, cite_private_route
from ...passes.targets import Generation
from ...utils.text_format import format_count
from ..control_flow._unrolled_size import MAX_CHAIN_PRODUCTS, MAX_FUNCTION_OPS, UnrolledSize, measure_unrolled_size

__all__ = [
    "EVIDENCE",
    "Direction",
    "UnrollRecurrent",
    "add_if_present",
    "apply_activation",
    "build_linear",
    "build_state_product",
    "split_equally",
]

_SUPPORTED_ACTIVATIONS = ("tanh", "sigmoid", "relu", "linear")
_UNSUPPORTED_ACTIVATIONS = {
    "scaled_tanh": "whose constants are not documented",
    **dict.fromkeys(("hard_sigmoid", "sigmoid_hard"), "which multiplies by 0.2, no number of fp16"),
}
EVIDENCE: tuple[Evidence, ...] = (
    Vendor(
        "RNN and LSTM ops are not supported on the neural engine",
        source="https://github.com/apple/coremltools/issues/1780",
        date="2023-02-26",
    ),
    cite_m4_study(
        "rnn, lstm and gru are unsupported; linear, split, concat, sigmoid, tanh, mul, add and clip are accepted"
    ),
    cite_private_route("lstm, gru and rnn have no form on any generation"),
    Community(
        "a chain of 386 convs compiles, 387 overflow the compiler's stack: why long sequences are left alone",
        chip="M6",
        date="2026",
        source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/defects.md",
    ),
)


class Direction(NamedTuple):
    """One direction through the sequence: the suffix of its weights, and whether it begins with the last step."""

    suffix: str
    backward: bool


class UnrollRecurrent(Rewrite):
    """What the three have in common; each says by `step` how it gets from one state to the next."""

    stage = "decompose"
    exactness = Exactness.ROUNDING
    preset = "full"
    states: ClassVar[tuple[str, ...]] = ("initial_h",)
    activations: ClassVar[tuple[str, ...]] = ("activation",)

    step_ops: ClassVar[int]
    "Number of ops that a step of one direction adds."

    max_steps: int = 256
    """The longest sequence that is unrolled. Each step adds 3 (rnn) to 16 ops (lstm), and the steps' products follow
    each other: of convs an M6 compiles no more than 386 in a row."""
    max_chain: int = MAX_CHAIN_PRODUCTS
    """The longest chain of products that depend on each other, through this layer and the ops before and after it in
    the function: layers in a row add up. An M6 compiles 386 convs in a row."""
    max_ops: int = MAX_FUNCTION_OPS
    "The most ops that all functions may have with layers unrolled: compile time and file size grow with them."

    def match(self, op: Operation) -> Hit | Miss:
        reason = self._reason(op)
        if reason:
            return Miss(op, reason)
        steps = int(op.x.shape[0])
        size = measure_unrolled_size(op, self._size, UnrolledSize(self.max_chain, self.max_ops), self.functions)
        if size.chain > self.max_chain:
            return Miss(
                op,
                f"{format_count(steps, 'step')} would make {size.chain} products that depend on each other in "
                f"the function, more than {self.max_chain} (max_chain)",
            )
        if size.ops > self.max_ops:
            return Miss(op, f"{format_count(steps, 'step')} would make a program of {size.ops} ops, more than "
                            f"{self.max_ops} (max_ops)")
        return Hit(op, note=f"{format_count(steps, 'step')} written out")

    def _reason(self, op: Operation) -> str | None:
        """Return why the layer cannot be unrolled, whatever else is in the function."""
        steps = op.x.shape[0]
        if is_symbolic(steps):
            return "the number of steps is known only at run time; fix the length of the sequence"
        if int(steps) > self.max_steps:
            return f"{int(steps)} steps, above max_steps={self.max_steps}"
        if op.x.dtype != types.fp16:
            return FP32_UNSUPPORTED_REASON
        return (
            _find_unknown_activation(op, self.activations)
            or _find_width_obstacle(op, self.generations)
            or _find_batch_obstacle(op, self.states)
        )

    def _size(self, op: Operation) -> UnrolledSize | None:
        """Estimate the size of the unrolled layer; None for another op or a layer that is not unrolled."""
        if op.op_type not in self.roots or self._reason(op):
            return None
        steps = int(op.x.shape[0])
        return UnrolledSize(
            1 + steps * self.count_products_per_step(op), 1 + len(_list_directions(op)) * steps * self.step_ops
        )

    def count_products_per_step(self, op: Operation) -> int:
        """Count the products of a step that depend on each other."""
        return 1

    def step(self, mb: RewriteBuilder, op: Operation, way: Direction, now: Any, states: Sequence[Any]) -> Sequence[Any]:
        """Build a step and return the states after it, the output first.

        Values after the layer's states are passed to the next step only. `now` is what `inputs` built for the step.
        """
        raise AssertionError(f"{type(self).__name__} must define step()")

    def inputs(self, mb: RewriteBuilder, op: Operation, way: Direction) -> Sequence[Any]:
        """Build, for each step in order of time, its input times the weights, with the bias."""
        bias = op.inputs.get(f"bias{way.suffix}")
        return split_equally(mb, build_linear(mb, op.x, op.inputs[f"weight_ih{way.suffix}"], bias), int(op.x.shape[0]))

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> list[Var]:
        op = hit.op
        ways = _list_directions(op)
        first = [
            _split_initial_state(mb, _collapse_equal_rows(mb, op.inputs[name], op.x.shape[1]), len(ways))
            for name in self.states
        ]
        hidden, last = [], []
        for number, way in enumerate(ways):
            states, seen = [parts[number] for parts in first], []
            steps = self.inputs(mb, op, way)
            for now in reversed(steps) if way.backward else steps:
                states = list(self.step(mb, op, way, now, states))
                seen.append(states[0])
            hidden.append(seen)
            last.append(states)
        made = [_join_sequence(mb, op, hidden) if is_used(op.outputs[0]) else op.outputs[0]]
        for number, old in enumerate(op.outputs[1:]):
            final = _concat_directions(mb, [states[number] for states in last]) if is_used(old) else None
            made.append(old if final is None else mb.squeeze(x=final, axes=[0]))
        return made


def split_equally(mb: RewriteBuilder, x: Var, count: int, axis: int = 0) -> list[Var]:
    """Split `x` into `count` equal parts."""
    return [x] if count == 1 else list(mb.split(x=x, num_splits=count, axis=axis))


def build_state_product(mb: RewriteBuilder, x: Var, weight: Var, bias: Var | None = None) -> Var | None:
    """Build a state times its weights, or return None for a product of zeros.

    That is a state of zeros, without a bias, times finite constant weights.
    """
    if bias is None and is_all_zero(x) and is_const(weight) and bool(np.all(np.isfinite(weight.val))):
        return None
    return build_linear(mb, x, weight, bias)


def build_linear(mb: RewriteBuilder, x: Var, weight: Var, bias: Var | None) -> Var:
    """Build `x` times the weights plus `bias`; without a bias use zeros, the same const at every step."""
    if bias is None:
        bias = mb.weight(weight, "no_bias", lambda: np.zeros(weight.shape[0], types.nptype_from_builtin(weight.dtype)))
    made: Var = mb.linear(x=x, weight=weight, bias=bias)
    return made


def add_if_present(mb: RewriteBuilder, x: Var, y: Var | None) -> Var:
    """Return `x + y`, or `x` where `y` is None."""
    made: Var = x if y is None else mb.add(x=x, y=y)
    return made


def apply_activation(mb: RewriteBuilder, op: Operation, parameter: str, x: Var) -> Var:
    """Apply to `x` the activation that `parameter` of the layer names."""
    name = str(get_const_value(op.inputs[parameter])).lower()
    if name == "linear":
        return x
    made: Var = getattr(mb, name)(x=x)
    return made


def _find_unknown_activation(op: Operation, parameters: Sequence[str]) -> str | None:
    for parameter in parameters:
        name = str(get_const_value(op.inputs[parameter]))
        if name.lower() not in _SUPPORTED_ACTIVATIONS:
            return f"{parameter} is {name}, {_UNSUPPORTED_ACTIVATIONS.get(name.lower(), 'which is not known here')}"
    return None


def _find_width_obstacle(op: Operation, generations: Sequence[Generation]) -> str | None:
    width = int(op.weight_ih.shape[0])
    broken = find_exceeded_limit("spatial", width, generations)
    return f"its gates are {width} wide together {broken.words}" if broken else None


def _find_batch_obstacle(op: Operation, states: Sequence[str]) -> str | None:
    """Return why an initial state does not have one row for each row of x, or None.

    coremltools does not check its batch.
    """
    batch = op.x.shape[1]
    for name in states:
        state, rows = op.inputs[name], op.inputs[name].shape[0]
        if is_symbolic(rows) or rows in (1, batch) or _has_equal_rows(state):
            continue
        differ = "differ" if is_const(state) else "may differ"
        found = "known only at run time" if is_symbolic(batch) else str(batch)
        return f"{name} has {rows} rows that {differ}, where the batch of x is {found}"
    return None


def _has_equal_rows(state: Var) -> bool:
    return is_const(state) and bool(np.all(state.val == state.val[:1]))


def _list_directions(op: Operation) -> tuple[Direction, ...]:
    direction = get_const_value(op.direction)
    if direction == "bidirectional":
        return Direction("", False), Direction("_back", True)
    return (Direction("", direction == "reverse"),)


def _collapse_equal_rows(mb: RewriteBuilder, state: Var, batch: Any) -> Var:
    """Return the constant `state` with a row for each of `batch`, or with one row that equals all."""
    if not is_const(state) or state.shape[0] in (1, batch):
        return state
    return mb.weight(state, "one_row", lambda: state.val[:1])


def _split_initial_state(mb: RewriteBuilder, state: Var, count: int) -> list[Var]:
    """Split an initial state [batch, count * features] into one [1, batch, features] for each direction."""
    if not is_const(state):
        return split_equally(mb, mb.expand_dims(x=state, axes=[0]), count, -1)
    if count == 1:
        return [mb.reshaped(state, (1, *state.shape))]
    return [mb.weight(state, f"way_{number}", partial(_slice_state, state, number, count)) for number in range(count)]


def _slice_state(state: Var, number: int, count: int) -> np.ndarray[Any, Any]:
    part: np.ndarray[Any, Any] = np.split(state.val[None], count, -1)[number]
    return part


def _join_sequence(mb: RewriteBuilder, op: Operation, hidden: Sequence[list[Var]]) -> Var:
    """Join the hidden states of all steps, or take those of the last one, with both directions side by side.

    A bidirectional layer returns the steps of its backward direction in order of time. A layer of direction `reverse`
    returns them in the order of computation, as coremltools' own op tests have it.
    """
    if not get_const_value(op.output_sequence):
        return _concat_directions(mb, [seen[-1] for seen in hidden])
    ways = [seen if number == 0 else seen[::-1] for number, seen in enumerate(hidden)]
    return _concat_directions(mb, [seen[0] if len(seen) == 1 else mb.concat(values=seen, axis=0) for seen in ways])


def _concat_directions(mb: RewriteBuilder, ways: list[Var]) -> Var:
    made: Var = ways[0] if len(ways) == 1 else mb.concat(values=ways, axis=-1)
    return made
