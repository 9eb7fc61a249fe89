"""Unrolling of recurrent layers: one product for the inputs of all steps, followed by the steps.

All values keep the rank 3 of the layer's input: a step is [1, batch, features]. Thus the steps are one split and the
results one concat, without squeezes or stacks between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ane.limits import find_exceeded_limit
from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_all_zero, is_const, is_symbolic, is_used
from ...passes.contract import (
    FP32_UNSUPPORTED_REASON,
    Community,
    Evidence,
    Exactness,
    Example,
    Hit,
    Miss,
    Rewrite,
    Vendor,
)
from ...passes.evidence import cite_ane_compiler, cite_m4_study
from ...passes.examples import make_example, make_weight
from ...passes.targets import Generation
from ...utils.text_format import format_count
from ..control_flow._unrolled_size import MAX_CHAIN_PRODUCTS, MAX_FUNCTION_OPS, UnrolledSize, measure_unrolled_size

__all__ = [
    "EVIDENCE",
    "Direction",
    "States",
    "UnrollRecurrent",
    "add_if_present",
    "apply_activation",
    "build_linear",
    "build_state_product",
    "split_equally",
]

States = Sequence[Any]
"States of a cell between two steps, the output first, and other values passed to the next step."
_SUPPORTED_ACTIVATIONS = ("tanh", "sigmoid", "relu", "linear")
_UNSUPPORTED_ACTIVATIONS = {
    "scaled_tanh": "whose constants are not documented",
    **dict.fromkeys(("hard_sigmoid", "sigmoid_hard"), "which multiplies by 0.2, which fp16 does not represent"),
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
    cite_ane_compiler("lstm, gru and rnn have no equivalent on any generation"),
    Community(
        "a chain of 386 convs compiles, 387 overflow the compiler's stack: why long sequences are skipped",
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
    """Base of the rewrites of rnn, gru and lstm; each defines a step of its cell by `step`."""

    stage = "decompose"
    exactness = Exactness.ROUNDING
    preset = "full"
    states: ClassVar[tuple[str, ...]] = ("initial_h",)
    activations: ClassVar[tuple[str, ...]] = ("activation",)

    gates: ClassVar[int]
    "Number of gates of the cell: rows of its weights for each unit."
    step_ops: ClassVar[int]
    "Number of ops that a step of one direction adds."

    max_steps: int = 256
    """Maximum length of a sequence to unroll. Each step adds 3 (rnn) to 16 ops (lstm), and the products of the steps
    are sequential: an M6 compiles at most 386 convs in sequence."""
    max_chain: int = MAX_CHAIN_PRODUCTS
    """Maximum length of a chain of dependent products through this layer and the ops before and after it in the
    function: layers in sequence add up. An M6 compiles 386 convs in sequence."""
    max_ops: int = MAX_FUNCTION_OPS
    "Maximum number of ops of all functions with unrolled layers: compile time and file size grow with them."

    def match(self, op: Operation) -> Hit | Miss:
        reason = self._find_obstacle(op)
        if reason:
            return Miss(op, reason)
        steps = format_count(int(op.x.shape[0]), "step")
        most = UnrolledSize(self.max_chain, self.max_ops)
        size = measure_unrolled_size(self, op, self._estimate_size, most)
        if size.chain > self.max_chain:
            return Miss(op, f"{steps} would make a chain of {size.chain} dependent products in the function, more "
                            f"than {self.max_chain} (max_chain)")
        if size.ops > self.max_ops:
            return Miss(op, f"{steps} would make a program of {size.ops} ops, more than {self.max_ops} (max_ops)")
        return Hit(op, note=f"{steps} unrolled")

    def _find_obstacle(self, op: Operation) -> str | None:
        """Return why the layer cannot be unrolled, whatever else is in the function."""
        steps = op.x.shape[0]
        if is_symbolic(steps):
            return "the number of steps is dynamic; fix the sequence length"
        if int(steps) > self.max_steps:
            return f"{int(steps)} steps, above max_steps={self.max_steps}"
        if op.x.dtype != types.fp16:
            return FP32_UNSUPPORTED_REASON
        return (
            _find_unknown_activation(op, self.activations)
            or _find_width_obstacle(op, self.generations)
            or _find_batch_obstacle(op, self.states)
        )

    def _estimate_size(self, op: Operation) -> UnrolledSize | None:
        """Estimate the size of the unrolled layer; None for another op or a layer that is not unrolled."""
        if op.op_type not in self.roots or self._find_obstacle(op):
            return None
        steps = int(op.x.shape[0])
        chain = 1 + steps * self.count_products_per_step(op)
        return UnrolledSize(chain, 1 + len(_list_directions(op)) * steps * self.step_ops)

    def count_products_per_step(self, op: Operation) -> int:
        """Count the products of a step that depend on each other."""
        return 1

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> list[Var]:
        op = hit.op
        directions = _list_directions(op)
        initial = [_split_initial_state(mb, op, name, len(directions)) for name in self.states]
        hidden, last = [], []
        for number, direction in enumerate(directions):
            states, outputs = [parts[number] for parts in initial], []
            steps = self.inputs(mb, op, direction)
            for x in reversed(steps) if direction.backward else steps:
                states = list(self.step(mb, op, direction, x, states))
                outputs.append(states[0])
            hidden.append(outputs)
            last.append(states)
        results = [_join_sequence(mb, op, hidden) if is_used(op.outputs[0]) else op.outputs[0]]
        for number, old in enumerate(op.outputs[1:]):
            if is_used(old):
                final = _concat_directions(mb, [states[number] for states in last])
                results.append(mb.squeeze(x=final, axes=[0]))
            else:
                results.append(old)
        return results

    def step(self, mb: RewriteBuilder, op: Operation, direction: Direction, x: Any, states: States) -> States:
        """Build a step and return the states after it; `x` is what `inputs` built for the step."""
        raise AssertionError(f"{type(self).__name__} must define step()")

    def inputs(self, mb: RewriteBuilder, op: Operation, direction: Direction) -> Sequence[Any]:
        """Build, for each step in order of time, its input times the weights, with the bias."""
        bias = op.inputs.get(f"bias{direction.suffix}")
        product = build_linear(mb, op.x, op.inputs[f"weight_ih{direction.suffix}"], bias)
        return split_equally(mb, product, int(op.x.shape[0]))

    def make_example(
        self,
        name: str,
        steps: int | None,
        *,
        batch: int | None = 1,
        dtype: Any = types.fp16,
        opset: Any = ct.target.iOS17,
        reason: str | None = None,
        options: dict[str, Any] | None = None,
        within: float = float("inf"),
        **parameters: Any,
    ) -> Example:
        """Make an example of a layer of 8 units whose initial states are inputs of the program."""
        weight = make_weight(self.gates * 8, 8, dtype=types.nptype_from_builtin(dtype))

        def build_body(x: Var, **states: Var) -> Any:
            return getattr(Builder, self.roots[0])(
                x=x, **dict(zip(self.states, states.values())), weight_ih=weight, weight_hh=weight[::-1], name="y",
                **parameters)

        states: dict[str, Any] = {short: (batch, 8) for short, _ in zip("hc", self.states)}
        return make_example(name, build_body, reason=reason, options=options, within=within, opset=opset, dtype=dtype,
                            x=(steps, batch, 8), **states)

    def make_constant_state_example(
        self, name: str, value: float, *, opset: Any = ct.target.iOS17, **parameters: Any
    ) -> Example:
        """Make an example of a layer of 8 units whose initial states are all `value`."""
        weight = make_weight(self.gates * 8, 8)
        states = dict.fromkeys(self.states, np.full((2, 8), value, np.float16))

        def build_body(x: Var) -> Any:
            return getattr(Builder, self.roots[0])(
                x=x, **states, weight_ih=weight, weight_hh=weight, output_sequence=True, name="y", **parameters)[0]

        return make_example(name, build_body, opset=opset, x=(3, 2, 8))

    def iterate_limit_examples(self, chain: int, ops: int) -> Iterator[Example]:
        """Yield the layers that no cell unrolls; `chain` and `ops` are the sizes that four steps would make."""
        yield self.make_example("flexible length", None, reason=(
            "the number of steps is dynamic; fix the sequence length"))
        yield self.make_example("long", 4, options={"max_steps": 3}, reason="4 steps, above max_steps=3")
        yield self.make_example("too long a chain", 4, options={"max_chain": 4}, reason=(
            f"4 steps would make a chain of {chain} dependent products in the function, more than 4 (max_chain)"))
        yield self.make_example("too many ops", 4, options={"max_ops": 9}, reason=(
            f"4 steps would make a program of {ops} ops, more than 9 (max_ops)"))
        yield self.make_example("fp32", 2, dtype=types.fp32, reason=FP32_UNSUPPORTED_REASON)


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
            return f"{parameter} is {name}, {_UNSUPPORTED_ACTIVATIONS.get(name.lower(), 'which is unknown here')}"
    return None


def _find_width_obstacle(op: Operation, generations: Sequence[Generation]) -> str | None:
    width = int(op.weight_ih.shape[0])
    broken = find_exceeded_limit("spatial", width, generations)
    return f"its gates have a total width of {width} {broken.words}" if broken else None


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


def _split_initial_state(mb: RewriteBuilder, op: Operation, name: str, count: int) -> list[Var]:
    """Split an initial state [batch, count * features] into one [1, batch, features] for each direction.

    A constant whose rows are not those of the batch has equal rows, of which one is kept.
    """
    state: Var = op.inputs[name]
    if not is_const(state):
        return split_equally(mb, mb.expand_dims(x=state, axes=[0]), count, -1)
    if state.shape[0] not in (1, op.x.shape[1]):
        rows = state
        state = mb.weight(rows, "one_row", lambda: rows.val[:1])
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
        return _concat_directions(mb, [outputs[-1] for outputs in hidden])
    in_order = [outputs if number == 0 else outputs[::-1] for number, outputs in enumerate(hidden)]
    return _concat_directions(mb, [each[0] if len(each) == 1 else mb.concat(values=each, axis=0) for each in in_order])


def _concat_directions(mb: RewriteBuilder, directions: list[Var]) -> Var:
    made: Var = directions[0] if len(directions) == 1 else mb.concat(values=directions, axis=-1)
    return made
