"""ANE302: right against PyTorch, and honest about who folds it back."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager

import mil_ane_passes as ane
from mil_ane_passes.core.engine import run
from mil_ane_passes.core.examples import program
from mil_ane_passes.core.registry import by_name
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import kinds


def layer_and_program():
    torch.manual_seed(0)
    layer = torch.nn.ConvTranspose1d(4, 6, 5, stride=3, padding=1)
    built = program(
        lambda x: mb.conv_transpose(x=x, weight=layer.weight.detach().numpy(), bias=layer.bias.detach().numpy(),
                                    strides=[3], pad_type="custom", pad=[1, 1], name="y"),
        dtype=types.fp32, x=(2, 4, 9))
    return layer, built


def test_is_pytorchs_conv_transpose_1d():
    layer, built = layer_and_program()
    assert run(by_name("split_conv_transpose_bias").configured(), built).fired
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
    run(by_name("split_conv_transpose_bias").configured(), built)
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
    assert kinds(built)["add"] == 0, "the page says that the host's default pipeline folds it back"


def test_in_one_pipeline_with_the_lift_there_is_nothing_left_to_lift():
    _, built = layer_and_program()
    PassPipelineManager.apply_pipeline(built, ane.pipeline(passes="safe,split_conv_transpose_bias"))
    assert kinds(built)["add"] == 1 and kinds(built)["expand_dims"] == 0
