"""Real architectures: the runtime's outputs are PyTorch's, at float32 and at float16; and the comparison can fail."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from tests.lab.models import architectures  # noqa: E402
from tests.lab.models.zoo import ARCHITECTURES  # noqa: E402

GOOD = architectures.Measurement(
    ARCHITECTURES[0], parameters=1, scale=1.0, spread=0.3, input_response=0.5, float32=1e-5, float16=2e-3, half=1e-3,
    unit=2.0**-10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.name)
def test_the_runtime_computes_what_pytorch_computes(architecture, tmp_path):
    if architecture.missing():
        pytest.skip(architecture.missing())
    measured = architectures.measure_architecture(architecture, tmp_path)
    assert measured.faults() == []


def test_ten_are_compared_with_the_module_as_it_is():
    kinds = Counter(each.kind for each in ARCHITECTURES if not each.coremltools_fault)
    assert kinds.total() >= 10
    assert min(kinds[kind] for kind in ("vision", "audio", "language")) >= 3


def test_a_good_measurement_has_no_faults():
    assert GOOD.faults() == []


@pytest.mark.parametrize("changes, said", [
    ({"float32": 2e-4}, "float32 error 0.0002, 0.0001 allowed"),
    ({"float32": float("nan")}, "float32 error nan"),
    ({"float16": 6e-3}, "float16 error 0.006, 0.00498 allowed"),
    ({"half": 0.06, "float16": 0.06}, "no yardstick"),
    ({"scale": 1e-4}, "no fair test"),
    ({"scale": 1e5}, "no fair test"),
    ({"spread": 0.01}, "hardly vary"),
    ({"input_response": 0.05}, "hardly depend on the inputs"),
    ({"architecture": dataclasses.replace(ARCHITECTURES[0], coremltools_fault="f"), "host": 1e-6}, "is not there"),
])
def test_a_bad_measurement_says_what_is_wrong(changes, said):
    (fault,) = dataclasses.replace(GOOD, **changes).faults()
    assert said in fault


def test_errors_are_relative_to_the_largest_value_and_nan_is_the_largest_error():
    expected = [np.array([0.0, -4.0]), np.array([1.0, 0.5])]
    assert architectures.compute_relative_error([np.array([0.002, -4.0]), expected[1]], expected) == pytest.approx(5e-4)
    assert architectures.compute_relative_error([expected[0], np.array([1.0, np.nan])], expected) == np.inf
    with pytest.raises(AssertionError):
        architectures.compute_relative_error([np.zeros((1, 2)), expected[1]], expected)
