"""Models that were captured in training mode are rejected, or named in a warning."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mil_ane_passes as ane

from .checks import input_types, outputs
from .test_checking import Adapted

X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Identity(), layer)

    def forward(self, x: torch.Tensor) -> Any:
        return self.block(x)


class WithoutGradients(Net):
    """Exported, the body is a region of its own."""

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            y = self.block(x)
        return y * 2


class Chosen(Net):
    """Both branches are regions."""

    def forward(self, x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: self.block(x) * 2, lambda x: x * 2, (x,))


class Called(nn.Module):
    """Passes the mode to a function of torch itself."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.mean, self.variance)


DECOMPOSITIONS: dict[str, Callable[[Any], Any]] = {
    "as exported": lambda program: program,
    "functional": lambda program: program.run_decompositions({}),
    "decomposed": lambda program: program.run_decompositions(),
}
LAYERS = {
    "batch_norm": (nn.BatchNorm2d(4), X), "instance_norm": (nn.InstanceNorm2d(4, track_running_stats=True), X),
    "dropout": (nn.Dropout(0.3), X), "feature_dropout": (nn.Dropout2d(0.3), X), "alpha_dropout": (nn.AlphaDropout(), X),
    "rrelu": (nn.RReLU(), X),
    "lstm": (nn.LSTM(4, 4, 2, dropout=0.3), ROWS), "gru": (nn.GRU(4, 4, 2, dropout=0.3), ROWS),
    "attention": (nn.TransformerEncoderLayer(4, 2, 8), ROWS),
}


def exported(module: nn.Module, x: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(module, (x,))


def converted(program: Any, **how: Any) -> Any:
    return ane.convert(program, **{"skip_model_load": True, "minimum_deployment_target": ct.target.iOS18,
                                   "compute_precision": ct.precision.FLOAT32, **how})


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "decomposition"), [
    (name, decomposition) for name in LAYERS for decomposition in DECOMPOSITIONS
    if (name, decomposition) not in (("lstm", "decomposed"), ("gru", "decomposed"))])  # torch leaves out their dropout
def test_a_program_exported_in_training_mode_is_refused(name, decomposition):
    layer, x = LAYERS[name]
    program = DECOMPOSITIONS[decomposition](exported(Net(layer).train(), x))
    with pytest.raises(ane.InputError, match=(
            r"^convert: the program was exported in training mode, in which op 'aten\.\w+\.\w+' in block\.1[\w.]* "
            r"\(.*\.py:\d+\) computes something else; call model\.eval\(\), and export it again$")) as refused:
        # Without states, which the default target has not; coremltools leaves out dropout, so that only a check fails.
        ane.convert(program, check=name == "dropout" and decomposition == "as exported")
    if decomposition == "as exported":
        assert re.search(rf"op 'aten\.(scaled_dot_product_)?{name}\.", str(refused.value))


@pytest.mark.parametrize(("kind", "layer"), [
    (WithoutGradients, nn.BatchNorm2d(4)), (WithoutGradients, nn.RReLU()), (Chosen, nn.RReLU()),
], ids=["batch norm without gradients", "rrelu without gradients", "rrelu in a branch"])
def test_regions_are_searched(kind, layer):
    program = exported(kind(layer).train(), X)
    assert any(each.op == "get_attr" for each in program.graph.nodes), "no region"
    with pytest.raises(ane.InputError, match=r"in training mode, in which op 'aten\..*\.py:\d+\) computes something"):
        converted(program)


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(4, track_running_stats=False), nn.InstanceNorm2d(4)])
def test_a_region_without_a_mode_converts(layer):
    program = exported(WithoutGradients(layer).train(), X)
    (found,) = outputs(converted(program), [X])
    np.testing.assert_allclose(found, 2 * layer(X).detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", [
    lambda x, mean, variance: F.rrelu(x, training=True),
    lambda x, mean, variance: F.batch_norm(x, mean, variance, training=True),
    lambda x, mean, variance: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
], ids=["rrelu", "batch norm", "attention"])
def test_code_that_passes_the_mode_itself_is_told_so(function):
    program = exported(Called(function).eval(), X)
    with pytest.raises(ane.InputError, match=r"\(.*test_training_mode\.py:\d+\) computes something else; call "
                                             r"model\.eval\(\).*; where its code passes training=True, pass"):
        converted(program)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("decomposition", DECOMPOSITIONS)
@pytest.mark.parametrize("module", [
    Net(nn.BatchNorm2d(4, track_running_stats=False)), Net(nn.InstanceNorm2d(4)), Adapted(), Net(nn.Dropout(0.0)),
    Called(lambda x, mean, variance: F.batch_norm(x, None, None, training=True)),
    Called(lambda x, mean, variance: F.batch_norm(x, torch.zeros(4), torch.ones(4), training=True)),
], ids=["batch norm", "instance norm", "adaptive", "no dropout", "called without", "called with constants"])
def test_what_computes_the_same_in_both_modes_converts(module, decomposition):
    program = DECOMPOSITIONS[decomposition](exported(module.train(), X))
    (found,) = outputs(converted(program), [X])
    np.testing.assert_allclose(found, module.eval()(X).detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize(("name", "decomposition"), [
    (name, decomposition) for name in LAYERS for decomposition in DECOMPOSITIONS
    if (name, decomposition) != ("rrelu", "decomposed")])  # an op without a lowering
def test_programs_exported_in_eval_mode_convert(name, decomposition, check):
    layer, x = LAYERS[name]
    program = DECOMPOSITIONS[decomposition](exported(Net(layer).eval(), x))
    converted(program, check=check)


@pytest.mark.parametrize("layer", [
    nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout(), nn.FeatureAlphaDropout(), nn.RReLU(),
], ids=lambda layer: type(layer).__name__)
def test_traces_in_eval_mode_convert(layer):
    traced = torch.jit.trace(Net(layer).eval(), X)
    ane.convert(traced, inputs=[ct.TensorType("x", X.shape)], skip_model_load=True, check=True)


@pytest.mark.parametrize(("layer", "x"), [
    (Net(nn.Dropout(0.0)), X), (Net(nn.Dropout2d(0.0)), X), (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), ROWS),
], ids=["dropout", "dropout 2-D", "transformer"])
def test_traces_with_dropout_of_probability_zero_are_checked(layer, x):
    traced = torch.jit.trace(layer.train(), x)
    ane.convert(traced, inputs=[ct.TensorType("x", x.shape)], skip_model_load=True, check=True)


def test_a_dropout_that_coremltools_leaves_out_converts():
    module = Net(nn.Dropout(0.3))
    (found,) = outputs(converted(exported(module.train(), X)), [X])
    np.testing.assert_allclose(found, module.eval()(X).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_recurrent_layer_without_dropout_has_no_mode():
    layer = nn.LSTM(4, 4).train()
    found, *_ = outputs(converted(exported(layer, ROWS)), [ROWS])
    np.testing.assert_allclose(found, layer.eval()(ROWS)[0].detach().numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("layer", "training", "warned"), [
    (nn.BatchNorm2d(4), True, "batch_norm"), (nn.InstanceNorm2d(4, track_running_stats=True), True, "instance_norm"),
    (nn.BatchNorm2d(4), False, ""), (nn.BatchNorm2d(4, track_running_stats=False), True, ""),
    (nn.InstanceNorm2d(4), True, ""), (nn.Dropout(), True, ""),
], ids=["batch norm", "instance norm", "eval", "without statistics", "plain instance norm", "dropout"])
def test_a_norm_of_a_trace_in_training_mode_is_named(layer, training, warned, caplog):
    """coremltools converts it; dropout, which coremltools leaves out, does not matter."""
    module = Net(layer).train(training)
    traced = torch.jit.trace(module, X, check_trace=False)
    with caplog.at_level("WARNING", logger="mil_ane_passes"):
        made = converted(traced, inputs=input_types([X]))
    assert isinstance(made, ct.models.MLModel)
    named = rf"was traced in training mode, in which op 'aten::{warned}' in block\.1 \(.*\.py:\d+\) normalizes by"
    assert bool(re.search(named, caplog.text)) == bool(warned)
    assert ("training mode" in caplog.text) == bool(warned)
