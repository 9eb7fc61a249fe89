"""Example programs with last axes that are not a multiple of 64."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Program, Var

from ...passes.contract import Example
from ...passes.examples import build_program, make_weight

__all__ = ["iterate_row_padding_examples"]

_POWERS_OF_TWO = np.exp2(np.arange(8)).astype(np.float16)


def iterate_row_padding_examples() -> Iterable[Example]:
    yield Example("activations", lambda: _build_activation_chain(50))
    yield Example("hidden width of a perceptron", _build_perceptron)
    yield Example("scores of queries and keys", _build_attention_scores, options={"multiple": 32})
    yield Example("a conv of one along the last axis", lambda: _build_between_activations(_build_conv, (1, 4, 2, 50)))
    yield Example("a sum over zeros", lambda: _build_between_activations(
        lambda v: Builder.reduce_sum(x=Builder.tanh(x=v), axes=[-1], keep_dims=True)))
    yield Example(
        "halves joined again", lambda: _build_between_activations(_swap_halves, (8, 4, 8)), options={"multiple": 32}
    )
    yield Example("rows in another order", lambda: _build_between_activations(_reorder_rows, (2, 3, 8)),
                  options={"multiple": 32})
    yield Example(
        "a softmax of another axis", lambda: _build_between_activations(lambda v: Builder.softmax(x=v, axis=1))
    )
    yield Example("selected by a constant", lambda: _build_between_activations(
        lambda v: Builder.select(cond=make_weight(8) > 0, a=v, b=np.float16(-2)), (2, 3, 8)), options={"multiple": 32})
    yield Example("infinities in the padding", lambda: _build_between_activations(
        lambda v: Builder.mul(x=Builder.log(x=v, epsilon=np.float16(0)), y=Builder.real_div(x=v, y=_POWERS_OF_TWO)),
        (2, 3, 8)), options={"multiple": 32})
    yield Example("by bytes", lambda: _build_activation_chain(20), options={"unit": "bytes"})
    yield Example("a row may grow", lambda: _build_activation_chain(20), options={"min_gain": -1.0})
    yield Example("two regions around a softmax", lambda: _build_between_activations(
        lambda v: Builder.tanh(x=Builder.exp(x=Builder.softmax(x=v, axis=-1)))), options={"min_ops": 1})
    yield Example(
        "a region behind another", lambda: _build_attention_scores(behind=True), options={"multiple": 32, "min_ops": 1}
    )
    yield Example("read as it is, too", _build_self_product, options={"min_ops": 1, "multiple": 32})
    yield Example("a multiple already", lambda: _build_activation_chain(128), reason="")
    yield Example("a row would grow", lambda: _build_activation_chain(20),
                  reason="a row of 20 padded to 64 takes 128 B in place of 64 B: gain -1, below min_gain 0")
    yield Example("a pad and a slice for one op", lambda: build_program(
        lambda x: Builder.tanh(x=x, name="y"), x=(2, 50)),
        reason="1 op on padded rows for 1 pads and 1 slices, fewer than min_ops 2 for each")
    yield Example("symbolic", lambda: build_program(lambda x: Builder.tanh(x=x, name="y"), x=(2, None)),
                  reason="the last axis is symbolic: what is missing to a multiple is not known")
    yield Example("large constants", _build_perceptron, options={"max_bytes": 1000},
                  reason="its constants would take 1.28 kB padded, more than max_bytes 1000")


def _build_activation_chain(width: int) -> Program:
    def body(x: Var) -> Var:
        added = Builder.add(x=x, y=np.float16(0.5))
        return Builder.relu(x=Builder.mul(x=Builder.tanh(x=added), y=added), name="y")

    return build_program(body, x=(2, 3, width))


def _build_between_activations(op: Callable[[Var], Var], shape: tuple[int, ...] = (2, 3, 50)) -> Program:
    """Build `op` after four activations and before one."""

    def body(x: Var) -> Var:
        found = x
        for _ in range(2):
            found = Builder.relu(x=Builder.sin(x=found))
        return Builder.relu(x=op(found), name="y")

    return build_program(body, x=shape)


def _build_perceptron() -> Program:
    def body(x: Var) -> Var:
        hidden = Builder.linear(x=x, weight=make_weight(50, 8), bias=make_weight(50))
        hidden = Builder.sigmoid(x=Builder.add(x=hidden, y=np.float16(1)))
        return Builder.linear(x=Builder.relu(x=hidden), weight=make_weight(10, 50), name="y")

    return build_program(body, x=(2, 3, 8))


def _build_attention_scores(behind: bool = False) -> Program:
    def body(q: Var, k: Var) -> Var:
        queries = Builder.tanh(x=Builder.sin(x=q))
        keys = Builder.add(x=Builder.tanh(x=k), y=make_weight(8))
        scores = Builder.matmul(x=queries, y=keys, transpose_y=True)
        found = Builder.sin(x=Builder.tanh(x=Builder.sin(x=scores))) if behind else scores
        return Builder.softmax(x=found, axis=-1, name="y")

    return build_program(body, q=(2, 3, 8), k=(2, 7, 8))


def _build_conv(x: Var) -> Var:
    found: Var = Builder.conv(x=x, weight=make_weight(5, 4, 1, 1), bias=make_weight(5))
    return found


def _swap_halves(x: Var) -> Var:
    first, second = Builder.split(x=x, num_splits=2, axis=1)
    joined: Var = Builder.concat(values=[second, first, make_weight(8, 1, 8)], axis=1)
    return joined


def _reorder_rows(x: Var) -> Var:
    turned = Builder.transpose(x=x, perm=[1, 0, 2])
    long = Builder.reshape(x=Builder.expand_dims(x=turned, axes=[0]), shape=[1, -1, 8])
    taken: Var = Builder.slice_by_index(x=long, begin=[0, 1, 0], end=[1, 5, 0], end_mask=[False, False, True],
                                      squeeze_mask=[True, False, False])
    return taken


def _build_self_product() -> Program:
    def body(x: Var) -> Any:
        found = Builder.tanh(x=Builder.sin(x=x))
        return Builder.relu(x=Builder.matmul(x=found, y=found), name="y")

    return build_program(body, x=(2, 8, 8))
