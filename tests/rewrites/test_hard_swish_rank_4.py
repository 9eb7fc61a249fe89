"""ANE321: linear layers of rank 2 with a hard swish, against PyTorch's own."""

from __future__ import annotations

from functools import partial

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.optimize.coreml import OpLinearQuantizerConfig, OptimizationConfig, linear_quantize_weights
from hypothesis import given
from hypothesis import strategies as st

import mil_ane_passes as ane
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.passes.contract import Exactness
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.runtime import Runtime
from tests.conversions import convert_model
from tests.rewrites.helpers import configure_rewrite, kinds

NAME = "hard_swish_rank_4"
SPELLINGS = {
    "module": torch.nn.functional.hardswish,
    "relu6": lambda x: x * torch.nn.functional.relu6(x + 3) / 6,
    "hardsigmoid": lambda x: x * torch.nn.functional.hardsigmoid(x),
    "clamp": lambda x: x * torch.clamp(x + 3, 0, 6) * (1 / 6),
}
rule = partial(configure_rewrite, NAME)


class Classifier(torch.nn.Module):
    """Two linear layers with a hard swish between them, as in MobileNetV3."""

    def __init__(self, activation, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(24, 40, bias=bias), torch.nn.Linear(40, 6)
        self.activation = activation

    def forward(self, x):
        return self.second(self.activation(self.first(x)))


def ranks_of_hard_swish(program):
    gates = ("sigmoid_hard", "relu6", "clip")
    return {op.outputs[0].rank for _, op in iterate_ops(program) if op.op_type in gates}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_converted_classifiers_are_pytorchs(spelling, bias):
    module, x = Classifier(SPELLINGS[spelling], bias).eval(), 4 * torch.randn(3, 24)
    made = convert_model(module, x, names="x", pass_pipeline=ane.pipeline())
    program = made._mil_program
    assert ranks_of_hard_swish(program) == {4} and kinds(program)["linear"] == 1
    (found,) = ane.run(made, {"x": x.numpy()}).values()
    wanted = module(x).detach().numpy()
    assert np.abs(found - wanted).max() <= 2e-3 * np.abs(wanted).max()
    assert not find_matches(rule(), program).fired


@pytest.mark.law
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.booleans(), st.booleans(), st.booleans(),
       st.integers(0, 2**31))
def test_products_with_transposed_operands_are_pytorchs(rows, width, outputs, turned, weight_first, open_rows, seed):
    random = np.random.default_rng(seed)
    weight = random.uniform(-3, 3, (outputs, width)).astype(np.float16)

    def body(x):
        if weight_first:
            made = mb.matmul(x=weight, y=x, transpose_y=True)
        else:
            made = mb.matmul(x=x, y=weight if turned else np.ascontiguousarray(weight.T), transpose_y=turned)
        gate = mb.sigmoid_hard(x=made, alpha=np.float16(1 / 6), beta=np.float16(0.5))
        return mb.mul(x=gate, y=made, name="y")

    held = build_program(body, x=(None if open_rows else rows, width))
    x = random.uniform(-1, 1, (rows, width)).astype(np.float16)
    feeds = {"x": x.astype(np.float32)}
    before = {precision: Runtime(held, precision=precision)(feeds)["y"] for precision in ("float16", "float64")}
    result = apply_rewrite(rule(), held)
    assert result.fired and result.strength is Exactness.BITWISE
    product = x.astype(np.float64) @ weight.T.astype(np.float64)
    product = product.T if weight_first else product
    gate = np.clip(float(np.float16(1 / 6)) * product + 0.5, 0, 1)
    for precision, old in before.items():
        np.testing.assert_array_equal(Runtime(held, precision=precision)(feeds)["y"], old)
    np.testing.assert_allclose(before["float64"], product * gate, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["linear_symmetric", "linear"])
def test_compressed_weights_stay_compressed(mode, tmp_path):
    module, x = Classifier(torch.nn.functional.hardswish).eval(), torch.randn(2, 24)
    made = convert_model(module, x, names="x", minimum_deployment_target=ct.target.iOS17)
    config = OptimizationConfig(OpLinearQuantizerConfig(mode=mode, weight_threshold=0))
    linear_quantize_weights(made, config).save(str(tmp_path / "before.mlpackage"))
    report = ane.rewrite(tmp_path / "before.mlpackage", tmp_path / "after.mlpackage")
    assert NAME in str(report)
    before, after = (ane.load(tmp_path / f"{each}.mlpackage").program for each in ("before", "after"))
    assert ranks_of_hard_swish(after) == {4}
    for program in (before, after):
        assert kinds(program)["constexpr_affine_dequantize"] == 2
    sizes = [sum(file.stat().st_size for file in (tmp_path / f"{each}.mlpackage").rglob("weight.bin"))
             for each in ("before", "after")]
    assert sizes[0] == sizes[1]


def test_a_layer_outside_the_block_is_left_alone():
    def body(x, c):
        made = mb.linear(x=x, weight=np.ones((4, 8), np.float16))

        def activate():
            return mb.mul(x=made, y=mb.sigmoid_hard(x=made, alpha=np.float16(1 / 6), beta=np.float16(0.5)))

        return mb.cond(pred=mb.greater(x=mb.reduce_sum(x=c), y=np.float16(0)), _true_fn=activate,
                       _false_fn=lambda: mb.relu(x=made), name="y")

    trace = find_matches(rule(), build_program(body, x=(2, 8), c=(2,)))
    assert not trace.fired
    assert [miss.reason for miss in trace.near_misses] == [
        "the linear layer and its hard swish are in different blocks"]
