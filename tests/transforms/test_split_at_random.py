"""Cuts of programs drawn at random: at every value, both parts together give what the whole gives, bit for bit."""

from __future__ import annotations

from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given, settings
from hypothesis import strategies as st

import mil_ane_passes as ane
from tests.package.helpers import make

from .splitting import chained, check_parts, cut, draws, folder, gives, same, takes, values

ONE = {"sin": mb.sin, "relu": mb.relu, "tanh": mb.tanh, "square": mb.square}
TWO = {"add": mb.add, "mul": mb.mul, "maximum": mb.maximum, "sub": mb.sub}
STEPS = st.lists(st.tuples(st.sampled_from([*ONE, *TWO, "const", "linear", "split", "cond", "loop", "bool"]),
                           st.integers(0, 99), st.integers(0, 99)), min_size=2, max_size=9)


def step(kind: str, known: list[Any], a: Any, b: Any, weights: list[Any]) -> list[Any]:
    """The values that one more op makes of two known ones."""
    if kind in ONE:
        return [ONE[kind](x=a)]
    if kind in TWO:
        return [TWO[kind](x=a, y=b)]
    if kind == "const":
        return [mb.mul(x=a, y=weights[0])]
    if kind == "linear":
        weight = mb.constexpr_blockwise_shift_scale(data=weights[1], scale=weights[2])
        return [mb.linear(x=a, weight=weight)]
    if kind == "split":
        left, right = mb.split(x=a, num_splits=2, axis=1)
        return [mb.concat(values=[right, left], axis=1), mb.concat(values=[left, left], axis=1)]
    if kind == "bool":
        return [mb.select(cond=mb.greater(x=a, y=b), a=b, b=a)]
    total = mb.reduce_sum(x=a, axes=[0, 1], keep_dims=False)
    if kind == "cond":
        positive = mb.greater(x=total, y=0.0)
        return [mb.cond(pred=positive, _true_fn=lambda: mb.add(x=a, y=b), _false_fn=lambda: mb.sin(x=b))]
    return list(mb.while_loop(_cond=lambda n, x: mb.less(x=n, y=np.float32(2.5)),
                              _body=lambda n, x: (mb.add(x=n, y=1.0), mb.add(x=mb.tanh(x=x), y=b)),
                              loop_vars=(mb.sin(x=total), a)))[1:]


def drawn(steps: list[tuple[str, int, int]], outputs: list[int]) -> Any:
    rng = np.random.default_rng(len(steps))
    made = [rng.standard_normal((2, 4)).astype(np.float32), rng.integers(-8, 8, (4, 4)).astype(np.int8),
            rng.random((4, 1)).astype(np.float32)]

    @mb.program(input_specs=[mb.TensorSpec((2, 4)), mb.TensorSpec((2, 4))], opset_version=ct.target.iOS18)
    def program(x, y):
        known = [x, y]
        weights = [mb.const(val=value, name=f"weight_{index}") for index, value in enumerate(made)]
        for kind, a, b in steps:
            known += step(kind, known, known[a % len(known)], known[b % len(known)], weights)
        chosen = {index % (len(known) - 2) + 2 for index in outputs}
        return tuple(mb.identity(x=known[index], name=f"out_{index}") for index in sorted(chosen))

    return program


PROGRAMS = given(STEPS, st.lists(st.integers(0, 99), min_size=1, max_size=3), st.integers(0, 99))


@settings(max_examples=2, deadline=None)
@PROGRAMS
def test_both_parts_of_random_programs_are_the_whole(steps, outputs, second):
    check(steps, outputs, second)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@PROGRAMS
def test_both_parts_of_many_random_programs_are_the_whole(steps, outputs, second):
    check(steps, outputs, second)


def check(steps: list[tuple[str, int, int]], outputs: list[int], second: int) -> None:
    """Cuts the program at each value, and at each value and another."""
    with folder() as where:
        source = make(where / "source.mlpackage", drawn(steps, outputs), ct.target.iOS18,
                      pass_pipeline=ct.PassPipeline.EMPTY)
        feeds = draws(source)
        whole, places = ane.run(source, feeds), values(source)
        done = 0
        for place, value in enumerate(places):
            also = places[(place + second) % len(places)]
            for named in ([value], [value, also]):
                try:
                    _, parts = cut(source, named, where, overwrite=True)
                except ane.InputError as error:
                    assert "part would be empty" in str(error) or "nothing uses" in str(error)
                    continue
                done += 1
                check_parts(source, parts, host=False)
                same(whole, chained(parts, feeds))
                assert set(takes(parts[1])) - set(takes(source)) <= set(gives(parts[0]))
        assert done or set(gives(source)) >= set(places[-1:])
