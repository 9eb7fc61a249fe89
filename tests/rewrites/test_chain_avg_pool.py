"""ANE222: large means from smaller ones, against PyTorch's own pooling."""

from __future__ import annotations

import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import example, given
from hypothesis import strategies as st

from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from tests.rewrites.convolutions import WAYS, BehindRelu, converted, distance
from tests.rewrites.helpers import kinds
from tests.rewrites.windows import configured, holds, refused

NAME = "chain_avg_pool"
REASONS = ("padding is excluded", "ceil_mode averages", "a window may be", "window ", "unsupported on")


def pooled(sizes, shape, kind="avg_pool", **parameters):
    parameters.setdefault("pad_type", "valid")
    return build_program(lambda x: getattr(mb, kind)(x=x, kernel_sizes=sizes, name="y", **parameters), x=shape)


def notes(program_, target="all", **options):
    found = find_matches(configured(NAME, **options), program_, target=target)
    return [hit.reason for hit in found.fired] + [f"- {miss.reason}" for miss in found.near_misses]


@st.composite
def pools(draw):
    rank = draw(st.sampled_from([1, 1, 2, 2, 3]))
    sizes = [draw(st.integers(1, 36)) for _ in range(rank - 1)] + [draw(st.integers(32, 60))]
    strides = [draw(st.sampled_from([1, 2, 5, size // 2 + 1, size, size + 2])) for size in sizes]
    kind = draw(st.sampled_from(["same", "same_lower", "valid", "custom"]))
    ceil = rank < 3 and kind in ("valid", "custom") and draw(st.booleans())
    pads = []
    for size in sizes if kind == "custom" else []:
        before, after = draw(st.integers(0, size // 2)), draw(st.integers(0, size // 2))
        pads += [before, before if ceil else after]
    least = [1 if kind.startswith("same") else max(1, size - sum(pads[2 * axis:2 * axis + 2]))
             for axis, size in enumerate(sizes)]
    shape = (draw(st.integers(1, 2)), 2, *(low + draw(st.integers(0, 20)) for low in least))
    given_pads = {"pad": pads} if pads else {}
    return sizes, shape, {"strides": strides, "pad_type": kind, "ceil_mode": ceil,
                          "exclude_padding_from_average": draw(st.booleans()), **given_pads}


CANCELLED = ([4, 32], (1, 2, 3, 16), {"strides": [1, 1], "pad_type": "same", "ceil_mode": False,
                                      "exclude_padding_from_average": False})
"Parts whose means cancel: their rounding is large beside the mean of all."


@pytest.mark.law
@given(pools(), st.sampled_from(["all", "m4", "a13"]))
@example(CANCELLED, "all")
def test_every_mean_is_the_same(pool, target):
    """Three roundings at most: of the parts, of the mean over one axis before the next, and of the result."""
    sizes, shape, parameters = pool
    made = pooled(sizes, shape, **parameters)
    before = refused(made, target)
    trace = holds(made, NAME, target=target, halves=3)
    if trace.fired:
        assert before and not refused(made, target)
    else:
        assert not before or all(miss.reason.startswith(REASONS) for miss in trace.near_misses)


@pytest.mark.parametrize("target", ["iOS15", "iOS18"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("layer", "shape"), [
    (torch.nn.AvgPool2d(56), (1, 4, 56, 56)), (torch.nn.AvgPool1d(50, 25), (2, 4, 200)),
    (torch.nn.AvgPool2d((36, 2), 1), (1, 4, 50, 9)), (torch.nn.AvgPool2d((3, 40), (2, 40), (1, 0)), (1, 4, 20, 85)),
], ids=["all", "overlapping", "parts", "one axis"])
def test_as_torch_converts(layer, shape, way, target, tmp_path):
    after = converted(BehindRelu(layer), shape, way, tmp_path, passes=NAME, target=target)
    assert not refused(after, "m4") and not refused(after, "m1")
    assert distance(after, BehindRelu(layer), shape) < 1e-12
    assert distance(after, BehindRelu(layer), shape, "float16") < 1e-3


def test_which_form_is_taken():
    assert notes(pooled([40], (1, 2, 40))) == ["window 40 on axis 2, the limit is 31: a reduction over axes 2"]
    assert notes(pooled([2, 40], (1, 2, 8, 80), strides=[1, 40])) == [
        "window 40 on axis 3, the limit is 31: windows on axis 3"]
    assert notes(pooled([40, 2], (1, 2, 90, 8))) == ["window 40 on axis 2, the limit is 31: 2 parts of 20 on axis 2"]
    assert notes(pooled([37], (1, 2, 90))) == ["- window 37 cannot be split into 8 or fewer equal parts of at most 31"]
    assert notes(pooled([1, 1, 40], (1, 2, 3, 4, 90))) == [
        "- window 40 of a 3-D pool: the concat of its parts would need rank 6"]
    assert notes(pooled([1, 26], (1, 2, 3, None), strides=[1, 3]), target="a13") == [
        "- window 26 would be split into parts of stride 3, which is unsupported, too"]
    assert notes(pooled([31, 31], (1, 2, 40, 40)), "m4") == []


def test_a_mean_of_all_without_its_padding_is_a_reduction():
    made = pooled([40], (1, 2, 30), pad_type="custom", pad=[5, 5], exclude_padding_from_average=True)
    assert holds(made, NAME).fired and kinds(made)["reduce_mean"] == 1


def test_the_norm_of_all():
    made = pooled([40, 40], (1, 2, 40, 40), "l2_pool")
    assert holds(made, NAME).fired and kinds(made)["reduce_l2_norm"] == 1
    assert notes(pooled([40], (1, 2, 50), "l2_pool")) == [
        "- an l2_pool of more than one window: its parts would have to be squared again"]


def test_old_chips_have_limits_of_their_own():
    made = pooled([4, 3], (1, 2, 16, 17), strides=[4, 3])
    assert notes(made) == ["- unsupported on A12 and A13 only; choose one of them as the target"]
    assert holds(made, NAME, target="a13").fired and not refused(made, "a13")
    far = pooled([3], (1, 2, None), strides=[4])
    assert holds(far, NAME, target="a13", extent=17).fired and kinds(far)["slice_by_index"] == 1
    assert apply_rewrite(configured(NAME, always=True), pooled([14], (1, 2, 20))).fired


def test_a_symbolic_size_stays_symbolic():
    assert holds(pooled([36, 2], (None, 2, None, None)), NAME, extent=40).fired
    assert holds(pooled([40], (None, 2, 80), strides=[40]), NAME).fired
