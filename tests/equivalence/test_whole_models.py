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


def save_pipeline(path, *parts):
    alone = [saved(path.with_name(f"{path.stem}{place}.mlpackage"), part) for place, part in enumerate(parts)]
    models = [ct.models.MLModel(str(each), skip_model_load=True) for each in alone]
    ct.utils.make_pipeline(*models).save(str(path))
    return path


def save_pair(path, change=0.0, factor=40, dtype=types.fp32):
    """Save a pipeline of a linear layer, whose weight differs by `change`, and a sine that enlarges differences."""
    number = types.nptype_from_builtin(dtype)
    table = (make_weight(8, 8).astype(np.float32) * (1.0003 + change)).astype(number)
    first = build_program(lambda x: mb.linear(x=x, weight=table, name="middle"), dtype=dtype, x=(2, 8))
    second = build_program(lambda middle: (mb.sin(x=mb.mul(x=middle, y=number(factor)), name="y"),
                                           mb.reduce_mean(x=middle, axes=[1], name="z")),
                           dtype=dtype, middle=(2, 8))
    return save_pipeline(path, first, second)


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipelines")
    return save_pair(folder / "one.mlpackage"), save_pair(folder / "other.mlpackage", 0.05)


@pytest.mark.parametrize("feeds", [None, {"x": np.random.default_rng(1).standard_normal((2, 8)).astype(np.float32)}])
def test_limits_are_those_of_the_outputs_of_entire_pipelines(pipelines, feeds):
    """A part makes an error within the limit, which grows beyond it in the next part."""
    x = np.ones((2, 8), np.float32) if feeds is None else feeds["x"]
    before, after = (ane.run(each, {"x": x})["y"] for each in pipelines)
    assert 10 * np.log10(np.sum(before ** 2) / np.sum((before - after) ** 2)) < 20
    report = ane.verify(*pipelines, snr=20, feeds=feeds)
    assert report.status == "different" and {each.output for case in report.cases for each in case.failed} == {"y"}
    assert {output.output for case in report.cases for output in case.outputs} == {"y", "z"}
    within = ane.verify(*pipelines, cosine=-1, feeds=feeds)
    assert within.equal and not within.equal_bits
    assert not any(output.equal_bits for case in within.cases for output in case.outputs)


def test_pipelines_of_other_float_widths_are_compared_on_request(pipelines, tmp_path):
    half = save_pair(tmp_path / "half.mlpackage", dtype=types.fp16)
    with pytest.raises(InputError, match="different inputs or outputs.* widths=True"):
        ane.verify(pipelines[0], half, snr=20)
    report = ane.verify(pipelines[0], half, snr=20, widths=True)
    assert report.equal and not report.equal_bits


def test_a_part_of_a_pipeline_is_compared_alone(pipelines):
    parts = list(ane.load(pipelines[0]).functions)
    assert ane.verify(*pipelines, snr=20, function=parts[0]).equal
    assert ane.verify(*pipelines, snr=20, function=parts[1]).equal_bits


def test_limits_of_pipelines_have_no_report(pipelines, tmp_path):
    with pytest.raises(InputError, match="limits on the error are those of an entire pipeline, for which no report"):
        ane.verify(*pipelines, snr=20, report=tmp_path / "report.json")


def test_pipelines_that_cannot_run_entirely_are_not_verified_by_limits(tmp_path):
    """The parts with states are compared alone, which does not tell how large the errors of the outputs are."""
    def build_counter(factor):
        @mb.program(input_specs=[mb.TensorSpec((2, 8), types.fp16), mb.StateTensorSpec((2, 8), types.fp16)],
                    opset_version=ct.target.iOS18)
        def counter(x, state):
            total = mb.add(x=mb.mul(x=x, y=np.float16(factor)), y=mb.read_state(input=state))
            return mb.identity(x=mb.coreml_update_state(state=state, value=total), name="middle")

        return counter

    squashed = build_program(lambda middle: mb.tanh(x=middle, name="y"), opset=ct.target.iOS18, middle=(2, 8))
    paths = [save_pipeline(tmp_path / f"{factor}.mlpackage", build_counter(factor), squashed) for factor in (1, 1.001)]
    report = ane.verify(*paths, snr=20)
    assert report.status == "not verified" and "outputs of the pipelines were not compared" in report.reason
    assert "which a pipeline does not keep" in report.reason


@pytest.mark.parametrize("factor, advised", [(4, True), (40, False)])
def test_the_advised_limit_is_that_of_the_entire_pipeline(factor, advised, tmp_path, capsys):
    """Of a result that only limits accept; none is advised where the outputs differ by too much for any."""
    pipeline, out = save_pair(tmp_path / "one.mlpackage", factor=factor), tmp_path / "out.mlpackage"
    report = ane.rewrite(pipeline, out, passes=["fp16_compute{mixed=true}"])
    assert min(report.verify.noise.values()) > 50 and (report.verify_command is not None) == advised
    difference = ane.verify(pipeline, out)
    assert difference.status == "different" and any("--snr" in each for each in difference.advice) == advised
    if advised:
        assert main(report.verify_command.split()[1:]) == 0
        assert "  y: " in capsys.readouterr().out
