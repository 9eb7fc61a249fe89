"""Pipelines of networks as one ML Program: values, interfaces, and the pipelines that are refused."""

import coremltools as ct
import numpy as np
import pytest
from coremltools import proto
from coremltools.models import datatypes, neural_network
from PIL import Image

import mil_ane_passes as ane
from mil_ane_passes.neuralnetwork.upgrade import upgrade_model

RNG = np.random.default_rng(3)
WEIGHT = RNG.standard_normal((4, 12)).astype(np.float32)


def make_doubler(source="data", result="half", shape=(3, 2, 2), image=False):
    builder = neural_network.NeuralNetworkBuilder([(source, datatypes.Array(*shape))],
                                                  [(result, datatypes.Array(*shape))])
    builder.add_activation("double", "LINEAR", source, result, [2.0, 1.0])
    if image:
        builder.set_pre_processing_parameters([source], is_bgr=False)
    return builder.spec


def make_linear(source="half", result="out", shape=(3, 2, 2)):
    builder = neural_network.NeuralNetworkBuilder([(source, datatypes.Array(*shape))], [(result, datatypes.Array(4))])
    builder.add_flatten("flat", 0, source, "flat")
    builder.add_inner_product("linear", WEIGHT, None, 12, 4, False, "flat", result)
    return builder.spec


def make_classifier():
    builder = neural_network.NeuralNetworkBuilder([("out", datatypes.Array(4))], [("scores", None)], mode="classifier")
    builder.add_softmax("softmax", "out", "scores")
    builder.set_class_labels(list("abcd"), predicted_feature_name="letter", prediction_blob="scores")
    return builder.spec


def join(*specs, kind="pipeline"):
    """A pipeline of the parts, with the inputs of the first and the outputs of the last."""
    whole = proto.Model_pb2.Model(specificationVersion=4)
    inner = getattr(whole, kind) if kind == "pipeline" else getattr(whole, kind).pipeline
    inner.models.extend(specs)
    inner.names.extend(f"part{at}" for at in range(len(specs)))
    whole.description.input.extend(specs[0].description.input)
    whole.description.output.extend(specs[-1].description.output)
    whole.description.predictedFeatureName = specs[-1].description.predictedFeatureName
    whole.description.predictedProbabilitiesName = specs[-1].description.predictedProbabilitiesName
    whole.description.metadata.author = "nobody"
    return whole


def predict(source, feeds):
    return ane.runtime.predictor(upgrade_model(source, precision="fp32").model).predict(feeds)


@pytest.mark.parametrize("kind", ["pipeline", "pipelineRegressor"])
def test_the_networks_of_a_pipeline_are_one_program(kind, tmp_path):
    x = RNG.standard_normal((3, 2, 2)).astype(np.float32)
    spec = join(make_doubler(), make_linear(), kind=kind)
    found = predict(spec, {"data": x})
    assert list(found) == ["out"]
    np.testing.assert_allclose(found["out"], WEIGHT @ (2 * x + 1).reshape(-1), rtol=1e-5)
    ct.utils.save_spec(spec, str(tmp_path / "in.mlmodel"))
    package = ane.upgrade(tmp_path / "in.mlmodel", tmp_path / "out.mlpackage")
    assert package.spec.description.metadata.author == "nobody"
    assert upgrade_model(spec).layers == {"activation": 1, "flatten": 1, "innerProduct": 1}


def test_a_pipeline_in_a_pipeline_takes_an_image_and_gives_labels():
    spec = join(join(make_doubler(image=True), make_linear()), make_classifier(), kind="pipelineClassifier")
    pixels = RNG.integers(0, 255, (2, 2, 3), dtype=np.uint8)
    found = predict(spec, {"data": Image.fromarray(pixels)})
    scores = WEIGHT @ (2.0 * pixels.transpose(2, 0, 1) + 1).reshape(-1)
    assert found["letter"] == "abcd"[scores.argmax()]
    made = upgrade_model(spec).model.get_spec().description
    assert made.input[0].type.WhichOneof("Type") == "imageType" and made.predictedFeatureName == "letter"


@pytest.mark.parametrize("nested", [False, True])
def test_a_general_pipeline_that_ends_in_a_classifier_keeps_the_name_of_its_label(nested):
    """Such a pipeline has no predictedFeatureName: `coremltools.utils.make_pipeline` sets none."""
    spec = join(make_linear(source="data"), make_classifier())
    spec = join(spec) if nested else spec
    spec.description.predictedFeatureName = spec.description.predictedProbabilitiesName = ""
    x = RNG.standard_normal((3, 2, 2)).astype(np.float32)
    found = predict(spec, {"data": x})
    assert set(found) == {"letter", "scores"} and found["letter"] == "abcd"[(WEIGHT @ x.reshape(-1)).argmax()]
    described = upgrade_model(spec).model.get_spec().description
    assert {each.name for each in described.output} == {"letter", "scores"}
    assert (described.predictedFeatureName, described.predictedProbabilitiesName) == ("letter", "scores")


def test_what_declares_another_shape_of_as_many_elements_is_reshaped():
    x = RNG.standard_normal((3, 2, 2)).astype(np.float32)
    found = predict(join(make_doubler(), make_linear(shape=(12, 1, 1))), {"data": x})
    np.testing.assert_allclose(found["out"], WEIGHT @ (2 * x + 1).reshape(-1), rtol=1e-5)


def make_unlike(spec):
    spec.description.input[0].type.imageType.width = spec.description.input[0].type.imageType.height = 2
    spec.description.input[0].type.imageType.colorSpace = 20
    return spec


def make_tree():
    return proto.Model_pb2.Model(treeEnsembleRegressor=proto.TreeEnsemble_pb2.TreeEnsembleRegressor())


def make_deep():
    spec = make_doubler()
    for _ in range(12):
        spec = join(spec)
    return spec


@pytest.mark.parametrize(("spec", "said"), [
    (lambda: join(make_doubler(), make_tree()),
     r"part 2 \('part1'\): the model is of type treeEnsembleRegressor.*upgrade the network of the pipeline by itself"),
    (lambda: join(make_doubler(), make_linear(source="gone")), "its input 'gone' is neither an input of the pipeline"),
    (lambda: join(make_doubler(), make_linear(shape=(2, 2, 2))), r"its input 'half' is of shape \(2, 2, 2\)"),
    (lambda: join(make_doubler(), make_unlike(make_linear())), "'half' is an image .RGB. but it receives an array"),
    (lambda: join(make_classifier(), make_doubler()), "a classifier before the last part of a pipeline"),
    (lambda: join(make_doubler()).__class__(pipeline=proto.Model_pb2.Pipeline()), "a pipeline without models"),
    (make_deep, "a pipeline nested too deep"),
], ids=["tree", "gone", "shape", "image", "classifier", "empty", "deep"])
def test_other_pipelines_are_refused_by_part(spec, said):
    with pytest.raises(ane.InputError, match=said):
        upgrade_model(spec())


def test_a_package_that_holds_a_network_is_read_as_its_manifest_says(tmp_path):
    model = ct.models.MLModel(make_doubler(), skip_model_load=True)
    model.save(str(tmp_path / "in.mlpackage"))
    stray = tmp_path / "in.mlpackage" / "Data" / "com.apple.CoreML" / "other.mlmodel"
    stray.write_bytes(b"")
    assert upgrade_model(tmp_path / "in.mlpackage").layers == {"activation": 1}
    (tmp_path / "in.mlpackage" / "Manifest.json").unlink()
    with pytest.raises(ane.InputError, match="not a package, it has no Manifest.json"):
        upgrade_model(tmp_path / "in.mlpackage")
