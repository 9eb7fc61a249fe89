"""ANE503: what a caller hands over and takes is fp16, the package says so, and nothing else changes."""

from __future__ import annotations

import shutil
from functools import partial

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager

import mil_ane_passes as ane
from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.runtime import Runtime
from tests.package.helpers import WEIGHTS, conv_program, host_program, make, proto_ops, spec_of, tree, write_spec
from tests.package.test_unchanged import BUILDERS, multifunction, with_state
from tests.rewrites.helpers import configure_rewrite, kinds

FLOAT16, FLOAT32 = 65552, 65568
HALF = ct.precision.FLOAT16


rule = partial(configure_rewrite, "fp16_io")


def dtypes(path):
    """What the description says of arrays, by function and name."""
    description = spec_of(path).description
    return {(getattr(ends, "name", ""), feature.name): feature.type.multiArrayType.dataType
            for ends in (description.functions or [description]) for feature in (*ends.input, *ends.output)
            if feature.type.HasField("multiArrayType")}


def rewritten(source, target, **options):
    report = ane.rewrite(source, target, passes={"fp16_io": options})
    assert report.status == "written", report
    return report


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make(tmp_path_factory.mktemp("io") / "source.mlpackage", conv_program(ct.target.iOS16), ct.target.iOS16,
                compute_precision=HALF)


def test_the_package_takes_and_gives_fp16_and_the_rest_is_kept(source, tmp_path):
    target = tmp_path / "io.mlpackage"
    report = rewritten(source, target)
    assert report.verify.equal_bits
    assert dtypes(source) == dict.fromkeys([("", "x"), ("", "out")], FLOAT32)
    assert dtypes(target) == dict.fromkeys([("", "x"), ("", "out")], FLOAT16)
    before, after = spec_of(source), spec_of(target)
    for feature in (*before.description.input, *before.description.output):
        feature.type.multiArrayType.dataType = FLOAT16
    assert after.description == before.description
    assert tree(target)[WEIGHTS] == tree(source)[WEIGHTS]
    old, new = proto_ops(source), proto_ops(target)
    assert {name for name in new if old.get(name) == new[name] and "cast" not in name} >= {"flat"} & set(old)
    program = ane.load(target).program
    assert kinds(program)["cast"] == 0 and program.functions["main"].inputs["x"].dtype == types.fp16
    ct.models.MLModel(str(target), skip_model_load=True)
    host = host_program(target).functions["main"]
    assert [host.inputs["x"].dtype, host.outputs[0].dtype] == [types.fp16, types.fp16]


def test_the_results_are_those_of_before_in_fp16(source, tmp_path):
    rewritten(source, tmp_path / "io.mlpackage")
    x = np.random.default_rng(0).standard_normal((1, 8, 16, 16)).astype(np.float16)
    old = ane.run(source, {"x": x.astype(np.float32)}, precision="float16")["out"]
    new = ane.run(tmp_path / "io.mlpackage", {"x": x}, precision="float16")["out"]
    assert new.dtype == np.float16
    np.testing.assert_array_equal(new, old.astype(np.float16))


def test_against_pytorch_from_fp32_to_fp16_throughout(tmp_path):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).eval()
    x = torch.randn(2, 64)
    ct.convert(torch.jit.trace(module, x), inputs=[ct.TensorType("x", shape=x.shape)], convert_to="mlprogram",
               outputs=[ct.TensorType("y")], minimum_deployment_target=ct.target.iOS17, skip_model_load=True,
               compute_precision=ct.precision.FLOAT32).save(str(tmp_path / "source.mlpackage"))
    report = ane.rewrite(tmp_path / "source.mlpackage", tmp_path / "half.mlpackage", passes="fp16_compute,fp16_io")
    assert report.status == "written"
    built = ane.load(tmp_path / "half.mlpackage").program
    assert kinds(built)["cast"] == 0
    with torch.no_grad():
        right = module.double()(x.half().double()).numpy()
    np.testing.assert_allclose(Runtime(built, precision="float16")({"x": x.half().numpy()})["y"], right,
                               atol=2e-3 * np.abs(right).max())


def test_every_function_of_several(tmp_path):
    source = multifunction(tmp_path / "source.mlpackage")
    rewritten(source, tmp_path / "io.mlpackage")
    assert dtypes(tmp_path / "io.mlpackage") == {(function, name): FLOAT16 for function in ("zeta", "alpha")
                                                 for name in ("x", "out")}


def test_states_stay(tmp_path):
    source = make(tmp_path / "source.mlpackage", with_state(), ct.target.iOS18)
    report = rewritten(source, tmp_path / "io.mlpackage")
    assert [hit.reason for hit in report.traces[0].fired] == ["input 'x' in fp16; its cast is removed"]
    assert spec_of(tmp_path / "io.mlpackage").description.state == spec_of(source).description.state


def test_images_and_what_a_classifier_gives_stay(tmp_path):
    @mb.program(input_specs=[mb.TensorSpec((1, 3, 8, 8)), mb.TensorSpec((1, 3))], opset_version=ct.target.iOS16)
    def built(image, bias):
        flat = mb.reshape(x=image, shape=(1, 192))
        weight = np.ones((3, 192), np.float32) / 192
        return mb.softmax(x=mb.add(x=mb.linear(x=flat, weight=weight), y=bias), axis=-1)

    source = make(tmp_path / "source.mlpackage", built, ct.target.iOS16, compute_precision=HALF,
                  classifier_config=ct.ClassifierConfig(["a", "b", "c"]),
                  inputs=[ct.ImageType("image", shape=(1, 3, 8, 8), color_layout=ct.colorlayout.RGB),
                          ct.TensorType("bias", shape=(1, 3))])
    report = rewritten(source, tmp_path / "io.mlpackage")
    assert [hit.value for hit in report.traces[0].near_misses] and report.traces[0].near_misses[0].reason == (
        "'image' is an image, whose type is set by the model description")
    before, after = spec_of(source).description, spec_of(tmp_path / "io.mlpackage").description
    assert dtypes(tmp_path / "io.mlpackage") == {("", "bias"): FLOAT16}
    before.input[1].type.multiArrayType.dataType = FLOAT16
    assert after == before


def test_images_of_a_conversion_stay_too():
    model, x = torch.nn.Conv2d(3, 4, 3).eval(), torch.randn(1, 3, 16, 16)
    made = ct.convert(torch.jit.trace(model, x), inputs=[ct.ImageType("x", shape=x.shape)], convert_to="mlprogram",
                      outputs=[ct.TensorType("y")], minimum_deployment_target=ct.target.iOS17, skip_model_load=True,
                      pass_pipeline=ane.pipeline(passes="fp16_io"))
    description = made.get_spec().description
    assert description.input[0].type.WhichOneof("Type") == "imageType"
    assert description.output[0].type.multiArrayType.dataType == FLOAT16


@pytest.mark.parametrize("exported", [False, True], ids=["traced", "exported"])
def test_as_a_pass_of_a_conversion(exported, tmp_path):
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval(), torch.randn(1, 8)
    made = torch.export.export(model, (x,)).run_decompositions({}) if exported else torch.jit.trace(model, x)
    inputs = {} if exported else {"inputs": [ct.TensorType("x", shape=x.shape)]}
    ct.convert(made, **inputs, convert_to="mlprogram", minimum_deployment_target=ct.target.iOS17, skip_model_load=True,
               pass_pipeline=ane.pipeline(passes="fp16_io")).save(str(tmp_path / "a.mlpackage"))
    assert set(dtypes(tmp_path / "a.mlpackage").values()) == {FLOAT16}
    assert kinds(ane.load(tmp_path / "a.mlpackage").program)["cast"] == 0


def test_shapes_and_defaults_of_the_description_are_kept(source, tmp_path):
    spec = spec_of(source)
    feature = spec.description.input[0]
    feature.shortDescription, feature.type.isOptional = "what is fed", True
    feature.type.multiArrayType.floatDefaultValue = 0.5
    feature.type.multiArrayType.enumeratedShapes.shapes.add().shape[:] = [1, 8, 16, 16]
    changed = tmp_path / "changed.mlpackage"
    shutil.copytree(source, changed)
    write_spec(changed, spec)
    rewritten(changed, tmp_path / "io.mlpackage")
    feature.type.multiArrayType.dataType = FLOAT16
    assert spec_of(tmp_path / "io.mlpackage").description.input[0] == feature


@pytest.mark.parametrize("options, said", [
    ({"inputs": False}, {"x": FLOAT32, "out": FLOAT16}), ({"outputs": False}, {"x": FLOAT16, "out": FLOAT32}),
    ({"names": "out"}, {"x": FLOAT32, "out": FLOAT16}), ({"names": "out + x"}, {"x": FLOAT16, "out": FLOAT16})])
def test_options_choose(source, tmp_path, options, said):
    rewritten(source, tmp_path / "io.mlpackage", **options)
    assert {name: dtype for (_, name), dtype in dtypes(tmp_path / "io.mlpackage").items()} == said


def test_a_name_that_is_none_is_refused(source):
    with pytest.raises(ane.InputError, match=r"'outt' is not an input or output of the model \(it has out, x\); did"):
        ane.rewrite(source, passes="fp16_io{names=outt}")


@pytest.mark.parametrize("kind", ["iOS17", "int4", "palettized18"])
def test_where_it_computes_in_fp32_the_casts_change_sides(kind, tmp_path):
    source = BUILDERS[kind](tmp_path / "source.mlpackage")
    rewritten(source, tmp_path / "io.mlpackage")
    built = ane.load(tmp_path / "io.mlpackage").program
    assert kinds(built)["cast"] == 2 and set(dtypes(tmp_path / "io.mlpackage").values()) == {FLOAT16}


def test_one_value_with_several_readers_and_names():
    """The same value twice among the outputs, an input that integers are made of, and one read in a nested block."""
    def body(x):
        half = mb.cast(x=x, dtype="fp16")
        whole = mb.cast(x=x, dtype="int32")
        y = mb.cast(x=mb.abs(x=half), dtype="fp32", name="y")
        pred = mb.greater(x=mb.reduce_max(x=y, axes=[0, 1], keep_dims=False), y=np.float32(1))
        z = mb.cond(pred=pred, _true_fn=lambda: mb.relu(x=x), _false_fn=lambda: mb.mul(x=x, y=np.float32(2)), name="z")
        return y, mb.identity(x=y, name="twin"), whole, z

    built, x = build_program(body, dtype=types.fp32, x=(1, 4)), np.float32([[1, -2, 0.5, 7]])
    names = [var.name for var in built.functions["main"].outputs]
    before = Runtime(built, precision="float16")({"x": x})
    assert len(apply_rewrite(rule(), built).fired) == 4
    built.validate()
    assert [var.name for var in built.functions["main"].outputs] == names
    after = Runtime(built, precision="float16")({"x": x})
    for name in names:
        np.testing.assert_array_equal(after[name], before[name])
        assert after[name].dtype == (np.int32 if before[name].dtype == np.int32 else np.float16)


def test_the_host_leaves_it_and_a_second_run_finds_nothing(source, tmp_path):
    rewritten(source, tmp_path / "io.mlpackage")
    built = ane.load(tmp_path / "io.mlpackage").program
    assert not find_matches(rule(), built).fired
    PassPipelineManager.apply_pipeline(built, ct.PassPipeline.DEFAULT)
    assert kinds(built)["cast"] == 0


def test_other_changes_of_the_interface_are_refused_when_saved(source, tmp_path):
    package = ane.load(source)
    package.program.functions["main"].inputs["x"]._sym_type = types.tensor(types.int32, (1, 8, 16, 16))
    with pytest.raises(ane.InputError, match="the interface of a package cannot be changed"):
        ane.save(package, tmp_path / "a.mlpackage")


def test_what_the_runs_show_beyond_fp16_stays_in_fp32():
    built = build_program(lambda x: mb.square(x=x, name="y"), dtype=types.fp32, x=(2, 8))
    report = ane.rewrite(built, passes="fp16_io", ranges={"x": (-300, 300)})
    assert [hit.reason for hit in report.traces[0].fired] == ["input 'x' in fp16; cast to fp32 for its fp32 users"]
    assert [miss.reason for miss in report.traces[0].near_misses] == ["'y' reaches 9e+04, the fp16 maximum is 65504"]
    tiny = ane.rewrite(built, passes="fp16_io", ranges={"x": (1e-5, 1e-5)})
    assert [miss.reason for miss in tiny.traces[0].near_misses] == [
        "the largest value of 'y' is 1e-10, below the fp16 minimum (6.0e-08)"]
    assert not ane.rewrite(built, passes="fp16_io", ranges={"x": (0, 10)}).traces[0].near_misses


def test_an_output_that_fp16_does_not_hold_is_not_proved():
    built = build_program(lambda x: mb.mul(x=x, y=np.float32(1e6), name="y"), dtype=types.fp32, x=(2, 3))
    report = ane.rewrite(built, passes="fp16_io")
    assert report.status == "not verified" and report.verify.reason.startswith("output 'y' reaches ")
    assert report.verify.reason.endswith(", which float16 cannot represent")
