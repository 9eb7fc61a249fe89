"""Exported programs whose arguments are not all tensors."""

from __future__ import annotations

import coremltools as ct
import torch

import mil_ane_passes as ane


def test_arguments_that_are_no_tensors_are_constants():
    class Model(torch.nn.Module):
        def forward(self, x, mask, count: int, *, bias=None, scale=1.0, cached=False):
            assert mask is None and not cached
            return (x * scale + bias).repeat(1, count), {"size": x.shape[1], "sum": x.sum(1)}

    exported = torch.export.export(Model().eval(), (torch.randn(2, 3), None, 2),
                                   kwargs={"bias": torch.randn(3), "scale": 2.0, "cached": False})
    mlmodel = ane.convert(exported, minimum_deployment_target=ct.target.iOS16, check=True)
    description = mlmodel.get_spec().description
    assert [each.name for each in description.input] == ["x", "bias"]
    assert [tuple(each.type.multiArrayType.shape) for each in description.output] == [(2, 6), (2,)]
    assert ane.verify(exported, mlmodel).equal
