"""coremltools' own op tests, on the reference runtime."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import coremltools as ct
import pytest

#: tests that ask for something else than an op's result, or contradict the documentation, and why
NOT_FOR_US = {
    "test_slice_by_index": "calls predict",
    "TestRandomCategorical and stress": "calls predict",
    "TestBandPart and test_value_inference": "calls predict",
    "TestRange1d and test_large_array": "calls predict",
    "test_constexpr_ops": "counts the ops of the converted program",
    "test_builder_eval_different_dtypes_error_out": "checks the words of an error of numpy",
    "test_real_div_int_builder_to_backend": "expects a fractional quotient for an output declared int32",
    "TestNormalizationLocalResponseNorm and test_builder_to_backend_smoke": "rank 3 as one channel; see its stress test",
    "TestCropResize and test_builder_to_backend_smoke": "iOS15: a box outside the image gives the whole image",
    "cast": "counts the casts of the converted program",
    "TestTopK and ios17": "counts the casts of the converted program",
    "mixed_precision": "counts the casts of the converted program",
    "TestResample": "counts the casts of the converted program",
    "iOS16 and image_resizing": "counts the casts of the converted program",
    "TestUpsampleBilinear and iOS16": "counts the casts of the converted program",
    "invalid_indices": "what an index outside gives is undefined",
    "test_builder_to_backend_corner_case": "calls predict",
    "pytorch_parity": "calls predict",
}


@pytest.mark.slow
@pytest.mark.parametrize("opset", ["iOS14", "iOS15", "iOS16", "iOS17", "iOS18", "coreml_dialect"])
def test_upstream(opset: str) -> None:
    for module in ("PIL", "scipy"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"coremltools' tests need {module}")
    tests = Path(ct.__file__).parent / "converters" / "mil" / "mil" / "ops" / "tests" / opset
    chosen = " and ".join(f"not ({each})" for each in NOT_FOR_US)
    options = ["-p", "tests.runtime.upstream_plugin", "-p", "no:cacheprovider", "-q", "--tb=short", "-c", "/dev/null"]
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(tests), "-k", chosen, str(tests)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
