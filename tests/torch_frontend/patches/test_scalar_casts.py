"""Sizes as numbers, traced, scripted and exported."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import coremltools as ct
import pytest
import torch
import torch.nn.functional as F

from ..checks import check

X = torch.arange(24.0).reshape(2, 4, 3)
Y = torch.arange(45.0).reshape(3, 5, 3)
EACH = pytest.mark.parametrize(("frontend", "flexible"), [("trace", ()), ("trace", (0, 1)), ("script", ()),
                                                          ("script", (0, 1)), ("export", ())])


def both(function: object, frontend: str, flexible: tuple[int, ...]) -> None:
    check(function, X, frontend=frontend, flexible=flexible, at=[[Y]] if flexible else [])


@EACH
def test_unpacked_sizes(frontend: str, flexible: tuple[int, ...]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        a, b, _ = x.shape
        return torch.zeros([a, b]) + x[:, :, 0]

    both(function, frontend, flexible)


@EACH
def test_arithmetic_of_sizes(frontend: str, flexible: tuple[int, ...]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        half = int(x.shape[1] // 2)
        return x[:, :half] * (x.shape[0] * 2 - 1) + x[:, half:half * 2].reshape(x.shape[0], half, -1)

    both(function, frontend, flexible)


@EACH
def test_arange_of_a_size(frontend: str, flexible: tuple[int, ...]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(x.shape[1]).unsqueeze(1) + torch.arange(1, x.shape[0] * 2, 2).reshape(-1, 1, 1)

    both(function, frontend, flexible)


def test_extremes_of_exported_sizes() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        rows = min(x.shape[1], 6)
        padded = torch.nn.functional.pad(x[:, :rows], (0, 0, 0, max(16 - x.shape[1], 0)))
        return padded.sum(1) * max(x.shape[1], 3)

    check(function, torch.randn(2, 8, 3), frontend="export", flexible=[1], lowest=7, at=[(torch.randn(2, 20, 3),)])


@EACH
def test_root_of_a_size(frontend: str, flexible: tuple[int, ...]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x / math.sqrt(x.shape[2]) * float(x.shape[0] + 1)

    check(function, X, frontend=frontend)


@pytest.mark.parametrize("frontend", ["trace", "script"])
def test_numbers_of_one_element_tensors(frontend: str) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("size", torch.tensor([2]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * int(self.size)

    check(Model().eval(), X, frontend=frontend)


def round_of_script(x: torch.Tensor) -> torch.Tensor:
    """Round in all forms that torch.jit.script supports; there `round` gives a float."""
    size = x.shape[2]
    return x[:, :, math.floor(size / 5):math.floor(size / 5) + math.ceil(size / 3)] * math.ceil(size / 2 + 0.25) \
        + x[:, :, :1].expand(2, 4, math.ceil(size / 3)) * int(round(size / 4))


def pad_to_multiple(x: torch.Tensor, axes: tuple[int, ...], multiple: int) -> torch.Tensor:
    widths = []
    for axis in axes:
        widths += [0, math.ceil(x.shape[axis] / multiple) * multiple - x.shape[axis]]
    return F.pad(x, widths)


ROUNDED: dict[str, Callable[..., Any]] = {
    "ceil": lambda x: torch.arange(math.ceil(x.shape[2] / 3)),
    "floor": lambda x: torch.arange(math.floor(x.shape[2] / 7)),
    "trunc": lambda x: torch.arange(20 + math.trunc((x.shape[2] - 40) / 3)),
    "round to even": lambda x: torch.arange(round(x.shape[2] / 4)),
    "round to even below 0": lambda x: torch.arange(20 + round((x.shape[2] - 40) / 6)),
    "round": lambda x: torch.arange(round(x.shape[2] / 3)),
    "ceil below 0": lambda x: torch.arange(20 + math.ceil((x.shape[2] - 40) / 3)),
    "negative divisor": lambda x: torch.arange(-math.ceil(x.shape[2] / -3) - math.floor(x.shape[2] / -4)),
    "float divisor": lambda x: torch.arange(math.ceil(x.shape[2] / 3.0)),
    "computed divisor": lambda x: torch.arange(math.ceil(x.shape[2] * 5 / (x.shape[2] - 20))),
    "twice": lambda x: torch.arange(math.ceil(math.ceil(x.shape[2] / 3) / 2)),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_quotients_are_computed_in_integers(name: str) -> None:
    mlmodel = check(ROUNDED[name], torch.ones(1, 2, 50), frontend="export", flexible=[2], lowest=24,
                    at=[(torch.ones(1, 2, size),) for size in range(24, 65)])
    main = mlmodel._mil_program.functions["main"]
    assert not {"real_div", "ceil", "floor", "round"} & {op.op_type for op in main.operations}


@pytest.mark.parametrize("function", [
    lambda x: x[:, :, :math.ceil(x.shape[2] / 3)],
    lambda x: x[:, :, :1].expand(1, 2, round(x.shape[2] / 2)) * math.ceil(x.shape[2] / 3),
    lambda x: pad_to_multiple(x, (2,), 6).view(1, 2, math.ceil(x.shape[2] / 6), 6),
    lambda x: torch.arange(math.floor(x.shape[2] * 0.75)).sum() * x + round((x.shape[2] - 3) / 2 + 0.25),
    lambda x: x * round(x.shape[2] / 3, 2),
], ids=["slice", "expand", "view", "product", "decimals"])
@pytest.mark.parametrize("precision", [ct.precision.FLOAT32, ct.precision.FLOAT16])
def test_exported_rounded_sizes_are_ints(function: Callable[..., Any], precision: Any) -> None:
    check(function, torch.ones(1, 2, 50), frontend="export", flexible=[2], lowest=24, precision=precision, rtol=1e-3,
          at=[(torch.ones(1, 2, size),) for size in range(24, 65)])


@pytest.mark.parametrize("flexible", [(), (2,)])
def test_scripted_rounded_sizes_are_ints(flexible: tuple[int, ...]) -> None:
    check(round_of_script, torch.randn(2, 4, 30), frontend="script", flexible=flexible, lowest=5,
          at=[(torch.randn(2, 4, size),) for size in range(5, 64)] if flexible else ())


@pytest.mark.parametrize("shorten", [
    lambda x: F.avg_pool1d(F.avg_pool1d(x, 2), 4),
    lambda x: F.conv1d(F.conv1d(x, torch.ones(3, 2, 4), stride=2, padding=1), torch.ones(3, 3, 4), stride=4),
], ids=["pool", "conv"])
@pytest.mark.parametrize("target", [ct.target.iOS15, ct.target.iOS18])
def test_padding_to_a_multiple_before_two_strided_layers(shorten: Callable[..., Any], target: Any) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        short = shorten(pad_to_multiple(x, (2,), 8))
        return F.normalize(short, dim=1), short.mean(1, keepdim=True).expand_as(short)

    check(function, torch.randn(1, 2, 50), frontend="export", flexible=[2], lowest=24, target=target,
          at=[(torch.randn(1, 2, size),) for size in range(24, 65)])


def test_padding_of_images_to_a_multiple_before_two_strided_layers() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.normalize(F.max_pool2d(F.max_pool2d(pad_to_multiple(x, (3, 2), 8), 2), 4), dim=1)

    check(function, torch.randn(1, 2, 50, 40), frontend="export", flexible=[2, 3], lowest=24,
          at=[(torch.randn(1, 2, height, width),) for height, width in ((24, 64), (25, 63), (31, 48), (33, 57))])
