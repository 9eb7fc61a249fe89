"""Whole models with random weights convert with the patches and compute what PyTorch computes."""

from __future__ import annotations

import dataclasses
import functools
import warnings

import coremltools as ct
import numpy as np
import pytest

torch = pytest.importorskip("torch")
import mil_ane_passes as ane  # noqa: E402
from tests.lab.versions.needs import coremltools_from  # noqa: E402
from tests.torch_frontend.checks import captured, convert_captured, outputs  # noqa: E402
from tests.torch_frontend.models.language import LANGUAGE, Model, padding, tokens  # noqa: E402
from tests.torch_frontend.models.vision import FLEXIBLE_IMAGES, VISION  # noqa: E402

MODELS = {**LANGUAGE, **VISION}
HAND_WRITTEN = ("mtcnn-rnet", "mtcnn-onet")
FLEXIBLE = ("bert", "gpt2", "opt", "qwen2", "t5-encoder")
QUICK = ("bert", "distilbert", "gpt2", "llama", "t5-encoder", "mtcnn-rnet", "mtcnn-onet", "dinov2", "patchtst")


def cases(*quick: str) -> list[object]:
    """Every name, all but the quick ones marked slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


@functools.cache
def built(name: str) -> Model:
    if name not in HAND_WRITTEN:
        pytest.importorskip("transformers", reason="the model is one of transformers")
    return MODELS[name]()


@functools.cache
def exported(name: str) -> torch.export.ExportedProgram:
    model = built(name)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return captured(model.module, model.example, "export")


def worst(mlmodel: ct.models.MLModel, model: Model, precision: str) -> float:
    """The largest error over the largest value, over all outputs; infinite where one is not finite."""
    with torch.no_grad():
        expected = model.module(*(feed.clone() for feed in model.example))
    expected = expected if isinstance(expected, tuple) else (expected,)
    found = outputs(mlmodel, model.example, precision)
    assert [one.shape for one in found] == [tuple(other.shape) for other in expected]
    errors = [np.abs(one - other.numpy()).max() / other.abs().max().item()
              for one, other in zip(found, expected, strict=True)]
    assert all(other.std() > 0.01 * other.abs().max() for other in expected), "the outputs hardly vary"
    return max(error if np.isfinite(error) else np.inf for error in errors)


def compare(name: str, frontend: str, half: bool = False) -> None:
    model = built(name)
    precision, allowed = (ct.precision.FLOAT16, 2e-2) if half else (ct.precision.FLOAT32, 1e-4)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = exported(name) if frontend == "export" else captured(model.module, model.example, frontend)
        mlmodel = convert_captured(program, model.example, frontend, precision=precision)
    assert worst(mlmodel, model, "float16" if half else "float32") < allowed


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", cases(*QUICK))
def test_a_traced_model_computes_what_pytorch_computes(name):
    compare(name, "trace")


@pytest.mark.parametrize("name", cases("bert", "mtcnn-rnet"))
def test_an_exported_model_computes_what_pytorch_computes(name):
    compare(name, "export")


@pytest.mark.parametrize("name", cases("bert", "gpt2", "mtcnn-rnet"))
def test_a_traced_model_is_finite_and_close_in_float16(name):
    compare(name, "trace", half=True)


@pytest.mark.parametrize("name", cases())
def test_an_exported_model_is_finite_and_close_in_float16(name):
    compare(name, "export", half=True)


TILES = coremltools_from("9.0", "tiles masks of a flexible length by -1")


@pytest.mark.parametrize("name", [
    pytest.param("llama", marks=TILES), *(pytest.param(name, marks=pytest.mark.slow) for name in FLEXIBLE)])
def test_a_flexible_length_of_ids_and_mask(name):
    model = built(name)
    inputs = [ct.TensorType(name=each, shape=(2, ct.RangeDim(2, 16, default=7)), dtype=np.int32)
              for each in ("ids", "mask")]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = captured(model.module, model.example, "trace")
        mlmodel = convert_captured(program, model.example, "trace", inputs=inputs)
    for length in (7, 3, 16):
        feeds = (tokens(length), padding(length, 2, length=length, left=True))
        assert worst(mlmodel, dataclasses.replace(model, example=feeds), "float32") < 1e-4


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", list(FLEXIBLE_IMAGES))
def test_a_flexible_height_and_width(name):
    pytest.importorskip("transformers", reason="the model is one of transformers")
    model = FLEXIBLE_IMAGES[name]()
    height, width = (ct.RangeDim(14, 128, default=size) for size in model.example[0].shape[2:])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        mlmodel = ane.convert(captured(model.module, model.example, "trace"), skip_model_load=True,
                              inputs=[ct.TensorType("image", (1, 3, height, width))],
                              minimum_deployment_target=ct.target.iOS18, compute_precision=ct.precision.FLOAT32)
    for height, width in (model.example[0].shape[2:], (24, 40), (64, 16)):
        feeds = (torch.rand(1, 3, height, width),)
        assert worst(mlmodel, dataclasses.replace(model, example=feeds), "float32") < 1e-4


@pytest.mark.parametrize("name", list(LANGUAGE))
def test_the_mask_matters(name):
    model = built(name)
    ids, mask, *rest = model.example
    with torch.no_grad():
        masked, whole = model.module(ids, mask, *rest), model.module(ids, torch.ones_like(mask), *rest)
    real = slice(None) if name == "bart" else mask[1].bool()
    assert (masked - whole)[1, real].abs().max() > 0.02 * whole.abs().max()
