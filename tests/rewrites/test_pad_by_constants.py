"""ANE226: constant pads as PyTorch makes them, without the fill that the ANE may not take."""

from __future__ import annotations

from functools import partial

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
from mil_ane_passes.passes.registry import get_all_rules
from mil_ane_passes.runtime import Runtime
from tests.conversions import reload_program
from tests.rewrites.helpers import configure_rewrite, kinds, only_output
from tests.rewrites.spellings import WAYS, converted, outputs, truth

SPELLINGS = {
    "sides": (lambda x: F.pad(x, (2, 1), value=1.5), "concat"),
    "image": (lambda x: F.pad(x, (2, 1, 0, 3), value=-10000.0), "concat"),
    "module": (torch.nn.ConstantPad1d((0, 3), 0.25), "concat"),
}


rule = partial(configure_rewrite, "pad_by_constants")


def left(built, target="m4"):
    """Ops that are unsupported, or may be."""
    found = predict_plan(built, [each() for each in get_all_rules().values()], target=target)[1]
    return [item for item in found if item.rule.code == "ANE226" and getattr(item.answer, "sure", None) is not None]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SPELLINGS)
def test_is_pytorchs_pad_in_every_spelling(name, way, tmp_path):
    function, kind = SPELLINGS[name]
    before = converted(function, way, tmp_path / "before")
    assert left(before) and find_matches(rule(), before).fired
    after = converted(function, way, tmp_path / "after", passes="pad_by_constants")
    assert not left(after) and not find_matches(rule(), after).fired and kinds(after)[kind]
    x = np.random.default_rng(0).standard_normal((2, 8, 4)).astype(np.float16)
    np.testing.assert_array_equal(outputs(after, x, "float64"), truth(function, x))


@pytest.mark.parametrize("way", ["traced", "exported"])
def test_a_pad_of_minus_infinity_becomes_the_max_pools_own(way, tmp_path):
    def function(x):
        return F.max_pool2d(F.pad(x, (0, 1, 0, 1), value=float("-inf")), 3, stride=2)

    after = converted(function, way, tmp_path, passes="pad_by_constants", shape=(1, 3, 8, 8))
    counted = kinds(after)
    assert (counted["pad"], counted["max_pool"], counted["concat"], counted["add"]) == (0, 1, 0, 0)
    x = np.random.default_rng(0).standard_normal((1, 3, 8, 8)).astype(np.float16)
    np.testing.assert_array_equal(outputs(after, x, "float64"), truth(function, x))


@st.composite
def pads(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=5)))
    count = draw(st.integers(1, len(shape)))
    amounts = draw(st.lists(st.integers(0, 3), min_size=2 * count, max_size=2 * count))
    fill = draw(st.sampled_from([1.0, -2.5, 65504.0, 6e-8, np.inf, -np.inf, np.nan]))
    return shape, amounts, fill, draw(st.sampled_from([0, 40, 1 << 20]))


@pytest.mark.law
@given(pads())
def test_any_pad_is_torchs_to_the_bit(drawn):
    shape, amounts, fill, most = drawn
    built = build_program(lambda x: mb.pad(x=x, pad=amounts, mode="constant", constant_val=np.float16(fill), name="y"),
                          x=shape)
    found = apply_rewrite(rule(max_bytes=most), built)
    if not found.fired:
        (miss,) = found.near_misses
        assert miss.reason.endswith(f"max_bytes={most}") and any(amounts)
    consts = [op.val.val for op in built.functions["main"].operations if op.op_type == "const"]
    assert sum(each.nbytes for each in consts if getattr(each, "dtype", None) == np.float16) <= max(most, 0) + 2
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float16)
    x.flat[::5], x.flat[1::5], x.flat[2::7], x.flat[3::11] = np.inf, np.nan, -0.0, 0.0
    pairs = [amount for pair in reversed(list(zip(amounts[::2], amounts[1::2]))) for amount in pair]
    wanted = F.pad(torch.from_numpy(x), pairs, value=fill).numpy()
    got = only_output(built, x, "float16")
    np.testing.assert_array_equal(got, wanted)
    zeros = wanted == 0
    assert np.array_equal(np.signbit(got[zeros]), np.signbit(wanted[zeros]))


@pytest.mark.law
@given(st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(0, 4), min_size=4, max_size=4), st.booleans())
def test_any_max_pool_behind_a_pad_is_torchs(size, stride, amounts, own):
    pads = [1, 0, 0, 1] if own and size > 1 else [0] * 4

    def body(x):
        padded = mb.pad(x=x, pad=amounts, mode="constant", constant_val=np.float16(-np.inf))
        kind = {"pad_type": "custom", "pad": pads} if any(pads) else {"pad_type": "valid"}
        return mb.max_pool(x=padded, kernel_sizes=[size, size], strides=[stride, stride], name="y", **kind)

    built = build_program(body, x=(2, 2, 5, 6))
    assert apply_rewrite(rule(), built).fired
    folds = all(one + other < size for one, other in zip(amounts, pads))
    assert (kinds(built)["add"] + kinds(built)["concat"] == 0) == (folds or not any(amounts))
    x = np.random.default_rng(0).standard_normal((2, 2, 5, 6)).astype(np.float16)
    x.flat[::7], x.flat[1::9] = -np.inf, np.inf
    whole = [one + other for one, other in zip(amounts, pads)]
    wide = F.pad(torch.from_numpy(x).double(), (whole[2], whole[3], whole[0], whole[1]), value=float("-inf"))
    np.testing.assert_array_equal(only_output(built, x, "float16"), F.max_pool2d(wide, size, stride).numpy())


def test_a_pad_with_another_reader_is_joined_and_the_pool_reads_that():
    def body(x):
        padded = mb.pad(x=x, pad=[1, 1], mode="constant", constant_val=np.float16(-np.inf))
        return [mb.max_pool(x=padded, kernel_sizes=[2, 2], strides=[1, 1], pad_type="valid", name="y"), padded]

    built = build_program(body, x=(1, 2, 4, 4))
    assert {finding.op for finding in find_matches(rule(), built).fired} == {"pad"}
    before = Runtime(built, precision="float16")({"x": (x := np.ones((1, 2, 4, 4), np.float16))})
    assert {finding.op for finding in apply_rewrite(rule(), built).fired} == {"pad"}
    after = Runtime(built, precision="float16")({"x": x})
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("shape", "held"), [
    ((1, 3, 4), [(1, 1, 4), (1, 3, 2), (1, 5, 2)]), ((None, 3, 4), [(1, 1, 8), (1, 5, 8)])])
def test_equal_borders_and_equal_blocks_are_one_constant(shape, held):
    def body(x):
        many = [mb.pad(x=x, pad=[1, 1, 2, 2], constant_val=np.float16(3)) for _ in range(3)]
        sides = [mb.pad(x=x, pad=[0, 0, 2, 2], constant_val=np.float16(3)) for _ in range(3)]
        return [mb.relu(x=each) for each in many + sides]

    built = build_program(body, x=shape)
    apply_rewrite(rule(), built)
    found = [np.asarray(op.val.val) for op in built.functions["main"].operations if op.op_type == "const"]
    assert sorted(each.shape for each in found if each.dtype == np.float16 and each.size > 1) == sorted(held)


@pytest.mark.parametrize("opset", [ct.target.iOS15, ct.target.iOS18])
def test_it_stands_through_a_conversion_with_our_pipeline_and_the_package(opset, tmp_path):
    def body(x):
        padded = mb.pad(x=x, pad=[1, 2, 3, 0], mode="constant", constant_val=np.float16(-1))
        return mb.conv(x=padded, weight=np.ones((2, 3, 2, 2), np.float16), name="y")

    built = build_program(body, opset=opset, x=(1, 3, 4, 4))
    loaded = reload_program(built, tmp_path / "m.mlpackage", opset, passes="pad_by_constants")
    assert not left(loaded) and not left(loaded, "m1")
    x = np.arange(48, dtype=np.float32).reshape(1, 3, 4, 4)
    wanted = F.conv2d(F.pad(torch.from_numpy(x), (3, 0, 1, 2), value=-1.0), torch.ones(2, 3, 2, 2)).numpy()
    np.testing.assert_array_equal(only_output(loaded, x.astype(np.float16), "float64"), wanted)
