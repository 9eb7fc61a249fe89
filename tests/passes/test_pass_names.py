"""Lists of pass names do what the pipeline object does, in another process as well."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager
from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

import mil_ane_passes as ane
from mil_ane_passes.ir.printer import format_program
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.pass_names import format_pass_name, parse_pass_name
from mil_ane_passes.utils.errors import InputError
from tests.without_torch import hide_torch

SETTINGS = [
    {"preset": "full", "target": "m4"},
    {"preset": "full", "target": "m4", "max_growth": None},
    {"target": "m1", "options": {"lift_conv_transpose_1d": {"axis": 2}}},
    {"passes": "full,split_conv_transpose_bias{any_rank=true},factor_conv_stride", "target": "m4", "strict": True},
    {},
]


def upsampled():
    """With a convolution that `factor_conv_stride` makes more expensive, which a guard undoes."""
    def body(x, image):
        wide = mb.conv(x=image, weight=make_weight(64, 64, 7, 7), strides=[7, 7], name="z")
        x = mb.tan(x=mb.max_pool(x=x, kernel_sizes=[13], strides=[3], pad_type="same"))
        x = mb.conv(x=x, weight=make_weight(8, 1, 80), groups=4, pad_type="same")
        return wide, mb.conv_transpose(x=x, weight=make_weight(8, 8, 16), bias=make_weight(8), strides=[2], name="y")

    return build_program(body, x=(1, 4, 300), image=(1, 64, 224, 224))


def converted(pipeline):
    built = upsampled()
    PassPipelineManager.apply_pipeline(built, pipeline)
    return format_program(built)


def made(**settings):
    return ane.pipeline(ct.PassPipeline.EMPTY, **settings)


def by_names(names):
    return converted(ct.PassPipeline(json.loads(json.dumps(names))))


@pytest.mark.parametrize("settings", SETTINGS)
def test_names_do_what_the_object_does(settings):
    pipeline = made(**settings)
    assert by_names(pipeline.passes) == converted(pipeline)


def test_the_settings_matter_here():
    guarded, unguarded, axis, requested, plain = (converted(made(**settings)) for settings in SETTINGS)
    assert guarded != unguarded
    assert guarded != requested
    assert axis != plain


ELSEWHERE = """
import json, sys
import coremltools as ct
import mil_ane_passes
sys.path.insert(0, sys.argv[1])
names = json.load(sys.stdin)
pipeline = ct.PassPipeline(names)
from tests.passes.test_pass_names import converted
print(converted(pipeline))
"""


@pytest.mark.slow
def test_a_process_that_has_only_imported_us_knows_the_names(request):
    pipeline = made(**SETTINGS[0])
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, str(request.config.rootpath)], text=True, check=False,
                          capture_output=True, input=json.dumps(pipeline.passes), env=hide_torch())
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n") == converted(pipeline)


def test_a_preset_and_a_pass_are_one_name():
    assert by_names(["ane::full{target=m4}"]) == converted(made(preset="full", target="m4"))
    assert by_names(["ane::full{target=m4, max_growth=none}"]) == converted(
        made(preset="full", target="m4", max_growth=None))
    assert by_names(["ane::safe"]) == converted(made())
    assert by_names(["ane::lift_conv_transpose_1d{axis=2 target=m1}"]) == converted(
        made(passes="lift_conv_transpose_1d{axis=2}", target="m1"))


def test_what_is_set_at_a_pass_goes_before_what_the_list_carries():
    pipeline = ct.PassPipeline(made(target="m1", options={"lift_conv_transpose_1d": {"axis": 2}}).passes)
    pipeline.set_options("ane::lift_conv_transpose_1d", {"axis": "-1"})
    assert converted(pipeline) == converted(made(target="m1"))


def test_settings_end_with_the_list():
    prog = upsampled()
    for name in ane.pipeline(target="m1").passes:
        if name.startswith("ane::"):
            PASS_REGISTRY[name](prog)
    assert not [name for name in vars(prog) if name.startswith("_ane")]


@pytest.mark.parametrize("names", [["ane::guard_begin", "ane::chain_max_pool", "ane::guard_end"], ["ane::guard_end"]])
def test_a_guard_without_settings_says_so(names, caplog):
    with caplog.at_level(logging.WARNING, "mil_ane_passes"):
        by_names(names)
    assert [record.getMessage() for record in caplog.records if "ane::guard_end is inactive" in record.getMessage()]


def test_feeds_that_names_cannot_carry_are_named(caplog):
    pytest.importorskip("torch")
    feeds = {"x": np.ones((1, 4, 300), np.float16), "image": np.ones((1, 64, 224, 224), np.float16)}
    names = made(passes="fp16_compute", feeds=feeds).passes
    with caplog.at_level(logging.WARNING, "mil_ane_passes"):
        by_names(names)
    assert "ane::fp16_compute does not have the feeds and ranges" in caplog.text


@pytest.mark.parametrize(("name", "words"), [
    ("ane::full{targt=m4}", "no setting 'targt'; .*did you mean 'target'"),
    ("ane::full{target=m99}", "m99"),
    ("ane::full{max_growth=much}", "found max_growth=much; expected a share"),
    ("ane::triangle_cumsum{target}", "cannot read the setting 'target'; expected key=value"),
    ("ane::triangle_cumsum{no_such=1}", "no option 'no_such'"),
    ("ane::guard_begin{lift_conv_1d.no_such=1}", "no option 'no_such'"),
    ("ane::guard_begin{speed=1}", "no setting 'speed'"),
])
def test_a_name_with_wrong_settings_is_refused_where_it_is_added(name, words):
    with pytest.raises(InputError, match=words):
        ct.PassPipeline.DEFAULT.append_pass(name)


@pytest.mark.parametrize("name", ["ane::no_such", "ane::no_such{target=m4}", "ane::full{", "other::full{target=m4}"])
def test_what_is_not_ours_is_not_registered(name):
    assert name not in PASS_REGISTRY
    with pytest.raises(KeyError):
        PASS_REGISTRY[name]


def test_a_name_that_is_nearly_ours_is_named_in_the_log(caplog):
    with pytest.raises(KeyError):
        PASS_REGISTRY["ane::ful{target=m4}"]
    assert "no pass 'ane::ful{target=m4}'; did you mean 'ane::full'?" in caplog.text


@pytest.mark.parametrize("value", ["a b", "1,2;3", "{x}=%20", "ü", "0.01"])
def test_any_value_survives_in_a_name(value):
    assert parse_pass_name(format_pass_name("fp16_compute", {"keep": value})) == ("fp16_compute", {"keep": value})
