"""`atan2` gives the angles of torch where a part is zero, of ints, and in fp16."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch

from ..checks import check, convert, outputs

PARTS = torch.tensor([0.0, 1.0, -1.0, 2.5, -3.0, 1e-12, -1e-12, 1e9, -1e9])
Y, X = (part.contiguous() for part in torch.meshgrid(PARTS, PARTS, indexing="ij"))
FRONTENDS = pytest.mark.parametrize("frontend", ["trace", "export"])


@FRONTENDS
def test_all_quadrants_and_axes(frontend: str) -> None:
    check(lambda y, x: torch.atan2(y, x) + torch.arctan2(y, x), Y, X, frontend=frontend)


@FRONTENDS
def test_operands_of_other_shapes(frontend: str) -> None:
    check(torch.atan2, PARTS[:, None, None], torch.stack([PARTS, PARTS.flip(0)]), frontend=frontend)
    check(lambda y: torch.atan2(y, torch.tensor(-1.0)), PARTS, frontend=frontend)


@FRONTENDS
def test_whole_numbers(frontend: str) -> None:
    check(torch.atan2, *(part.clamp(-5, 5).round().int() for part in (Y, X)), frontend=frontend)


@FRONTENDS
def test_the_phase_of_a_spectrum_whose_first_bin_is_real(frontend: str) -> None:
    def phase(x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.view_as_real(torch.fft.rfft(x))
        return torch.atan2(spectrum[..., 1].abs(), spectrum[..., 0])

    check(phase, torch.tensor([[-1.0, -2.0, -1.5, -4.0], [1.0, 2.0, 0.5, 0.25]]), frontend=frontend, atol=1e-4)


def test_zeros_and_pi_in_fp16() -> None:
    y, x = torch.tensor([0.0, 0.0, 0.0, 3.0, -3.0]), torch.tensor([0.0, -2.0, 2.0, 0.0, 0.0])
    model = convert(torch.atan2, [y, x], precision=ct.precision.FLOAT16)
    found, = outputs(model, [y, x], precision="float16")
    np.testing.assert_allclose(found, torch.atan2(y, x), atol=2e-3)
