"""ANE202 to ANE202: tan, asin, acos, sinh, cosh and atanh of every fp16 number, against PyTorch and NumPy."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given
from hypothesis import strategies as st

from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import find_rewrite, get_all_rules
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import kinds, only_output, unsupported_ops
from tests.rewrites.spellings import WAYS, converted, outputs, truth

REWRITES = [find_rewrite(name) for name in ("tangent", "arcsine", "hyperbolic", "inverse_tanh")]
RULES = {kind: rewrite.name for rewrite in REWRITES for kind in rewrite.forms}
ERRORS = {kind: error for rewrite in REWRITES for kind, (_, error) in rewrite.forms.items()}
"Units in the last place, as the pages state them."
EVERY = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
"Every fp16 number, infinities and NaN included."


def rewritten(kind, *shape, target="m4", **settings):
    built = build_program(lambda x: getattr(mb, kind)(x=x, name="y"), x=shape, **settings)
    assert apply_rewrite(find_rewrite(RULES[kind]).configured(), built, target=target).fired and not kinds(built)[kind]
    return built


def exact(kind):
    """NumPy's, as PyTorch's cosh and sinh are infinite at 710 already, where they are 1.1e308."""
    with np.errstate(all="ignore"):
        return getattr(np, kind.replace("a", "arc", 1) if kind[0] == "a" else kind)(EVERY.astype(np.float64))


@pytest.mark.parametrize("kind", RULES)
def test_every_fp16_number_is_within_what_the_page_states(kind):
    found, wanted = only_output(rewritten(kind, EVERY.size), EVERY, "float16"), exact(kind)
    with np.errstate(over="ignore"):
        rounded = wanted.astype(np.float16)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(rounded))
    np.testing.assert_array_equal(found[np.isinf(rounded)], rounded[np.isinf(rounded)])
    finite = np.isfinite(rounded)
    ulps = np.abs(found[finite].astype(np.float64) - wanted[finite]) / np.spacing(np.abs(rounded[finite]))
    assert ERRORS[kind] - 0.011 <= ulps.max() <= ERRORS[kind], "the page states what is measured, rounded up"
    zeros = rounded == 0
    np.testing.assert_array_equal(np.signbit(found[zeros]), np.signbit(rounded[zeros]))


@pytest.mark.parametrize("kind", RULES)
def test_every_fp16_number_at_full_precision(kind):
    found, wanted = only_output(rewritten(kind, EVERY.size), EVERY, "float64"), exact(kind)
    np.testing.assert_allclose(found, wanted, rtol=3e-12, atol=0)


@pytest.mark.law
@pytest.mark.parametrize("kind", RULES)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.sampled_from([ct.target.iOS15, ct.target.iOS18]),
       st.floats(1e-3, 20), st.integers(0, 99))
def test_any_rank_opset_and_size_of_numbers(kind, shape, opset, scale, seed):
    x = (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float16)
    built = rewritten(kind, *shape, opset=opset)
    assert built.functions["main"].outputs[0].rank == len(shape) and not unsupported_ops(built)
    with torch.no_grad():
        wanted = getattr(torch, kind)(torch.from_numpy(x.astype(np.float64))).numpy()
    np.testing.assert_allclose(only_output(built, x, "float64"), wanted, rtol=3e-12, atol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", RULES)
def test_is_pytorchs_function_through_a_conversion_and_the_package(kind, way, tmp_path):
    function = getattr(torch, kind)
    after = converted(function, way, tmp_path, passes=RULES[kind], chip="m4")
    assert not kinds(after)[kind] and not unsupported_ops(after)
    x = (np.random.default_rng(0).uniform(-0.99, 0.99, (2, 8, 4))).astype(np.float16)
    np.testing.assert_allclose(outputs(after, x, "float64"), truth(function, x), rtol=1e-12)


@pytest.mark.parametrize("kind", RULES)
def test_what_the_rule_finds_is_fixed(kind):
    before = build_program(lambda x: getattr(mb, kind)(x=x, name="y"), x=(2, 3))
    assert unsupported_ops(before) == [kind]
    assert find_rewrite(RULES[kind]).fixes == (get_all_rules()["elementary_functions"],)


def test_tan_stays_where_sin_and_cos_are_refused_as_well():
    built = build_program(lambda x: mb.tan(x=x, name="y"), x=(2, 3))
    rule = find_rewrite("tangent").configured()
    fires = {
        target: bool(find_matches(rule, built, target=target).fired)
        for target in ("a13", "m1", "m2", "m3", "m4", "all")
    }
    assert fires == {"a13": False, "m1": False, "m2": False, "m3": True, "m4": True, "all": False}
    assert find_matches(find_rewrite("tangent").configured(always=True), built).fired


@pytest.mark.parametrize("kind", ["asin", "acos", "cosh", "sinh", "atanh"])
def test_the_others_hold_nothing_that_m1_refuses(kind):
    assert not unsupported_ops(rewritten(kind, 2, 3, target="m1"), "m1")


def test_two_functions_of_one_value_and_of_each_other():
    def body(x):
        wave = mb.cosh(x=x, name="one")
        return [wave, mb.atanh(x=mb.tanh(x=x), name="two"), mb.acos(x=mb.real_div(x=np.float16(1), y=wave), name="y")]

    built = build_program(body, x=(4,))
    for name in dict.fromkeys(RULES.values()):
        apply_rewrite(find_rewrite(name).configured(), built)
    x = np.array([-2, -0.5, 0.25, 1.5], np.float16)
    found, wide = Runtime(built, precision="float64")({"x": x}), x.astype(np.float64)
    np.testing.assert_allclose(found["one"], np.cosh(wide), rtol=1e-13)
    np.testing.assert_allclose(found["two"], wide, rtol=1e-13)
    np.testing.assert_allclose(found["y"], np.arccos(1 / np.cosh(wide)), rtol=1e-13)
