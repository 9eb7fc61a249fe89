"""`edit --rename`: other names, nothing else."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mil_ane_passes as ane
from mil_ane_passes.transforms.names import collect_names
from mil_ane_passes.transforms.rename import Rename
from mil_ane_passes.transforms.sources import open_draft
from tests.package.helpers import main_block, make, spec_of, tree, write_spec
from tests.transforms.helpers import (
    ONLY_MODEL,
    changed_files,
    changed_ops,
    described,
    host_takes,
    same_outputs,
)


def names_in(path):
    return collect_names(ane.load(path).program.functions["main"])


def test_interface_and_inner_values_are_renamed_and_nothing_else(package, tmp_path):
    source, target = package("iOS16"), tmp_path / "out.mlpackage"
    names = {"x": "image", "out": "probabilities", "relu": "activation"}
    report = ane.edit(source, target, rename=names)
    assert report.status == "written" and report.changed and report.exact
    assert changed_files(source, target) == ONLY_MODEL
    assert changed_ops(source, target) == {"conv", "relu", "activation", "flat", "out", "probabilities"}
    assert described(target) == (["image"], ["probabilities"])
    host_takes(target)
    assert set(same_outputs(source, target, names)) == {"probabilities"}


@pytest.mark.parametrize("kind", ["control_flow", "state", "classifier", "palettized16", "sparse18"])
def test_every_name_in_a_program_can_be_another(package, tmp_path, kind):
    source, target = package(kind), tmp_path / "out.mlpackage"
    names = {name: f"{name}_2" for name in names_in(source)}
    ane.edit(source, target, rename=names)
    assert names_in(target) == set(names.values())
    host_takes(target)
    same_outputs(source, target, names)
    ane.edit(target, tmp_path / "back.mlpackage", rename={new: old for old, new in names.items()})
    assert tree(tmp_path / "back.mlpackage") == tree(source)


def test_what_a_classifier_predicts_is_found_under_its_new_name(package, tmp_path):
    ane.edit(package("classifier"), tmp_path / "out.mlpackage", rename={"classLabel": "animal",
                                                                        "classLabel_probs": "chances"})
    found = host_takes(tmp_path / "out.mlpackage").description
    assert (found.predictedFeatureName, found.predictedProbabilitiesName) == ("animal", "chances")
    assert [each.name for each in found.output] == ["animal", "chances"]


def test_a_state_is_described_under_its_new_name(package, tmp_path):
    ane.edit(package("state"), tmp_path / "out.mlpackage", rename={"s": "cache"})
    assert [each.name for each in spec_of(tmp_path / "out.mlpackage").description.state] == ["cache"]


def test_all_functions_or_one(package, tmp_path):
    source = package("multifunction")
    both = ane.edit(source, tmp_path / "both.mlpackage", rename={"x": "image"})
    assert {each.function for each in both.done} == {"alpha", "zeta"}
    one = ane.edit(source, tmp_path / "one.mlpackage", rename={"x": "image"}, function="zeta")
    assert {each.function for each in one.done} == {"zeta"}
    found = {each.name: [end.name for end in each.input]
             for each in host_takes(tmp_path / "one.mlpackage").description.functions}
    assert found == {"alpha": ["x"], "zeta": ["image"]}
    assert changed_ops(source, tmp_path / "one.mlpackage", "alpha") == set()
    same_outputs(source, tmp_path / "one.mlpackage", {"x": "image"}, "zeta")
    same_outputs(source, tmp_path / "one.mlpackage", function="alpha")


def test_names_in_nested_blocks_that_hide_outer_ones_stay_apart(tmp_path):
    @mb.program(input_specs=[mb.TensorSpec((1, 2))])
    def program(x):
        y = mb.relu(x=x, name="y")
        chosen = mb.greater(x=mb.reduce_sum(x=x, axes=[0, 1], keep_dims=False), y=0.0)
        return mb.cond(pred=chosen, _true_fn=lambda: mb.sigmoid(x=y, name="inner"),
                       _false_fn=lambda: mb.abs(x=y, name="other"), name="out")

    source = make(tmp_path / "in.mlpackage", program)
    spec = spec_of(source)
    block = next(op for op in main_block(spec).operations if op.type == "cond").blocks[0]
    block.operations[-1].outputs[0].name = block.outputs[0] = "y"  # hides the outer one from here on
    write_spec(source, spec)
    ane.edit(source, tmp_path / "out.mlpackage", rename={"y": "z"})
    renamed = next(op for op in main_block(spec_of(tmp_path / "out.mlpackage")).operations if op.type == "cond")
    assert renamed.blocks[0].operations[-1].inputs["x"].arguments[0].name == "z" == renamed.blocks[0].outputs[0]
    same_outputs(source, tmp_path / "out.mlpackage")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_permutations_give_each_value_the_other_names(package, data):
    draft = open_draft(package("control_flow"))
    function = draft.program.functions["main"]
    old = sorted(collect_names(function))
    new = data.draw(st.permutations(old))
    names = dict(zip(old, new))
    Rename(names).apply(draft)
    assert collect_names(function) == set(old)
    assert list(function.inputs) == [names["x"]]
    Rename({new: old for old, new in names.items()}).apply(draft)
    assert draft.emit() == (draft.package.raw, None)


def test_two_values_swap_their_names(package, tmp_path):
    source, target = package("iOS16"), tmp_path / "out.mlpackage"
    ane.edit(source, target, rename={"relu": "conv", "conv": "relu"})
    assert [op.type for op in main_block(spec_of(target)).operations if op.outputs[0].name in ("conv", "relu")] == [
        "conv", "relu"]
    same_outputs(source, target)


@pytest.mark.parametrize("names", [{"y": "z"}, {"x": "y", "y": "x"}])
def test_an_input_that_is_an_output_is_renamed_as_both(tmp_path, names):
    @mb.program(input_specs=[mb.TensorSpec((2,)), mb.TensorSpec((2,))], opset_version=ct.target.iOS17)
    def program(x, y):
        return mb.add(x=x, y=y, name="sum"), y

    source = make(tmp_path / "source.mlpackage", program, ct.target.iOS17, pass_pipeline=ct.PassPipeline.EMPTY)
    report = ane.edit(source, tmp_path / "out.mlpackage", rename=names, verify=True)
    assert report.status == "written", str(report)
    assert f"input and output 'y' is called '{names['y']}'" in str(report)
    found = ane.run(tmp_path / "out.mlpackage", {names.get(name, name): np.full(2, number, np.float32)
                                                 for number, name in enumerate("xy")})
    assert {name: value.tolist() for name, value in found.items()} == {"sum": [1, 1], names["y"]: [1, 1]}


def test_a_name_that_is_there_already_is_nothing_to_do(package, tmp_path):
    report = ane.edit(package("iOS16"), tmp_path / "out.mlpackage", rename={"x": "x"})
    assert report.status == "unchanged" and "'x' has this name already" in str(report)
    assert tree(tmp_path / "out.mlpackage") == tree(package("iOS16"))


@pytest.mark.parametrize(("names", "message"), [
    ({"relv": "y"}, "there is no value 'relv' in the model; did you mean 'relu'?"),
    ({"x": "relu"}, "has a value 'relu' already"),
    ({"x": "same", "relu": "same"}, "has a value 'same' already"),
    ({"x": "1st"}, "'1st' is not a name that Core ML accepts"),
    ({"x": "a b"}, "'a b' is not a name that Core ML accepts"),
    ({"x": "größe"}, "is not a name that Core ML accepts"),
    ({"x": "x\n"}, "is not a name that Core ML accepts"),
    ({"x": ""}, "'' is not a name that Core ML accepts"),
    ({"x": "bool"}, "'bool' is a reserved word of the MIL language; expected another name, such as 'bool_'"),
])
def test_names_that_cannot_be(package, tmp_path, names, message):
    with pytest.raises(ane.InputError) as refused:
        ane.edit(package("iOS16"), tmp_path / "out.mlpackage", rename=names)
    assert message in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_function_that_is_not_there(package, tmp_path):
    with pytest.raises(ane.InputError, match=r"no function 'beta'; the model has alpha, zeta; did you mean 'zeta'\?"):
        ane.edit(package("multifunction"), tmp_path / "out.mlpackage", rename={"x": "y"}, function="beta")


@pytest.mark.parametrize("kind", ["iOS16", "palettized16"])
def test_where_the_host_can_rename_it_makes_the_same_model(package, tmp_path, kind):
    source = package(kind)
    spec = spec_of(source)
    output = spec.description.output[0].name
    ane.edit(source, tmp_path / "out.mlpackage", rename={"x": "image", output: "result"})
    ct.utils.rename_feature(spec, "x", "image")
    ct.utils.rename_feature(spec, output, "result")
    assert spec_of(tmp_path / "out.mlpackage") == spec


def test_fields_we_do_not_know_stay(package, tmp_path):
    source = tmp_path / "in.mlpackage"
    ane.edit(package("iOS16"), source, rename={"x": "x"})
    spec = spec_of(source)
    op = next(op for op in main_block(spec).operations if op.type == "conv")
    op.MergeFromString(b"\xc2\x3e\x05hello")  # field 1000
    write_spec(source, spec)
    ane.edit(source, tmp_path / "out.mlpackage", rename={"x": "image"})
    renamed = next(op for op in main_block(spec_of(tmp_path / "out.mlpackage")).operations if op.type == "conv")
    assert b"\xc2\x3e\x05hello" in renamed.SerializeToString()
