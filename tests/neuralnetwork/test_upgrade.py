"""Networks of .mlmodel files as ML Programs: values against PyTorch and numpy, interfaces, refusals, damaged files."""

import json

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import types
from coremltools.models import datatypes, neural_network
from coremltools.models.neural_network.quantization_utils import quantize_weights
from coremltools.proto import NeuralNetwork_pb2
from PIL import Image

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.ir.query import iterate_ops
from mil_ane_passes.neuralnetwork.layer_converter import CONVERTERS
from mil_ane_passes.neuralnetwork.upgrade import upgrade_model

RNG = np.random.default_rng(7)


def draw(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def predict(source, feeds, **options):
    return ane.runtime.predictor(upgrade_model(source, **{"precision": "fp32", **options}).model).predict(feeds)


def make_builder(exact=False, **inputs):
    features = [(name, datatypes.Array(*shape)) for name, shape in inputs.items()]
    return neural_network.NeuralNetworkBuilder(features, [("out", None)], disable_rank5_shape_mapping=exact)


def make_conv_net(weight, bias):
    builder = make_builder(data=(3, 8, 8))
    builder.add_convolution("conv", 3, 4, 3, 3, 2, 2, "same", 1, weight.transpose(2, 3, 1, 0), bias, True,
                            input_name="data", output_name="a")
    builder.add_activation("relu", "RELU", "a", "b")
    builder.add_pooling("pool", 2, 2, 1, 1, "AVERAGE", "VALID", "b", "c")
    builder.add_flatten("flatten", 0, "c", "d")
    builder.add_softmax("softmax", "d", "out")
    return builder


def test_every_kind_of_layer_has_a_decision():
    upgrade_model(make_conv_net(draw(4, 3, 3, 3), draw(4)).spec)  # loads the converters
    fields = NeuralNetwork_pb2.NeuralNetworkLayer.DESCRIPTOR.oneofs_by_name["layer"].fields
    assert {each.name for each in fields} - set(CONVERTERS) == {"custom"}
    assert len(fields) == 158


def test_a_convolutional_network_gives_the_values_of_pytorch():
    weight, bias, x = draw(4, 3, 3, 3), draw(4), draw(3, 8, 8)
    found = predict(make_conv_net(weight, bias).spec, {"data": x})["out"]
    padded = torch.nn.functional.pad(torch.tensor(x[None]), (0, 1, 0, 1))  # the bottom and right get the odd element
    y = torch.relu(torch.nn.functional.conv2d(padded, torch.tensor(weight), torch.tensor(bias), stride=2))
    y = torch.nn.functional.avg_pool2d(y, 2, 1).flatten().softmax(0)
    assert found.shape == (36,)
    np.testing.assert_allclose(found, y.numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shape", [(24,), (5, 24), (2, 3, 24), (5, 2, 3, 4), (2, 6, 2, 3, 4)])
def test_a_linear_layer_takes_the_last_three_axes_together_from_rank_4_on(shape):
    weight, bias, x = draw(7, 24), draw(7), draw(*shape)
    builder = make_builder(exact=True, data=shape)
    builder.add_inner_product("linear", weight, bias, 24, 7, True, "data", "out")
    found = predict(builder.spec, {"data": x})["out"]
    rows = x.reshape(*shape[:-3], 24) if len(shape) > 3 else x
    expected = rows @ weight.T + bias
    np.testing.assert_allclose(found, expected[..., None, None] if len(shape) > 3 else expected, rtol=1e-4, atol=1e-5)


def add_constants(builder, **values):
    for name, value in values.items():
        value = np.asarray(value, np.float32)
        builder.add_load_constant_nd(name, name, value, list(value.shape))


def interleave(builder):
    add_constants(builder, a=[0, 1, 2], b=[10, 11, 12])
    builder.add_concat_nd("concat", ["a", "b"], "c", 0, interleave=True)
    return [0, 10, 1, 11, 2, 12]


def add_at_places(builder):
    add_constants(builder, a=[1, 2, 3], i=[1], u=[10])
    builder.add_scatter_along_axis("scatter", ["a", "i", "u"], "c", 0, "ADD")
    return [1, 12, 3]


def sum_before(builder):
    add_constants(builder, a=[1, 2, 3])
    builder.add_cumsum("cumsum", ["a"], "c", 0, False, True)
    return [0, 1, 3]


def flatten_all(builder):
    add_constants(builder, a=[1, 2, 3])
    builder.add_flatten_to_2d("flatten", "a", "c", 0)
    return [[1, 2, 3]]


def flatten_from_the_end(builder):
    add_constants(builder, a=[1, 2, 3])
    builder.add_flatten_to_2d("flatten", "a", "c", -1)
    return [[1, 2, 3]]


def threshold(builder):
    """A constant that is read with the threshold and without."""
    add_constants(builder, a=[-2, 0.5, 3])
    builder.add_activation("threshold", "THRESHOLDEDRELU", "a", "t", 1.0)
    builder.add_add_broadcastable("sum", ["a", "t"], "c")
    return [-2, 0.5, 6]


@pytest.mark.parametrize("add", [interleave, add_at_places, sum_before, flatten_all,
                                 flatten_from_the_end, threshold])
def test_layers_of_constants_are_those_of_inputs(add):
    """coremltools' constant folding gives other values, or fails."""
    builder = make_builder(exact=True, data=(1,))
    expected = np.array(add(builder), np.float32)
    builder.add_add_broadcastable("last", ["data", "c"], "out")
    np.testing.assert_array_equal(predict(builder.spec, {"data": np.zeros(1, np.float32)})["out"], expected)


def test_what_ios15_lacks_is_named_with_the_target_that_has_it():
    builder = make_builder(exact=True, data=(1, 2, 6, 6))
    builder.add_convolution("conv", 2, 3, 2, 2, 1, 1, "same", 1, draw(2, 2, 2, 3), None, False, input_name="data",
                            output_name="out", same_padding_asymmetry_mode="TOP_LEFT_HEAVY")
    upgrade_model(builder.spec, deployment_target="iOS16")
    with pytest.raises(ane.InputError, match="same_lower.*expected deployment_target iOS16"):
        upgrade_model(builder.spec, deployment_target="iOS15")


@pytest.mark.parametrize("axis", [-3, -2, -1, 0, 2])
def test_a_running_sum_along_an_axis_from_the_end(axis):
    builder, x = make_builder(exact=True, data=(2, 3, 4)), draw(2, 3, 4)
    builder.add_cumsum("sum", ["data"], "out", axis=axis)
    np.testing.assert_allclose(predict(builder.spec, {"data": x})["out"], np.cumsum(x, axis), rtol=1e-5, atol=1e-6)


def test_the_interface_stays_and_the_package_can_be_rewritten(tmp_path):
    builder = make_conv_net(draw(4, 3, 3, 3), draw(4))
    builder.spec.description.input[0].shortDescription = "an image"
    builder.spec.description.metadata.author = "nobody"
    package = ane.upgrade(builder.spec, tmp_path / "out.mlpackage")
    described = ane.load(tmp_path / "out.mlpackage").spec.description
    assert [each.name for each in described.input] == ["data"]
    assert list(described.input[0].type.multiArrayType.shape) == [3, 8, 8]
    assert described.input[0].shortDescription == "an image" and described.metadata.author == "nobody"
    assert [each.name for each in described.output] == ["out"]
    assert any(op.op_type == "conv" for _, op in iterate_ops(package.program))
    assert ane.lint(tmp_path / "out.mlpackage", target="m4").to_dict()["summary"]["ops"] > 0


def choose_levels(bits, weights):
    """A table of equal steps over all weights, and the index of the nearest for each."""
    table = np.linspace(weights.min(), weights.max(), 2**bits)
    return table, np.abs(weights.flatten()[:, None] - table).argmin(axis=1).astype(np.uint8)


@pytest.mark.parametrize(("mode", "bits"), [
    ("custom_lut", 6), ("custom_lut", 5), ("linear", 8), ("linear_symmetric", 8)])
def test_quantized_weights_stay_quantized(mode, bits):
    weight, bias, x = draw(4, 3, 3, 3), draw(4), draw(3, 8, 8)
    model = ct.models.MLModel(make_conv_net(weight, bias).spec, skip_model_load=True)
    spec = quantize_weights(model, bits, quantization_mode=mode, lut_function=choose_levels)
    spec = spec if hasattr(spec, "SerializeToString") else spec.get_spec()
    upgraded = upgrade_model(spec, "iOS18")
    kinds = [op.op_type for _, op in iterate_ops(upgraded.package.program)]
    assert sum(kind.startswith("constexpr_") for kind in kinds) == 1
    found = predict(spec, {"data": x}, deployment_target="iOS18")["out"]
    exact = predict(make_conv_net(weight, bias).spec, {"data": x})["out"]
    np.testing.assert_allclose(found, exact, atol=0.2 if bits < 8 else 0.01)
    assert upgraded.expanded == {"the model: layer 'conv' (convolution): bias": 4}


@pytest.mark.parametrize("shape", [(4, 1, 1), (1, 4, 1), (2, 4, 1)])
def test_quantized_scales_are_expanded_where_they_are_vectors(shape):
    builder = ct.models.neural_network.NeuralNetworkBuilder(
        [("data", ct.models.datatypes.Array(4, 4, 4))], [("out", ct.models.datatypes.Array(4, 4, 4))])
    scale, bias, x = draw(*shape), draw(*shape), draw(4, 4, 4)
    builder.add_scale("scaled", scale, bias, True, "data", "out", list(shape), list(shape))
    layer = builder.spec.neuralNetwork.layers[0].scale
    for params, values in ((layer.scale, scale), (layer.bias, bias)):
        step = float(values.max() - values.min()) / 255
        params.ClearField("floatValue")
        params.rawValue = np.round((values - values.min()) / step).astype(np.uint8).tobytes()
        params.quantization.numberOfBits = 8
        params.quantization.linearQuantization.scale.append(step)
        params.quantization.linearQuantization.bias.append(float(values.min()))
    if shape[0] == 2:
        with pytest.raises(ane.InputError, match="layer 'scaled' .*'scale' is quantized"):
            upgrade_model(builder.spec, "iOS16")
        return
    np.testing.assert_allclose(predict(builder.spec, {"data": x})["out"], x * scale + bias, atol=0.05)
    assert upgrade_model(builder.spec, "iOS16").expanded == {
        f"the model: layer 'scaled' (scale): {name}": 4 for name in ("scale", "bias")}


@pytest.mark.parametrize("mode", ["linear", "linear_symmetric"])
def test_a_channel_of_equal_weights_has_a_scale_of_0(mode):
    weight, bias, x = draw(4, 3, 3, 3), draw(4), draw(3, 8, 8)
    weight[1], weight[2] = 0.0, 0.5
    model = ct.models.MLModel(make_conv_net(weight, bias).spec, skip_model_load=True)
    spec = quantize_weights(model, 8, quantization_mode=mode)
    spec = spec if hasattr(spec, "SerializeToString") else spec.get_spec()
    stored = spec.neuralNetwork.layers[0].convolution.weights.quantization.linearQuantization
    assert 0.0 in stored.scale
    found = predict(spec, {"data": x}, deployment_target="iOS18")["out"]
    exact = predict(make_conv_net(weight, bias).spec, {"data": x})["out"]
    np.testing.assert_allclose(found[1:3], exact[1:3], atol=0.01)
    np.testing.assert_allclose(found, exact, atol=0.2)


@pytest.mark.parametrize("bits", range(1, 9))
def test_scales_by_channel_keep_codes_of_4_bits(bits):
    weight, x = draw(4, 3, 3, 3), draw(3, 8, 8)
    weight[1], weight[2] = 0.0, 0.5
    model = ct.models.MLModel(make_conv_net(weight, np.zeros(4, np.float32)).spec, skip_model_load=True)
    spec = quantize_weights(model, bits, quantization_mode="linear")
    spec = spec if hasattr(spec, "SerializeToString") else spec.get_spec()
    stored = spec.neuralNetwork.layers[0].convolution.weights
    packed = np.unpackbits(np.frombuffer(stored.rawValue, np.uint8))[:weight.size * bits].reshape(-1, bits)
    codes = (packed * (1 << np.arange(bits - 1, -1, -1))).sum(axis=1).reshape(weight.shape)
    scale, shift = (np.array(each, np.float32)[:, None, None, None] for each in (
        stored.quantization.linearQuantization.scale, stored.quantization.linearQuantization.bias))
    expanded = make_conv_net((codes * scale + shift).astype(np.float32), np.zeros(4, np.float32)).spec
    exact = predict(expanded, {"data": x})
    np.testing.assert_allclose(predict(spec, {"data": x}, deployment_target="iOS18")["out"], exact["out"], atol=1e-4)
    program = upgrade_model(spec, "iOS18", "fp32").package.program
    (op,) = (op for _, op in iterate_ops(program) if op.op_type == "constexpr_blockwise_shift_scale")
    assert types.builtin_to_string(op.data.dtype) == ("uint4" if bits <= 4 else "uint8")


def test_scales_by_channel_need_ios18():
    model = ct.models.MLModel(make_conv_net(draw(4, 3, 3, 3), draw(4)).spec, skip_model_load=True)
    spec = quantize_weights(model, 8, quantization_mode="linear")
    spec = spec if hasattr(spec, "SerializeToString") else spec.get_spec()
    with pytest.raises(ane.InputError, match="a scale and a bias per output channel.*iOS18"):
        upgrade_model(spec, "iOS16")


def test_an_image_is_scaled_and_shifted_by_channel():
    builder = make_builder(data=(3, 4, 4))
    builder.add_activation("copy", "LINEAR", "data", "out", [1.0, 0.0])
    builder.set_pre_processing_parameters(["data"], is_bgr=True, red_bias=1.0, green_bias=2.0, blue_bias=3.0,
                                          image_scale=0.5)
    pixels = RNG.integers(0, 255, (4, 4, 3), dtype=np.uint8)
    found = predict(builder.spec, {"data": Image.fromarray(pixels)})["out"]
    bgr = pixels[:, :, ::-1].transpose(2, 0, 1).astype(np.float32)
    np.testing.assert_allclose(found.reshape(3, 4, 4), bgr * 0.5 + np.array([3.0, 2.0, 1.0]).reshape(3, 1, 1))


def test_a_classifier_keeps_its_labels():
    features = [("data", datatypes.Array(3))]
    builder = neural_network.NeuralNetworkBuilder(features, [("probs", None)], mode="classifier")
    builder.add_softmax("softmax", "data", "probs")
    builder.set_class_labels(["cat", "dog", "owl"], predicted_feature_name="animal", prediction_blob="probs")
    found = predict(builder.spec, {"data": np.array([0.0, 3.0, 1.0], np.float32)})
    assert found["animal"] == "dog"
    (scores,) = (value for name, value in found.items() if name != "animal")
    assert max(scores, key=scores.get) == "dog" and sum(scores.values()) == pytest.approx(1)


def test_an_lstm_of_two_directions_gives_the_values_of_pytorch():
    inner, hidden, steps = 3, 4, 5
    lstm = torch.nn.LSTM(inner, hidden, bidirectional=True)
    gates = {"i": 0, "f": 1, "o": 3, "z": 2}

    def part(name, gate):
        return getattr(lstm, name).detach().numpy().reshape(4, hidden, -1)[gates[gate]].squeeze()

    def stack(prefix, suffix=""):
        return [part(f"{prefix}_l0{suffix}", gate) for gate in "ifoz"]

    def bias(suffix=""):
        return [a + b for a, b in zip(stack("bias_ih", suffix), stack("bias_hh", suffix))]

    builder = neural_network.NeuralNetworkBuilder(
        [("data", datatypes.Array(steps, 1, inner, 1, 1))], [("out", None)], disable_rank5_shape_mapping=True)
    builder.add_bidirlstm(
        "lstm", stack("weight_hh"), stack("weight_ih"), bias(), stack("weight_hh", "_reverse"),
        stack("weight_ih", "_reverse"), bias("_reverse"), hidden, inner, ["data"], ["out"], output_all=True)
    x = draw(steps, 1, inner)
    found = predict(builder.spec, {"data": x.reshape(steps, 1, inner, 1, 1)})["out"]
    with torch.no_grad():
        y, _ = lstm(torch.tensor(x))
    np.testing.assert_allclose(found.reshape(y.shape), y.numpy(), rtol=1e-4, atol=1e-5)


def test_a_loop_with_a_break_runs_as_python_does():
    builder = make_builder(exact=True, data=(1,))
    builder.add_copy("start", "data", "out")
    loop = builder.add_loop("loop", max_iterations=10)
    body = neural_network.NeuralNetworkBuilder(nn_spec=loop.loop.bodyNetwork, disable_rank5_shape_mapping=True)
    body.add_elementwise("double", ["out"], "next", "MULTIPLY", alpha=2.0)
    body.add_copy("assign", "next", "out")
    body.add_greater_than("large", ["out"], "is_large", alpha=20.0)
    branch = body.add_branch("stop", "is_large")
    inner = neural_network.NeuralNetworkBuilder(nn_spec=branch.branch.ifBranch, disable_rank5_shape_mapping=True)
    inner.add_loop_break("leave")
    body.add_elementwise("one", ["out"], "more", "ADD", alpha=1.0)
    body.add_copy("assign_more", "more", "out")
    value = 1.0
    for _ in range(10):
        value *= 2
        if value > 20:
            break
        value += 1
    assert predict(builder.spec, {"data": np.ones(1, np.float32)})["out"] == pytest.approx(value)


def test_a_custom_layer_is_refused_by_name():
    builder = make_builder(data=(3, 4, 4))
    builder.add_custom("mine", ["data"], ["out"])
    with pytest.raises(ane.InputError, match=r"layer 'mine' \(custom\): it is a custom layer, whose code is in an app"):
        upgrade_model(builder.spec)


def test_weights_of_a_wrong_size_are_named():
    builder = make_conv_net(draw(4, 3, 3, 3), draw(4))
    del builder.spec.neuralNetwork.layers[0].convolution.weights.floatValue[5:]
    with pytest.raises(ane.InputError, match=r"layer 'conv' \(convolution\): its weights have 5 numbers; expected 108"):
        upgrade_model(builder.spec)


def test_an_input_that_no_layer_makes_is_named():
    builder = make_conv_net(draw(4, 3, 3, 3), draw(4))
    builder.spec.neuralNetwork.layers[1].input[0] = "gone"
    with pytest.raises(ane.InputError, match="its input 'gone' is not computed by an earlier layer"):
        upgrade_model(builder.spec)


def test_the_command_writes_a_package_or_says_why_not(tmp_path, capsys):
    source = tmp_path / "in.mlmodel"
    ct.models.utils.save_spec(make_conv_net(draw(4, 3, 3, 3), draw(4)).spec, str(source))
    assert main(["upgrade", str(source), "-o", str(tmp_path / "out.mlpackage"), "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["command"] == "upgrade" and report["layers"]["convolution"] == 1 and report["renamed"] == {}
    assert main(["verify", str(tmp_path / "out.mlpackage"), str(tmp_path / "out.mlpackage")]) == 0
    capsys.readouterr()
    source.write_bytes(source.read_bytes()[:200])
    assert main(["upgrade", str(source), "-o", str(tmp_path / "other.mlpackage")]) == 2
    assert "is not a Core ML model, or it is damaged" in capsys.readouterr().err
    assert not (tmp_path / "other.mlpackage").exists()
    assert main(["upgrade", str(tmp_path / "out.mlpackage"), "-o", str(tmp_path / "other.mlpackage")]) == 2
    assert "it is an ML Program already" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["fill", "range", "broadcast", "tile"])
def test_a_layer_cannot_declare_a_value_that_fills_the_memory(kind):
    builder = make_builder(exact=True, data=(1,))
    if kind == "fill":
        builder.add_fill_static("large", "out", [1000, 1000, 1000], 1.0)
    elif kind == "range":
        builder.add_range_static("large", "out", end=2e9)
    elif kind == "broadcast":
        builder.add_broadcast_to_static("large", "data", "out", [1000, 1000, 1000])
    else:
        builder.add_tile("large", "data", "out", [2**30])
    with pytest.raises(ane.InputError, match=r"layer 'large' .*a value of \d+ elements; expected at most 67108864"):
        upgrade_model(builder.spec)


@pytest.mark.parametrize("exact", [False, True], ids=["classic", "exact"])
@pytest.mark.parametrize("kind", ["range", "enumerated"])
def test_flexible_shapes_stay_flexible(exact, kind):
    weight, bias = draw(4, 3, 3, 3), draw(4)
    lead = (1, 3) if exact else (3,)
    builder = make_builder(exact=exact, data=(*lead, 8, 8))
    builder.add_convolution("conv", 3, 4, 3, 3, 1, 1, "same", 1, weight.transpose(2, 3, 1, 0), bias, True,
                            input_name="data", output_name="out")
    array = builder.spec.description.input[0].type.multiArrayType
    if kind == "range":
        for low, high in (*((size, size) for size in lead), (4, 64), (4, 64)):
            each = array.shapeRange.sizeRanges.add()
            each.lowerBound, each.upperBound = low, high
    else:
        for size in (8, 16):
            array.enumeratedShapes.shapes.add().shape.extend([*lead, size, size])
    model = upgrade_model(builder.spec, precision="fp32").model
    made = model.get_spec().description.input[0].type.multiArrayType
    assert made.WhichOneof("ShapeFlexibility") == array.WhichOneof("ShapeFlexibility") and made.shape == array.shape
    for size in (8, 16):
        x = draw(*lead, size, size)
        found = ane.runtime.predictor(model).predict({"data": x})["out"]
        y = torch.nn.functional.conv2d(torch.tensor(x).reshape(1, 3, size, size), torch.tensor(weight),
                                       torch.tensor(bias), padding=1)
        np.testing.assert_allclose(found.reshape(y.shape), y.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("size", "parts"), [(7, 2), (13, 3), (6, 3)])
def test_a_split_into_parts_that_differ_by_one_is_that_of_numpy(size, parts):
    names = [f"part{at}" for at in range(parts)]
    builder = neural_network.NeuralNetworkBuilder(
        [("data", datatypes.Array(2, size))], [(name, None) for name in names], disable_rank5_shape_mapping=True)
    builder.add_split_nd("split", "data", names, axis=1, num_splits=parts)
    x = draw(2, size)
    found = predict(builder.spec, {"data": x})
    for name, expected in zip(names, np.array_split(x, parts, axis=1), strict=True):
        np.testing.assert_array_equal(found[name], expected)


@pytest.mark.parametrize(("shape", "axis"), [((7,), 0), ((3, 7), 1), ((3, 7, 2), -2)])
def test_the_number_of_largest_elements_may_be_an_input(shape, axis):
    builder = neural_network.NeuralNetworkBuilder(
        [("data", datatypes.Array(*shape)), ("k", datatypes.Array(1))], [("out", None), ("places", None)],
        disable_rank5_shape_mapping=True)
    builder.add_topk("top", ["data", "k"], ["out", "places"], axis=axis)
    x = draw(*shape)
    found = predict(builder.spec, {"data": x, "k": np.full(1, 3, np.float32)})
    order = np.take(np.argsort(-x, axis=axis), range(3), axis=axis)
    np.testing.assert_array_equal(found["places"], order)
    np.testing.assert_array_equal(found["out"], np.take_along_axis(x, order, axis))


def test_the_inverse_hyperbolic_tangent():
    builder = make_builder(exact=True, data=(5,))
    builder.add_atanh("atanh", "data", "out")
    x = np.linspace(-0.9, 0.9, 5).astype(np.float32)
    np.testing.assert_allclose(predict(builder.spec, {"data": x})["out"], np.arctanh(x), rtol=1e-5)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize(("kind", "function", "least"), [("asinh", np.arcsinh, -6e4), ("acosh", np.arccosh, 1)])
def test_inverse_hyperbolic_functions_beyond_the_squares_of_fp16(kind, function, least, precision):
    builder = make_builder(exact=True, data=(8,))
    getattr(builder, f"add_{kind}")(kind, "data", "out")
    x = np.array([least, 1, 1.5, 3, 255, 300, 2000, 6e4], np.float32)
    found = predict(builder.spec, {"data": x}, precision=precision)["out"]
    np.testing.assert_allclose(found, function(x.astype(np.float64)), rtol={"fp16": 2e-3, "fp32": 1e-6}[precision])


@pytest.mark.parametrize("size", [2, 4, 5, 40])
def test_a_local_response_norm_of_any_width(size):
    builder = make_builder(data=(6, 2, 2))
    builder.add_lrn("lrn", "data", "out", 0.5, 0.75, size, k=2.0)
    x = draw(6, 2, 2)
    total = [sum(x[at]**2 for at in range(max(c - (size - 1) // 2, 0), min(c + size // 2, 5) + 1)) for c in range(6)]
    expected = x / (2 + 0.5 / size * np.stack(total)) ** 0.75
    np.testing.assert_allclose(predict(builder.spec, {"data": x})["out"], expected, rtol=1e-4)


def test_an_lstm_of_two_directions_is_one_op_with_its_states():
    inner, hidden, steps = 3, 2, 4
    features = [("data", datatypes.Array(steps, 1, inner, 1, 1)),
                *((name, datatypes.Array(1, 1, hidden, 1, 1)) for name in ("h", "c", "hb", "cb"))]
    outputs = ["out", "h2", "c2", "hb2", "cb2"]
    lstm = torch.nn.LSTM(inner, hidden, bidirectional=True)

    def stack(prefix, suffix):
        parts = getattr(lstm, f"{prefix}_l0{suffix}").detach().numpy().reshape(4, hidden, -1)
        return [parts[at].squeeze() for at in (0, 1, 3, 2)]

    builder = neural_network.NeuralNetworkBuilder(
        features, [(name, None) for name in outputs], disable_rank5_shape_mapping=True)
    biases = [[a + b for a, b in zip(stack("bias_ih", suffix), stack("bias_hh", suffix))]
              for suffix in ("", "_reverse")]
    builder.add_bidirlstm(
        "lstm", stack("weight_hh", ""), stack("weight_ih", ""), biases[0], stack("weight_hh", "_reverse"),
        stack("weight_ih", "_reverse"), biases[1], hidden, inner, [name for name, _ in features], outputs,
        output_all=True)
    upgraded = upgrade_model(builder.spec, precision="fp32")
    assert [op.op_type for _, op in iterate_ops(upgraded.package.program)].count("lstm") == 1
    feeds = {name: draw(*kind.dimensions) if hasattr(kind, "dimensions") else draw(*kind[1:])
             for name, kind in features}
    found = predict(builder.spec, feeds)
    with torch.no_grad():
        h, c = (torch.tensor(np.stack([feeds[one].reshape(1, hidden), feeds[two].reshape(1, hidden)]))
                for one, two in (("h", "hb"), ("c", "cb")))
        y, (h, c) = lstm(torch.tensor(feeds["data"].reshape(steps, 1, inner)), (h, c))
    for name, expected in zip(outputs, (y, h[0], c[0], h[1], c[1])):
        np.testing.assert_allclose(found[name].reshape(-1), expected.numpy().reshape(-1), rtol=1e-4, atol=1e-5)


def make_ramp(rows):
    """A table whose row `at` holds `at % 1009`, which fp16 has."""
    return np.arange(rows, dtype=np.float32) % 1009


@pytest.mark.parametrize("exact", [False, True], ids=["classic", "exact"])
@pytest.mark.parametrize("target", ["iOS16", "iOS17", "iOS18"])
def test_indices_beyond_2048_are_exact_in_programs_of_fp16(exact, target):
    rows = 60_000
    builder = make_builder(exact=exact, ids=(1, 4, 1) if exact else (1,))
    if exact:
        builder.add_embedding_nd("table", "ids", "out", rows, 1, make_ramp(rows)[None])
    else:
        builder.add_embedding("table", make_ramp(rows)[None], None, rows, 1, False, "ids", "out")
    for at in (2049, 50_001, 59_999):
        ids = np.full((1, 4, 1) if exact else (1,), at, np.float32)
        found = predict(builder.spec, {"ids": ids}, precision="fp16", deployment_target=target)["out"]
        np.testing.assert_array_equal(found.reshape(-1), at % 1009)


def test_places_and_sizes_beyond_2048_are_exact_in_programs_of_fp16():
    builder = neural_network.NeuralNetworkBuilder(
        [("data", datatypes.Array(1, 5001))], [("place", None), ("size", None), ("flat", None)],
        disable_rank5_shape_mapping=True)
    builder.add_argmax("largest", "data", "index", axis=1, keepdims=True)
    builder.add_squeeze("squeeze", "index", "place", axes=[0])
    builder.add_get_shape("shape", "data", "shape")
    builder.add_slice_static("last", "shape", "size", [1], [2], [1], [False], [False])
    builder.add_reshape_dynamic("flatten", ["data", "size"], "flat")
    x = np.zeros((1, 5001), np.float32)
    x[0, 4999] = 1
    found = predict(builder.spec, {"data": x}, precision="fp16")
    assert found["place"] == 4999 and found["size"] == 5001 and found["flat"].shape == (5001,)


def test_a_loop_counts_beyond_2048_in_programs_of_fp16():
    builder = make_builder(exact=True, data=(1,))
    builder.add_copy("start", "data", "out")
    loop = builder.add_loop("loop", max_iterations=3000)
    body = neural_network.NeuralNetworkBuilder(nn_spec=loop.loop.bodyNetwork, disable_rank5_shape_mapping=True)
    body.add_elementwise("more", ["out"], "next", "ADD", alpha=1.0)
    body.add_copy("assign", "next", "out")
    assert predict(builder.spec, {"data": np.zeros(1, np.float32)}, precision="fp16")["out"] == 3000


@pytest.mark.parametrize(("mode", "function"), [
    ("sqrt", np.sqrt), ("rsqrt", lambda x: 1 / np.sqrt(x + 1e-4)), ("inverse", lambda x: 1 / (x + 1e-4)),
    ("power", lambda x: x ** 3), ("exp", np.exp), ("log", lambda x: np.log(x + 1e-6)), ("abs", np.abs),
    ("threshold", lambda x: np.maximum(x, 3)),
])
@pytest.mark.parametrize("scale", [0.5, 0.0])
def test_a_unary_function_is_of_what_is_scaled_and_shifted(mode, function, scale):
    """The format reads a scale of 0 as 1."""
    builder = make_builder(data=(2, 3, 4))
    builder.add_unary("unary", "data", "out", mode, alpha=3.0, shift=0.25, scale=scale)
    x = np.abs(draw(2, 3, 4)) + 1
    np.testing.assert_allclose(predict(builder.spec, {"data": x})["out"], function((scale or 1) * x + 0.25),
                               rtol=1e-5, atol=2e-6)


def list_kinds(upgraded):
    return [op.op_type for _, op in iterate_ops(upgraded.package.program) if op.op_type != "const"]


def make_lookup(exact, rows=50):
    """A table of [rows, 3] that is read at four ids: as torch's converters write it, or in the classic mapping."""
    table = draw(rows, 3)
    builder = make_builder(exact=exact, ids=(2, 2) if exact else (4,))
    if exact:
        builder.add_expand_dims("last", "ids", "columns", axes=[-1])
        builder.add_embedding_nd("table", "columns", "out", rows, 3, table.T)
    else:
        builder.add_embedding("table", table.T, None, rows, 3, False, "ids", "out")
    return builder, table


@pytest.mark.parametrize("exact", [False, True], ids=["classic", "exact"])
@pytest.mark.parametrize("target", ["iOS16", "iOS18"])
def test_ids_are_looked_up_as_they_come(exact, target):
    """The axis that the format has behind the ids is not made, and ids that are in range are not wrapped."""
    builder, table = make_lookup(exact)
    upgraded = upgrade_model(builder.spec, target, "fp32")
    kinds = list_kinds(upgraded)
    assert kinds[:2] == ["cast", "gather"] and "select" not in kinds, kinds
    ids = np.array([[0, 7], [49, 3]], np.float32)
    found = predict(builder.spec, {"ids": ids if exact else ids.reshape(4)}, deployment_target=target)["out"]
    np.testing.assert_array_equal(found.reshape(2, 2, 3), table[ids.astype(int)])


def test_ids_beyond_16_bits_are_looked_up_as_int32():
    builder, table = make_lookup(True, 70_000)
    ids = np.array([[0, 69_999], [65_536, 3]], np.float32)
    found = predict(builder.spec, {"ids": ids}, deployment_target="iOS18")["out"]
    np.testing.assert_array_equal(found, table[ids.astype(int)])


def test_ids_of_flexible_shape_are_looked_up_as_they_come():
    builder, table = make_lookup(True)
    neural_network.flexible_shape_utils.set_multiarray_ndshape_range(builder.spec, "ids", [1, 2], [5, 2])
    upgraded = upgrade_model(builder.spec, "iOS18", "fp32")
    assert not {"expand_dims", "squeeze"} & set(list_kinds(upgraded))
    for rows in (1, 5):
        ids = RNG.integers(0, 50, (rows, 2)).astype(np.float32)
        found = ane.runtime.predictor(upgraded.model).predict({"ids": ids})["out"]
        np.testing.assert_array_equal(found, table[ids.astype(int)])


def make_counted_loop(limit=None, leave=False):
    """A loop that doubles `data` three times, counted by the network or with a limit; with `leave`, left after one."""
    builder = make_builder(exact=True, data=(2,))
    builder.add_copy("start", "data", "out")
    builder.add_load_constant_nd("zero", "count", np.zeros(1, np.float32), (1,))
    loop = builder.add_loop("loop", body_network=None, condition_network=None, condition="is_going",
                            **({} if limit is None else {"max_iterations": limit}))
    check = neural_network.NeuralNetworkBuilder(nn_spec=loop.loop.conditionNetwork, disable_rank5_shape_mapping=True)
    check.add_less_than("below", ["count"], "is_going", alpha=3.0)
    body = neural_network.NeuralNetworkBuilder(nn_spec=loop.loop.bodyNetwork, disable_rank5_shape_mapping=True)
    body.add_elementwise("double", ["out"], "next", "MULTIPLY", alpha=2.0)
    body.add_copy("assign", "next", "out")
    if leave:
        body.add_loop_break("leave")
    body.add_elementwise("more", ["count"], "next_count", "ADD", alpha=1.0)
    body.add_copy("assign_count", "next_count", "count")
    return builder


@pytest.mark.parametrize(("limit", "leave", "factor", "carried"), [
    (None, False, 8, 2), (2, False, 4, 3), (9, False, 8, 3), (None, True, 2, 3)])
def test_a_loop_carries_what_its_network_needs(limit, leave, factor, carried):
    """A loop without a limit counts nothing, and one without a break keeps no flag of it."""
    builder = make_counted_loop(limit, leave)
    upgraded = upgrade_model(builder.spec, "iOS18", "fp32")
    loop = next(op for _, op in iterate_ops(upgraded.package.program) if op.op_type == "while_loop")
    assert len(loop.loop_vars) == carried
    if carried == 2:
        assert [op.op_type for op in loop.blocks[0].operations if op.op_type != "const"] == ["less"]
    x = draw(2)
    np.testing.assert_array_equal(predict(builder.spec, {"data": x})["out"], x * factor)


@pytest.mark.parametrize("shape", [(1,), (2,), (2, 3)])
def test_a_loop_may_assign_a_constant(shape):
    builder = make_builder(exact=True, data=shape)
    builder.add_copy("start", "data", "out")
    builder.add_load_constant_nd("first", "kept", np.ones(shape, np.float32), shape)
    loop = builder.add_loop("loop", max_iterations=3)
    body = neural_network.NeuralNetworkBuilder(nn_spec=loop.loop.bodyNetwork, disable_rank5_shape_mapping=True)
    body.add_elementwise("more", ["out", "kept"], "next", "ADD")
    body.add_copy("assign", "next", "out")
    body.add_load_constant_nd("ten", "ten", np.full(shape, 10, np.float32), shape)
    body.add_copy("keep", "ten", "kept")
    x = draw(*shape)
    np.testing.assert_allclose(predict(builder.spec, {"data": x})["out"], x + 21, rtol=1e-6)


@pytest.mark.parametrize("kind", ["add", "addBroadcastable"])
@pytest.mark.parametrize("first", [True, False])
def test_a_sum_with_a_negation_is_a_difference(kind, first):
    """Networks have no layer for the difference of a constant and a value in the classic mapping."""
    builder = make_builder(exact=True, data=(2, 3))
    builder.add_load_constant_nd("one", "one", np.ones(1, np.float32), (1,))
    builder.add_activation("negate", "LINEAR", "data", "negated", [-1.0, 0.0])
    names = ["negated", "one"] if first else ["one", "negated"]
    if kind == "add":
        builder.add_elementwise("difference", names, "out", "ADD")
    else:
        builder.add_add_broadcastable("difference", names, "out")
    assert list_kinds(upgrade_model(builder.spec, "iOS18", "fp32")) == ["sub"]
    x = draw(2, 3)
    np.testing.assert_array_equal(predict(builder.spec, {"data": x})["out"], 1 - x)


def scale_tanh(x):
    return 1.75 * np.tanh(0.75 * x)


def run_gru(x, h, weights, gate, activation):
    """The GRU of the format's documentation, whose reset gate is applied before the recursion matrix."""
    (w_z, w_r, w_o), (r_z, r_r, r_o), (b_z, b_r, b_o) = weights
    found = []
    for row in x:
        z, r = gate(w_z @ row + r_z @ h + b_z), gate(w_r @ row + r_r @ h + b_r)
        h = (1 - z) * activation(w_o @ row + r_o @ (h * r) + b_o) + z * h
        found.append(h)
    return np.stack(found)


@pytest.mark.parametrize(("inner", "outer", "gate", "activation"), [
    ("SIGMOID", "TANH", lambda x: 1 / (1 + np.exp(-x)), np.tanh),
    ("SCALED_TANH", "TANH", scale_tanh, np.tanh),
    ("SIGMOID", "SCALED_TANH", lambda x: 1 / (1 + np.exp(-x)), scale_tanh),
])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_gate_of_a_gru_resets_before_the_recursion(inner, outer, gate, activation, reverse):
    steps, size, hidden = 4, 3, 5
    weights = [[draw(hidden, width) for _ in range(3)] for width in (size, hidden)] + [[draw(hidden) for _ in range(3)]]
    builder = neural_network.NeuralNetworkBuilder(
        [("data", datatypes.Array(steps, 1, size, 1, 1)), ("h", datatypes.Array(1, 1, hidden, 1, 1))],
        [("out", None), ("last", None)], disable_rank5_shape_mapping=True)
    builder.add_gru("gru", weights[1], weights[0], np.stack(weights[2]), hidden, size, ["data", "h"], ["out", "last"],
                    activation=outer, inner_activation=inner, output_all=True, reverse_input=reverse)
    for each in builder.spec.neuralNetwork.layers[0].gru.activations:
        if each.HasField("scaledTanh"):  # the builder leaves both numbers at 0
            each.scaledTanh.alpha, each.scaledTanh.beta = 1.75, 0.75
    x, h = draw(steps, size), draw(hidden)
    found = predict(builder.spec, {"data": x.reshape(steps, 1, size, 1, 1), "h": h.reshape(1, 1, hidden, 1, 1)})
    expected = run_gru(x[::-1] if reverse else x, h, weights, gate, activation)
    np.testing.assert_allclose(found["out"].reshape(steps, hidden), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["last"].reshape(hidden), expected[-1], rtol=1e-4, atol=1e-5)


def make_named_classifier(label="animal", scores="probs"):
    builder = neural_network.NeuralNetworkBuilder(
        [("data", datatypes.Array(3))], [(scores, None)], mode="classifier")
    builder.add_softmax("softmax", "data", scores)
    builder.set_class_labels(["cat", "dog", "owl"], predicted_feature_name=label, prediction_blob=scores)
    return builder.spec


@pytest.mark.parametrize(("label", "scores", "expected"), [
    ("animal", "probs", ["animal", "probs"]), ("animal", "animal_probs", ["animal", "animal_probs"]),
    ("which one?", "all-scores", ["which_one_", "all_scores"])])
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_the_outputs_of_a_classifier_keep_their_names(label, scores, expected, precision, tmp_path):
    spec = make_named_classifier(label, scores)
    spec.description.output[0].shortDescription = "one for each"
    model = upgrade_model(spec, precision=precision).model
    described = model.get_spec().description
    assert {each.name for each in described.output} == set(expected)
    assert [described.predictedFeatureName, described.predictedProbabilitiesName] == expected
    texts = {each.name: each.shortDescription for each in described.output}
    assert texts[expected[1]] == "one for each"
    ane.upgrade(spec, tmp_path / "out.mlpackage", precision=precision)
    found = ane.runtime.predictor(tmp_path / "out.mlpackage").predict({"data": np.array([0.0, 3.0, 1.0], np.float32)})
    assert found[expected[0]] == "dog" and sum(found[expected[1]].values()) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(("kind", "function"), [
    ("LINEAR", lambda x: x), ("SIGMOID_HARD", lambda x: np.clip(0.2 * x + 0.5, 0, 1))])
@pytest.mark.parametrize("unrolled", [False, True])
def test_an_activation_of_a_recurrent_layer_has_its_usual_numbers_where_none_are_stored(kind, function, unrolled):
    """The builder stores none; converters of Keras models rely on it."""
    steps, size, hidden = 3, 3, 4
    weights = [[0.5 * draw(hidden, width) for _ in range(3)] for width in (size, hidden)]
    weights.append([draw(hidden) for _ in range(3)])
    builder = neural_network.NeuralNetworkBuilder(
        [("data", datatypes.Array(steps, 1, size, 1, 1))], [("out", None)], disable_rank5_shape_mapping=True)
    builder.add_gru("gru", weights[1], weights[0], np.stack(weights[2]), hidden, size, ["data"], ["out"],
                    activation="SCALED_TANH" if unrolled else "TANH", inner_activation=kind, output_all=True)
    outer = builder.spec.neuralNetwork.layers[0].gru.activations[1]
    if unrolled:
        outer.scaledTanh.alpha, outer.scaledTanh.beta = 1.75, 0.75
    x = draw(steps, size)
    found = predict(builder.spec, {"data": x.reshape(steps, 1, size, 1, 1)})["out"]
    expected = run_gru(x, np.zeros(hidden), weights, function, scale_tanh if unrolled else np.tanh)
    np.testing.assert_allclose(found.reshape(steps, hidden), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("across", [False, True])
def test_the_epsilon_of_a_mean_variance_normalization_is_under_the_root(across):
    """coremltools writes layer norms, whose epsilon is there, as this layer."""
    builder = make_builder(exact=True, data=(2, 3, 4, 5))
    builder.add_mvn("mvn", "data", "out", across_channels=across, normalize_variance=True, epsilon=0.25)
    x = draw(2, 3, 4, 5)
    y = torch.nn.functional.layer_norm(torch.tensor(x), (3, 4, 5) if across else (4, 5), eps=0.25)
    np.testing.assert_allclose(predict(builder.spec, {"data": x})["out"], y.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("pads", "kinds"), [
    ((1, 1, 2, 2), ["conv_transpose"]), ((0, 0, 3, 3), ["conv_transpose"]), ((0, 0, 0, 0), ["conv_transpose"]),
    ((1, 0, 2, 2), ["conv_transpose", "slice_by_index"])])
def test_a_deconvolution_that_loses_the_same_at_both_ends_is_one_op(pads, kinds):
    weight, x = draw(3, 2, 4, 6), draw(1, 3, 5, 7)
    builder = make_builder(exact=True, data=x.shape)
    top, bottom, left, right = pads
    builder.add_convolution(
        "up", 3, 2, 4, 6, 2, 3, "valid", 1, weight.transpose(2, 3, 0, 1), None, False, is_deconv=True,
        input_name="data", output_name="out", padding_top=top, padding_bottom=bottom, padding_left=left,
        padding_right=right)
    assert list_kinds(upgrade_model(builder.spec, "iOS18", "fp32")) == kinds
    y = torch.nn.functional.conv_transpose2d(torch.tensor(x), torch.tensor(weight), stride=(2, 3)).numpy()
    expected = y[:, :, top:y.shape[2] - bottom, left:y.shape[3] - right]
    np.testing.assert_allclose(predict(builder.spec, {"data": x})["out"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("mode", "left", "right", "size"), [
    ("valid", 0, 0, None), ("valid", 4, 4, None), ("valid", 3, 5, None), ("same", 4, 4, None), ("valid", 4, 4, 88),
    ("valid", 3, 5, 88)])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_deconvolution_of_a_sequence_has_one_dimension(mode, left, right, size, groups):
    """The format has it with a height of 1, where a kernel of 16 is too wide for the ANE."""
    weight, bias, x = draw(4, 6 // groups, 16), draw(6), draw(1, 4, 11)
    builder = make_builder(exact=True, data=x.shape)
    builder.add_expand_dims("tall", "data", "tall", [2])
    builder.add_convolution(
        "up", 4, 6, 1, 16, 1, 8, mode, groups, weight[:, :, None].transpose(2, 3, 0, 1), bias, True, is_deconv=True,
        input_name="tall", output_name="long", padding_left=left, padding_right=right,
        output_shape=size and (1, size))
    builder.add_squeeze("flat", "long", "out", [2])
    program = upgrade_model(builder.spec, "iOS18", "fp16").package.program
    assert [op.x.rank for _, op in iterate_ops(program) if op.op_type == "conv_transpose"] == [3]
    report = ane.rewrite(program, preset="full", target="m4", verify=False)
    assert report.predicted[1].unsupported == 0
    y = torch.nn.functional.conv_transpose1d(
        torch.tensor(x), torch.tensor(weight), torch.tensor(bias), stride=8, groups=groups).numpy()
    expected = y[:, :, left:y.shape[2] - right]
    np.testing.assert_allclose(predict(builder.spec, {"data": x})["out"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("numbers", [None, (0.2, 0.5), (0.25, 0.5)], ids=["usual", "the same", "others"])
def test_an_lstm_of_hard_sigmoids_gives_the_values_of_its_equations(numbers):
    """As models of Keras have them; with peepholes, a bias of the forget gate and a bound of the cell, from the end."""
    steps, size, hidden = 4, 3, 5
    w, r = ([0.5 * draw(hidden, width) for _ in range(4)] for width in (size, hidden))
    b, peep = [draw(hidden) for _ in range(4)], [draw(hidden) for _ in range(3)]
    features = [("data", datatypes.Array(steps, 1, size, 1, 1)), ("h", datatypes.Array(1, 1, hidden, 1, 1)),
                ("c", datatypes.Array(1, 1, hidden, 1, 1))]
    builder = neural_network.NeuralNetworkBuilder(features, [("out", None), ("h_out", None), ("c_out", None)],
                                                  disable_rank5_shape_mapping=True)
    builder.add_unilstm("lstm", r, w, b, hidden, size, ["data", "h", "c"], ["out", "h_out", "c_out"],
                        inner_activation="SIGMOID_HARD", cell_state_update_activation="RELU", peep=peep,
                        output_all=True, forget_bias=True, cell_clip_threshold=0.5, reverse_input=True)
    alpha, beta = numbers or (0.2, 0.5)
    if numbers is not None:
        stored = builder.spec.neuralNetwork.layers[0].uniDirectionalLSTM.activations[0].sigmoidHard
        stored.alpha, stored.beta = numbers
    x, h, c = draw(steps, size), draw(hidden), draw(hidden)
    found = predict(builder.spec, {"data": x.reshape(steps, 1, size, 1, 1), "h": h.reshape(1, 1, hidden, 1, 1),
                                   "c": c.reshape(1, 1, hidden, 1, 1)})
    expected = []
    for row in x[::-1]:
        into, forget, out, block = (w[at] @ row + r[at] @ h + b[at] for at in range(4))
        into, forget = (np.clip(alpha * each + beta, 0, 1) for each in (into + peep[0] * c, forget + 1 + peep[1] * c))
        c = np.clip(forget * c + into * np.maximum(block, 0), -0.5, 0.5)
        h = np.clip(alpha * (out + peep[2] * c) + beta, 0, 1) * np.tanh(c)
        expected.append(h)
    for name, values in (("out", np.stack(expected)), ("h_out", h), ("c_out", c)):
        np.testing.assert_allclose(found[name].reshape(values.shape), values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("outer", ["TANH", "SOFTSIGN"])
def test_a_scaled_tanh_without_numbers_is_that_of_the_recurrent_op(outer):
    """coremltools writes the op's `scaled_tanh`, whose numbers nobody states, without any."""
    builder = neural_network.NeuralNetworkBuilder(
        [("data", datatypes.Array(3, 1, 2, 1, 1))], [("out", None)], disable_rank5_shape_mapping=True)
    builder.add_gru("gru", [draw(4, 4)] * 3, [draw(4, 2)] * 3, None, 4, 2, ["data"], ["out"],
                    inner_activation="SCALED_TANH", activation="TANH")
    if outer == "SOFTSIGN":  # which the op lacks, so that the layer is written out
        builder.spec.neuralNetwork.layers[0].gru.activations[1].softsign.SetInParent()
        with pytest.raises(ane.InputError, match=r"layer 'gru' \(gru\): a scaled tanh without parameters"):
            upgrade_model(builder.spec)
        return
    (op,) = [op for _, op in iterate_ops(upgrade_model(builder.spec).package.program) if op.op_type == "gru"]
    assert op.recurrent_activation.val == "scaled_tanh"


def make_nms():
    builder = make_builder(exact=True, boxes=(1, 6, 4), scores=(1, 6, 2))
    builder.spec.description.output[0].name = "kept"
    for name in ("ranks", "places", "count"):
        builder.spec.description.output.add().CopyFrom(builder.spec.description.output[0])
        builder.spec.description.output[-1].name = name
    builder.add_nms("nms", ["boxes", "scores"], ["kept", "ranks", "places", "count"], iou_threshold=0.4,
                    score_threshold=0.1, max_boxes=3)
    return builder.spec


@pytest.mark.parametrize("target", ["iOS17", "iOS18"])
def test_a_score_threshold_needs_an_op_before_ios17(target):
    with pytest.raises(ane.InputError, match="'nms' .*it has a score threshold, which the op lacks from iOS17 on; "
                                             "expected deployment_target iOS16"):
        upgrade_model(make_nms(), target)
    assert upgrade_model(make_nms(), "iOS16").layers == {"NonMaximumSuppression": 1}


def test_a_network_with_a_score_threshold_is_linted_and_rewritten(tmp_path):
    ct.models.utils.save_spec(make_nms(), str(tmp_path / "in.mlmodel"))
    assert ane.lint(tmp_path / "in.mlmodel").upgraded
    assert ane.rewrite(tmp_path / "in.mlmodel", tmp_path / "out.mlmodel", preset="full").status == "unchanged"
