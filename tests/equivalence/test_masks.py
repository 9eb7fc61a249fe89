"""Programs whose masks make NaN are held against what they stand for: the limit of ever larger masks."""

from __future__ import annotations

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

from mil_ane_passes.equivalence import equivalence
from mil_ane_passes.equivalence.comparison import Strictness, fill_undefined
from mil_ane_passes.equivalence.equivalence import FINITE_CONSTANTS_NOTE, compare_programs
from mil_ane_passes.passes.contract import Exactness
from mil_ane_passes.passes.examples import build_program
from tests.equivalence.test_feeds import default, function

MENDS = Strictness(Exactness.ROUNDING, fixes_nonfinite=True)
BOTH = ("float64", "float16")


def attention(low, dtype=np.float16, extra=None):
    """softmax of scores and (1 - m) * low, the product in `dtype`; the last key of the first row is never seen."""
    def body(x, m):
        shut = mb.sub(x=dtype(1), y=mb.cast(x=mb.greater(x=m, y=np.float16(0)),
                                            dtype="fp16" if dtype is np.float16 else "fp32"))
        mask = mb.mul(x=shut, y=dtype(low))
        mask = mask if dtype is np.float16 else mb.cast(x=mask, dtype="fp16")
        y = mb.softmax(x=mb.add(x=x, y=mask), axis=-1, name="y")
        return [y, mb.softmax(x=mb.add(x=x, y=np.float16(extra)), axis=-1, name="z")] if extra else y

    return build_program(body, dtype=types.fp16, x=(2, 3, 8), m=(2, 3, 8))


def feeds(masked_throughout=True):
    m = np.ones((2, 3, 8), np.float16)
    m[:, 1, 3:] = 0
    if masked_throughout:
        m[1, 2] = 0
    return {"x": np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float16), "m": m}


def held(before, after, promised=MENDS, given=None):
    return compare_programs(before, after, precisions=BOTH, exactness=promised, feeds=given or feeds())


@pytest.mark.parametrize(("low", "dtype"), [(-np.inf, np.float16), (-1e9, np.float32), (-3.4e38, np.float32)])
def test_a_finite_mask_is_what_an_infinite_one_stands_for(low, dtype):
    report = held(attention(low, dtype), attention(-1e4, dtype))
    assert report.equal and FINITE_CONSTANTS_NOTE in report.notes, str(report)


@pytest.mark.parametrize(("low", "dtype"), [(-np.inf, np.float16), (-1e9, np.float32)])
def test_a_mask_that_does_not_silence_is_another_program(low, dtype):
    assert held(attention(low, dtype), attention(-1.0, dtype)).status == "different"


def test_without_the_promise_nan_stays_nan():
    assert held(attention(-np.inf), attention(-1e4), Exactness.ROUNDING).status == "different"
    assert held(attention(-np.inf), attention(-np.inf), Exactness.ROUNDING).equal


def test_what_is_left_nan_is_no_difference():
    """One mask is fixed, another still gives NaN."""
    before = attention(-np.inf, extra=np.nan)
    assert held(before, attention(-1e4, extra=np.nan)).equal
    assert held(before, attention(-1.0, extra=np.nan)).status == "different"


def test_where_all_is_finite_nothing_is_read_otherwise():
    report = held(attention(-1e4), attention(-1e4), given=feeds(masked_throughout=False))
    assert report.equal_bits and not report.notes


def test_what_is_taken_from_the_limit():
    before = {"float64": {"y": np.array([1.0, np.nan, 3.0, np.nan])},
              "float16": {"y": np.array([1.0, 2.0, np.inf, np.nan])}}
    limit = {precision: {"y": np.array([7.0, 7.0, 7.0, 7.0])} for precision in BOTH}
    after = {precision: {"y": np.array([7.0, 7.0, 7.0, np.nan])} for precision in BOTH}
    found = fill_undefined(before, limit, after)["float64"]["y"]
    np.testing.assert_array_equal(found, [1, 7, 7, np.nan])
    close = {precision: {"y": np.array([7.0, 7.0, 3.5, 7.0])} for precision in BOTH}
    np.testing.assert_array_equal(fill_undefined(before, limit, close)["float64"]["y"], [1, 7, 3, 7])


@pytest.mark.parametrize("low", [-1e4, -np.inf, -65504.0, 65504.0, np.inf])
@pytest.mark.parametrize("kind", [types.int32, types.fp16, types.fp32])
def test_what_a_mask_is_made_of_is_drawn_as_zeros_and_ones(low, kind):
    def body(m):
        shut = mb.sub(x=np.float16(1), y=mb.cast(x=m, dtype="fp16"))
        return mb.mul(x=np.float16(low), y=mb.expand_dims(x=shut, axes=[0]))

    assert set(default(function(body, m=(kind, (64,))))["m"].tolist()) == {0, 1}


@pytest.mark.parametrize("factor", [-100.0, 1000.0, 0.125])
def test_other_factors_ask_nothing(factor):
    made = function(lambda x: mb.mul(x=x, y=np.float16(factor)), x=(types.fp16, (64,)))
    assert len(set(default(made)["x"].tolist())) > 30


def test_a_program_without_huge_constants_is_not_run_again(monkeypatch):
    """Only huge constants are read as finite ones; without them, such a run would be the one that was made."""
    def overflow(factor):
        return build_program(lambda x: mb.mul(x=mb.mul(x=x, y=np.float16(factor)), y=np.float16(1e4), name="y"), x=(4,))

    asked = []
    original = equivalence.execute_plans

    def execute(*arguments, **options):
        asked.append(options.get("finite_constants", False))
        return original(*arguments, **options)

    monkeypatch.setattr(equivalence, "execute_plans", execute)
    given = {"x": np.full(4, 10, np.float16)}
    for factor, expected in ((3e4, False), (65504, True)):
        asked.clear()
        held(overflow(factor), overflow(factor), given=given)
        assert any(asked) == expected, factor


@pytest.mark.parametrize("dtype", [types.fp32, types.fp16, types.int32])
def test_a_number_that_is_used_as_a_flag_alone_is_drawn_as_zeros_and_ones(dtype):
    def body(x):
        flag = mb.cast(x=x, dtype="bool")
        return mb.select(cond=flag, a=np.float32(1), b=np.float32(2))

    for draw in range(4):
        assert set(np.unique(default(function(body, x=(dtype, (4, 8))), draw)["x"]).tolist()) == {0, 1}


def test_a_number_that_is_used_otherwise_too_is_drawn_as_a_number():
    def body(x):
        return mb.add(x=mb.cast(x=mb.cast(x=x, dtype="bool"), dtype="fp32"), y=x)

    assert np.unique(default(function(body, x=(types.fp32, (4, 8))))["x"]).size > 2
