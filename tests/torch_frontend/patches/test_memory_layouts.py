"""Exported programs do not depend on the layout of their example inputs."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch

import mil_ane_passes as ane


@pytest.mark.parametrize("flexible", [False, True])
@pytest.mark.parametrize("layout", ["channels last", "transposed"])
def test_values_are_those_of_torch(layout, flexible):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(2)).eval()
    example = torch.randn(2, 3, 6, 8)
    example = example.to(memory_format=torch.channels_last) if layout == "channels last" else (
        torch.randn(2, 3, 8, 6).transpose(2, 3))
    dynamic = ({2: torch.export.Dim("height", min=2, max=16)},) if flexible else None
    exported = torch.export.export(model, (example,), dynamic_shapes=dynamic).run_decompositions({})
    mlmodel = ane.convert(exported, skip_model_load=True, compute_precision=ct.precision.FLOAT32,
                          minimum_deployment_target=ct.target.iOS17)
    x = torch.randn(2, 3, 9 if flexible else 6, 8)
    (name,) = (each.name for each in mlmodel.get_spec().description.input)
    (found,) = ane.run(mlmodel, {name: x.numpy()}, precision="float32").values()
    np.testing.assert_allclose(found, model(x).detach().numpy(), atol=1e-5)
    first = next(iter(exported.graph_module.graph.nodes))
    placeholders = [node.meta["val"] for node in exported.graph_module.graph.nodes if node.op == "placeholder"]
    assert first.op == "placeholder" and not placeholders[-1].is_contiguous(), "the program is not changed"
