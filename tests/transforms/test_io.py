"""`edit --io`: inputs and outputs of another float type, with the casts that this takes and no other."""

from __future__ import annotations

from collections import Counter

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from tests.package.helpers import make, spec_of, tree, write_spec

from .borders import PROGRAMS, bare, inside, made, single
from .helpers import changed_ops, feeds_of, host_takes, ops_of, run, same_outputs

ARRAY = ct.proto.FeatureTypes_pb2.ArrayFeatureType
TYPES = {np.dtype(np.float16): ARRAY.FLOAT16, np.dtype(np.float32): ARRAY.FLOAT32, np.dtype(np.int32): ARRAY.INT32}


@pytest.fixture(scope="module", params=PROGRAMS)
def border(request, tmp_path_factory):
    """A package with that program, as it is: without coremltools' own passes."""
    path = tmp_path_factory.mktemp(request.param) / "source.mlpackage"
    return make(path, PROGRAMS[request.param](), ct.target.iOS17, pass_pipeline=ct.PassPipeline.EMPTY)


def as_halves(feeds):
    return {name: value.astype(np.float16) for name, value in feeds.items()}


def declared(path):
    """The types that the model's description gives, by name."""
    description = spec_of(path).description
    return {each.name: each.type.multiArrayType.dataType for each in (*description.input, *description.output)}


def test_halves_hold_the_results_of_before_rounded(border, tmp_path):
    target = tmp_path / "out.mlpackage"
    report = ane.edit(border, target, io="fp16")
    feeds = feeds_of(border, dtype=np.float16)  # what fp16 holds of the inputs is all that fp16 inputs can be
    before, after = run(border, feeds), run(target, as_halves(feeds))
    assert before.keys() == after.keys() and report.changed
    for name, value in before.items():
        expected = value.astype(np.float16) if value.dtype == np.float32 else value
        assert after[name].dtype == expected.dtype and after[name].tobytes() == expected.tobytes(), name
        assert declared(target)[name] == TYPES[expected.dtype]
    exact = {each.value: each.exact for each in report.done}
    for name, value in before.items():
        if exact.get(name):
            assert np.array_equal(after[name].astype(np.float32), value), f"{name} is said to be exact"
    host_takes(target)


def test_it_is_what_the_rewrite_does(border, tmp_path):
    """`rewrite --passes fp16_io` builds the program and asks the engine; the file is edited without either."""
    ane.edit(border, tmp_path / "edited.mlpackage", io="fp16")
    ane.rewrite(border, tmp_path / "rewritten.mlpackage", passes="fp16_io", verify=False)
    edited, rewritten = tmp_path / "edited.mlpackage", tmp_path / "rewritten.mlpackage"
    assert declared(edited) == declared(rewritten)
    assert Counter(ops_of(edited)) == Counter(ops_of(rewritten))
    feeds = as_halves(feeds_of(border))
    first, second = run(edited, feeds), run(rewritten, feeds)
    assert all(first[name].tobytes() == second[name].tobytes() for name in second)


def test_there_and_back_gives_the_first_results(border, tmp_path):
    ane.edit(border, tmp_path / "halves.mlpackage", io="fp16")
    report = ane.edit(tmp_path / "halves.mlpackage", tmp_path / "back.mlpackage", io="fp32")
    assert report.exact, "fp32 holds all that fp16 does"
    host_takes(tmp_path / "back.mlpackage")
    feeds = feeds_of(border, dtype=np.float16)
    halves, back = run(tmp_path / "halves.mlpackage", as_halves(feeds)), run(tmp_path / "back.mlpackage", feeds)
    for name, value in halves.items():
        wide = value.astype(np.float32) if value.dtype == np.float16 else value
        assert back[name].dtype == wide.dtype and back[name].tobytes() == wide.tobytes()
    assert declared(tmp_path / "back.mlpackage") == declared(border)


def test_casts_that_only_undo_each_other_go_and_no_other_op_changes(package, tmp_path):
    source, target = package("halves"), tmp_path / "out.mlpackage"
    assert ops_of(source) == ["cast", "conv", "relu", "reshape", "softmax", "cast"]
    report = ane.edit(source, target, io="fp16")
    assert ops_of(target) == ["conv", "relu", "reshape", "softmax"]
    assert report.exact and [each.note for each in report.done] == [
        "input 'x' is fp16; its cast is removed", "output 'out' is fp16; its cast is removed"]
    assert changed_ops(source, target) == {
        "x_to_fp16", "x_to_fp16_dtype_0", "conv_cast_fp16", "out_cast_fp16", "out", "out_cast_fp16_to_fp32_dtype_0"}


def test_only_the_names_that_are_given(package, tmp_path):
    source = package("halves")
    ane.edit(source, tmp_path / "in.mlpackage", io={"fp16": "x"})
    assert declared(tmp_path / "in.mlpackage") == {"x": ARRAY.FLOAT16, "out": ARRAY.FLOAT32}
    ane.edit(tmp_path / "in.mlpackage", tmp_path / "out.mlpackage", io={"fp16": ["out"], "fp32": ["x"]})
    assert declared(tmp_path / "out.mlpackage") == {"x": ARRAY.FLOAT32, "out": ARRAY.FLOAT16}
    report = ane.edit(source, tmp_path / "same.mlpackage", io={"fp32": ["x", "out"]})
    assert report.status == "unchanged" and "'x' is fp32 already" in str(report)
    assert tree(tmp_path / "same.mlpackage") == tree(source)


def test_an_output_of_rank_0_is_a_float_as_others(tmp_path):
    @mb.program(input_specs=[mb.TensorSpec((4,))], opset_version=ct.target.iOS17)
    def program(x):
        return mb.reduce_sum(x=mb.exp(x=x), axes=[0], keep_dims=False, name="total")

    source = make(tmp_path / "source.mlpackage", program, ct.target.iOS17)
    for number, wanted in enumerate(("fp16", {"fp16": "total"})):
        target = tmp_path / f"out{number}.mlpackage"
        report = ane.edit(source, target, io=wanted, verify=True)
        assert report.status == "written" and report.verification.equal
        assert declared(target)["total"] == ARRAY.FLOAT16
    ane.edit(target, tmp_path / "back.mlpackage", io="fp32")
    assert declared(tmp_path / "back.mlpackage") == declared(source)


def test_states_stay_and_integers_are_not_asked(package, tmp_path):
    report = ane.edit(package("state"), tmp_path / "out.mlpackage", io="fp32")
    assert [each.value for each in report.done] == ["out"]  # x is fp32 already
    found = host_takes(tmp_path / "out.mlpackage").description
    assert found.state[0].type.stateType.arrayType.dataType == ARRAY.FLOAT16
    feeds = feeds_of(package("state"))
    before, after = run(package("state"), feeds), run(tmp_path / "out.mlpackage", feeds)
    assert np.array_equal(before["out"].astype(np.float32), after["out"])
    assert before["state s"].tobytes() == after["state s"].tobytes()


def test_images_stay_and_what_a_classifier_gives(package, tmp_path):
    report = ane.edit(package("classifier"), tmp_path / "out.mlpackage", io="fp16")
    assert report.status == "unchanged" and "'image' is an image" in str(report)
    assert tree(tmp_path / "out.mlpackage") == tree(package("classifier"))


def test_functions_share_their_weights_after(package, tmp_path):
    ane.edit(package("multifunction"), tmp_path / "out.mlpackage", io="fp16", function="alpha")
    ends = {each.name: each.input[0].type.multiArrayType.dataType
            for each in host_takes(tmp_path / "out.mlpackage").description.functions}
    assert ends == {"alpha": ARRAY.FLOAT16, "zeta": ARRAY.FLOAT32}
    assert changed_ops(package("multifunction"), tmp_path / "out.mlpackage", "zeta") == set()
    same_outputs(package("multifunction"), tmp_path / "out.mlpackage", function="zeta")


def test_the_default_of_an_input_stays(package, tmp_path):
    source = tmp_path / "in.mlpackage"
    ane.edit(package("halves"), source, io="fp32")
    spec = spec_of(source)
    spec.description.input[0].type.isOptional = True
    spec.description.input[0].type.multiArrayType.floatDefaultValue = 0.5
    write_spec(source, spec)
    ane.edit(source, tmp_path / "out.mlpackage", io="fp16")
    found = spec_of(tmp_path / "out.mlpackage").description.input[0].type
    assert found.isOptional and found.multiArrayType.floatDefaultValue == 0.5
    assert found.multiArrayType.dataType == ARRAY.FLOAT16
    spec.description.input[0].type.multiArrayType.floatDefaultValue = 1e5
    write_spec(source, spec)
    with pytest.raises(ane.InputError, match="input 'x' has the default value 100000, above the fp16 maximum of 65504"):
        ane.edit(source, tmp_path / "two.mlpackage", io="fp16")


def test_an_input_that_is_returned_stays(tmp_path):
    source = make(tmp_path / "in.mlpackage", made(lambda x: (x, mb.relu(x=x, name="out"))), ct.target.iOS17)
    report = ane.edit(source, tmp_path / "out.mlpackage", io="fp16")
    assert [(each.value, each.changed) for each in report.done] == [("x", False), ("out", True)]
    host_takes(tmp_path / "out.mlpackage")
    with pytest.raises(ane.InputError, match=r"^io fp16 x: input 'x' is returned directly and has to keep its type"):
        ane.edit(source, tmp_path / "two.mlpackage", io={"fp16": "x"})


@pytest.mark.parametrize(("kind", "io", "message"), [
    ("iOS15", "fp16", "need iOS16; function 'main' is for CoreML5"),
    ("halves", "fp8", "'fp8' is not a supported type; expected fp16 or fp32"),
    ("halves", {"fp16": "ouT"}, "there is no input or output 'ouT' in the model; did you mean 'out'?"),
    ("halves", {"fp16": "relu_cast_fp16"}, "there is no input or output 'relu_cast_fp16'"),
    ("halves", {"fp16": "x", "fp32": ["x"]}, "both fp16 and fp32 are requested for x"),
    ("halves", {"fp16": [], "fp32": ["x"]}, "both fp16 and fp32 are requested for all names"),
    ("classifier", {"fp16": "image"}, "'image' is an image"),
    ("classifier", {"fp16": "classLabel_probs"}, "'classLabel_probs' is not an array"),
    ("state", {"fp32": "s"}, "there is no input or output 's'"),
])
def test_what_cannot_be(package, tmp_path, kind, io, message):
    with pytest.raises(ane.InputError) as refused:
        ane.edit(package(kind), tmp_path / "out.mlpackage", io=io)
    assert message in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_integers_that_are_named(tmp_path):
    source = make(tmp_path / "in.mlpackage", made(lambda x: mb.add(x=x, y=1, name="out"), dtype=types.int32))
    with pytest.raises(ane.InputError, match="'x' is not an array of floats"):
        ane.edit(source, tmp_path / "out.mlpackage", io={"fp16": "x"})


def test_exactness_is_said_of_each(tmp_path):
    kinds = {}
    for name, body in (("bare", bare), ("inside", inside)):
        source = make(tmp_path / f"{name}.mlpackage", made(body), ct.target.iOS17, pass_pipeline=ct.PassPipeline.EMPTY)
        report = ane.edit(source, dry_run=True, io="fp16")
        kinds[name] = [each.exact for each in report.done]
    assert kinds == {"bare": [True, True], "inside": [False, False]}


def test_a_branch_that_returns_the_input_itself_returns_a_cast_of_it(tmp_path):
    def body(x):
        positive = mb.greater(x=mb.reduce_sum(x=x, axes=[0, 1], keep_dims=False), y=np.float32(0))
        return mb.cond(pred=positive, _true_fn=lambda: x, _false_fn=lambda: mb.abs(x=x), name="out")

    source = make(tmp_path / "in.mlpackage", made(body), ct.target.iOS17, pass_pipeline=ct.PassPipeline.EMPTY)
    report = ane.edit(source, tmp_path / "out.mlpackage", io="fp16", verify=True)
    assert report.verification.equal
    host_takes(tmp_path / "out.mlpackage")
    ane.rewrite(source, tmp_path / "rewritten.mlpackage", passes="fp16_io", verify=False)
    assert Counter(ops_of(tmp_path / "out.mlpackage")) == Counter(ops_of(tmp_path / "rewritten.mlpackage"))
    host_takes(tmp_path / "rewritten.mlpackage")


def test_a_constant_output_leaves_the_constant_its_name(tmp_path):
    def body(x):
        return mb.relu(x=x, name="out"), single(mb.const(val=np.float16([1, 2]), name="kept"), "fixed")

    source = make(tmp_path / "in.mlpackage", made(body), ct.target.iOS17, pass_pipeline=ct.PassPipeline.EMPTY)
    report = ane.edit(source, tmp_path / "out.mlpackage", io="fp16", verify=True)
    assert report.verification.equal and "kept" not in changed_ops(source, tmp_path / "out.mlpackage")
    host_takes(tmp_path / "out.mlpackage")
