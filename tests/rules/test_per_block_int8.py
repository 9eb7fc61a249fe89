"""ANE402 on what coremltools' own quantizer writes."""

from __future__ import annotations

import coremltools as ct
import pytest
import torch

import mil_ane_passes as ane
from mil_ane_passes.passes.engine import find_matches
from mil_ane_passes.passes.registry import get_all_rules


def quantized(tmp_path, **how):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Conv2d(64, 32, 1), torch.nn.Flatten(2), torch.nn.Linear(64, 96)).eval()
    model = ct.convert(torch.jit.trace(layers, torch.zeros(1, 64, 8, 8)), inputs=[ct.TensorType("x", (1, 64, 8, 8))],
                       minimum_deployment_target=ct.target.iOS18, skip_model_load=True)
    cto = ct.optimize.coreml
    config = cto.OptimizationConfig(global_config=cto.OpLinearQuantizerConfig(weight_threshold=0, **how))
    cto.linear_quantize_weights(model, config).save(str(tmp_path / "m.mlpackage"))
    return find_matches(get_all_rules()["per_block_int8"](), ane.load(tmp_path / "m.mlpackage").program)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_blocks_are_found_and_counted(dtype, tmp_path):
    found = quantized(tmp_path, mode="linear_symmetric", dtype=dtype, granularity="per_block", block_size=16).fired
    assert [(hit.op, hit.reason) for hit in found] == [
        (kind, f"{dtype} weight with one scale per 16 of 64 input channels; palettize, or quantize per output "
               "channel") for kind in ("conv", "linear")]


def test_scales_by_output_channel_are_no_finding(tmp_path):
    trace = quantized(tmp_path, mode="linear_symmetric", dtype="int8", granularity="per_channel")
    assert not trace.fired and not trace.near_misses, "the ordinary form is not almost one"
