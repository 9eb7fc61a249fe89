"""`edit --expose`: inner values become outputs."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import get_new_symbol

import mil_ane_passes as ane
from tests.package.helpers import make, normal, spec_of, tree
from tests.transforms.helpers import (
    ONLY_MODEL,
    changed_files,
    changed_ops,
    described,
    host_takes,
    same_outputs,
)


def test_values_are_returned_behind_the_outputs_and_no_op_changes(package, tmp_path):
    source, target = package("iOS16"), tmp_path / "out.mlpackage"
    report = ane.edit(source, target, expose=["relu", "conv"])
    assert report.status == "written" and report.exact
    assert changed_files(source, target) == ONLY_MODEL and changed_ops(source, target) == set()
    assert described(target) == (["x"], ["out", "relu", "conv"])
    array = host_takes(target).description.output[1].type.multiArrayType
    assert (list(array.shape), array.dataType) == ([1, 16, 16, 16], ct.proto.FeatureTypes_pb2.ArrayFeatureType.FLOAT32)
    found = same_outputs(source, target)
    assert np.array_equal(np.maximum(found["conv"], 0), found["relu"]) and found["relu"].any()


def test_the_value_is_that_of_the_program_cut_there(tmp_path):
    """What coremltools makes when the value is an output from the start."""
    weight = normal(4, 4)

    def body(x):
        y = mb.linear(x=x, weight=weight, name="first")
        return y, mb.relu(x=y, name="second")

    @mb.program(input_specs=[mb.TensorSpec((1, 4))])
    def both(x):
        return body(x)

    @mb.program(input_specs=[mb.TensorSpec((1, 4))])
    def last(x):
        return body(x)[1]

    ane.edit(make(tmp_path / "last.mlpackage", last), tmp_path / "out.mlpackage", expose="first")
    expected = spec_of(make(tmp_path / "both.mlpackage", both)).description.output
    found = {each.name: each for each in spec_of(tmp_path / "out.mlpackage").description.output}
    assert found == {each.name: each for each in expected}
    same_outputs(tmp_path / "both.mlpackage", tmp_path / "out.mlpackage")


@pytest.mark.parametrize(("kind", "value", "name", "dtype"), [
    ("float16", "relu_cast_fp16", "relu_cast_fp16_fp32", np.float32),  # for iOS15
    ("halves", "relu_cast_fp16", "relu_cast_fp16", np.float16),
    ("control_flow", "greater_0", "greater_0_int32", np.int32),
    ("control_flow", "cast_0", "cast_0", np.int32),
    ("state", "read_state_0", "read_state_0", np.float16),
])
def test_what_may_not_leave_a_model_is_cast(package, tmp_path, kind, value, name, dtype):
    report = ane.edit(package(kind), tmp_path / "out.mlpackage", expose=value)
    assert report.done[0].value == name and report.done[0].exact
    assert ("cast to" in report.done[0].note) == (name != value)
    assert described(tmp_path / "out.mlpackage")[1][-1] == name
    host_takes(tmp_path / "out.mlpackage")
    assert same_outputs(package(kind), tmp_path / "out.mlpackage")[name].dtype == dtype


def test_a_shape_that_is_not_known_is_not_described(tmp_path):
    size = ct.RangeDim(1, 8, default=2)
    source = make(tmp_path / "in.mlpackage", _ranged(), inputs=[ct.TensorType("x", shape=(size, 4))])
    ane.edit(source, tmp_path / "out.mlpackage", expose="inner")
    array = host_takes(tmp_path / "out.mlpackage").description.output[-1].type.multiArrayType
    assert list(array.shape) == [] and array.dataType == ct.proto.FeatureTypes_pb2.ArrayFeatureType.FLOAT32
    same_outputs(source, tmp_path / "out.mlpackage")


def _ranged():
    @mb.program(input_specs=[mb.TensorSpec((get_new_symbol(), 4))])
    def program(x):
        return mb.relu(x=mb.sub(x=x, y=1.0, name="inner"), name="out")

    return program


def test_a_classifier_shows_its_scores(package, tmp_path):
    ane.edit(package("classifier"), tmp_path / "out.mlpackage", expose="linear_0")
    spec = host_takes(tmp_path / "out.mlpackage")
    assert [each.name for each in spec.description.output] == ["classLabel", "classLabel_probs", "linear_0"]
    found = same_outputs(package("classifier"), tmp_path / "out.mlpackage")
    assert found["classLabel"] == "abc"[int(np.argmax(found["linear_0"]))]


def test_each_function_that_has_the_value_or_one(package, tmp_path):
    source = package("multifunction")
    ane.edit(source, tmp_path / "both.mlpackage", expose="relu")
    ane.edit(source, tmp_path / "one.mlpackage", expose="relu", function="alpha")
    for path, expected in (("both", {"alpha": 2, "zeta": 2}), ("one", {"alpha": 2, "zeta": 1})):
        functions = host_takes(tmp_path / f"{path}.mlpackage").description.functions
        assert {each.name: len(each.output) for each in functions} == expected
    assert "relu" in same_outputs(source, tmp_path / "one.mlpackage", function="alpha")
    assert "relu" not in same_outputs(source, tmp_path / "one.mlpackage", function="zeta")


def test_the_name_that_a_cast_would_get_is_taken(tmp_path):
    @mb.program(input_specs=[mb.TensorSpec((1, 4))])
    def program(x):
        many = mb.greater(x=x, y=0.0, name="many")
        return mb.select(cond=many, a=x, b=mb.abs(x=x, name="many_int32"), name="out")

    source = make(tmp_path / "in.mlpackage", program)
    ane.edit(source, tmp_path / "out.mlpackage", expose="many")
    assert described(tmp_path / "out.mlpackage")[1] == ["out", "many_int32_1"]
    host_takes(tmp_path / "out.mlpackage")
    found = same_outputs(source, tmp_path / "out.mlpackage")
    assert found["many_int32_1"].dtype == np.int32


def test_an_output_is_nothing_to_do(package, tmp_path):
    report = ane.edit(package("iOS16"), tmp_path / "out.mlpackage", expose="out")
    assert report.status == "unchanged" and "'out' is an output already" in str(report)
    assert tree(tmp_path / "out.mlpackage") == tree(package("iOS16"))


@pytest.mark.parametrize(("kind", "value", "message"), [
    ("iOS16", "rela", "did you mean 'relu'?"),
    ("iOS16", "x", "'x' is already an input of function 'main'"),
    ("iOS16", "conv_weight_0", "is a constant of function 'main'"),
    ("palettized16", "first_weight_0_palettized", "is a constant of function 'main'"),
    ("control_flow", "grown", "'grown' is made inside a nested block"),
    ("state", "s", "'s' is already an input of function 'main'"),
])
def test_values_that_cannot_be_outputs(package, tmp_path, kind, value, message):
    with pytest.raises(ane.InputError) as refused:
        ane.edit(package(kind), tmp_path / "out.mlpackage", expose=value)
    assert message in str(refused.value) and value in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_lists_and_odd_integers_cannot_leave(tmp_path):
    @mb.program(input_specs=[mb.TensorSpec((2, 3))], opset_version=ct.target.iOS18)
    def program(x):
        written = mb.list_write(ls=mb.make_list(init_length=2, elem_shape=(3,), name="made"), index=0,
                                value=mb.reduce_sum(x=x, axes=[0]), name="written")
        short = mb.cast(x=x, dtype="int16", name="short")
        return mb.list_read(ls=written, index=0, name="out"), mb.cast(x=short, dtype="fp32", name="rounded")

    source = make(tmp_path / "in.mlpackage", program, ct.target.iOS18)
    with pytest.raises(ane.InputError, match="'written' is a list; only tensors can be made outputs"):
        ane.edit(source, tmp_path / "out.mlpackage", expose="written")
    ane.edit(source, tmp_path / "out.mlpackage", expose="short")
    found = same_outputs(source, tmp_path / "out.mlpackage")
    assert found["short_int32"].dtype == np.int32
    assert np.array_equal(found["short_int32"], found["rounded"].astype(np.int32))

