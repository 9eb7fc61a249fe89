"""What early reports name has a finding where they speak of it, cites them, and has newer measurements beside it."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder, types

import mil_ane_passes as ane
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.registry import get_all_rules

pytestmark = pytest.mark.filterwarnings("ignore")
NOTES, LIST, TIPS = "CoreML notes (in Chinese)", "hollance/neural-engine", "eiln, coreml102"


def of(body, *shape, dtype=types.fp16, **more):
    return lambda: build_program(body, opset=ct.target.iOS17, dtype=dtype, x=shape, **more)


def lstm(x):
    return Builder.lstm(x=x, initial_h=np.zeros((1, 3), np.float16), initial_c=np.zeros((1, 3), np.float16),
                        weight_ih=make_weight(12, 4), weight_hh=make_weight(12, 3))[0]


def pool(size, stride):
    return lambda x: Builder.avg_pool(x=x, kernel_sizes=[size] * 2, strides=[stride] * 2, pad_type="valid", name="y")


def filled(x):
    return Builder.add(x=x, y=Builder.fill(shape=[2, 3], value=np.float16(1)), name="y")


def counted(x):
    return Builder.add(x=x, y=Builder.range_1d(start=np.float16(0), end=np.float16(3), step=np.float16(1)), name="y")


def relu(x):
    return Builder.relu(x=x, name="y")


REPORTS = {
    "cumsum": ("cumsum", NOTES, "all m4 a13", of(lambda x: Builder.cumsum(x=x, axis=-1, name="y"), 2, 5)),
    "fill": ("fills", NOTES, "all m4 a13", of(filled, 2, 3)),
    "fill_like": (
        "fills",
        NOTES,
        "all a13 !m4",
        of(lambda x: Builder.fill_like(ref_tensor=x, value=np.float16(1), name="y"), 2, None),
    ),
    "range_1d": ("range_1d", NOTES, "all m4 a13", of(counted, 2, 3)),
    "gather": (
        "constant_gather",
        LIST,
        "all a13 !m4",
        of(lambda x: Builder.gather(x=x, indices=np.array([2, 0], np.int32), axis=1, name="y"), 1, 3, 4),
    ),
    "lstm": ("recurrent", LIST, "all m4 a13", of(lstm, 5, 1, 4)),
    "dilated": (
        "dilated_conv",
        LIST,
        "all a13 !m4",
        of(lambda x: Builder.conv(x=x, weight=make_weight(2, 2, 3, 3), dilations=[2, 2], name="y"), 1, 2, 16, 16),
    ),
    "large pool": ("old_pools", LIST, "all a13 !m4", of(pool(14, 1), 1, 2, 28, 28)),
    "far pool": ("old_pools", LIST, "all a13 !m4", of(pool(3, 3), 1, 2, 28, 28)),
    "upsampling": (
        "old_upsampling",
        LIST,
        "all a13 !m4",
        of(
            lambda x: Builder.upsample_nearest_neighbor(x=x, scale_factor_height=4, scale_factor_width=4, name="y"),
            1,
            2,
            4,
            4,
        ),
    ),
    "broadcast": (
        "old_broadcast",
        LIST,
        "all a13 !m4",
        of(lambda x, z: Builder.mul(x=x, y=z, name="y"), 1, 2, 4, 4, z=(1, 2, 1, 1)),
    ),
    "int input": (
        "int_inputs",
        TIPS,
        "all m4 a13",
        of(lambda x: Builder.cast(x=x, dtype="fp16", name="y"), 3, dtype=types.int32),
    ),
    "dynamic shape": ("flexible_shapes", TIPS, "all m4 a13", of(relu, None, 8)),
    "too small": ("tiny_tensors", TIPS, "all m4 a13", of(relu, 1, 63)),
    "too lopsided": ("lopsided", TIPS, "m4", of(relu, 50000)),
    "lone sine": ("sin_cos", TIPS, "all a13 m1 !m4", of(lambda x: Builder.sin(x=x, name="y"), 2, 3)),
}


@pytest.mark.parametrize(("name", "source", "targets", "build"), REPORTS.values(), ids=REPORTS)
def test_a_report_has_its_finding_on_the_targets_it_holds_for(name, source, targets, build):
    assert any(source in evidence.source for evidence in get_all_rules()[name].evidence)
    for target in targets.split():
        found = {finding.rule.name for finding in ane.lint(build(), target=target.lstrip("!")).findings}
        assert (name in found) is not target.startswith("!"), (target, found)


@pytest.mark.parametrize("name", sorted({name for name, *_ in REPORTS.values()} - {"recurrent", "cumsum", "range_1d"}))
def test_what_an_m4_contradicts_has_the_measurement_beside_it(name):
    cited = get_all_rules()[name].evidence
    assert any(evidence.kind in ("measured", "vendor") for evidence in cited)


def test_a_vector_longer_than_an_axis_is_refused_where_axes_are_short():
    found = {finding.rule.name for finding in ane.lint(build_program(relu, x=(50000,)), target="m1").findings}
    assert "dimension_limit" in found and "lopsided" not in found
