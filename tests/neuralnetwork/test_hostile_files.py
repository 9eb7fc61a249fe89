"""Damaged and hostile .mlmodel files: each ends with one clear line, at once and in little memory."""

import os
import time
import tracemalloc

import coremltools as ct
import numpy as np
import pytest
from coremltools import proto
from coremltools.models import datatypes, neural_network

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.neuralnetwork.upgrade import upgrade_model
from tests.lab.fuzz.networks import BUILDERS

LAYERS = proto.NeuralNetwork_pb2.NeuralNetworkLayer


def make_builder(exact=True, **inputs):
    features = [(name, datatypes.Array(*shape)) for name, shape in (inputs or {"data": (1, 4)}).items()]
    return neural_network.NeuralNetworkBuilder(features, [("out", None)], disable_rank5_shape_mapping=exact)


def make_network(change):
    builder = make_builder()
    builder.add_copy("copy", "data", "out")
    change(builder.spec)
    return builder.spec


def nest(depth, kind):
    """A network of branches or loops in each other."""
    builder = make_builder(data=(1,))
    builder.add_copy("start", "data", "out")
    layers = builder.spec.neuralNetwork.layers
    for _ in range(depth):
        layer = layers.add(name="nested")
        if kind == "branch":
            layer.input.append("data")
            layers = layer.branch.ifBranch.layers
        else:
            layer.loop.maxLoopIterations = 2
            layers = layer.loop.bodyNetwork.layers
    last = layers.add(name="last", input=["out"], output=["out"])
    last.copy.SetInParent()
    return builder.spec


def grow(count):
    """Two short constants whose sum has `count` x `count` elements."""
    builder = make_builder()
    numbers = np.ones(count, np.float32)
    builder.add_load_constant_nd("row", "a", numbers, (1, count))
    builder.add_load_constant_nd("column", "b", numbers, (count, 1))
    builder.add_add_broadcastable("sum", ["a", "b"], "c")
    builder.add_reduce_sum("total", "c", "d", None, True, True)
    builder.add_add_broadcastable("end", ["data", "d"], "out")
    return builder.spec


def set_array(spec, shape):
    array = spec.description.input[0].type.multiArrayType
    array.ClearField("shape")
    array.shape.extend(shape)


REFUSED = {
    "no layers": (lambda spec: spec.neuralNetwork.ClearField("layers"), "no layer computes the output 'out'"),
    "no kind": (lambda spec: spec.neuralNetwork.layers[0].ClearField("copy"), "its kind is unknown to this version"),
    "no input": (lambda spec: spec.neuralNetwork.layers[0].ClearField("input"), "it has no input"),
    "no shape": (lambda spec: set_array(spec, ()), "the input 'data' has no shape"),
    "negative size": (lambda spec: set_array(spec, (1, -4)), "expected up to 5 of at least 1"),
    "size 0": (lambda spec: set_array(spec, (0, 4)), "expected up to 5 of at least 1"),
    "rank 4000": (lambda spec: set_array(spec, (1,) * 4000), "is declared with 4000 sizes"),
    "size of 2^62": (lambda spec: set_array(spec, (1, 2**62)), "expected up to 5 of at least 1"),
    "two inputs of a name": (lambda spec: spec.description.input.add().CopyFrom(spec.description.input[0]),
                             "2 inputs or outputs are called 'data'"),
    "two outputs of a name": (lambda spec: spec.description.output.add().CopyFrom(spec.description.output[0]),
                              "2 inputs or outputs are called 'out'"),
    "sequence": (lambda spec: spec.description.input[0].type.sequenceType.SetInParent(), "is of type sequenceType"),
    "no type": (lambda spec: spec.description.input[0].ClearField("type"), "is of type None"),
    "image of no size": (lambda spec: spec.description.input[0].type.imageType.__setattr__("colorSpace", 20),
                         "is declared with 0 x 0 pixels"),
    "image of no color": (lambda spec: spec.description.input[0].type.imageType.SetInParent(),
                          "has color space INVALID"),
    "a cycle": (lambda spec: spec.neuralNetwork.layers[0].input.__setitem__(0, "out"),
                "its input 'out' is not computed by an earlier layer"),
    "more outputs than the layer has": (lambda spec: spec.neuralNetwork.layers[0].output.append("more"),
                                        "it has 2 outputs; expected at most 1"),
    "updatable": (lambda spec: setattr(spec, "isUpdatable", True), "the model is updatable"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_network_that_contradicts_itself_is_refused_in_one_line(case):
    change, said = REFUSED[case]
    with pytest.raises(ane.InputError, match=said) as caught:
        upgrade_model(make_network(change))
    assert "\n" not in str(caught.value)


def add(kind, **settings):
    def change(spec):
        layer = spec.neuralNetwork.layers[0]
        getattr(layer, kind).SetInParent()
        for name, value in settings.items():
            held = getattr(getattr(layer, kind), name)
            if isinstance(value, (list, tuple)):
                held.extend(value)
            else:
                setattr(getattr(layer, kind), name, value)
    return change


@pytest.mark.parametrize("change", [
    add("fillStatic", targetShape=[10**9]), add("fillStatic", targetShape=[0, 5]),
    add("rangeStatic", endValue=1.0), add("rangeStatic", endValue=float("nan"), stepSizeValue=1.0),
    add("tile", reps=[2**40, 1]), add("broadcastToStatic", targetShape=[10**6, 10**6]),
    add("loadConstantND", shape=[10**9]), add("loadConstantND", shape=[2**62, 2**62]),
    add("randomNormalStatic", outputShape=[2**62]), add("convolution", outputChannels=2**40, kernelChannels=2**40),
    add("convolution", kernelSize=[0, 0]), add("pooling", kernelSize=[0, 0], stride=[0, 0]),
    add("pooling", type=7), add("unary", type=99), add("gelu", mode=9), add("permute", axis=[9, 9, 9, 9]),
    add("transpose", axes=[5, 5]), add("transpose", axes=[2**63]), add("softmaxND", axis=2**62),
    add("concatND", axis=-9),
    add("reduceSum", axes=[77]), add("squeeze", axes=[1]), add("expandDims", axes=[0] * 60), add("topK", axis=9, K=0),
    add("innerProduct", inputChannels=2**63, outputChannels=2**63), add("embedding", inputDim=4, outputChannels=10**9),
    add("splitND", axis=1, numSplits=2**62), add("split"), add("slice", startIndex=-2**62, stride=0),
    add("sliceStatic", beginIds=[0], endIds=[1]), add("cropResize"), add("gru"), add("uniDirectionalLSTM"),
    add("biDirectionalLSTM"), add("simpleRecurrent", outputVectorSize=2**62), add("reorganizeData", blockSize=0),
    add("lrn", localSize=2**62), add("constantPad", padAmounts=[2**62]), add("activation"), add("oneHot", axis=9),
    add("slidingWindows", windowSize=0), add("NonMaximumSuppression"), add("loop", conditionVar="gone"),
    add("layerNormalization", normalizedShape=[10**9]), add("categoricalDistribution", numSamples=2**62),
    add("matrixBandPart", numLower=-2**62, numUpper=-2**62), add("upsample", scalingFactor=[0, 0]),
    add("resizeBilinear", targetSize=[2**62, 2**62]), add("sequenceRepeat", nRepetitions=2**62), add("loopBreak"),
])
def test_a_layer_with_absurd_parameters_costs_nothing(change):
    """Refused in one line with the layer's name, or converted; in little time and memory either way."""
    spec = make_network(change)
    tracemalloc.start()
    started = time.process_time()
    try:
        upgrade_model(spec)
    except ane.InputError as error:
        assert "\n" not in str(error) and ("layer 'copy'" in str(error) or "cannot save the program" in str(error))
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert time.process_time() - started < 8 and most < 100e6


def test_values_that_follow_from_small_constants_are_not_computed_where_they_are_large():
    tracemalloc.start()
    upgrade_model(grow(40_000))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 100e6


@pytest.mark.parametrize("kind", ["branch", "loop"])
@pytest.mark.parametrize("depth", [3, 30, 90])
def test_networks_in_each_other(kind, depth):
    spec = nest(depth, kind)
    started = time.process_time()
    try:
        upgrade_model(spec)
    except ane.InputError as error:
        assert depth > 3 and "nested too deep" in str(error) and "\n" not in str(error)
    assert time.process_time() - started < 20


@pytest.mark.parametrize("name", BUILDERS)
def test_a_file_that_is_cut_is_refused_or_read(name, tmp_path):
    data = BUILDERS[name]().SerializeToString()
    path = tmp_path / "cut.mlmodel"
    for at in range(0, len(data), max(len(data) // 12, 1)):
        path.write_bytes(data[:at])
        try:
            upgrade_model(path)
        except ane.InputError as error:
            assert "\n" not in str(error)


def test_what_is_no_regular_file_is_refused(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.mlmodel")
    (tmp_path / "zero.mlmodel").symlink_to("/dev/zero")
    (tmp_path / "folder.mlmodel").mkdir()
    (tmp_path / "empty.mlmodel").write_bytes(b"")
    for name in ("pipe", "zero", "folder", "empty", "missing"):
        assert main(["upgrade", str(tmp_path / f"{name}.mlmodel"), "-o", str(tmp_path / "out.mlpackage")]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and f"{name}.mlmodel" in said, said


def test_a_version_of_the_format_that_is_newer_is_read_as_far_as_it_is_known(tmp_path):
    spec = make_network(lambda spec: setattr(spec, "specificationVersion", 2**31 - 1))
    ct.utils.save_spec(spec, str(tmp_path / "in.mlmodel"))
    assert upgrade_model(tmp_path / "in.mlmodel").layers == {"copy": 1}
