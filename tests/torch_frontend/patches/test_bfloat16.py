"""Models in bfloat16, which Core ML does not have, and in float16 that coremltools rejects."""

from __future__ import annotations

import logging
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch

import mil_ane_passes as ane
from mil_ane_passes.torch_frontend import NotConverted
from mil_ane_passes.torch_frontend.patches.bfloat16 import widen_bfloat16

from ..checks import captured, input_types, outputs

SAMPLE = torch.linspace(-2, 2, 16).reshape(2, 8)
MASKED = float(torch.finfo(torch.bfloat16).min)


class Block(torch.nn.Module):
    """Weights, a buffer, a constant, casts and a mask of bfloat16, at two precisions by its dtype."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dtype = dtype
        self.linear = torch.nn.Linear(8, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))
        self.bfloat16().to(dtype)  # both have the numbers of bfloat16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.linear(x.to(self.dtype)) * self.scale)
        mask = torch.full((2, 8), MASKED, dtype=self.dtype).triu(3)
        return torch.softmax(y + mask[:1], -1)


class Rounded(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.bfloat16).to(torch.float32) * 1.5


class Summed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2, 8, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x.to(torch.bfloat16))
        return self.total.float() * 2


def converted(program: Any, frontend: str, **options: Any) -> Any:
    return ane.convert(program, inputs=None if frontend in ("export", "training") else input_types([SAMPLE]),
                       skip_model_load=True, check=True, **{"minimum_deployment_target": ct.target.iOS16, **options})


def taken(module: torch.nn.Module, frontend: str) -> Any:
    if frontend == "training":
        return torch.export.export(module.eval(), (SAMPLE,))
    return captured(module.eval(), [SAMPLE], frontend)


@pytest.mark.parametrize("frontend", ["trace", "export", "training"])
def test_a_block_is_that_of_float32(frontend: str) -> None:
    model = converted(taken(Block(), frontend), frontend, compute_precision=ct.precision.FLOAT32)
    [found] = outputs(model, [SAMPLE])
    np.testing.assert_allclose(found, Block(torch.float32)(SAMPLE).detach(), atol=1e-5)
    with pytest.raises(AssertionError):  # the model itself is less exact
        np.testing.assert_allclose(found, Block()(SAMPLE).detach().float(), atol=1e-5)


@pytest.mark.parametrize("frontend", ["trace", "script", "export", "training"])
def test_casts_do_not_round(frontend: str) -> None:
    model = converted(taken(Rounded(), frontend), frontend, compute_precision=ct.precision.FLOAT32)
    np.testing.assert_allclose(outputs(model, [SAMPLE])[0], SAMPLE * 1.5, rtol=1e-6)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_the_result_at_fp16_passes_the_check(frontend: str) -> None:
    model = converted(taken(Block(), frontend), frontend)
    np.testing.assert_allclose(outputs(model, [SAMPLE])[0], Block(torch.float32)(SAMPLE).detach(), atol=0.01)


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_the_model_is_left_as_it_is(frontend: str) -> None:
    model = taken(Block(), frontend)
    printed = str(model.graph)
    converted(model, frontend)
    held = model.state_dict() if frontend == "trace" else model.state_dict
    assert str(model.graph) == printed
    assert len(held) == 5 and all(torch.equal(value, Block().state_dict()[name]) for name, value in held.items())


def test_a_warning_says_that_float32_is_used(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="mil_ane_passes"):
        converted(taken(Rounded(), "trace"), "trace")
    assert sum("bfloat16" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("frontend", ["trace", "script", "export", "training"])
def test_other_models_are_not_copied(frontend: str) -> None:
    model = taken(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), frontend)
    assert widen_bfloat16(model) is model


def test_flexible_sizes_stay_flexible() -> None:
    model = converted(captured(Block().eval(), [SAMPLE], "export", [0]), "export")
    assert outputs(model, [torch.zeros(5, 8)])[0].shape == (5, 8)


def test_states_are_kept() -> None:
    state = ct.StateType(ct.TensorType(shape=(2, 8), dtype=np.float16), name="total")
    model = converted(torch.jit.trace(Summed().eval(), SAMPLE), "trace", states=[state],
                      minimum_deployment_target=ct.target.iOS18)
    assert "total" in model._mil_program.functions["main"].inputs


def test_names_that_are_words_of_python_are_kept() -> None:
    """As of the argument of each layer of `torch.nn`."""
    program = torch.export.export(torch.nn.Linear(8, 8).bfloat16().eval(), (SAMPLE.bfloat16(),))
    model = converted(program, "export")
    assert [each.name for each in model.get_spec().description.input] == ["input"]


class Normalized(torch.nn.Module):
    """Layers of float16 that coremltools rejects: with a bias beside a weight, or an epsilon beside a gamma."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = torch.nn.Conv1d(2, 4, 3, padding=1)
        self.group, self.layer = torch.nn.GroupNorm(2, 4), torch.nn.LayerNorm(8)
        self.recurrent = torch.nn.LSTM(8, 8, batch_first=True)
        self.block = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(self.group(self.convolution(x[None].to(self.layer.weight.dtype))))
        return self.block(self.recurrent(y)[0])


@pytest.mark.parametrize("frontend", ["trace", "export"])
def test_a_model_of_float16_that_is_rejected_is_converted_as_one_in_float32(
    frontend: str, caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="mil_ane_passes"):
        model = converted(taken(Normalized(), frontend), frontend, compute_precision=ct.precision.FLOAT32)
    assert "the model computes in float16, in which it cannot be converted (op '" in caplog.text
    expected = Normalized().float().eval()(SAMPLE).detach()
    np.testing.assert_allclose(outputs(model, [SAMPLE])[0], expected, atol=1e-4)


def test_a_model_of_float16_that_is_not_rejected_stays_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="mil_ane_passes"):
        converted(taken(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).half(), "script"), "script")
    assert "float16" not in caplog.text


def test_an_op_that_is_not_implemented_is_named_for_float16_as_well() -> None:
    class Integral(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.trapezoid(super().forward(x))

    program = captured(Integral(8, 8).half().eval(), [SAMPLE.half()], "trace")
    with pytest.raises(NotConverted, match="op 'trapezoid'"):
        ane.convert(program, inputs=input_types([SAMPLE]), skip_model_load=True)
