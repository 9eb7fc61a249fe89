"""What every builder needs: seeded weights of a sane size, and one way through ct.convert."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import coremltools as ct
    import torch


def seed_weights(
    model: torch.nn.Module, seed: int, bias: float = 0.1, gains: dict[str, float] | None = None
) -> torch.nn.Module:
    """Draw every parameter again, seeded: a layer keeps the deviation, a bias is +-(0.5..1) * `bias`.

    `gains` maps a part of a layer's name to what it shall multiply the deviation by.
    Fresh modules come with zero biases, or with alphas whose exponential is one; both let coremltools drop the very ops
    under test. Drawing here also keeps the values when a library changes its initialisation.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, module in model.named_modules():
            gain = next((value for part, value in (gains or {}).items() if part in path), 1.0)
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dim() >= 2:
                    draw = (
                        torch.randn(parameter.shape, generator=generator)
                        * gain
                        / _compute_fan_in(module, parameter) ** 0.5
                    )
                elif name == "bias":
                    size = 0.5 + 0.5 * torch.rand(parameter.shape, generator=generator)
                    draw = bias * size * torch.randn(parameter.shape, generator=generator).sign() + 0.0  # no -0
                else:  # the snakes' alpha and beta
                    draw = 0.3 * torch.randn(parameter.shape, generator=generator)
                parameter.copy_(draw)
    return model.eval()


def _compute_fan_in(module: torch.nn.Module, weight: torch.Tensor) -> float:
    """The number of products that make one output value."""
    if getattr(module, "transposed", False):
        return float(weight.shape[0] / module.groups * weight[0, 0].numel() / np.prod(module.stride))
    return float(weight[0].numel())


def make_example_input(shape: tuple[int, ...], seed: int, scale: float = 1.0, mean: float = 0.0) -> torch.Tensor:
    import torch

    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + mean


def convert_traced(
    model: torch.nn.Module,
    example: torch.Tensor,
    *,
    flexible: dict[int, tuple[int, int]] | None = None,
    pass_pipeline: ct.PassPipeline | None = None,
    **kwargs: Any,
) -> ct.models.MLModel:
    """Trace and convert. `flexible` maps an input axis to its lower and upper bound; `kwargs` override ct.convert's."""
    import coremltools as ct
    import torch

    with torch.no_grad():
        traced = torch.jit.trace(model.eval(), example, check_trace=False)
    shape: list[Any] = list(example.shape)
    for axis, (low, high) in (flexible or {}).items():
        shape[axis] = ct.RangeDim(low, high, default=example.shape[axis])
    arguments: dict[str, Any] = {
        "inputs": [ct.TensorType(name="input", shape=ct.Shape(shape), dtype=np.float32)],
        "convert_to": "mlprogram",
        "minimum_deployment_target": ct.target.iOS18,
        "skip_model_load": True,
        "pass_pipeline": pass_pipeline,
    }
    return ct.convert(traced, **{**arguments, **kwargs})


def summarize_equivalence(report: Any) -> str:
    """How a rewrite is verified, in a word; what was left out of it counts as not verified."""
    if report.left_out_passes:
        return "not verified: " + ", ".join(each.rule for each in report.left_out_passes)
    if not report.changed:
        return "nothing fired"
    return str(report.verify.exactness.value if report.verified else report.verify)
