"""ANE401: the parts are the whole, against what the tables and scales say in NumPy."""

from __future__ import annotations

from functools import partial

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.runtime import Runtime
from tests.rewrites.helpers import configure_rewrite, kinds

NAME = "split_grouped_palettized_conv"


rule = partial(configure_rewrite, NAME)


def blown_up(array, shape):
    for axis, extent in enumerate(shape):
        array = np.repeat(array, extent // array.shape[axis], axis)
    return array


def drawn(shape, lut_blocks, scale_blocks, bits=4):
    """Indices, tables, scales, and the weight they stand for in double precision."""
    random = np.random.default_rng(0)
    indices = random.integers(0, 2**bits, shape)
    lut = random.standard_normal((*lut_blocks, 2**bits)).astype(np.float16)
    scale = random.uniform(0.5, 2, scale_blocks).astype(np.float16)
    tables = np.stack([blown_up(lut[..., entry], shape) for entry in range(2**bits)], axis=-1)
    dense = np.take_along_axis(tables.astype(np.float64), indices[..., None], -1)[..., 0]
    return indices, lut[..., None], scale, dense * blown_up(scale.astype(np.float64), shape)


def convolution(shape, lut_blocks, scale_blocks, groups, bias=None, **parameters):
    indices, lut, scale, dense = drawn(shape, lut_blocks, scale_blocks)

    def body(x):
        weight = mb.constexpr_lut_to_dense(indices=indices.astype(types.np_uint4_dtype), lut=lut)
        if scale.size > 1:
            weight = mb.constexpr_blockwise_shift_scale(data=weight, scale=scale)
        given = {} if bias is None else {"bias": bias}
        return mb.conv(x=x, weight=weight, groups=groups, name="y", **given, **parameters)

    made = build_program(body, opset=ct.target.iOS18, x=(2, shape[1] * groups, *[7] * (len(shape) - 2)))
    return made, dense if scale.size > 1 else dense / scale.astype(np.float64)


def held(made, dense, groups, bias, strides):
    x = np.random.default_rng(1).standard_normal(made.functions["main"].inputs["x"].shape).astype(np.float16)
    apply = torch.nn.functional.conv1d if dense.ndim == 3 else torch.nn.functional.conv2d
    expected = apply(torch.from_numpy(x.astype(np.float64)), torch.from_numpy(dense),
                     None if bias is None else torch.from_numpy(bias.astype(np.float64)), stride=strides,
                     groups=groups).numpy()
    found = Runtime(made, precision="float64")({"x": x.astype(np.float32)})["y"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11)


CASES = {
    "as published": ((64, 64, 1, 1), (1, 1, 1, 1), (64, 2, 1, 1), 1, 2),
    "tables": ((8, 12, 3, 3), (2, 3, 1, 1), (1, 1, 1, 1), 1, 3),
    "tables and scales": ((8, 12, 3), (1, 2, 1), (8, 4, 1), 1, 4),
    "groups": ((8, 3, 3, 3), (4, 1, 1, 1), (1, 1, 1, 1), 4, 4),
    "groups and scales by channel": ((8, 3, 3), (1, 1, 1), (8, 1, 1), 2, 2),
    "groups of blocks": ((8, 4, 1, 1), (2, 2, 1, 1), (1, 1, 1, 1), 2, 4),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_parts_are_the_whole(case, with_bias):
    shape, lut_blocks, scale_blocks, groups, parts = CASES[case]
    bias = np.linspace(-1, 1, shape[0]).astype(np.float16) if with_bias else None
    strides = [2] * (len(shape) - 2)
    made, dense = convolution(shape, lut_blocks, scale_blocks, groups, bias, strides=strides)
    held(made, dense, groups, bias, strides)
    assert apply_rewrite(rule(), made).fired
    counted = kinds(made)
    assert (counted["conv"], counted["constexpr_lut_to_dense"]) == (parts, parts)
    assert all(op.groups.val == 1 for _, op in iterate_ops(made) if op.op_type == "conv")
    assert not find_matches(rule(), made).fired
    held(made, dense, groups, bias, strides)


def test_the_indices_take_as_many_bits_as_before_and_are_stored_once(tmp_path):
    made, _ = convolution((64, 64, 3, 3), (1, 2, 1, 1), (1, 1, 1, 1), 1)
    sizes = {}
    for name, passes in (("before", None), ("after", NAME)):
        model = ct.convert(made, skip_model_load=True, minimum_deployment_target=ct.target.iOS18,
                           pass_pipeline=ct.PassPipeline.EMPTY if passes is None
                           else ane.pipeline(ct.PassPipeline.EMPTY, passes=passes))
        model.save(str(tmp_path / f"{name}.mlpackage"))
        sizes[name] = (tmp_path / f"{name}.mlpackage/Data/com.apple.CoreML/weights/weight.bin").stat().st_size
    assert kinds(ane.load(tmp_path / "after.mlpackage").program)["conv"] == 2
    assert sizes["after"] - sizes["before"] < 1024


def test_what_coremltools_palettizes_in_groups_of_input_channels(tmp_path):
    """granularity per_grouped_channel along the input channels, from a saved package and back."""
    cto = ct.optimize.coreml
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(32, 64, 3).eval()
    model = ct.convert(torch.jit.trace(layer, torch.zeros(1, 32, 8, 8)), inputs=[ct.TensorType("x", (1, 32, 8, 8))],
                       minimum_deployment_target=ct.target.iOS18, skip_model_load=True)
    config = cto.OpPalettizerConfig(mode="uniform", nbits=4, granularity="per_grouped_channel", group_size=16,
                                    channel_axis=1, weight_threshold=0)
    cto.palettize_weights(model, cto.OptimizationConfig(global_config=config)).save(str(tmp_path / "m.mlpackage"))
    program_ = ane.load(tmp_path / "m.mlpackage").program
    x = {"x": np.random.default_rng(0).standard_normal((1, 32, 8, 8)).astype(np.float32)}
    (before,) = Runtime(program_, precision="float64")(x).values()
    assert apply_rewrite(rule(), program_).fired
    assert kinds(program_)["conv"] == 2
    (after,) = Runtime(program_, precision="float64")(x).values()
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-12)


def test_the_form_of_ios16_is_no_candidate():
    made = build_program(
        lambda x: mb.conv(x=x, weight=mb.constexpr_lut_to_dense(
            indices=np.zeros(8, np.uint8), lut=np.zeros(16, np.float16), shape=np.array([4, 4, 1], np.uint32))),
        x=(1, 4, 5))
    trace = find_matches(rule(), made)
    assert not trace.fired and not trace.near_misses


@pytest.mark.parametrize(("second", "fires"), [({}, 2), ({"groups": 2}, 0)])
def test_a_weight_that_others_read_is_not_stored_twice(second, fires):
    indices, lut, _, _ = drawn((8, 8, 1, 1), (1, 2, 1, 1), (1, 1, 1, 1))

    def body(x, z):
        weight = mb.constexpr_lut_to_dense(indices=indices.astype(types.np_uint4_dtype), lut=lut)
        return mb.conv(x=x, weight=weight, name="y"), mb.conv(x=z, weight=weight, name="w", **second)

    made = build_program(body, opset=ct.target.iOS18, x=(1, 8, 3, 3), z=(1, 8 * second.get("groups", 1), 3, 3))
    trace = apply_rewrite(rule(), made)
    assert len(trace.fired) == fires
    assert {miss.reason for miss in trace.near_misses} <= {
        "weight has other users, so its parts would be stored in addition"}
    assert kinds(made)["constexpr_lut_to_dense"] == (2 if fires else 1)
