"""Norms whose scale is computed have the values of torch."""

from __future__ import annotations

from typing import Optional

import coremltools as ct
import pytest
import torch
from torch.nn import functional as F

from ..checks import FRONTENDS, check


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_computed_weights_and_biases(frontend):
    def model(x: torch.Tensor, scale: torch.Tensor):
        fixed = torch.ones(4)
        return (F.layer_norm(x, [4], scale, scale * 2, 1e-3), F.layer_norm(x, [4], scale * 3),
                F.layer_norm(x, [4], None, scale), F.layer_norm(x, [4], fixed, fixed * 2),
                F.layer_norm(x, [3, 4], scale.expand(3, 4)))

    check(model, torch.randn(2, 3, 4), torch.randn(4), frontend=frontend)


def test_sizes_that_a_script_takes_from_the_input():
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.layer_norm(x, x.shape[1:]), F.layer_norm(x, [x.shape[1], 4], x[0] + 2.0, x[0])

    check(model, torch.randn(2, 3, 4), frontend="script", flexible=[1], at=[[torch.randn(2, 5, 4)]])


class Normalized(torch.nn.Module):
    """A norm with a weight, a bias, both or none, which are constant."""

    def __init__(self, kind: str, weight: bool, bias: bool, sizes: tuple[int, ...] = (4,)) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.kind = kind
        self.weight = torch.nn.Parameter(torch.rand(sizes, generator=generator) + 0.5, False) if weight else None
        self.bias = torch.nn.Parameter(torch.rand(sizes, generator=generator), False) if bias else None
        self.register_buffer("mean", torch.rand(sizes, generator=generator))
        self.register_buffer("var", torch.rand(sizes, generator=generator) + 0.5)
        self.sizes = list(sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Optional[torch.Tensor] = self.weight
        bias: Optional[torch.Tensor] = self.bias
        if self.kind == "layer":
            return F.layer_norm(x, self.sizes, weight, bias)
        if self.kind == "group":
            return F.group_norm(x, 2, weight, bias, 1e-3)
        if self.kind == "instance":
            return F.instance_norm(x, None, None, weight, bias)
        if self.kind == "instance statistics":
            return F.instance_norm(x, self.mean, self.var, weight, bias, False)
        if self.kind == "batch by input":
            return F.batch_norm(x, None, None, weight, bias, True)
        return F.batch_norm(x, self.mean, self.var, weight, bias)


SHAPES = {"rows": (3, 4), "series": (2, 4, 5), "images": (2, 4, 3, 5), "volumes": (1, 4, 2, 3, 2)}
NOT_CONVERTED = {("rows", "instance"): "torch has none", ("rows", "instance statistics"): "torch has none",
                 ("volumes", "group"): "its groups have rank 6, which only a pass of `ane.convert` lowers"}
KINDS = ("layer", "group", "instance", "instance statistics", "batch", "batch by input")


@pytest.mark.parametrize("weight, bias", [(False, True), (True, False)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_constant_weight_or_bias_alone(frontend, kind, weight, bias):
    for name, shape in SHAPES.items():
        if (name, kind) in NOT_CONVERTED:
            continue
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        check(Normalized(kind, weight, bias).eval(), x.movedim(1, -1) if kind == "layer" else x,
              frontend=frontend)


@pytest.mark.parametrize("weight, bias", [(False, True), (True, False)])
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_layer_norms_with_one_of_both(frontend, weight, bias):
    x = torch.randn(2, 3, 4)
    check(Normalized("layer", weight, bias, (3, 4)).eval(), x, frontend=frontend)
    check(Normalized("layer", weight, bias, (3, 4)).eval(), x, frontend=frontend, precision=ct.precision.FLOAT16,
          rtol=2e-3, atol=2e-3)  # the constants are rounded to fp16
    for target in (ct.target.iOS17, ct.target.iOS18):
        check(Normalized("layer", weight, bias).eval(), x, frontend=frontend, target=target)
    check(Normalized("layer", weight, bias).eval(), x, frontend=frontend, flexible=[0, 1], at=[[torch.randn(3, 5, 4)]])
