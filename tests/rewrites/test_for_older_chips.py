"""ANE230 and ANE231: enlarged images and reflecting pads for old chips, to the bit PyTorch's own."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given
from hypothesis import strategies as st

from mil_ane_passes.ane.prediction import predict_plan
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import find_rewrite, get_all_rules
from tests.conversions import reload_program
from tests.rewrites.helpers import kinds, only_output
from tests.rewrites.spellings import WAYS, converted, outputs, truth


def upsampling(**options):
    return find_rewrite("split_upsampling").configured(**options)


def padding(**options):
    return find_rewrite("sliced_pad").configured(**options)


def found_on(built, code, target):
    """What the rule of this code reports."""
    return [item for item in predict_plan(built, [each() for each in get_all_rules().values()], target=target)[1]
            if item.rule.code == code]


def numbers(shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float16)
    x.flat[::7], x.flat[1::11], x.flat[2::13] = np.inf, np.nan, -0.0
    return x


ENLARGED = {
    "by 4": lambda x: F.interpolate(x, scale_factor=4, mode="nearest"),
    "by 3 and 8": lambda x: F.interpolate(x, scale_factor=(3, 8), mode="nearest"),
    "to a size": lambda x: F.interpolate(x, size=(24, 12), mode="nearest"),
    "module": torch.nn.UpsamplingNearest2d(scale_factor=4),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ENLARGED)
def test_enlarging_is_pytorchs_in_every_spelling(name, way, tmp_path):
    function = ENLARGED[name]
    built = converted(function, way, tmp_path, shape=(1, 3, 4, 4))
    assert found_on(built, "ANE230", "a13")
    assert not find_matches(upsampling(), built).fired and apply_rewrite(upsampling(), built, target="a13").fired
    assert not found_on(built, "ANE230", "a13")
    x = numbers((1, 3, 4, 4)).astype(np.float32)
    np.testing.assert_array_equal(outputs(built, x, "float16"), truth(function, x))


@st.composite
def enlargements(draw):
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=3, max_size=5)))
    return shape, draw(st.integers(1, 12)), draw(st.integers(1, 12)), draw(st.sampled_from(["up", "to", "resize"]))


@pytest.mark.law
@given(enlargements())
def test_any_whole_factors_repeat_elements(drawn):
    shape, tall, wide, kind = drawn
    size = {"target_size_height": shape[-2] * tall, "target_size_width": shape[-1] * wide}
    body = {
        "up": lambda x: mb.upsample_nearest_neighbor(x=x, scale_factor_height=tall, scale_factor_width=wide, name="y"),
        "to": lambda x: mb.resize_nearest_neighbor(x=x, name="y", **size),
        "resize": lambda x: mb.resize(x=x, shape=[*size.values()], resized_dims=np.uint32(2), name="y",
                                      interpolation_mode="NEAREST_NEIGHBOR"),
    }[kind]
    built = build_program(body, x=shape)
    found = apply_rewrite(upsampling(), built, target="a13")
    x = numbers(shape)
    np.testing.assert_array_equal(only_output(built, x, "float16"), x.repeat(tall, -2).repeat(wide, -1))
    odd = [factor for factor in (tall, wide) if factor & (factor - 1)]
    assert bool(found.fired) == (max(tall, wide) > 2 and not (odd and len(shape) == 5))
    if found.fired:
        assert not found_on(built, "ANE230", "a13") and built.functions["main"].outputs[0].rank == len(shape)
    elif max(tall, wide) > 2:
        assert found.near_misses[0].reason.endswith("no dimension is left to stack copies")


def test_linear_by_4_is_not_twice_by_2_which_is_why_it_stays():
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((1, 1, 4, 4)))
    twice = F.interpolate(F.interpolate(x, scale_factor=2, mode="bilinear"), scale_factor=2, mode="bilinear")
    assert (twice - F.interpolate(x, scale_factor=4, mode="bilinear")).abs().max() > 0.05
    built = build_program(lambda x: mb.upsample_bilinear(x=x, scale_factor_height=4, scale_factor_width=4, name="y"),
                          x=(1, 1, 4, 4))
    (miss,) = find_matches(upsampling(), built, target="a12").near_misses
    assert miss.reason == "linear interpolation by 4 x 4: twice by 2 differs from once by 4"


REFLECTED = {
    "last": lambda x: F.pad(x, (2, 3), mode="reflect"),
    "image": lambda x: F.pad(x[None], (1, 0, 2, 3), mode="reflect"),
    "module": torch.nn.ReflectionPad1d(1),
}


@pytest.mark.parametrize("way", WAYS[:2])  # decomposed it is a gather
@pytest.mark.parametrize("name", REFLECTED)
def test_reflecting_is_pytorchs_in_every_spelling(name, way, tmp_path):
    function = REFLECTED[name]
    built = converted(function, way, tmp_path)
    assert found_on(built, "ANE231", "m1")
    assert not find_matches(padding(), built).fired and apply_rewrite(padding(), built, target="m1").fired
    assert not found_on(built, "ANE231", "m1") and not kinds(built)["pad"]
    x = numbers((2, 8, 4)).astype(np.float32)
    np.testing.assert_array_equal(outputs(built, x, "float16"), truth(function, x))


@pytest.mark.law
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.data())
def test_any_reflecting_pad_is_numpys_to_the_bit(shape, data):
    count = data.draw(st.integers(1, len(shape)))
    pairs = [tuple(data.draw(st.integers(0, extent - 1)) for _ in range(2)) for extent in shape[-count:]]
    built = build_program(
        lambda x: mb.pad(x=x, pad=[each for pair in pairs for each in pair], mode="reflect", name="y"), x=tuple(shape)
    )
    assert apply_rewrite(padding(), built, target="m1").fired and not kinds(built)["pad"]
    x = numbers(shape)
    wanted = np.pad(x, [(0, 0)] * (len(shape) - count) + pairs, mode="reflect")
    found = only_output(built, x, "float16")
    np.testing.assert_array_equal(found, wanted)
    assert np.array_equal(np.signbit(found), np.signbit(wanted))


@pytest.mark.parametrize(("rule", "fires"), [
    (upsampling, {"a12", "a13"}), (padding, {"a12", "a13", "a14", "m1"})])
def test_nothing_fires_where_a_chip_is_looked_at_that_takes_it(rule, fires):
    def body(x):
        wide = mb.upsample_nearest_neighbor(x=x, scale_factor_height=4, scale_factor_width=4)
        return mb.pad(x=wide, pad=[1, 1], mode="reflect", name="y")

    built = build_program(body, x=(1, 2, 4, 4))
    targets = ("a12", "a13", "a14", "m1", "m2", "m3", "m4", "all")
    assert {target for target in targets if find_matches(rule(), built, target=target).fired} == fires
    assert find_matches(rule(always=True), built).fired


@pytest.mark.parametrize("opset", [ct.target.iOS15, ct.target.iOS18])
def test_they_stand_through_a_conversion_with_our_pipeline_and_the_package(opset, tmp_path):
    def body(x):
        wide = mb.upsample_nearest_neighbor(x=x, scale_factor_height=6, scale_factor_width=4)
        return mb.pad(x=wide, pad=[2, 1, 1, 3], mode="reflect", name="y")

    built = build_program(body, opset=opset, x=(1, 2, 4, 4))
    loaded = reload_program(built, tmp_path / "m.mlpackage", opset, passes="split_upsampling,sliced_pad", chip="a13")
    assert not found_on(loaded, "ANE230", "a13") and not found_on(loaded, "ANE231", "a13")
    x = numbers((1, 2, 4, 4))
    wanted = np.pad(x.repeat(6, -2).repeat(4, -1), [(0, 0), (0, 0), (2, 1), (1, 3)], mode="reflect")
    np.testing.assert_array_equal(only_output(loaded, x, "float16"), wanted)
