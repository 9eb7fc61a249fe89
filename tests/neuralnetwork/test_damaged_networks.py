"""Networks whose description or parameters contradict themselves: refused with what was found, and within bounds."""

import coremltools as ct
import numpy as np
import pytest
from coremltools.models import datatypes, neural_network

import mil_ane_passes as ane
from mil_ane_passes.neuralnetwork.upgrade import upgrade_model

RNG = np.random.default_rng(11)


def make_builder(**inputs):
    return neural_network.NeuralNetworkBuilder(
        [(name, datatypes.Array(*shape)) for name, shape in inputs.items()], [("out", None)])


def make_classifier():
    builder = neural_network.NeuralNetworkBuilder(
        [("data", datatypes.Array(3))], [("probs", None)], mode="classifier")
    builder.add_softmax("softmax", "data", "probs")
    builder.set_class_labels(["cat", "dog", "owl"], predicted_feature_name="animal", prediction_blob="probs")
    return builder


def make_convolution():
    builder = make_builder(data=(3, 8, 8))
    builder.add_convolution("conv", 3, 4, 3, 3, 1, 1, "same", 1, np.ones((3, 3, 3, 4)), None, False,
                            input_name="data", output_name="out")
    return builder


def test_a_color_space_of_a_later_format_is_refused():
    builder = make_convolution()
    builder.set_pre_processing_parameters(["data"])
    builder.spec.description.input[0].type.imageType.colorSpace = 77
    with pytest.raises(ane.InputError, match="the image 'data' has color space 77; expected RGB, BGR or grayscale"):
        upgrade_model(builder.spec)


def test_an_input_without_a_shape_is_refused():
    builder = make_convolution()
    del builder.spec.description.input[0].type.multiArrayType.shape[:]
    with pytest.raises(ane.InputError, match="the input 'data' has no shape; expected the sizes of an array"):
        upgrade_model(builder.spec)


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_classifier_has_a_label_for_each_probability(count):
    spec = make_classifier().spec
    labels = spec.neuralNetworkClassifier.stringClassLabels.vector
    labels[:] = [f"class {at}" for at in range(count)]
    fault = f"{count} class labels for 3 probabilities; expected one label per probability"
    with pytest.raises(ane.InputError, match=fault):
        upgrade_model(spec)


@pytest.mark.parametrize("name", ["stride", "dilationFactor", "kernelSize"])
def test_a_convolution_with_a_zero_is_refused(name):
    builder = make_convolution()
    getattr(builder.spec.neuralNetwork.layers[0].convolution, name)[:] = [1, 0]
    with pytest.raises(ane.InputError, match=rf"layer 'conv' \(convolution\): a {name} of \(1, 0\); expected 2"):
        upgrade_model(builder.spec)


@pytest.mark.parametrize("name", ["stride", "kernelSize"])
def test_a_pooling_with_a_zero_is_refused(name):
    builder = make_builder(data=(3, 8, 8))
    builder.add_pooling("pool", 2, 2, 1, 1, "MAX", "INCLUDE_LAST_PIXEL", "data", "out")
    getattr(builder.spec.neuralNetwork.layers[0].pooling, name)[:] = [0, 1]
    with pytest.raises(ane.InputError, match=rf"layer 'pool' \(pooling\): a {name} of \(0, 1\); expected 2 numbers"):
        upgrade_model(builder.spec)


@pytest.mark.parametrize("size", [2, 4, 10, 1_000_000_000])
def test_a_response_norm_is_as_wide_as_there_are_channels(size):
    builder = make_builder(data=(6, 2, 3))
    builder.add_lrn("norm", "data", "out", 0.5, 0.75, size, 1.5)
    x = RNG.standard_normal((6, 2, 3)).astype(np.float32)
    found = ane.runtime.predictor(upgrade_model(builder.spec, precision="fp32").model).predict({"data": x})["out"]
    before = (size - 1) // 2
    squares = np.stack([(x[max(at - before, 0):at - before + size] ** 2).sum(axis=0) for at in range(6)])
    np.testing.assert_allclose(found, x / (1.5 + 0.5 / size * squares) ** 0.75, rtol=1e-4)


def test_a_response_norm_of_many_channels_is_refused_where_it_needs_an_op_for_each():
    builder = make_builder(data=(2000, 1, 1))
    builder.add_lrn("norm", "data", "out", 0.5, 0.75, 1000, 1.5)
    with pytest.raises(ane.InputError, match=r"layer 'norm' \(lrn\): an even window of 1000 channels; expected"):
        upgrade_model(builder.spec)


def test_a_convolution_of_its_own_program_with_a_dilation_of_zero_is_linted():
    from coremltools.converters.mil.mil import Builder as mb

    @mb.program(input_specs=[mb.TensorSpec((1, 3, 8, 8))])
    def program(x):
        return mb.conv(x=x, weight=np.ones((4, 3, 1, 1), np.float32), dilations=[0, 0])

    assert ane.lint(program, target="m4").to_dict()["summary"]["ops"] > 0


def test_the_settings_of_coremltools_are_those_of_upgrade():
    spec = make_convolution().spec
    made = [ane.upgrade(spec, deployment_target=target, precision=precision).spec
            for target, precision in (("iOS17", "fp32"), (ct.target.macOS14, ct.precision.FLOAT32))]
    assert made[0].specificationVersion == made[1].specificationVersion == ct.target.iOS17
    assert "fp16" not in str(made[1])
    with pytest.raises(ane.InputError, match="deployment target 'iOS13'; expected iOS15"):
        ane.upgrade(spec, deployment_target=ct.target.iOS13)
