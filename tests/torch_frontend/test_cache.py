"""A decoder with a cache of keys and values: buffers written in place become states, and fill as in PyTorch."""

from __future__ import annotations

import copy
import warnings

import coremltools as ct
import numpy as np
import pytest

torch = pytest.importorskip("torch")
import mil_ane_passes as ane  # noqa: E402
from tests.torch_frontend.models.cache import (  # noqa: E402
    CachedDecoder,
    IndexedCache,
    ShiftedCache,
    SlicedCache,
)
from tests.torch_frontend.models.language import seeded  # noqa: E402

TOKENS = (3, 17, 0, 8, 5, 11)


def decoder(kind: type[CachedDecoder]) -> CachedDecoder:
    module = seeded(kind())
    module.k.zero_()
    module.v.zero_()
    return module


def feeds(place: int, token: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([[token]], dtype=torch.int32), torch.tensor([place], dtype=torch.int32)


def converted(module: CachedDecoder, frontend: str) -> ct.models.MLModel:
    states = [ct.StateType(wrapped_type=ct.TensorType(shape=tuple(getattr(module, name).shape), dtype=np.float16),
                           name=name) for name in ("k", "v")]
    inputs = [ct.TensorType(name="token", shape=(1, 1), dtype=np.int32),
              ct.TensorType(name="at", shape=(1,), dtype=np.int32)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = copy.deepcopy(module)
        program = torch.jit.trace(source, feeds(1, 4), check_trace=False) if frontend == "trace" \
            else torch.export.export(source, feeds(1, 4)).run_decompositions({})
    for name in ("k", "v"):  # tracing runs the module
        getattr(source, name).zero_()
    with ane.torch_frontend.patched():
        return ct.convert(program, inputs=inputs if frontend == "trace" else None,
                          states=states if frontend == "trace" else None, convert_to="mlprogram",
                          minimum_deployment_target=ct.target.iOS18, skip_model_load=True)


@pytest.mark.parametrize("kind, frontend", [
    (IndexedCache, "trace"), (IndexedCache, "export"), (SlicedCache, "trace"),  # torch exports no computed slice
    pytest.param(ShiftedCache, "trace", marks=pytest.mark.slow), (ShiftedCache, "export")])
def test_every_step_is_pytorchs_and_the_states_fill(kind, frontend):
    module = decoder(kind)
    predictor = ane.runtime.predictor(converted(module, frontend))
    state = predictor.make_state()
    for place, token in enumerate(TOKENS):
        token_at = feeds(place, token)
        with torch.no_grad():
            expected = module(*token_at).numpy()
        names = [feature.name for feature in predictor._model.get_spec().description.input]
        found = predictor.predict({name: each.numpy() for name, each in zip(names, token_at, strict=True)}, state)
        (logits,) = found.values()
        np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-2 * np.abs(expected).max())
        for name in ("k", "v"):
            kept = getattr(module, name).numpy()
            np.testing.assert_allclose(state.read_state(name), kept, rtol=0, atol=2e-2 * np.abs(kept).max())
    assert np.count_nonzero(module.k.numpy().any(axis=(0, 1, 2, 4))) == len(TOKENS)
