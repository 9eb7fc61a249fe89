"""ANE302: right against PyTorch, and honest about who folds it back."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager

import mil_ane_passes as ane
from mil_ane_passes.ir.query import get_itemsize, get_static_shape
from mil_ane_passes.passes.engine import apply_rewrite
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.layout import compute_padded_bytes
from mil_ane_passes.passes.registry import find_rewrite
from mil_ane_passes.runtime import Runtime
from tests.lab.models import hifigan
from tests.rewrites.helpers import kinds


def layer_and_program():
    torch.manual_seed(0)
    layer = torch.nn.ConvTranspose1d(4, 6, 5, stride=3, padding=1)
    built = build_program(
        lambda x: mb.conv_transpose(x=x, weight=layer.weight.detach().numpy(), bias=layer.bias.detach().numpy(),
                                    strides=[3], pad_type="custom", pad=[1, 1], name="y"),
        dtype=types.fp32, x=(2, 4, 9))
    return layer, built


def test_is_pytorchs_conv_transpose_1d():
    layer, built = layer_and_program()
    assert apply_rewrite(find_rewrite("split_conv_transpose_bias").configured(), built).fired
    x = np.random.default_rng(0).standard_normal((2, 4, 9)).astype(np.float32)
    with torch.no_grad():
        expected = layer.double()(torch.from_numpy(x).double()).numpy()
    found = Runtime(built, precision="float64")({"x": x})["y"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_the_published_fault_no_longer_reaches_it():
    layer, built = layer_and_program()
    x = np.random.default_rng(0).standard_normal((2, 4, 9)).astype(np.float32)
    right = Runtime(built, precision="float64")({"x": x})["y"]
    faulty = Runtime(built, precision="float64", quirks=["conv_transpose_1d_bias"])({"x": x})["y"]
    assert np.abs(right - faulty).max() > 0.1 * layer.bias.abs().max().item()
    apply_rewrite(find_rewrite("split_conv_transpose_bias").configured(), built)
    cured = Runtime(built, precision="float64", quirks=["conv_transpose_1d_bias"])({"x": x})["y"]
    np.testing.assert_allclose(cured, right, rtol=0, atol=1e-12)


def test_it_stands_after_fuse_conv_bias_which_would_fold_it_back():
    passes = ane.pipeline(passes="split_conv_transpose_bias").passes
    last_fold = max(index for index, name in enumerate(passes) if name == "common::fuse_conv_bias")
    assert passes.index("ane::split_conv_transpose_bias") > last_fold
    _, built = layer_and_program()
    PassPipelineManager.apply_pipeline(built, ane.pipeline(passes="split_conv_transpose_bias"))
    assert kinds(built)["add"] == 1
    PassPipelineManager.apply_pipeline(built, ct.PassPipeline.DEFAULT)
    assert kinds(built)["add"] == 0, "the page says that coremltools' default pipeline folds it back"


def test_in_one_pipeline_with_the_lift_there_is_nothing_left_to_lift():
    _, built = layer_and_program()
    PassPipelineManager.apply_pipeline(built, ane.pipeline(passes="safe,split_conv_transpose_bias"))
    assert kinds(built)["add"] == 1 and kinds(built)["expand_dims"] == 0


def layer_of(kernel, bias=np.float16([0.5, -1.0, 0.25, 2.0])):
    return build_program(
        lambda x: mb.conv_transpose(x=x, weight=make_weight(16, 4, kernel), bias=bias, strides=[2], name="y"),
        x=(1, 16, 96),
    )


@pytest.mark.parametrize(("kernel", "target", "preset", "made"), [
    (8, "all", "safe", "lifted"), (8, "all", "full", "split"), (13, "all", "full", "split"),
    (14, "all", "full", "lifted"), (14, "m4", "full", "split"), (16, "m4", "full", "lifted")])
def test_full_splits_what_the_target_supports_without_a_lift(kernel, target, preset, made):
    built = layer_of(kernel)
    report = ane.rewrite(built, preset=preset, target=target, verify=False)
    kinds_of = kinds(report.package)
    assert (kinds_of["expand_dims"], kinds_of["add"]) == {"lifted": (1, 0), "split": (0, 1)}[made]


def test_a_wide_kernel_is_split_on_request_only():
    built = layer_of(16)
    (miss,) = apply_rewrite(find_rewrite("split_conv_transpose_bias").configured(), built).near_misses
    assert "use ane::lift_conv_transpose_1d" in miss.reason
    assert apply_rewrite(find_rewrite("split_conv_transpose_bias").configured(any_kernel=True), built).fired


def padded(built):
    """The bytes of all tensors of the main function with the rows that their last axes are padded to."""
    made = [var for op in built.functions["main"].operations if op.op_type != "const" for var in op.outputs]
    return sum(compute_padded_bytes(get_static_shape(var), get_itemsize(var)) for var in made)


def codes(package):
    return {finding.rule.code for finding in ane.lint(package).findings}


def test_full_leaves_a_vocoder_without_new_warnings_or_padded_rows(tmp_path):
    pytest.importorskip("transformers")
    source = tmp_path / "vocoder.mlpackage"
    hifigan.convert_model(minimum_deployment_target=ct.target.iOS17).save(str(source))
    before, outcome = ane.load(source), ane.rewrite(source, tmp_path / "out.mlpackage", preset="full")
    assert outcome.verified and kinds(ane.load(tmp_path / "out.mlpackage").program)["conv_transpose"] == 2
    after = ane.load(tmp_path / "out.mlpackage")
    assert "ANE301" in codes(before) and codes(after) <= codes(before) - {"ANE301", "ANE302"}
    # beside what was there two sums: (1, 16, 96) and (1, 8, 192), rows of 192 and 384 bytes
    assert padded(after.program) - padded(before.program) == 16 * 192 + 8 * 384
