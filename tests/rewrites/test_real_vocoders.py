"""The vocoders of the transformers package, random weights, at the size they are shipped in."""

from __future__ import annotations

import numpy as np
import pytest

from mil_ane_passes.equivalence.equivalence import compare_programs
from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.passes.contract import Exactness
from mil_ane_passes.passes.pipeline import apply_rewrites, select_rewrites
from tests.rewrites.helpers import half, kinds, only_output, torch_outputs
from tests.rewrites.test_carry_lift import WHATEVER_IT_TAKES, lifting

pytestmark = pytest.mark.slow


@pytest.fixture(params=["hifigan", "bigvgan"])
def builder(request):
    pytest.importorskip("transformers", reason="the real vocoders come from the transformers package")
    import importlib

    return importlib.import_module(f"tests.lab.models.{request.param}")


@pytest.mark.parametrize("full", [False, True], ids=["small", "as shipped"])
def test_one_lift_for_the_whole_vocoder(builder, full):
    before = builder.convert_model(full=full)._mil_program
    after = clone_program(before)
    apply_rewrites(lifting({"lift_conv_1d": {"axis": -1, "always": True}, "lift_conv_transpose_1d": {"axis": -1},
                            "carry_lift": WHATEVER_IT_TAKES}), after)
    assert kinds(after)["expand_dims"] - kinds(before)["expand_dims"] == 1
    assert kinds(after)["squeeze"] - kinds(before)["squeeze"] == 1
    report = compare_programs(before, after, precisions=("float64", "float16"), seeds=1, exactness=Exactness.BITWISE)
    assert report.equal, str(report)


@pytest.mark.parametrize("preset", ["safe", "full"])
def test_is_still_what_pytorch_computes(builder, preset):
    module, example = builder.make_torch_model()
    before = builder.convert_model()._mil_program
    after = clone_program(before)
    apply_rewrites(select_rewrites(preset), after)
    expected = torch_outputs(half(module), example).reshape(-1)
    old = only_output(before, example.numpy(), "float64")
    new = only_output(after, example.numpy(), "float64")
    assert np.array_equal(old, new)
    assert np.abs(new.reshape(-1) - expected).max() <= 2.0**-8 * np.abs(expected).max()
