"""ANE212: the place that PyTorch's argmax and argmin give, in fp16."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given
from hypothesis import strategies as st

import mil_ane_passes as ane
from mil_ane_passes.passes.engine import apply_rewrite
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.passes.registry import find_rewrite
from mil_ane_passes.runtime import Runtime
from tests.conversions import convert_model
from tests.rewrites.helpers import kinds


def rewritten(built):
    return apply_rewrite(find_rewrite("argmax_by_max").configured(), built)


def placed(kind, shape, axis, keep_dims=False):
    return build_program(
        lambda x: mb.cast(x=getattr(mb, f"reduce_{kind}")(x=x, axis=axis, keep_dims=keep_dims), dtype="fp16", name="y"),
        x=shape,
    )


def proved(module, target, tmp_path):
    """Draws, and what the module makes of them once it is converted, rewritten and verified."""
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).half().float()
    convert_model(module, x, names="x", minimum_deployment_target=target).save(str(tmp_path / "in.mlpackage"))
    report = ane.rewrite(tmp_path / "in.mlpackage", tmp_path / "out.mlpackage", passes="argmax_by_max", target="m4")
    assert report.verified and [trace.rule for trace in report.traces if trace.fired] == ["argmax_by_max"]
    before, after = report.predicted
    assert before.unsupported == 2 and after.unsupported == 0
    (found,) = ane.run(tmp_path / "out.mlpackage", {"x": x.numpy()}, precision="float64").values()
    return x.double(), found


class Pointed(torch.nn.Module):
    """Goes on computing with the place of the largest."""

    def forward(self, x):
        return x.argmax(-1).to(x.dtype) * 0.5 + x.mean(-1)


@pytest.mark.parametrize("target", [ct.target.iOS16, ct.target.iOS18])
def test_a_place_that_torch_goes_on_computing_with(tmp_path, target):
    x, found = proved(Pointed(), target, tmp_path)
    np.testing.assert_allclose(found, Pointed()(x).numpy(), atol=1e-6)


def test_a_place_that_leaves_a_model_for_ios15_in_fp32(tmp_path):
    """The result is fp32 there; what finds it is not."""
    class Chosen(torch.nn.Module):
        def forward(self, x):
            return x.softmax(-1).argmax(-1).float()

    x, found = proved(Chosen(), ct.target.iOS15, tmp_path)
    np.testing.assert_array_equal(found, Chosen()(x).numpy())


class Gated(torch.nn.Module):
    """Takes the row of the expert with the highest score."""

    def forward(self, x):
        return torch.nn.functional.one_hot(x.argmax(-1), 6).to(x.dtype) @ torch.arange(12.0).to(x.dtype).view(6, 2)


def test_a_choice_made_by_one_hot_is_cured_in_one_run(tmp_path):
    """The cast that is looked for is what one_hot_compare makes."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).half().float()
    convert_model(Gated(), x, names="x").save(str(tmp_path / "in.mlpackage"))
    report = ane.rewrite(tmp_path / "in.mlpackage", tmp_path / "out.mlpackage", preset="full", target="m4")
    fired = [trace.rule for trace in report.traces if trace.fired]
    assert report.verified and {"one_hot_compare", "argmax_by_max"} <= set(fired)
    assert report.predicted[1].unsupported == 0
    (found,) = ane.run(tmp_path / "out.mlpackage", {"x": x.numpy()}, precision="float16").values()
    np.testing.assert_array_equal(found, Gated()(x).numpy())


@st.composite
def draws(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=5)))
    values = [-np.inf, np.inf, np.nan, 0.0, -0.0, 1.0, -1.0, 65504.0, 6e-8]
    given_values = draw(st.lists(st.sampled_from(values), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    return (draw(st.sampled_from(["argmax", "argmin"])), shape, draw(st.integers(-len(shape), len(shape) - 1)),
            draw(st.booleans()), np.array(given_values, np.float16).reshape(shape))


@pytest.mark.law
@given(draws())
def test_the_first_of_the_largest_ties_infinities_and_nan(drawn):
    kind, shape, axis, keep_dims, x = drawn
    built = placed(kind, shape, axis, keep_dims)
    assert rewritten(built).fired and not {"reduce_argmax", "reduce_argmin"} & set(kinds(built))
    expected = getattr(np, kind)(x, axis=axis, keepdims=keep_dims)  # the first one, and a NaN before all others
    for precision in ("float64", "float16"):
        np.testing.assert_array_equal(Runtime(built, precision=precision)({"x": x})["y"], expected)


def test_every_place_of_as_many_as_are_taken():
    built = placed("argmax", (1024, 1024), -1)
    assert rewritten(built).fired
    for x in (np.eye(1024), np.where(np.eye(1024) > 0, np.nan, 1.0)):
        found = Runtime(built, precision="float16")({"x": x.astype(np.float16)})["y"]
        np.testing.assert_array_equal(found, np.arange(1024))
    assert [miss.reason for miss in rewritten(placed("argmin", (2, 1025), 1)).near_misses] == [
        "the axis has 1025 elements: with more than 1024 not every index is exact in fp16"]
