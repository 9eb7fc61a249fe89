"""Exported programs as torch.export.export returns them."""

from __future__ import annotations

import warnings

import coremltools as ct
import numpy as np
import pytest
import torch
from torch import nn

import mil_ane_passes as ane
from mil_ane_passes.torch_frontend.errors import NotConverted

from ..checks import outputs


@pytest.mark.filterwarnings("ignore")
def test_converts_and_is_left_as_it_is() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)).eval()
    x = torch.randn(1, 2, 4, 4)
    program = torch.export.export(model, (x,))
    before = (program.dialect, str(program.graph))
    with ane.torch_frontend.patched():
        mlmodel = ct.convert(program, skip_model_load=True, minimum_deployment_target=ct.target.iOS16,
                             compute_precision=ct.precision.FLOAT32)
    assert (program.dialect, str(program.graph)) == before
    np.testing.assert_allclose(outputs(mlmodel, [x])[0], model(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_flexible_size() -> None:
    batch = torch.export.Dim("batch", min=2, max=9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(nn.ReLU(), (torch.ones(3, 2),), dynamic_shapes=({0: batch},))
    with ane.torch_frontend.patched():
        mlmodel = ct.convert(program, skip_model_load=True, minimum_deployment_target=ct.target.iOS16)
    x = torch.randn(5, 2)
    np.testing.assert_allclose(outputs(mlmodel, [x])[0], x.relu().numpy(), rtol=1e-3, atol=1e-3)


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.argmax(1, keepdim=True).to(torch.float32)


def test_what_export_checked_of_a_type_leaves_no_op() -> None:
    x = torch.randn(3, 4)
    program = torch.export.export(Scaled(), (x,))
    assert "_assert_tensor_metadata" in str(program.graph)
    with ane.torch_frontend.patched():
        mlmodel = ct.convert(program, skip_model_load=True, minimum_deployment_target=ct.target.iOS16,
                             compute_precision=ct.precision.FLOAT32)
    np.testing.assert_allclose(outputs(mlmodel, [x])[0], Scaled()(x).numpy(), rtol=1e-5)


class Windowed(nn.Module):
    """Rows of a table around its middle, as of DeBERTa, whose number is computed of a size."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = torch.tensor(min(x.shape[1], 32))
        return x @ self.table[32 - count:32 + count].t()


def test_what_export_checked_of_a_slice_leaves_no_op() -> None:
    model, x = Windowed().eval(), torch.randn(1, 6, 8)
    length = torch.export.Dim("length", min=2, max=32)
    program = torch.export.export(model, (x,), dynamic_shapes=({1: length},), strict=False)
    assert "sym_storage_offset" in str(program.graph)
    mlmodel = ane.convert(program, skip_model_load=True, minimum_deployment_target=ct.target.iOS16,
                          compute_precision=ct.precision.FLOAT32, check=True)
    for rows in (2, 9, 32):
        x = torch.randn(1, rows, 8)
        np.testing.assert_allclose(outputs(mlmodel, [x])[0], model(x).detach().numpy(), rtol=1e-4, atol=1e-5)


class Placed(Windowed):
    """Adds the place of the rows in the memory of the table, which a converted program does not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = torch.tensor(min(x.shape[1], 32))
        rows = self.table[32 - count:32 + count]
        return x @ rows.t() + rows.storage_offset()


def test_a_place_in_memory_that_an_op_reads_is_refused() -> None:
    length = torch.export.Dim("length", min=2, max=32)
    program = torch.export.export(Placed().eval(), (torch.randn(1, 6, 8),), dynamic_shapes=({1: length},), strict=False)
    with pytest.raises(NotConverted, match="^op 'sym_storage_offset'.* reads the storage offset .*; compute "):
        ane.convert(program, skip_model_load=True)
