"""Programs with last axes that are no multiple of 64."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Program, Var

from ..core.contract import Example
from ..core.examples import program, weight

__all__ = ["examples"]

_POWERS = np.exp2(np.arange(8)).astype(np.float16)


def examples() -> Iterable[Example]:
    yield Example("activations", lambda: _chain(50))
    yield Example("hidden width of a perceptron", _perceptron)
    yield Example("scores of queries and keys", _scores, options={"multiple": 32})
    yield Example("a conv of one along the last axis", lambda: _between(_conv, (1, 4, 2, 50)))
    yield Example("a sum over zeros", lambda: _between(
        lambda v: Builder.reduce_sum(x=Builder.tanh(x=v), axes=[-1], keep_dims=True)))
    yield Example("halves joined again", lambda: _between(_halves, (8, 4, 8)), options={"multiple": 32})
    yield Example("rows in another order", lambda: _between(_moved, (2, 3, 8)),
                  options={"multiple": 32})
    yield Example("a softmax of another axis", lambda: _between(lambda v: Builder.softmax(x=v, axis=1)))
    yield Example("selected by a constant", lambda: _between(
        lambda v: Builder.select(cond=weight(8) > 0, a=v, b=np.float16(-2)), (2, 3, 8)), options={"multiple": 32})
    yield Example("infinities in the padding", lambda: _between(
        lambda v: Builder.mul(x=Builder.log(x=v, epsilon=np.float16(0)), y=Builder.real_div(x=v, y=_POWERS)),
        (2, 3, 8)), options={"multiple": 32})
    yield Example("by bytes", lambda: _chain(20), options={"unit": "bytes"})
    yield Example("a row may grow", lambda: _chain(20), options={"min_gain": -1.0})
    yield Example("two regions around a softmax", lambda: _between(
        lambda v: Builder.tanh(x=Builder.exp(x=Builder.softmax(x=v, axis=-1)))), options={"min_ops": 1})
    yield Example("a region behind another", lambda: _scores(behind=True), options={"multiple": 32, "min_ops": 1})
    yield Example("read as it is, too", _squared, options={"min_ops": 1, "multiple": 32})
    yield Example("a multiple already", lambda: _chain(128), reason="")
    yield Example("a row would grow", lambda: _chain(20),
                  reason="a row of 20 padded to 64 takes 128 B in place of 64 B: gain -1, below min_gain 0")
    yield Example("a pad and a slice for one op", lambda: program(
        lambda x: Builder.tanh(x=x, name="y"), x=(2, 50)),
        reason="1 op on padded rows for 1 pads and 1 slices, fewer than min_ops 2 for each")
    yield Example("symbolic", lambda: program(lambda x: Builder.tanh(x=x, name="y"), x=(2, None)),
                  reason="the last axis is symbolic: what is missing to a multiple is not known")
    yield Example("large constants", _perceptron, options={"max_bytes": 1000},
                  reason="its constants would take 1.28 kB padded, more than max_bytes 1000")


def _chain(width: int) -> Program:
    def body(x: Var) -> Var:
        added = Builder.add(x=x, y=np.float16(0.5))
        return Builder.relu(x=Builder.mul(x=Builder.tanh(x=added), y=added), name="y")

    return program(body, x=(2, 3, width))


def _between(op: Callable[[Var], Var], shape: tuple[int, ...] = (2, 3, 50)) -> Program:
    """`op` behind four activations and before one."""

    def body(x: Var) -> Var:
        found = x
        for _ in range(2):
            found = Builder.relu(x=Builder.sin(x=found))
        return Builder.relu(x=op(found), name="y")

    return program(body, x=shape)


def _perceptron() -> Program:
    def body(x: Var) -> Var:
        hidden = Builder.linear(x=x, weight=weight(50, 8), bias=weight(50))
        hidden = Builder.sigmoid(x=Builder.add(x=hidden, y=np.float16(1)))
        return Builder.linear(x=Builder.relu(x=hidden), weight=weight(10, 50), name="y")

    return program(body, x=(2, 3, 8))


def _scores(behind: bool = False) -> Program:
    def body(q: Var, k: Var) -> Var:
        queries = Builder.tanh(x=Builder.sin(x=q))
        keys = Builder.add(x=Builder.tanh(x=k), y=weight(8))
        scores = Builder.matmul(x=queries, y=keys, transpose_y=True)
        found = Builder.sin(x=Builder.tanh(x=Builder.sin(x=scores))) if behind else scores
        return Builder.softmax(x=found, axis=-1, name="y")

    return program(body, q=(2, 3, 8), k=(2, 7, 8))


def _conv(x: Var) -> Var:
    found: Var = Builder.conv(x=x, weight=weight(5, 4, 1, 1), bias=weight(5))
    return found


def _halves(x: Var) -> Var:
    first, second = Builder.split(x=x, num_splits=2, axis=1)
    joined: Var = Builder.concat(values=[second, first, weight(8, 1, 8)], axis=1)
    return joined


def _moved(x: Var) -> Var:
    turned = Builder.transpose(x=x, perm=[1, 0, 2])
    long = Builder.reshape(x=Builder.expand_dims(x=turned, axes=[0]), shape=[1, -1, 8])
    taken: Var = Builder.slice_by_index(x=long, begin=[0, 1, 0], end=[1, 5, 0], end_mask=[False, False, True],
                                      squeeze_mask=[True, False, False])
    return taken


def _squared() -> Program:
    def body(x: Var) -> Any:
        found = Builder.tanh(x=Builder.sin(x=x))
        return Builder.relu(x=Builder.matmul(x=found, y=found), name="y")

    return program(body, x=(2, 8, 8))
