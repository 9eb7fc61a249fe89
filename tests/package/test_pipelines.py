"""Pipelines: their ML Programs are loaded as one program, rewritten in place, linted and run; the rest is kept."""

from __future__ import annotations

import shutil

import coremltools as ct
import numpy as np
import pytest
from coremltools import proto
from coremltools.converters.mil import Builder as mb
from coremltools.models import datatypes
from coremltools.models.neural_network import NeuralNetworkBuilder

import mil_ane_passes as ane

from .helpers import MODEL, make, normal, proto_ops, spec_of, tree, write_spec

X = np.random.default_rng(0).standard_normal((1, 4, 32)).astype(np.float32)


def up_program():
    weight, bias = normal(4, 8, 5), np.ones(8, np.float32)

    @mb.program(input_specs=[mb.TensorSpec((1, 4, 32))], opset_version=ct.target.iOS16)
    def program(x):
        return mb.relu(x=mb.conv_transpose(x=x, weight=weight, bias=bias, name="up"), name="mid")

    return program


def out_program():
    weight = normal(128, 36)

    @mb.program(input_specs=[mb.TensorSpec((1, 8, 36))], opset_version=ct.target.iOS16)
    def program(mid):
        return mb.linear(x=mid, weight=weight, name="out")

    return program


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    return [make(folder / f"{name}.mlpackage", program, ct.target.iOS16)
            for name, program in (("up", up_program()), ("out", out_program()))]


@pytest.fixture(scope="module")
def pipeline(parts, tmp_path_factory):
    models = [ct.models.MLModel(str(part), skip_model_load=True) for part in parts]
    path = tmp_path_factory.mktemp("pipeline") / "pipeline.mlpackage"
    ct.utils.make_pipeline(*models).save(str(path))
    return path


def changed(pipeline, tmp_path, change):
    """A copy of the pipeline's package whose spec `change` was given."""
    path = tmp_path / "changed.mlpackage"
    shutil.copytree(pipeline, path)
    spec = spec_of(path)
    write_spec(path, change(spec) or spec)
    return path


def wrapped(spec):
    """A model whose pipelines lie in pipelines: a classifier's of one named part, which is the pipeline."""
    outer = proto.Model_pb2.Model(specificationVersion=spec.specificationVersion, description=spec.description)
    outer.pipelineClassifier.pipeline.models.add().CopyFrom(spec)
    outer.pipelineClassifier.pipeline.names.append("inner")
    return outer


def with_network(spec):
    """The pipeline with a neural network behind its parts, and names for all three."""
    inputs = [("out", datatypes.Array(1, 8, 128))]
    builder = NeuralNetworkBuilder(inputs, [("last", None)], disable_rank5_shape_mapping=True)
    builder.add_activation("act", "RELU", "out", "last")
    spec.pipeline.models.add().CopyFrom(builder.spec)
    spec.pipeline.names.extend(["up", "out", "net"])


KINDS = {
    "as made": lambda spec: None,
    "in a classifier's pipeline": wrapped,
    "with a neural network": with_network,
    "two parts of one name": lambda spec: spec.pipeline.names.extend(["same", "same"]),
}
NAMES = {
    "as made": ("part0/main", "part1/main"),
    "in a classifier's pipeline": ("inner/part0/main", "inner/part1/main"),
    "with a neural network": ("up/main", "out/main"),
    "two parts of one name": ("same_0/main", "same_1/main"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_touched_is_kept_byte_for_byte(pipeline, tmp_path, kind):
    source = changed(pipeline, tmp_path, KINDS[kind])
    package = ane.load(source)
    assert package.functions == NAMES[kind]
    ane.save(package, tmp_path / "again.mlpackage")
    assert tree(source) == tree(tmp_path / "again.mlpackage")


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_is_rewritten_in_place(pipeline, parts, tmp_path, kind):
    source, target = changed(pipeline, tmp_path, KINDS[kind]), tmp_path / "rewritten.mlpackage"
    before = tree(source)
    report = ane.rewrite(source, target, passes="lift_conv_transpose_1d")
    assert report.status == "written" and report.verified
    assert [hit.function for trace in report.traces for hit in trace.fired] == [NAMES[kind][0]]
    assert tree(source) == before
    old, new = spec_of(source), spec_of(target)
    models, rewritten = flat(old), flat(new)
    alone = tmp_path / "alone.mlpackage"
    ane.rewrite(parts[0], alone, passes="lift_conv_transpose_1d")
    wanted = {name: data for name, data in proto_ops(alone).items() if b"weight.bin" not in data}
    made = rewritten[0].mlProgram.functions["main"]
    found = {op.outputs[0].name: op.SerializeToString() for op in made.block_specializations[made.opset].operations}
    assert {name: proto.MIL_pb2.Operation.FromString(found[name]) for name in wanted} == {
        name: proto.MIL_pb2.Operation.FromString(data) for name, data in wanted.items()}
    rewritten[0].mlProgram.CopyFrom(models[0].mlProgram)
    assert new == old, "more than the program of the one part differs"


def flat(spec):
    kind = spec.WhichOneof("Type")
    if not kind.startswith("pipeline"):
        return [spec]
    inner = getattr(spec, kind) if kind == "pipeline" else getattr(spec, kind).pipeline
    return [each for model in inner.models for each in flat(model)]


def test_the_host_loads_the_result(pipeline, tmp_path):
    ane.rewrite(pipeline, tmp_path / "new.mlpackage", preset="full")
    loaded = ct.models.MLModel(str(tmp_path / "new.mlpackage"), skip_model_load=True)
    assert [model.WhichOneof("Type") for model in loaded.get_spec().pipeline.models] == ["mlProgram"] * 2


def test_running_a_pipeline_runs_its_parts_one_after_the_other(pipeline, parts, tmp_path):
    wanted = ane.run(parts[1], ane.run(parts[0], {"x": X}))
    found = ane.run(pipeline, {"x": X})
    assert list(found) == ["out"] and np.array_equal(found["out"], wanted["out"])
    predicted = ane.runtime.predictor(pipeline, precision="float32").predict({"x": X})
    assert np.array_equal(predicted["out"], wanted["out"])
    ane.rewrite(pipeline, tmp_path / "new.mlpackage")
    assert np.allclose(ane.run(tmp_path / "new.mlpackage", {"x": X})["out"], wanted["out"], atol=1e-5)
    middle = ane.run(pipeline, {"x": X}, function="part0/main")["mid"]
    assert np.array_equal(middle, ane.run(parts[0], {"x": X})["mid"])


def test_given_feeds_reach_every_part(pipeline, tmp_path):
    """A difference in the second part is seen, though the feeds are those of the first."""
    def doubled(spec):
        main = spec.pipeline.models[1].mlProgram.functions["main"]
        block = main.block_specializations[main.opset]
        linear = next(op for op in block.operations if op.type == "linear")
        linear.type = "matmul"
        linear.inputs["x"].arguments[0].name, weight = "mid", linear.inputs["weight"].arguments[0].name
        linear.inputs["y"].arguments.add().name = weight
        del linear.inputs["weight"], linear.inputs["bias"]
        linear.inputs["transpose_y"].arguments.add().name = "yes"
        const = block.operations.add(type="const")
        const.outputs.add(name="yes").type.tensorType.dataType = 1
        const.attributes["val"].type.tensorType.dataType = 1
        const.attributes["val"].immediateValue.tensor.bools.values.append(True)
        block.operations.insert(0, block.operations.pop())
        scale = block.operations.add(type="add")
        scale.inputs["x"].arguments.add().name = "product"
        scale.inputs["y"].arguments.add().name = "product"
        scale.outputs.add().CopyFrom(linear.outputs[0])
        linear.outputs[0].name = "product"

    other = changed(pipeline, tmp_path, doubled)
    report = ane.verify(pipeline, other, feeds={"x": X})
    assert not report.equal and {case.function for case in report.cases if not case.passed} == {"part1/main"}
    with pytest.raises(ane.InputError, match=r"feed 'z': no such input.*no ML Program of the pipeline reads it"):
        ane.verify(pipeline, pipeline, feeds={"z": X})
    part = next(iter(ane.load(pipeline).functions))
    found = ane.verify(pipeline, other, function=part)
    assert {case.function for case in found.cases} == {part}


def test_a_callable_stands_for_one_part(pipeline, parts):
    weight, bias = (ane.load(parts[1]).program.find_ops(op_type="linear")[0].inputs[name].val
                    for name in ("weight", "bias"))
    assert ane.verify(pipeline, lambda mid: mid @ weight.T + bias, function="part1/main").equal
    assert ane.verify(lambda mid: mid @ weight.T + 1, pipeline, function="part1/main").status == "different"


def test_lint_looks_at_every_part_and_names_what_it_leaves_out(pipeline, tmp_path):
    source = changed(pipeline, tmp_path, with_network)
    report = ane.lint(source)
    assert {row.function for row in report.plan.rows} == {"up/main", "out/main"}
    assert "ANE301" in {item.rule.code for item in report.findings}
    assert report.to_dict()["left_out"] == {"net": "neuralNetwork"}
    assert "  net: a neuralNetwork, not linted" in str(report).splitlines()
    assert "fp32-io" not in {item.rule.slug for item in report.findings}, "a part's interface is its neighbours', too"
    assert "left_out" not in ane.lint(pipeline).to_dict()
    rewritten = ane.rewrite(source, tmp_path / "new.mlpackage")
    assert rewritten.to_dict()["left_out"] == {"net": "neuralNetwork"}
    assert "net: a neuralNetwork, unchanged" in str(rewritten).splitlines()


REFUSED = {
    "a rewrite of the interface": (
        lambda path, folder: ane.rewrite(path, folder / "out.mlpackage", passes="fp16_io"), lambda spec: None,
        "is a pipeline, but ane::fp16_io changes inputs and outputs"),
    "a trace of no part": (lambda path, folder: ane.trace(path, {"x": X}), lambda spec: None,
                           "choose one function to trace: part0/main, part1/main"),
    "a run with a neural network": (lambda path, folder: ane.run(path, {"x": X}), with_network,
                                    "part 'net' is a neuralNetwork"),
    "a feed of another name": (lambda path, folder: ane.run(path, {"y": X}), lambda spec: None,
                               "feed 'y': no such input .inputs: x."),
    "a missing feed": (lambda path, folder: ane.run(path, {}), lambda spec: None, "input 'x': not fed"),
    "a state": (lambda path, folder: ane.run(path, {"x": X}, state={"s": X}), lambda spec: None,
                "state 's': a pipeline has no states"),
    "a callable": (lambda path, folder: ane.verify(path, lambda x: x), lambda spec: None,
                   "is compared with one ML Program; choose the function of a part: function=part0/main"),
    "a network alone that nothing feeds": (lambda path, folder: ane.load(path),
                      lambda spec: (with_network(spec), spec.pipeline.models.pop(0), spec.pipeline.models.pop(0))[:0],
                      "its input 'out' is neither an input of the pipeline nor an output of an earlier part"),
    "no part": (lambda path, folder: ane.load(path), lambda spec: spec.pipeline.ClearField("models"),
                "it has no parts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_for_pipelines_is_refused(pipeline, tmp_path, case):
    action, change, reason = REFUSED[case]
    path = changed(pipeline, tmp_path, change)
    with pytest.raises(ane.AnePassesError, match=reason):
        action(path, tmp_path)
    assert not (tmp_path / "out.mlpackage").exists()


def test_two_pipelines_in_one_field_are_damage(pipeline, tmp_path):
    path = tmp_path / "twice.mlpackage"
    shutil.copytree(pipeline, path)
    data = (path / MODEL).read_bytes()
    empty = bytes([202 << 3 & 0x7F | 2 | 0x80, 202 << 3 >> 7, 0])
    (path / MODEL).write_bytes(data + empty)
    with pytest.raises(ane.InputError, match="found 2 fields 202; expected one pipeline"):
        ane.load(path)


def scaled(folder, name, ends, factor, images=(None, None)):
    """A part that multiplies its first input and adds the second, if it has one, as a spec; its weights are in that."""
    shape = (1, 3, 4, 4)

    def product(x):
        return mb.mul(x=x, y=np.float32(factor), name=ends[-1])

    def product_and_sum(x, z):
        return mb.add(x=mb.mul(x=x, y=np.float32(factor)), y=z, name=ends[-1])

    body = product if len(ends) == 2 else product_and_sum
    program = mb.program(input_specs=[mb.TensorSpec(shape) for _ in ends[:-1]], opset_version=ct.target.iOS16)(body)
    path = make(folder / f"{name}.mlpackage", program, ct.target.iOS16)
    spec = spec_of(path)
    for feature, layout in zip((spec.description.input[0], spec.description.output[0]), images):
        if layout is not None:
            feature.type.imageType.height = feature.type.imageType.width = shape[-1]
            feature.type.imageType.colorSpace = proto.FeatureTypes_pb2.ImageFeatureType.ColorSpace.Value(layout)
    write_spec(path, spec)
    ane.edit(path, folder / f"{name}_renamed.mlpackage", rename=dict(zip(("x", "z"), ends[:-1])))
    return spec_of(folder / f"{name}_renamed.mlpackage")


def joined(parts, inputs, outputs, path=None, names=()):
    """The spec of a pipeline of specs, also saved where there is a `path`."""
    spec = proto.Model_pb2.Model(specificationVersion=7)
    features = {each.name: each for part in parts for each in (*part.description.output, *part.description.input)}
    for ends, section in ((inputs, spec.description.input), (outputs, spec.description.output)):
        for each in ends:
            section.add().CopyFrom(features[each])
    for part in parts:
        spec.pipeline.models.add().CopyFrom(part)
    spec.pipeline.names.extend(names)
    if path is not None:
        ct.models.MLModel(spec, skip_model_load=True).save(str(path))
    return spec


SQUARE = np.random.default_rng(0).integers(0, 60, (1, 3, 4, 4)).astype(np.float32)


def test_pipelines_in_pipelines_have_their_own_names(tmp_path):
    """What the inner parts hand each other is not what the outer ones do, though both call it `mid`."""
    inner = joined([scaled(tmp_path, "a", ("x", "mid"), 100.0), scaled(tmp_path, "b", ("mid", "u"), 1.0)], ["x"], ["u"])
    parts = [scaled(tmp_path, "c", ("x", "mid"), 2.0), inner, scaled(tmp_path, "d", ("mid", "u", "out"), 3.0)]
    path = tmp_path / "nested.mlpackage"
    joined(parts, ["x"], ["out"], path)
    wanted = SQUARE * 2 * 3 + SQUARE * 100
    assert np.array_equal(ane.run(path, {"x": SQUARE})["out"], wanted)
    assert np.array_equal(ane.runtime.predictor(path, precision="float32").predict({"x": SQUARE})["out"], wanted)

    @mb.program(input_specs=[mb.TensorSpec(SQUARE.shape)], opset_version=ct.target.iOS16)
    def program(x):
        return mb.mul(x=x, y=np.float32(106.0), name="out")

    assert ane.verify(make(tmp_path / "one.mlpackage", program, ct.target.iOS16), path).equal
    report = ane.calibrate(path, feeds={"x": SQUARE})
    assert {row.trace.maximum for row in report.found.rows if row.function == "part2/main"} >= {float(wanted.max())}


def test_images_between_parts_are_pixels_in_the_order_of_each(tmp_path):
    parts = [scaled(tmp_path, "a", ("x", "mid"), 5.5, (None, "RGB")),
             scaled(tmp_path, "b", ("mid", "out"), 2.0, ("BGR", None))]
    path = tmp_path / "images.mlpackage"
    joined(parts, ["x"], ["out"], path)
    found = ane.run(path, {"x": SQUARE})["out"]
    assert np.array_equal(found, np.clip(np.rint(SQUARE * 5.5), 0, 255)[:, ::-1] * 2)


def test_other_parts_of_two_pipelines_are_compared(pipeline, tmp_path):
    """Parts that are not ML Programs were passed over, and pipelines with other networks called equal."""
    def with_another(spec):
        with_network(spec)
        layer = spec.pipeline.models[2].neuralNetwork.layers[0]
        layer.activation.leakyReLU.alpha = 0.5

    one = changed(pipeline, tmp_path, with_network)
    (tmp_path / "other").mkdir()
    (tmp_path / "third").mkdir()
    two = changed(pipeline, tmp_path / "other", with_another)
    report = ane.verify(one, two)
    assert report.status == "not verified" and "part 'net', a neuralNetwork, differs" in report.reason
    assert ane.verify(one, one).equal and ane.verify(one, two, function="up/main").equal
    rewritten = ane.rewrite(one, tmp_path / "new.mlpackage", preset="full")
    assert rewritten.status == "written" and ane.verify(one, tmp_path / "new.mlpackage").equal
    with pytest.raises(ane.InputError, match="part 'net', a neuralNetwork, is in the first only"):
        ane.verify(one, changed(pipeline, tmp_path / "third", lambda spec: spec.pipeline.names.extend(["up", "out"])))


def test_pipelines_that_connect_their_parts_otherwise_are_refused(tmp_path):
    """Parts with the same names and programs in another order read other values."""
    parts = [scaled(tmp_path, "a", ("x", "y"), 2.0), scaled(tmp_path, "b", ("x", "y"), 3.0)]
    one, two, three = (tmp_path / f"{name}.mlpackage" for name in ("one", "two", "three"))
    joined(parts, ["x"], ["y"], one, ["a", "b"])
    joined(parts[::-1], ["x"], ["y"], two, ["b", "a"])
    joined(parts, ["x"], ["y", "x"], three, ["a", "b"])
    with pytest.raises(ane.InputError, match="output 'y' of the pipeline is output 'y' of part 'b' in the first and "
                                             "output 'y' of part 'a' in the second"):
        ane.verify(one, two)
    with pytest.raises(ane.InputError, match="output 'x' of the pipeline is .* in the second"):
        ane.verify(one, three)
    assert ane.verify(one, one).equal


def test_an_image_of_a_pipeline_is_in_the_order_of_the_other_model(tmp_path):
    parts = [scaled(tmp_path, "a", ("x", "mid"), 2.0, ("BGR", None)), scaled(tmp_path, "b", ("mid", "out"), 3.0)]
    whole = tmp_path / "whole.mlpackage"
    scaled(tmp_path, "whole", ("x", "out"), 6.0, ("RGB", None))
    joined(parts, ["x"], ["out"], tmp_path / "pipeline.mlpackage")
    for pair in ((whole, tmp_path / "pipeline.mlpackage"), (tmp_path / "pipeline.mlpackage", whole)):
        with pytest.raises(ane.InputError, match="input 'x' of the model is an image in the order"):
            ane.verify(*pair)
    same = scaled(tmp_path, "c", ("x", "mid"), 2.0, ("RGB", None))
    joined([same, parts[1]], ["x"], ["out"], tmp_path / "same.mlpackage")
    assert ane.verify(whole, tmp_path / "same.mlpackage").equal
