"""The search for what may be in fp16, and constants in fp16, on their own."""

from __future__ import annotations

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from hypothesis import given
from hypothesis import strategies as st

from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.rewrites.precision._fp16_conversion import FP16_MIN_SUBNORMAL, Fp16Constants
from mil_ane_passes.rewrites.precision.fp16_compute import PrecisionSearch

LOSSES = st.lists(st.sampled_from([0.0, 0.1, 0.5, 2.0, float("inf")]), min_size=1, max_size=40)


@pytest.mark.law
@given(LOSSES, st.sampled_from([0.0, 0.4, 1.0, 3.0]), st.integers(1, 100))
def test_what_is_taken_keeps_to_the_bound_and_nothing_more_would(losses, most, trials):
    runs = []

    def error(some):
        runs.append(list(some))
        return sum(losses[number] for number in some)

    found = PrecisionSearch(range(len(losses)), error, most, trials)
    assert len(runs) <= trials and all(run == sorted(set(run)) for run in runs)
    assert found.error == pytest.approx(sum(losses[number] for number in found.accepted)) and found.error <= most
    assert sorted([*found.accepted, *found.rejected, *found.untried_ops]) == list(range(len(losses)))
    for number, said in found.rejected.items():
        assert said > most and sum(losses[each] for each in found.accepted) + losses[number] > most
    if len(losses) * 2 <= trials:
        assert not found.untried_ops


def test_one_run_is_enough_where_nothing_is_lost():
    runs = []
    assert PrecisionSearch(range(1000), lambda some: runs.append(some) or 0.0, 0.0, 64).accepted == list(range(1000))
    assert len(runs) == 1


def const(value):
    built = build_program(lambda x: mb.add(x=x, y=mb.const(val=value)), dtype=types.fp32, x=np.shape(value) or (1,))
    return next(op.outputs[0] for _, op in iterate_ops(built) if op.op_type == "const")


def test_constants_are_rounded_as_numpy_rounds_and_small_ones_do_not_vanish():
    value = np.float32([[1 / 3, 70000, -1e-9, 1e-9, 0, np.inf]])
    made = Fp16Constants().convert(const(value))
    with np.errstate(over="ignore"):
        expected = value.astype(np.float16)
    expected[0, 2:4] = -FP16_MIN_SUBNORMAL, FP16_MIN_SUBNORMAL
    np.testing.assert_array_equal(made, expected)
    many = np.random.default_rng(0).standard_normal(3_000_000).astype(np.float32) * 1e-4
    np.testing.assert_array_equal(Fp16Constants().convert(const(many)), many.astype(np.float16))


def test_the_same_bytes_are_made_once():
    value = np.ones((4, 6), np.float32)
    constants, var = Fp16Constants(), const(value)
    assert np.shares_memory(constants.convert(var), constants.convert(var))


@pytest.mark.parametrize("values, largest, beyond, vanishes", [
    ([1.0, -70000.0], 70000.0, False, False), ([np.finfo(np.float32).min, 2.0], 2.0, True, False),
    ([-np.inf, 0.0], 0.0, False, False), ([1e-9, 0.0], 1e-9, False, True), ([0.0, 0.0], 0.0, False, False)])
def test_what_a_constant_holds(values, largest, beyond, vanishes):
    found = Fp16Constants().summarize(const(np.float32(values)))
    assert (found.largest, found.beyond, found.is_below_fp16) == (pytest.approx(largest, rel=1e-6), beyond, vanishes)
