"""Max pools with dilation, average pools with a divisor."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mil_ane_passes.torch_frontend import NotConverted

from ..checks import check

X = torch.randn(2, 3, 9, 8)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_dilation(frontend: str) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        plain = F.max_pool2d(x, 2)
        wide = F.max_pool2d(x, 2, 1, dilation=2), F.max_pool2d(x, 3, 2, 1, dilation=(2, 1), ceil_mode=True)
        return plain, *wide, F.max_pool1d(x[:, 0], 2, 3, dilation=3)

    check(model, X, frontend=frontend)
    check(lambda x: F.max_pool2d(x, 2, return_indices=True)[0], X, frontend=frontend)


def test_dilation_with_a_flexible_batch() -> None:
    check(lambda x: F.max_pool2d(x, 3, 2, 1, dilation=2), X, flexible=[0], at=[(torch.randn(5, 3, 9, 8) - 9,)])


def test_dilation_of_a_flexible_image_is_refused() -> None:
    with pytest.raises(NotConverted, match="dilation takes floats of known spatial sizes"):
        check(lambda x: F.max_pool2d(x, 2, dilation=2), X, flexible=[2])


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_a_divisor(frontend: str) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.avg_pool2d(x, 2, divisor_override=3), F.avg_pool2d(x, 3, 2, 1, divisor_override=1), F.avg_pool2d(x, 3)

    check(model, X, frontend=frontend)


def test_a_divisor_with_ceil_mode_is_refused() -> None:
    with pytest.raises(NotConverted, match="divisor_override with ceil_mode"):
        check(lambda x: F.avg_pool2d(x, 2, ceil_mode=True, divisor_override=3), X)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_a_window_behind_the_input_is_dropped(frontend: str) -> None:
    """With a stride above the kernel; MIL's shape rule counts it where there is no padding."""
    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one = x[:, 0]
        return (F.max_pool2d(x, 1, 2, ceil_mode=True), F.avg_pool2d(x, (2, 1), (5, 7), ceil_mode=True),
                F.avg_pool1d(one, 2, 6, ceil_mode=True), F.max_pool1d(one, 1, 4, ceil_mode=True),
                F.max_pool2d(x, 2, 3, ceil_mode=True), F.avg_pool2d(x, 3, 2, 1, ceil_mode=True))

    check(model, X, frontend=frontend)
    check(lambda x: F.max_pool3d(x, 1, 3, ceil_mode=True), torch.randn(1, 2, 4, 6, 7), frontend=frontend)


SIZES = [(torch.randn(2, 3, rows, columns),) for rows, columns in ((1, 2), (2, 1), (3, 5), (4, 4), (5, 7), (12, 13))]


@pytest.mark.parametrize("pool", [F.max_pool2d, F.avg_pool2d])
@pytest.mark.parametrize("kernel, stride", [(1, 2), (1, 3), (2, 3), ((1, 2), (4, 2)), ((2, 1), (5, 7))])
def test_a_window_behind_a_flexible_size_is_dropped(pool, kernel, stride) -> None:
    reach = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    sizes = [size for size in SIZES if all(have >= need for have, need in zip(size[0].shape[-2:], reach))]
    check(lambda x: pool(x, kernel, stride, ceil_mode=True), X, flexible=[2, 3], at=sizes)


def test_a_window_behind_a_padded_flexible_size_is_refused() -> None:
    with pytest.raises(NotConverted, match="ceil_mode with padding and a stride above the kernel, on a flexible size"):
        check(lambda x: F.max_pool2d(x, (2, 1), (1, 3), (1, 0), ceil_mode=True), X, flexible=[3])
    check(lambda x: F.max_pool2d(x, 2, ceil_mode=True), X, flexible=[2])
