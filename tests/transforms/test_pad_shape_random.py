"""Padding of programs drawn at random: results of real lengths are those of the source, or the op is named."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

import mil_ane_passes as ane

from .test_pad_shape import LENGTH, WIDTH, pad, program_of

UNARY = (mb.relu, mb.tanh, mb.sigmoid, mb.exp, mb.sin, mb.square, mb.abs, mb.softplus, mb.gelu, mb.erf, mb.floor)
BINARY = (mb.add, mb.sub, mb.mul, mb.maximum, mb.minimum)
COMPARISONS = (mb.greater, mb.less, mb.greater_equal, mb.not_equal)
REDUCTIONS = (mb.reduce_mean, mb.reduce_sum, mb.reduce_max, mb.reduce_min, mb.reduce_l2_norm, mb.reduce_l1_norm,
              mb.reduce_sum_square, mb.reduce_log_sum_exp, mb.reduce_prod)


def draw_weight(draws: random.Random, *shape: int) -> Any:
    return np.random.default_rng(draws.randrange(99)).standard_normal(shape).astype(np.float32)


def along_time(x: Any, make: Callable[[Any], Any]) -> Any:
    """Apply an op on (1, channels, length) to a value (1, length, channels); None for other values."""
    if x.rank != 3 or is_symbolic(x.shape[2]):
        return None
    return mb.transpose(x=make(mb.transpose(x=x, perm=[0, 2, 1])), perm=[0, 2, 1])


def make_conv(draws: random.Random, x: Any) -> Any:
    channels = int(x.shape[1])
    groups = draws.choice([1, channels])
    kind = draws.choice(["valid", "same", "custom"])
    padding = {"pad": [draws.randint(0, 3), draws.randint(0, 3)]} if kind == "custom" else {}
    return mb.conv(x=x, weight=draw_weight(draws, channels, channels // groups, draws.choice([1, 2, 3])),
                   dilations=[draws.choice([1, 2])], groups=groups, pad_type=kind, **padding)


def make_slice(draws: random.Random, x: Any) -> Any:
    begin, end, stride = [0] * x.rank, [0] * x.rank, [1] * x.rank
    masks = [[True] * x.rank, [True] * x.rank]
    axis = draws.choice([place for place, size in enumerate(x.shape) if is_symbolic(size)] or [0])
    begin[axis], masks[0][axis] = draws.choice([0, 1, 2, -1, -2, -3]), False
    if draws.random() < 0.6:
        end[axis], masks[1][axis] = draws.choice([-1, -2, 1, 2, 3]), False
    stride[axis] = draws.choice([1, 1, 1, 2])
    return mb.slice_by_index(x=x, begin=begin, end=end, stride=stride, begin_mask=masks[0], end_mask=masks[1])


def make_size(draws: random.Random, x: Any) -> Any:
    axes = [axis for axis, size in enumerate(x.shape) if is_symbolic(size)]
    if not axes:
        return None
    size = mb.gather(x=mb.shape(x=x), indices=axes[0], axis=0)
    if draws.random() < 0.5:
        return mb.cast(x=size, dtype="fp32")
    return mb.cast(x=mb.range_1d(start=0, end=size, step=draws.choice([1, 1, 2])), dtype="fp32")


def make_masked(draws: random.Random, x: Any) -> Any:
    shown = draws.choice(COMPARISONS)(x=mb.reduce_sum(x=x, axes=[-1], keep_dims=True), y=np.float32(0.3))
    other = draws.choice([0, 1, -3])  # not -1e4, which would hide all keys of some queries
    return mb.select(cond=shown, a=x, b=np.float32(other))


STEPS: dict[str, Callable[[random.Random, Any, Any], Any]] = {
    "unary": lambda draws, x, y: draws.choice(UNARY)(x=x),
    "binary": lambda draws, x, y: draws.choice(BINARY)(x=x, y=y),
    "reduction": lambda draws, x, y: draws.choice(REDUCTIONS)(
        x=x, axes=sorted(draws.sample(range(x.rank), draws.randint(1, x.rank))), keep_dims=draws.random() < 0.7),
    "extreme": lambda draws, x, y: mb.cast(
        x=draws.choice([mb.reduce_argmax, mb.reduce_argmin])(x=x, axis=draws.randrange(x.rank)), dtype="fp32"),
    "norm": lambda draws, x, y: mb.layer_norm(x=x, axes=[x.rank - 1], epsilon=np.float32(1e-3)),
    "softmax": lambda draws, x, y: mb.softmax(x=x, axis=draws.randrange(x.rank)),
    "product": lambda draws, x, y: mb.matmul(x=x, y=y, transpose_x=draws.random() < 0.5,
                                             transpose_y=draws.random() < 0.5),
    "linear": lambda draws, x, y: mb.linear(x=x, weight=draw_weight(draws, WIDTH, int(x.shape[-1]))),
    "conv": lambda draws, x, y: along_time(x, lambda each: make_conv(draws, each)),
    "pool": lambda draws, x, y: along_time(x, lambda each: draws.choice([mb.avg_pool, mb.max_pool])(
        x=each, kernel_sizes=[draws.choice([1, 2, 3])], strides=[draws.choice([1, 2])], pad_type="valid")),
    "slice": lambda draws, x, y: make_slice(draws, x),
    "concat": lambda draws, x, y: mb.concat(values=[x, y], axis=draws.randrange(x.rank)),
    "transpose": lambda draws, x, y: mb.transpose(x=x, perm=draws.sample(range(x.rank), x.rank)),
    "expand": lambda draws, x, y: mb.expand_dims(x=x, axes=[draws.randint(0, x.rank)]) if x.rank < 4 else None,
    "cumsum": lambda draws, x, y: mb.cumsum(x=x, axis=draws.randrange(x.rank), reverse=draws.random() < 0.3),
    "pad": lambda draws, x, y: mb.pad(x=x, pad=[draws.randint(0, 2) for _ in range(2 * x.rank)],
                                      constant_val=np.float32(draws.choice([0, 1]))),
    "rows": lambda draws, x, y: mb.gather(x=x, indices=np.int32(draws.choice([[0], [-1], [0, 0]])),
                                          axis=draws.randrange(x.rank)),
    "size": lambda draws, x, y: make_size(draws, x),
    "masked": lambda draws, x, y: make_masked(draws, x),
    "constant": lambda draws, x, y: mb.fill_like(ref_tensor=x, value=np.float32(draws.choice([0, 1]))),
}


def fits(kind: str, x: Any, y: Any) -> bool:
    """Return whether coremltools infers the shape of a step on these operands."""
    if kind == "binary":
        return x.rank == y.rank and all(a == b or 1 in (a, b) for a, b in zip(x.shape, y.shape))
    if kind == "product":
        return x.rank == y.rank >= 2 and tuple(x.shape) == tuple(y.shape)
    if kind == "concat":
        return tuple(x.shape) == tuple(y.shape)
    if kind == "linear":
        return x.rank >= 2 and not is_symbolic(x.shape[-1])
    return x.rank >= 2


def draw_program(seed: int) -> Any:
    draws = random.Random(seed)

    def body(x: Any) -> Any:
        known = [x]
        for _ in range(draws.randint(2, 9)):
            kind = draws.choice(list(STEPS))
            x, y = draws.choice(known[-4:]), draws.choice(known)
            made = STEPS[kind](draws, x, y) if fits(kind, x, y) else None
            known += [made] if made is not None and made.rank <= 4 else []
        last = [var for var in known[1:] if not var.child_ops] or [known[-1]]
        return tuple(mb.identity(x=var, name=f"out_{place}") for place, var in enumerate(last))

    return program_of(body, shape=(1, None, WIDTH), dtype=types.fp32)


def check(seed: int) -> str:
    """Compare a padded program with its source; return "equal" or "refused"."""
    try:
        program = draw_program(seed)
    except (ValueError, TypeError):  # sizes that coremltools' inference rejects, such as a window of a single row
        return "not built"
    shortest = random.Random(seed).choice([4, LENGTH])
    try:
        _, found = pad(program, {"x": (1, (shortest, LENGTH) if shortest < LENGTH else LENGTH, WIDTH)})
    except ane.InputError as error:
        assert "cannot be padded" in str(error) or "is impossible" in str(error) or "nothing" in str(error), error
        return "refused"
    if found.status == "not verified" and "program before cannot be run" in found.reason:
        return "not built"
    assert found.equal, f"seed {seed}: {found}\n{program}"
    return "equal"


def test_random_programs_are_padded_or_refused():
    results = [check(seed) for seed in range(120)]
    assert results.count("equal") >= 20, results


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 6000, 250))
def test_many_random_programs_are_padded_or_refused(start):
    results = [check(seed) for seed in range(start, start + 250)]
    assert results.count("equal") >= 40, results
