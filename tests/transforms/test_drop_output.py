"""`edit --drop-output`: an output goes, with all that only it needed."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from tests.package.helpers import WEIGHTS, make, normal, proto_ops, spec_of, write_spec
from tests.transforms.helpers import described, host_takes, ops_of, same_outputs


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """One body, two heads with weights of their own, one of them behind a condition."""
    @mb.program(input_specs=[mb.TensorSpec((1, 64)), mb.TensorSpec((1,))])
    def program(x, scale):
        body = mb.relu(x=mb.linear(x=x, weight=normal(64, 64), name="body"), name="features")
        second = mb.linear(x=body, weight=normal(96, 64), name="hidden")
        chosen = mb.greater(x=mb.reduce_sum(x=second, axes=[0, 1], keep_dims=False), y=0.0, name="chosen")
        branch = mb.cond(pred=chosen, _true_fn=lambda: mb.mul(x=second, y=scale),
                         _false_fn=lambda: mb.abs(x=second), name="branch")
        return mb.linear(x=body, weight=normal(32, 64), name="first"), branch

    return make(tmp_path_factory.mktemp("heads") / "source.mlpackage", program)


def test_what_only_the_output_needed_goes_and_its_weights(heads, tmp_path):
    report = ane.edit(heads, tmp_path / "out.mlpackage", drop_output="branch")
    assert ops_of(tmp_path / "out.mlpackage") == ["linear", "relu", "linear"]
    assert described(tmp_path / "out.mlpackage") == (["x", "scale"], ["first"])
    old, new = (path.stat().st_size for path in (heads / WEIGHTS, tmp_path / "out.mlpackage" / WEIGHTS))
    assert 96 * 64 * 4 <= old - new < 96 * 64 * 4 + 1000
    assert (report.weight_bytes_before, report.weight_bytes_after) == (old, new)
    notes = [each.note for each in report.done]
    assert notes[0] == "'branch' is removed from the outputs" and notes[1].startswith("4 ops and ")
    assert notes[2] == "input 'scale' stays, but no op reads it"
    host_takes(tmp_path / "out.mlpackage")
    assert set(same_outputs(heads, tmp_path / "out.mlpackage")) == {"first"}


def test_what_is_needed_elsewhere_stays(heads, tmp_path):
    ane.edit(heads, tmp_path / "out.mlpackage", drop_output=["first"])
    assert ops_of(tmp_path / "out.mlpackage") == ["linear", "relu", "linear", "reduce_sum", "greater", "cond"]
    host_takes(tmp_path / "out.mlpackage")
    assert set(same_outputs(heads, tmp_path / "out.mlpackage")) == {"branch"}


def test_an_exposed_value_can_stand_for_the_output(heads, tmp_path):
    """The way to cut a model: what is behind the value goes."""
    report = ane.edit(heads, tmp_path / "out.mlpackage", expose="features", drop_output=["first", "branch"],
                      io={"fp32": ["x"]}, rename={"features": "embedding"})
    assert ops_of(tmp_path / "out.mlpackage") == ["linear", "relu"]
    assert described(tmp_path / "out.mlpackage")[1] == ["embedding"]
    assert next(each.option for each in report.done if each.changed) == "--expose"
    ane.edit(heads, tmp_path / "whole.mlpackage", expose="features")
    same_outputs(tmp_path / "whole.mlpackage", tmp_path / "out.mlpackage", {"features": "embedding"})


def test_ops_that_nothing_needed_all_along_stay(heads, tmp_path):
    source = tmp_path / "in.mlpackage"
    ane.edit(heads, source, rename={"x": "x"})
    spec = spec_of(source)
    function = spec.mlProgram.functions["main"]
    del function.block_specializations[function.opset].outputs[1]
    del spec.description.output[1]
    write_spec(source, spec)
    ane.edit(source, tmp_path / "two.mlpackage", expose="features", drop_output="first")
    assert set(proto_ops(source)) - set(proto_ops(tmp_path / "two.mlpackage")) == {
        "first", "first_weight_0", "first_bias_0"}
    host_takes(tmp_path / "two.mlpackage")


def test_what_writes_a_state_stays(tmp_path):
    @mb.program(input_specs=[mb.TensorSpec((1, 4)), mb.StateTensorSpec((1, 4), dtype=types.fp16)],
                opset_version=ct.target.iOS18)
    def program(x, s):
        low = mb.cast(x=x, dtype="fp16")
        kept = mb.coreml_update_state(state=s, value=mb.add(x=mb.read_state(input=s), y=low), name="kept")
        return mb.mul(x=kept, y=np.float16(2), name="doubled"), mb.relu(x=x, name="other")

    source = make(tmp_path / "in.mlpackage", program, ct.target.iOS18)
    ane.edit(source, tmp_path / "out.mlpackage", drop_output="doubled")
    assert sorted(ops_of(tmp_path / "out.mlpackage")) == ["add", "cast", "read_state", "relu", "write_state"]
    host_takes(tmp_path / "out.mlpackage")
    assert set(same_outputs(source, tmp_path / "out.mlpackage")) == {"other", "state s"}


def test_an_op_nobody_knows_stays(heads, tmp_path):
    source = tmp_path / "in.mlpackage"
    ane.edit(heads, source, rename={"x": "x"})
    spec = spec_of(source)
    block = next(iter(spec.mlProgram.functions["main"].block_specializations.values()))
    next(op for op in block.operations if op.outputs[0].name == "hidden").type = "linear_of_tomorrow"
    write_spec(source, spec)
    ane.edit(source, tmp_path / "out.mlpackage", drop_output="branch")
    assert ops_of(tmp_path / "out.mlpackage") == ["linear", "relu", "linear_of_tomorrow", "linear"]


def test_one_function_keeps_what_the_other_drops(package, tmp_path):
    source = tmp_path / "in.mlpackage"
    ane.edit(package("multifunction"), source, expose="relu")
    report = ane.edit(source, tmp_path / "out.mlpackage", drop_output="out", function="zeta")
    assert report.weight_bytes_before == report.weight_bytes_after
    same_outputs(source, tmp_path / "out.mlpackage", function="alpha")
    assert set(same_outputs(source, tmp_path / "out.mlpackage", function="zeta")) == {"relu"}
    host_takes(tmp_path / "out.mlpackage")


def test_compressed_weights_go_with_their_blobs(package, tmp_path):
    source = package("palettized16")
    ane.edit(source, tmp_path / "out.mlpackage", expose="relu", drop_output="second")
    ops = ops_of(tmp_path / "out.mlpackage")
    assert ops == ["constexpr_lut_to_dense", "linear", "relu"]
    assert (tmp_path / "out.mlpackage" / WEIGHTS).stat().st_size < (source / WEIGHTS).stat().st_size - 4096
    ane.edit(source, tmp_path / "whole.mlpackage", expose="relu")
    assert "relu" in same_outputs(tmp_path / "whole.mlpackage", tmp_path / "out.mlpackage")
    host_takes(tmp_path / "out.mlpackage")


@pytest.mark.parametrize(("dropped", "message"), [
    (["first", "branch"], "function 'main' would have no output left (first, branch)"),
    ("features", "there is no output 'features' in the model; its outputs are branch, first"),
    ("brunch", "did you mean 'branch'?"),
])
def test_outputs_that_cannot_go(heads, tmp_path, dropped, message):
    with pytest.raises(ane.InputError) as refused:
        ane.edit(heads, tmp_path / "out.mlpackage", drop_output=dropped)
    assert message in str(refused.value)


@pytest.mark.parametrize("asked", [
    {"rename": {"branch": "second"}}, {"rename": {"hidden": "second"}}, {"io": {"fp16": "branch"}},
    {"split_at": "hidden"}, {"split_at": ["features", "branch"]},
])
def test_what_goes_with_an_output_cannot_be_edited_besides(heads, tmp_path, asked):
    with pytest.raises(ane.InputError, match=r"'(branch|hidden)' is removed by drop_output= already; expected"):
        ane.edit(heads, tmp_path / "out.mlpackage", drop_output="branch", **asked)
    assert not (tmp_path / "out.mlpackage").exists()


def test_what_is_an_inner_value_from_now_on_can_be_renamed(package, tmp_path):
    source = package("iOS16")
    ane.edit(source, tmp_path / "two.mlpackage", expose="relu")
    ane.edit(tmp_path / "two.mlpackage", tmp_path / "out.mlpackage", drop_output="relu", rename={"relu": "inner"})
    ane.edit(source, tmp_path / "renamed.mlpackage", rename={"relu": "inner"})
    assert proto_ops(tmp_path / "out.mlpackage") == proto_ops(tmp_path / "renamed.mlpackage")


def test_what_a_classifier_predicts_by_cannot_go(package, tmp_path):
    for name in ("classLabel", "classLabel_probs"):
        with pytest.raises(ane.InputError, match=f"'{name}' is a prediction of the classifier and cannot be removed"):
            ane.edit(package("classifier"), tmp_path / "out.mlpackage", drop_output=name)
