"""`verify` of models whose form differs and whose interface does not: functions in another order, pipelines."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.utils.errors import InputError
from tests.conversions import save_program


def saved(path, built):
    save_program(built, path, ct.target.iOS18)
    return path


def layers(last="relu", dtype=types.fp16):
    def body(x):
        for number in range(4):
            table = np.roll(make_weight(8, 8), number).astype(types.nptype_from_builtin(dtype))
            x = mb.tanh(x=mb.linear(x=x, weight=table))
        return getattr(mb, last)(x=x, name="y")

    return build_program(body, dtype=dtype, opset=ct.target.iOS18, x=(2, 8))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    one, other = saved(folder / "one.mlpackage", layers()), saved(folder / "other.mlpackage", layers("tanh"))
    desc = ct.utils.MultiFunctionDescriptor()
    desc.add_function(str(one), "main", "two")
    desc.add_function(str(other), "main", "one")
    desc.default_function_name = "two"
    ct.utils.save_multifunction(desc, str(folder / "both.mlpackage"))
    return folder / "both.mlpackage"


def test_functions_have_no_order(two, tmp_path):
    """As a re-save by coremltools may write them: a model file has its functions in a protobuf map."""
    again = tmp_path / "again.mlpackage"
    ct.models.MLModel(str(two), skip_model_load=True).save(str(again))
    assert ane.verify(two, again).equal_bits
    first, second = ane.load(two).program, ane.load(two).program
    second.functions = dict(reversed(second.functions.items()))
    assert list(first.functions) != list(second.functions)
    report = ane.verify(first, second)
    assert report.equal_bits and {case.function for case in report.cases} == {"one", "two"}


def test_functions_of_other_names_are_still_refused(two):
    renamed = ane.load(two).program
    renamed.functions = {name.replace("one", "three"): function for name, function in renamed.functions.items()}
    with pytest.raises(InputError, match="different inputs or outputs"):
        ane.verify(two, renamed)


@pytest.fixture(scope="module", params=[types.fp16, types.fp32], ids=["fp16", "fp32"])
def bisected(request, tmp_path_factory):
    """A model, and the pipeline of two that coremltools makes of it."""
    folder = tmp_path_factory.mktemp("bisected")
    path = saved(folder / "whole.mlpackage", layers(dtype=request.param))
    ct.models.utils.bisect_model(str(path), str(folder), merge_chunks_to_pipeline=True, check_output_correctness=False)
    (pipeline,) = folder.glob("*pipeline*.mlpackage")
    return path, pipeline


@pytest.mark.parametrize("precision", ["float64", "float32", "float16"])
def test_a_pipeline_is_compared_with_the_model_it_was_made_of(bisected, precision):
    whole, pipeline = bisected
    for pair in ((whole, pipeline), (pipeline, whole)):
        report = ane.verify(*pair, precision=precision)
        assert report.equal_bits and report.cases, report
    x = np.random.default_rng(1).standard_normal((2, 8)).astype(np.float32)
    assert ane.verify(whole, pipeline, feeds={"x": x}, exactness="bitwise").equal_bits


def test_a_pipeline_that_computes_something_else_is_different(bisected, tmp_path, capsys):
    whole, pipeline = bisected
    dtype = types.fp32 if ane.load(whole).program.functions["main"].outputs[0].dtype == types.fp32 else types.fp16
    other = saved(tmp_path / "other.mlpackage", layers("sigmoid", dtype))
    assert main(["verify", str(other), str(pipeline)]) == 1 and "different" in capsys.readouterr().out
    assert main(["verify", str(whole), str(pipeline)]) == 0


def test_a_pipeline_that_gives_nan_throughout_is_not_proved(bisected):
    whole, pipeline = bisected
    for pair in ((whole, pipeline), (pipeline, whole)):
        report = ane.verify(*pair, feeds={"x": np.full((2, 8), np.nan, np.float32)})
        assert report.status == "not verified" and "NaN in all runs" in report.reason


def test_a_pipeline_of_another_interface_is_refused(bisected, tmp_path):
    whole, pipeline = bisected
    ane.edit(whole, tmp_path / "renamed.mlpackage", rename={"y": "z"})
    with pytest.raises(InputError, match="the pipeline has the inputs x and the outputs y; expected x and z"):
        ane.verify(tmp_path / "renamed.mlpackage", pipeline)
