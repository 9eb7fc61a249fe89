"""Recurrent models, trained ones among them, whole on the ANE: nothing is refused, and the numbers are PyTorch's."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest

torch = pytest.importorskip("torch")
import mil_ane_passes as ane  # noqa: E402
from mil_ane_passes import torch_frontend  # noqa: E402
from mil_ane_passes.runtime import Runtime  # noqa: E402
from tests.lab.models.recurrent import RECURRENT_MODELS  # noqa: E402
from tests.rewrites.recurrent_layers import refused  # noqa: E402


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", RECURRENT_MODELS, ids=lambda model: model.name)
def test_nothing_is_left_on_the_cpu(model, tmp_path):
    if model.missing():
        pytest.skip(model.missing())
    module, drawn = model.module(), model.draw()
    with torch_frontend.patched(), torch.no_grad():
        traced = torch.jit.trace(module, tuple(drawn.values()), check_trace=False)
        made = ct.convert(traced, inputs=[ct.TensorType(name=name, shape=x.shape) for name, x in drawn.items()],
                          convert_to="mlprogram", minimum_deployment_target=ct.target.iOS17, skip_model_load=True)
    made.save(str(tmp_path / "in.mlpackage"))
    before = ane.load(tmp_path / "in.mlpackage").program
    assert refused(before) & {"lstm", "while_loop"}
    # by default a small model that stays on the CPU is left as it is, and so is the last of three layers of 160 steps
    report = ane.rewrite(tmp_path / "in.mlpackage", tmp_path / "out.mlpackage", preset="full", target="m4",
                         ranges=model.ranges, verify=model.proved, max_growth=None,
                         options={"unroll_lstm": {"max_chain": 512}})
    assert report.status == "written", report.verify
    after = ane.load(tmp_path / "out.mlpackage").program
    assert refused(after) == set()
    feeds = {name: x.numpy() for name, x in drawn.items()}
    with torch.no_grad():
        expected = module.double()(*(x.double() for x in drawn.values()))
    for precision, allowed in (("float64", model.full), ("float16", model.half)):
        found = Runtime(after, precision=precision)(feeds).values()
        for value, truth in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
            np.testing.assert_allclose(value, truth.numpy(), rtol=0, atol=allowed * float(truth.abs().max()))
