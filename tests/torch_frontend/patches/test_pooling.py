"""Indices of the maxima of pools (`return_indices=True`), and unpooling to them."""

from __future__ import annotations

import coremltools as ct
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mil_ane_passes as ane
from mil_ane_passes.torch_frontend.errors import NotConverted

from ..checks import captured, check, convert

BOTH = pytest.mark.parametrize("frontend", ["trace", "export"])


def draw(*shape: int) -> torch.Tensor:
    """Few values, so that windows have ties, of which torch returns the first."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(0)).float()


@BOTH
@pytest.mark.parametrize(("shape", "kernel"), [
    ((2, 3, 8, 6), 2), ((1, 2, 9, 7), (3, 2)), ((2, 3, 7, 7), 3), ((3, 8, 6), 2), ((1, 1, 4, 4), 4)])
def test_places_in_an_image_are_those_of_torch(shape: tuple[int, ...], kernel: int, frontend: str) -> None:
    check(lambda x: F.max_pool2d(x, kernel, return_indices=True), draw(*shape), frontend=frontend)


@BOTH
@pytest.mark.parametrize("shape", [(2, 3, 9), (3, 8)])
def test_places_in_a_signal_are_those_of_torch(shape: tuple[int, ...], frontend: str) -> None:
    check(lambda x: F.max_pool1d(x, 3, return_indices=True), draw(*shape), frontend=frontend)


@BOTH
def test_places_alone_and_of_a_flexible_batch(frontend: str) -> None:
    check(lambda x: F.max_pool2d(x, 2, return_indices=True)[1] + 1, draw(2, 3, 6, 8), frontend=frontend, flexible=[0],
          at=[(draw(5, 3, 6, 8),)])


@BOTH
@pytest.mark.parametrize(("options", "flexible"), [
    ({"kernel_size": 3, "stride": 2}, []), ({"kernel_size": 2, "padding": 1}, []),
    ({"kernel_size": 2, "dilation": 2}, []), ({"kernel_size": 3, "ceil_mode": True}, []), ({"kernel_size": 2}, [2])])
def test_places_of_other_windows_are_refused(options: dict[str, int], flexible: list[int], frontend: str) -> None:
    with pytest.raises(NotConverted, match="returns indices of maxima .* in windows that overlap.*; use a stride"):
        convert(lambda x: F.max_pool2d(x, return_indices=True, **options), [draw(1, 2, 8, 8)], frontend,
                flexible=flexible, lowest=4)


class Segmenter(nn.Module):
    """The encoder and the decoder of ENet and SegNet: a pool, and its inverse by the places of the maxima."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 2, 3, padding=1)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, places = self.pool(self.first(x))
        return self.last(self.unpool(torch.relu(x), places))


@pytest.mark.parametrize("flexible", [False, True])
def test_a_segmenter_with_unpooling(flexible: bool) -> None:
    batch = torch.export.Dim("batch", min=1, max=4)
    exported = torch.export.export(Segmenter().eval(), (torch.randn(2, 3, 8, 12),),
                                   dynamic_shapes=({0: batch},) if flexible else None)
    model = ane.convert(exported, skip_model_load=True, minimum_deployment_target=ct.target.iOS16, check=True)
    assert "scatter_along_axis" in {op.op_type for op in model._mil_program.functions["main"].operations}


def test_unpooling_to_a_given_size_and_without_a_batch() -> None:
    def restore(x: torch.Tensor) -> torch.Tensor:
        maxima, places = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(maxima, places, 2, output_size=(7, 9))

    for shape in ((2, 3, 7, 9), (3, 7, 9)):
        check(restore, draw(*shape) + 5, frontend="export")


def test_pools_whose_places_nothing_reads_stay_pools() -> None:
    program = captured(lambda x: F.max_pool2d(x, 3, 2), [draw(1, 2, 8, 8)], "export")
    model = ane.convert(program, skip_model_load=True, minimum_deployment_target=ct.target.iOS16)
    assert "max_pool" in {op.op_type for op in model._mil_program.functions["main"].operations}
