"""ANE237: PyTorch's logical ops on masks, as numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from hypothesis import given
from hypothesis import strategies as st

from mil_ane_passes.ane.prediction import predict_plan
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import find_rewrite, get_all_rules
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import kinds

KINDS = ("logical_and", "logical_or", "logical_xor")


def masks(kind, one=(2, 3), other=(2, 3)):
    def body(x, z):
        return mb.cast(x=getattr(mb, kind)(x=mb.cast(x=x, dtype="bool"), y=mb.cast(x=z, dtype="bool")), dtype="fp16",
                       name="y")

    return build_program(body, dtype=types.fp16, x=one, z=other)


def rewritten(built, target="m1"):
    return apply_rewrite(find_rewrite("logical_as_arithmetic").configured(), built, target=target)


@st.composite
def pairs(draw):
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    bits = st.lists(st.booleans(), min_size=int(np.prod(shape)), max_size=int(np.prod(shape)))
    one, other = (np.array(draw(bits)).reshape(shape) for _ in range(2))
    axis = draw(st.integers(0, len(shape) - 1))
    return draw(st.sampled_from(KINDS)), one, other[(slice(None),) * axis + (slice(0, 1),)]


@pytest.mark.law
@given(pairs())
def test_the_truth_is_pytorchs(drawn):
    kind, one, other = drawn
    built = masks(kind, one.shape, other.shape)
    assert rewritten(built).fired and not set(KINDS) & set(kinds(built))
    expected = getattr(torch, kind)(torch.from_numpy(one), torch.from_numpy(other)).numpy()
    feeds = {"x": one.astype(np.float16), "z": other.astype(np.float16)}
    for precision in ("float64", "float16"):
        np.testing.assert_array_equal(Runtime(built, precision=precision)(feeds)["y"], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_constant_mask_is_a_constant_of_numbers(kind):
    """Nothing is left that fold_constants would have to work out in a second run."""
    known = np.tril(np.ones((8, 8), bool))
    built = build_program(lambda x: mb.cast(x=getattr(mb, kind)(x=mb.cast(x=x, dtype="bool"), y=known), dtype="fp16",
                                            name="y"), x=(1, 8))
    assert rewritten(built).fired and kinds(built)["cast"] == 3
    assert not apply_rewrite(find_rewrite("fold_constants").configured(), built).fired
    x = np.array([[0, 1, 1, 0, 1, 0, 0, 1]], np.float16)
    expected = getattr(np, kind)(x != 0, known)
    np.testing.assert_array_equal(Runtime(built, precision="float16")({"x": x})["y"], expected)


def test_it_is_gated_by_what_is_known():
    rule = find_rewrite("logical_as_arithmetic").configured()
    fires = {(kind, target): bool(find_matches(rule, masks(kind), target=target).fired) for kind in KINDS
             for target in ("m1", "m4", "all")}
    assert {key for key, fired in fires.items() if not fired} == {("logical_and", "m4"), ("logical_and", "all")}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_made_is_predicted_on_the_ane(kind):
    rules = [rule() for rule in get_all_rules().values()]
    before, after = masks(kind), masks(kind)
    rewritten(after)
    off = [sum(not row.takes and row.op.op_type != "cast" for row in predict_plan(each, rules, target="m1")[0].rows)
           for each in (before, after)]
    assert off == [1, 0]


def test_a_mask_that_is_read_twice_becomes_a_number_once():
    def body(x, z):
        x, z = (mb.greater(x=each, y=np.float16(0)) for each in (x, z))
        found = [mb.logical_or(x=x, y=z), mb.logical_xor(x=x, y=z)]
        return [mb.cast(x=each, dtype="fp16", name=f"y{place}") for place, each in enumerate(found)]

    built = build_program(body, x=(2, 3), z=(2, 3))
    assert len(rewritten(built).fired) == 2 and kinds(built)["cast"] == 4
