"""Loops for the examples of unroll_while_loop, and those that its law samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Program, Var

from ...passes.examples import build_program, make_weight

__all__ = [
    "build_alternating_loop",
    "build_counted_loop",
    "build_data_dependent_loop",
    "build_dependent_loops",
    "build_nested_loops",
    "build_sequential_loops",
    "build_weighted_loop",
]


def build_counted_loop(steps: int, step: Any = None) -> Program:
    def ordinary(i: Var, x: Var, z: Var) -> tuple[Var, Var]:
        return Builder.mul(x=Builder.add(x=x, y=Builder.cast(x=i, dtype="fp16")), y=z), z

    def body(x: Var) -> list[Var]:
        outputs = Builder.while_loop(
            _cond=lambda i, x, z: Builder.less(x=i, y=np.int32(steps)),
            _body=lambda i, x, z: (Builder.add(x=i, y=np.int32(1)), *(step or ordinary)(i, x, z)),
            loop_vars=(np.int32(0), x, Builder.abs(x=x)), name="y")
        return list(outputs[1:])

    return build_program(body, x=(2, 3))


def build_weighted_loop() -> Program:
    def body(x: Var) -> Var:
        outputs: tuple[Var, ...] = Builder.while_loop(
            _cond=lambda i, x: Builder.less(x=i, y=np.int32(3)),
            _body=lambda i, x: (Builder.add(x=i, y=np.int32(1)), Builder.linear(x=x, weight=make_weight(8, 8))),
            loop_vars=(np.int32(0), x))
        return outputs[1]

    return build_program(body, x=(2, 8))


def build_dependent_loops() -> Program:
    def inner(i: Var, x: Var) -> Var:
        outputs: tuple[Var, ...] = Builder.while_loop(
            _cond=lambda j, x: Builder.less_equal(x=j, y=i),
            _body=lambda j, x: (Builder.add(x=j, y=np.int32(1)), Builder.mul(x=x, y=np.float16(0.5))),
            loop_vars=(np.int32(0), x))
        return outputs[1]

    return build_counted_loop(3, lambda i, x, z: (inner(i, x), z))


def _build_halving_loop(steps: int, x: Var) -> Var:
    """Build a loop of `steps` steps of one op."""
    outputs: tuple[Var, ...] = Builder.while_loop(
        _cond=lambda j, x: Builder.less(x=j, y=np.int32(steps)),
        _body=lambda j, x: (Builder.add(x=j, y=np.int32(1)), Builder.mul(x=x, y=np.float16(0.5))),
        loop_vars=(np.int32(0), x))
    return outputs[1]


def build_nested_loops(inner: int, outer: int | None) -> Program:
    """Build a loop of `inner` steps in one of `outer` steps (None: a dynamic number)."""
    def body(x: Var) -> Var:
        if outer is not None:
            outputs: tuple[Var, ...] = Builder.while_loop(
                _cond=lambda i, x: Builder.less(x=i, y=np.int32(outer)),
                _body=lambda i, x: (Builder.add(x=i, y=np.int32(1)), _build_halving_loop(inner, x)),
                loop_vars=(np.int32(0), x),
            )
            return outputs[1]
        outputs = Builder.while_loop(
            _cond=lambda x: Builder.greater(x=Builder.reduce_sum(x=Builder.abs(x=x)), y=np.float16(4)),
            _body=lambda x: _build_halving_loop(inner, x), loop_vars=(x,))
        return outputs[0] if isinstance(outputs, (list, tuple)) else outputs

    return build_program(body, x=(2, 3))


def build_sequential_loops(steps: int) -> Program:
    return build_program(lambda x: _build_halving_loop(steps, _build_halving_loop(steps, x)), x=(2, 3))


def build_alternating_loop() -> Program:
    def chosen(i: Var, x: Var) -> Var:
        odd = Builder.equal(x=Builder.mod(x=i, y=np.int32(2)), y=np.int32(1))
        made: Var = Builder.cond(pred=odd, _true_fn=lambda: Builder.relu(x=x), _false_fn=lambda: Builder.exp(x=x))
        return made

    return build_counted_loop(3, lambda i, x, z: (chosen(i, x), z))


def build_data_dependent_loop() -> Program:
    def body(x: Var) -> Var:
        outputs: tuple[Var, ...] = Builder.while_loop(
            _cond=lambda x: Builder.less(x=Builder.reduce_sum(x=Builder.abs(x=x)), y=np.float16(4)),
            _body=lambda x: Builder.sub(x=Builder.mul(x=x, y=np.float16(2)), y=np.float16(1)), loop_vars=(x,))
        return outputs[0] if isinstance(outputs, (list, tuple)) else outputs

    return build_program(body, x=(2, 3))
