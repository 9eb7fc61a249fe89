"""torch.fft with and without its arguments, and the conjugate."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from tests.torch_frontend.checks import check  # noqa: E402

torch.manual_seed(0)
X = torch.randn(2, 4, 6)


@pytest.mark.parametrize("frontend", ["trace", "script", "export"])
@pytest.mark.parametrize("name", ["fft", "fft2", "fftn", "rfft", "rfft2", "rfftn"])
def test_forward_with_default_arguments(frontend, name):
    transform = getattr(torch.fft, name)

    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = transform(x)
        return y.real, y.imag

    check(model, X, frontend="trace" if frontend == "script" else frontend, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_sizes_axes_and_norm(frontend):
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.fft.rfft(x, n=4, dim=1, norm="ortho").imag, torch.fft.fftn(x, s=(2, 8), norm="forward").real

    check(model, X, frontend=frontend, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_back_and_forth(frontend):
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.fft.irfft(torch.fft.rfft(x)), torch.fft.ifft2(torch.fft.fft2(x)).real

    check(model, X, frontend=frontend, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["irfft", "ifft2"])
def test_the_inverse_of_real_numbers(name):
    transform = getattr(torch.fft, name)
    check(lambda x: transform(x) if name == "irfft" else transform(x).real, X, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_the_conjugate(frontend):
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.conj(torch.fft.fft(x)).resolve_conj()
        return y.real, y.imag

    check(model, X, frontend=frontend, rtol=1e-3, atol=1e-4)
