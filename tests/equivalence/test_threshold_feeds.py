"""Feeds at the constants that integers are compared with."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types

from mil_ane_passes.equivalence.equivalence import compare_programs

PLACES = np.arange(512, dtype=np.int32)


def make_program(body):
    specs = [mb.TensorSpec((1, 512)), mb.TensorSpec((1,), dtype=types.int32)]

    def program(x, place):
        return mb.identity(x=body(x, place), name="y")

    return mb.program(input_specs=specs, opset_version=ct.target.iOS17)(program)


def masked(limit, name="less"):
    """A causal mask that ends at a place, as far as `limit`."""
    def body(x, place):
        seen = getattr(mb, name)(x=PLACES, y=mb.minimum(x=mb.add(x=place, y=np.int32([1])), y=np.int32(limit)))
        return mb.select(cond=mb.expand_dims(x=seen, axes=[0]), a=x, b=np.float32(-1e4))

    return body


def chosen(limit, factor):
    """One scale up to a length and another behind it, as of positions beyond the length of the training."""
    def body(x, place):
        long = mb.greater(x=place, y=np.int32(limit))
        return mb.mul(x=x, y=mb.select(cond=long, a=np.float32(factor), b=np.float32(1)))

    return body


def wrapped(period):
    return lambda x, place: mb.gather(x=x, indices=mb.mod(x=place, y=np.int32(period)), axis=1)


def repeated(limit):
    """As many steps as the input says, up to `limit`."""
    def body(x, place):
        def proceed(step, value):
            return mb.squeeze(x=mb.less(x=step, y=mb.minimum(x=place, y=np.int32([limit]))))

        def advance(step, value):
            return mb.add(x=step, y=np.int32([1])), mb.add(x=value, y=np.float32(1))

        return mb.while_loop(_cond=proceed, _body=advance, loop_vars=(np.int32([0]), x))[1]

    return body


def narrowed(dtype):
    return lambda x, place: mb.mul(x=x, y=mb.cast(x=mb.cast(x=place, dtype=dtype), dtype="fp32"))


PAIRS = {
    "a limit in a loop": (repeated(100), repeated(40)),
    "a narrow dtype": (narrowed("int32"), narrowed("int16")),
    "a mask that ends earlier": (masked(512), masked(400)),
    "a mask that ends one place earlier": (masked(512), masked(511)),
    "what is read behind a limit": (chosen(300, 2.0), chosen(300, 3.0)),
    "a limit": (chosen(300, 2.0), chosen(301, 2.0)),
    "a period": (wrapped(500), wrapped(512)),
    "a limit as floats": (
        lambda x, place: mb.mul(x=x, y=mb.clip(x=mb.cast(x=place, dtype="fp32"), alpha=0.0, beta=300.0)),
        lambda x, place: mb.mul(x=x, y=mb.clip(x=mb.cast(x=place, dtype="fp32"), alpha=0.0, beta=200.0))),
}


@pytest.mark.parametrize("name", PAIRS)
def test_what_depends_on_a_threshold_is_seen(name):
    """Draws of free integers end at 8, and the two were called equal."""
    one, other = (make_program(body) for body in PAIRS[name])
    found = compare_programs(one, other)
    assert found.status == "different", str(found)
    assert any(case.failed for case in found.cases if case.feeds.startswith("thresholds"))
    assert compare_programs(one, make_program(PAIRS[name][0])).equal


def test_thresholds_are_within_the_user_s_ranges():
    one, other = (make_program(masked(limit)) for limit in (512, 400))
    assert compare_programs(one, other, ranges={"place": (0, 300)}).equal
    assert compare_programs(one, other, ranges={"place": (0, 500)}).status == "different"


def test_thresholds_are_described_and_few():
    report = compare_programs(*(make_program(masked(512)) for _ in range(2)))
    assert any(each.startswith("thresholds: integers at, above and below") for each in report.sampled)
    assert 1 <= sum(case.feeds.startswith("thresholds") for case in report.cases) <= 6
    plain = [make_program(lambda x, place: mb.mul(x=x, y=mb.cast(x=place, dtype="fp32"))) for _ in range(2)]
    assert not any(each.startswith("thresholds") for each in compare_programs(*plain).sampled)


def test_a_comparison_of_as_many_values_as_the_input_decides():
    """The positions of non_zero are as many as elements that are not 0: none for an input of zeros."""
    def build(added):
        @mb.program(input_specs=[mb.TensorSpec((8,)), mb.TensorSpec((8,), dtype=types.int32)],
                    opset_version=ct.target.iOS17)
        def program(x, mask):
            places = mb.squeeze(x=mb.non_zero(x=mask), axes=[1])
            places = mb.select(cond=mb.less(x=places, y=np.int32(3)), a=mb.add(x=places, y=np.int32(1)), b=places)
            return mb.add(x=mb.gather(x=x, indices=places), y=np.float32(added), name="y")

        return program

    assert compare_programs(build(1), build(1)).equal and not compare_programs(build(1), build(2)).equal
