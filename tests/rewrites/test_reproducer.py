"""The published model: wrong under the fault model as it is, right once rewritten, through both ways in."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from tests.lab.models import reproducer
from tests.rewrites.helpers import half, kinds, only_output, torch_outputs

FAULT = ("conv_transpose_1d_bias",)


@pytest.fixture(scope="module")
def truth():
    """Input, and PyTorch's own output with the weights the package stores (fp16), in double precision."""
    module, example = reproducer.make_torch_model()
    return example.numpy(), torch_outputs(half(module), example)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    path = tmp_path_factory.mktemp("reproducer") / "before.mlpackage"
    reproducer.convert_model().save(str(path))
    return path


def agrees(found, expected) -> bool:
    """Same algebra: both sum the same products of the same numbers in double precision."""
    return bool(np.abs(found - expected).max() <= 1e-12 * np.abs(expected).max())


def typed_bound(example) -> np.ndarray:
    """How far typed fp16 execution may be from exact: the input and the sum are rounded to fp16 once each, and the
    sum of 1792 products is taken in float32 (relative error at most n * 2**-24 of the sum of absolute products)."""
    module, _ = reproducer.make_torch_model()
    with torch.no_grad():
        for parameter in half(module).parameters():
            parameter.abs_()
        size = module.double()(torch.from_numpy(np.abs(example)).double()).numpy()
    return size * (2.0**-11 + 1792 * 2.0**-24 + 2.0**-11) + 2.0**-24


def test_the_fault_model_breaks_the_model_as_it_is(package, truth):
    program = ane.load(package).program
    example, expected = truth
    assert agrees(only_output(program, example, "float64"), expected)
    assert not agrees(only_output(program, example, "float64", FAULT), expected)


def test_rewritten_through_ct_convert(truth):
    example, expected = truth
    program = reproducer.convert_model(pass_pipeline=ane.pipeline())._mil_program
    assert kinds(program)["expand_dims"] == kinds(program)["squeeze"] == 1
    assert agrees(only_output(program, example, "float64", FAULT), expected)
    typed = only_output(program, example, "float16", FAULT)
    assert np.all(np.abs(typed - expected) <= typed_bound(example))


def test_rewritten_through_the_command(package, truth, tmp_path, capsys):
    example, expected = truth
    target = tmp_path / "after.mlpackage"
    assert main(["rewrite", str(package), "-o", str(target), "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["status"] == "written" and report["verified"] and report["verify"]["equal_bits"]
    assert report["weight_bytes"]["after"] == report["weight_bytes"]["before"]
    after = ane.load(target).program
    assert agrees(only_output(after, example, "float64", FAULT), expected)
    assert np.all(np.abs(only_output(after, example, "float16", FAULT) - expected) <= typed_bound(example))


@pytest.mark.slow
def test_the_split_bias_cures_it_too(package, truth):
    report = ane.rewrite(package, passes="split_conv_transpose_bias")
    assert report.verified and report.verify.exactness.value == "rounding"
    example, expected = truth
    assert agrees(only_output(report.package.program, example, "float64", FAULT), expected)
