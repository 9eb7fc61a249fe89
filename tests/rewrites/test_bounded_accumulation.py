"""ANE312: the published limit of sums no longer strikes, the numbers are PyTorch's, and nothing is done blindly."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given
from hypothesis import strategies as st

import mil_ane_passes as ane
from mil_ane_passes.passes.examples import build_program
from tests.rewrites.helpers import kinds

QUIRK = ["mac_overflow_32768"]


def cancelling(terms=64, size=1200.0):
    """Weights that go up beyond 32768 first and come back afterwards."""
    return np.concatenate([np.full(terms // 2, size), np.full(terms // 2, -size)]).astype(np.float16)


def linear(weight, bias=None, x=(2, 64)):
    return build_program(lambda x: mb.linear(x=x, weight=weight, bias=bias, name="y"), x=x)


def rewritten(before, feeds, **options):
    report = ane.rewrite(before, feeds=feeds, passes="bounded_accumulation", options={"bounded_accumulation": options})
    return report


def test_the_limit_strikes_before_and_not_after():
    weight = np.stack([cancelling(), -cancelling()])
    x = np.ones((2, 64), np.float16)
    x[1] = 0.9
    expected = torch.nn.functional.linear(*(torch.from_numpy(each.astype(np.float64)) for each in (x, weight))).numpy()
    before = linear(weight)
    struck = ane.run(before, {"x": x}, quirks=QUIRK)["y"]
    assert np.isinf(struck).all() and np.abs(expected).max() == 0
    report = rewritten(before, {"x": x})
    assert report.verified and report.changed
    cured = ane.run(report.package, {"x": x}, precision="float16", quirks=QUIRK)["y"]
    np.testing.assert_array_equal(cured, expected)


@pytest.mark.parametrize("layer, shape", [
    (lambda: torch.nn.Conv2d(16, 8, 3, padding=1, groups=2), (1, 16, 9, 9)),
    (lambda: torch.nn.Conv1d(16, 8, 5, stride=2), (1, 16, 20)),
    (lambda: torch.nn.ConvTranspose2d(16, 8, 3, stride=2), (1, 16, 5, 5)),
    (lambda: torch.nn.Linear(128, 16), (1, 40, 128)),
])
def test_layers_of_pytorch_that_sum_too_much(layer, shape):
    torch.manual_seed(0)
    module = layer().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_((parameter * 8).half())
    inputs = (torch.randn(shape) * 3000).half()
    traced = torch.jit.trace(module, inputs.float())
    feeds = {"x": inputs.numpy()}
    asked = {"inputs": [ct.TensorType("x", shape, dtype=np.float16)], "skip_model_load": True,
             "minimum_deployment_target": ct.target.iOS17}
    before = ct.convert(traced, **asked)._mil_program
    pipeline = ane.pipeline(passes="bounded_accumulation", feeds=feeds)
    after = ct.convert(traced, pass_pipeline=pipeline, **asked)._mil_program
    assert kinds(after)["mul"] in (1, 2) and kinds(before)["mul"] == 0
    expected = module.double()(inputs.double()).detach().numpy()
    assert np.abs(expected).max() < 65504
    name = after.functions["main"].outputs[0].name
    wrong = ane.run(before, feeds, precision="float16", quirks=QUIRK)[before.functions["main"].outputs[0].name]
    right = ane.run(after, feeds, precision="float16", quirks=QUIRK)[name]
    plain = ane.run(after, feeds, precision="float64")[name]
    assert not np.isfinite(wrong).all()
    np.testing.assert_allclose(right, expected, rtol=0, atol=2**-10 * np.abs(expected).max())
    np.testing.assert_allclose(plain, expected, rtol=1e-9, atol=1e-9 * np.abs(expected).max())


def test_ranges_do_for_feeds():
    weight = np.stack([cancelling(), -cancelling()])
    assert not ane.rewrite(linear(weight), ranges={"x": (-0.1, 0.1)}, passes="bounded_accumulation").changed
    assert ane.rewrite(linear(weight), ranges={"x": (-1, 1)}, passes="bounded_accumulation").changed


def test_without_measurements_nothing_is_done():
    report = ane.rewrite(linear(np.stack([cancelling(), -cancelling()])), passes="bounded_accumulation")
    assert not report.changed and not report.traces[0].near_misses


def test_a_result_beyond_fp16_is_no_case_for_it():
    report = rewritten(linear(np.full((1, 64), 1200, np.float16)), {"x": np.ones((2, 64), np.float16)})
    (miss,) = report.traces[0].near_misses
    assert not report.changed and miss.reason.startswith("the result itself reaches 7.68e+04")


def test_small_weights_keep_their_bits_because_x_is_scaled():
    weight = np.full((1, 64), 6e-8, np.float16)  # the smallest number of fp16: it has no half
    weight[0, :2] = 1000, -1000
    x = np.full((1, 64), 60, np.float16)
    report = rewritten(linear(weight, x=(1, 64)), {"x": x})
    assert report.verified and kinds(report.package)["mul"] == 2
    kept = next(op for op in report.package.functions["main"].operations if op.op_type == "linear").weight.val
    np.testing.assert_array_equal(kept, weight)


def test_sums_that_no_factor_in_fp16_brings_back_are_left_alone():
    weight = np.where(np.arange(64) % 2, -4096, 4096).astype(np.float16)[None]
    report = rewritten(linear(weight, x=(1, 64)), {"x": np.full((1, 64), 60000, np.float16)})
    (miss,) = report.traces[0].near_misses
    assert not report.changed and miss.reason.endswith("no power of two in fp16 brings them back")


def test_a_weight_that_others_read_is_not_stored_again():
    def body(x):
        weight = mb.const(val=np.tile(np.where(np.arange(64) % 2, -256, 256).astype(np.float16), (64, 1)))
        small = mb.linear(x=mb.mul(x=x, y=np.float16(2**-10)), weight=weight)
        return [mb.linear(x=x, weight=weight), small]

    before = build_program(body, x=(2, 64))
    report = rewritten(before, {"x": np.full((2, 64), 40, np.float16)})
    assert report.verified and len(report.traces[0].fired) == 1
    held = [op.outputs[0].val.size for op in report.package.functions["main"].operations if op.op_type == "const"]
    assert sum(size > 64 for size in held) == 1


def test_a_compressed_bias_of_a_convolution_is_left_alone():
    def body(x):
        bias = mb.constexpr_affine_dequantize(
            quantized_data=np.arange(8, dtype=np.int8), scale=np.float16(64), zero_point=np.int8(0), axis=0)
        return mb.conv(x=x, weight=np.full((8, 8, 3), 256, np.float16), bias=bias)

    report = rewritten(build_program(body, x=(1, 8, 5)), {"x": np.full((1, 8, 5), 10, np.float16)})
    (miss,) = report.traces[0].near_misses
    assert not report.changed and miss.reason.startswith("bias is compressed")


def test_a_bias_that_would_lose_bits_is_added_afterwards():
    weight = np.stack([cancelling(), -cancelling()])
    report = rewritten(linear(weight, bias=np.array([6e-8, 0], np.float16)), {"x": np.ones((2, 64), np.float16)})
    assert report.verified and kinds(report.package)["add"] == 1
    found = ane.run(report.package, {"x": np.ones((2, 64), np.float16)}, precision="float64")["y"]
    np.testing.assert_array_equal(found, np.tile(np.array([np.float16(6e-8), 0], np.float64), (2, 1)))


def test_matmul_of_two_computed_values():
    before = build_program(lambda x, z: mb.mul(x=mb.matmul(x=x, y=z, transpose_y=True), y=np.float16(0.5), name="y"),
                           x=(2, 3, 64), z=(2, 3, 64))
    random = np.random.default_rng(0)
    feeds = {name: (random.standard_normal((2, 3, 64)) * 50).astype(np.float16) for name in "xz"}
    report = rewritten(before, feeds)
    assert report.verified and report.changed
    expected = np.einsum("bik,bjk->bij", *(each.astype(np.float64) for each in feeds.values())) / 2
    assert not np.isfinite(ane.run(before, feeds, quirks=QUIRK)["y"]).all()
    found = ane.run(report.package, feeds, quirks=QUIRK)["y"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.law
@given(st.integers(0, 2**32 - 1), st.floats(1, 4000))
def test_whatever_was_measured_no_sum_passes_the_limit_afterwards(seed, size):
    random = np.random.default_rng(seed)
    weight = (random.standard_normal((4, 64)) * 64).astype(np.float16)
    feeds = {"x": (random.standard_normal((2, 64)) * size / 64).astype(np.float16)}
    before = linear(weight)
    exact = ane.run(before, feeds, precision="float64")["y"]
    report = rewritten(before, feeds)
    if np.abs(exact).max() < 60000:
        found = ane.run(report.package, feeds, quirks=QUIRK)["y"]
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-4 * np.abs(exact).max())
