"""Rewrites of .mlmodel files within the format: what is replaced by what, near misses with reasons, what stays."""

import json

import coremltools as ct
import numpy as np
import pytest
from coremltools.models import datatypes, neural_network
from coremltools.models.neural_network.quantization_utils import quantize_weights

import mil_ane_passes as ane
from mil_ane_passes.commands.main import main
from mil_ane_passes.neuralnetwork.layer_rewriting import get_layer_rewrites, select_layer_rewrites
from mil_ane_passes.neuralnetwork.layer_rules import get_layer_rules

RNG = np.random.default_rng(5)


def draw(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def make_builder(exact=True, outputs=("out",), **inputs):
    features = [(name, datatypes.Array(*shape)) for name, shape in inputs.items()]
    return neural_network.NeuralNetworkBuilder(features, [(name, None) for name in outputs],
                                               disable_rank5_shape_mapping=exact)


def combine(add, *shapes, constant=None, first=False):
    """A layer of two values: of two inputs, or of one and a constant."""
    builder = make_builder(**dict(zip("xy", shapes)))
    names = ["x", "y"]
    if constant is not None:
        builder.add_load_constant_nd("c", "y", constant, constant.shape or (1,))
    getattr(builder, f"add_{add}")("layer", names[::-1] if first else names, "out")
    return builder


def apply(add, *shapes, outputs=("out",), exact=True, **settings):
    """A layer of one value."""
    builder = make_builder(exact, outputs, x=shapes[0])
    target = {"output_names": list(outputs)} if len(outputs) > 1 else {"output_name": "out"}
    getattr(builder, f"add_{add}")(name="layer", input_name="x", **target, **settings)
    return builder


def pool(shape, window, stride, kind="MAX", padding="VALID", pads=None, exact=True):
    builder = make_builder(exact, x=shape)
    builder.add_pooling("layer", *window, *stride, kind, padding, "x", "out", **(pads or {}))
    return builder


C, HW = np.arange(1, 5, dtype=np.float32).reshape(1, 4, 1, 1), draw(1, 1, 6, 5)
X = (1, 4, 6, 5)
REPLACED = {
    "sum of equal shapes": ("replace_broadcastable", lambda: combine("add_broadcastable", X, X), ["add"]),
    "sum over channels": ("replace_broadcastable", lambda: combine("add_broadcastable", X, (1, 4, 1, 1)), ["add"]),
    "sum over channels, smaller first": (
        "replace_broadcastable", lambda: combine("add_broadcastable", (1, 4, 1, 1), X), ["add"]),
    "sum of an image of lower rank": (
        "replace_broadcastable", lambda: combine("add_broadcastable", X, (6, 5)), ["add"]),
    "product of a batch": ("replace_broadcastable", lambda: combine("multiply_broadcastable", (2, 4, 6, 5),
                                                                    (2, 1, 1, 1)), ["multiply"]),
    "maximum of equal shapes": ("replace_broadcastable", lambda: combine("max_broadcastable", X, X), ["max"]),
    "minimum over channels": ("replace_broadcastable", lambda: combine("min_broadcastable", X, (1, 4, 1, 1)), ["min"]),
    "sum with channels": ("replace_broadcastable", lambda: combine("add_broadcastable", X, constant=C), ["bias"]),
    "product with channels": (
        "replace_broadcastable", lambda: combine("multiply_broadcastable", X, constant=C, first=True), ["scale"]),
    "product with an image": (
        "replace_broadcastable", lambda: combine("multiply_broadcastable", X, constant=HW), ["scale"]),
    "product with a number": (
        "replace_broadcastable", lambda: combine("multiply_broadcastable", (3,), constant=draw(1)), ["activation"]),
    "sum with a number": (
        "replace_broadcastable", lambda: combine("add_broadcastable", (2, 3), constant=draw(1, 1)), ["activation"]),
    "maximum with a number": (
        "replace_broadcastable", lambda: combine("max_broadcastable", X, constant=draw(1)), ["unary"]),
    "minimum with a number": ("replace_broadcastable", lambda: combine("min_broadcastable", X, constant=draw(1)),
                              ["activation", "unary", "activation"]),
    "difference": ("replace_subtract", lambda: combine("subtract_broadcastable", X, X), ["activation", "add"]),
    "difference from channels, computed": (
        "replace_subtract", lambda: combine("subtract_broadcastable", (1, 4, 1, 1), X), ["activation", "add"]),
    "difference with channels": (
        "replace_subtract", lambda: combine("subtract_broadcastable", X, constant=C), ["bias"]),
    "difference from channels": (
        "replace_subtract", lambda: combine("subtract_broadcastable", X, constant=C, first=True),
        ["activation", "bias"]),
    "quotient with channels": ("replace_divide", lambda: combine("divide_broadcastable", X, constant=C), ["scale"]),
    "quotient with a number": (
        "replace_divide", lambda: combine("divide_broadcastable", X, constant=np.float32([3])), ["activation"]),
    "power": ("replace_power", lambda: combine("pow_broadcastable", X, constant=np.float32([2])), ["unary"]),
    "concat": ("replace_concat", lambda: _join(X, X, axis=1), ["concat"]),
    "concat from the back": ("replace_concat", lambda: _join((4, 6, 5), (2, 6, 5), axis=-3), ["concat"]),
    "split": ("replace_split", lambda: apply("split_nd", X, outputs=("a", "b"), axis=1, num_splits=2), ["split"]),
    "unequal split": (
        "replace_split", lambda: apply("split_nd", X, outputs=("a", "b"), axis=-3, split_sizes=[1, 3]),
        ["slice", "slice"]),
    "split of the width": (
        "replace_split", lambda: apply("split_nd", X, outputs=("a", "b"), axis=3, split_sizes=[2, 3]),
        ["slice", "slice"]),
    "split of the height": (
        "replace_split", lambda: apply("split_nd", X, outputs=("a", "b"), axis=2, num_splits=2), ["slice", "slice"]),
    "softmax": ("replace_softmax", lambda: apply("softmax_nd", X, axis=1), ["softmax"]),
    "permute": ("replace_transpose", lambda: apply("transpose", (2, 1, 3, 4, 5), axes=(3, 1, 0, 4, 2)), ["permute"]),
    "flatten": (
        "replace_reshape", lambda: apply("reshape_static", X, output_shape=(1, 120, 1, 1)), ["flatten"]),
    "flatten of kept axes": (
        "replace_reshape", lambda: apply("rank_preserving_reshape", X, output_shape=(0, -1, 1, 1)), ["flatten"]),
    "reshape of rank 5": (
        "replace_reshape", lambda: apply("reshape_static", (2, 1, 4, 6, 5), output_shape=(2, 1, 8, 5, 3)), ["reshape"]),
    "mean over the image": (
        "replace_reduction", lambda: apply("reduce_mean", X, axes=[2, 3], keepdims=True, reduce_all=False),
        ["pooling"]),
    "sum over channels only": (
        "replace_reduction", lambda: apply("reduce_sum", X, axes=[1], keepdims=True, reduce_all=False), ["reduce"]),
    "index of the largest channel": (
        "replace_reduction", lambda: apply("argmax", X, axis=1, keepdims=True), ["reduce"]),
    "window of the whole image": ("replace_pooling", lambda: pool((1, 3, 16, 15), (16, 15), (1, 1), "AVERAGE"),
                                  ["pooling"]),
    "maximum of a large window": ("replace_pooling", lambda: pool((1, 3, 40, 30), (30, 15), (2, 1)),
                                  ["pooling"] * 3),
    "maximum with padding": ("replace_pooling", lambda: pool((1, 3, 40, 30), (15, 15), (1, 2), pads={
        f"padding_{side}": amount for side, amount in zip(("top", "bottom", "left", "right"), (7, 7, 3, 6))}),
        ["pooling"] * 2),
    "maximum with a stride of 4": ("replace_pooling", lambda: pool((3, 41, 30), (3, 2), (4, 1), exact=False),
                                   ["pooling"] * 2),
    "mean of windows of 4": ("replace_pooling", lambda: pool((3, 37, 30), (4, 16), (4, 16), "AVERAGE", exact=False),
                             ["pooling"] * 4),
    "enlargement by 4": ("replace_upsampling", lambda: apply("upsample", (3, 5, 4), exact=False, scaling_factor_h=4,
                                                             scaling_factor_w=2, mode="NN"), ["upsample"] * 2),
}


def _join(*shapes, axis, **settings):
    builder = make_builder(**dict(zip("xy", shapes)))
    builder.add_concat_nd("layer", ["x", "y"], "out", axis=axis, **settings)
    return builder


def get_kinds(spec):
    return [layer.WhichOneof("layer") for layer in spec.neuralNetwork.layers]


def rewrite(builder, tmp_path, **options):
    source, target = tmp_path / "in.mlmodel", tmp_path / "out.mlmodel"
    ct.models.utils.save_spec(builder.spec, str(source))
    raw = source.read_bytes()
    report = ane.rewrite(source, target, **{"preset": "full", "seeds": 1, **options})
    assert source.read_bytes() == raw
    return report, ct.utils.load_spec(str(target)) if target.exists() else None


@pytest.mark.parametrize("case", REPLACED)
def test_layers_are_replaced_by_classic_ones(case, tmp_path):
    name, make, kinds = REPLACED[case]
    report, spec = rewrite(make(), tmp_path)
    assert report.status == "written" and report.verify.equal, str(report)
    assert [trace.rule for trace in report.traces if trace.fired and trace.rule != "replace_constant"] == [name]
    assert get_kinds(spec) == kinds
    assert report.off_ane_after < report.off_ane_before or "channels" in case
    assert spec.neuralNetwork.layers[-1].output[-1] == make().spec.description.output[-1].name
    exact = name not in ("replace_divide", "replace_pooling") or report.verify.equal_bits
    assert exact or next(trace for trace in report.traces if trace.rule == name).exactness.value == "rounding"


def convolve(shape, dilations, pads=None, kernel=(3, 3), groups=1, exact=False, padding="valid", stride=1):
    builder = make_builder(exact, x=shape)
    channels = shape[-3]
    weights = draw(*kernel, channels // groups, 6)
    builder.add_convolution("layer", channels // groups, 6, *kernel, stride, stride, padding, groups, weights, draw(6),
                            True, input_name="x", output_name="out", dilation_factors=list(dilations), **(pads or {}))
    return builder


PADS = {"padding_top": 2, "padding_bottom": 1, "padding_left": 0, "padding_right": 3}


@pytest.mark.parametrize(
    "settings",
    [
        {"dilations": (2, 2)}, {"dilations": (2, 3), "pads": PADS}, {"dilations": (1, 4), "kernel": (1, 3)},
        {"dilations": (3, 1), "kernel": (2, 3), "groups": 2}, {"dilations": (5, 2), "pads": PADS, "groups": 3},
    ],
    ids=str,
)
def test_a_dilated_convolution_runs_on_its_phases(settings, tmp_path):
    builder = convolve((6, 13, 17), **settings)
    report, spec = rewrite(builder, tmp_path, passes="undilate_convolution")
    assert report.status == "written" and report.verify.equal, str(report)
    (made,) = [layer for layer in spec.neuralNetwork.layers if layer.WhichOneof("layer") == "convolution"]
    (old,) = builder.spec.neuralNetwork.layers
    assert made.convolution.weights == old.convolution.weights and list(made.convolution.dilationFactor) == [1, 1]
    assert set(get_kinds(spec)) <= {"padding", "reshape", "permute", "convolution", "crop"}
    assert (report.off_ane_before, report.off_ane_after) == (1, 0)


DILATED = {
    "exact ranks": ({"shape": (1, 6, 13, 17), "exact": True}, "this network has exact ranks"),
    "strides": ({"stride": 2}, "it has strides [2, 2]"),
    "same": ({"padding": "same"}, "of the form 'same'"),
}


@pytest.mark.parametrize("case", DILATED)
def test_a_dilated_convolution_stays_with_a_reason(case, tmp_path):
    settings, reason = DILATED[case]
    report, _ = rewrite(convolve(**{"shape": (6, 13, 17), "dilations": (2, 2), **settings}), tmp_path,
                        passes="undilate_convolution")
    assert report.status == "unchanged" and reason in str(report)


def test_a_dilated_convolution_is_rewritten_only_by_name(tmp_path):
    report, _ = rewrite(convolve((6, 13, 17), (2, 2)), tmp_path)
    assert report.status == "unchanged" and report.remaining[0].layer == "layer"
    assert "'layer' (convolution): undilate_convolution replaces it, only by name" in str(report)


def test_layers_without_a_rewrite_are_listed(tmp_path):
    builder = make_builder(True, x=(6, 4), y=(3,))
    builder.add_gather("layer", ["x", "y"], "out", axis=0)
    report, _ = rewrite(builder, tmp_path)
    assert "NN105  'layer' (gather): no rewrite within the format applies; upgrade" in str(report)
    assert report.to_dict()["remaining"][0]["code"] == "NN105"


NEAR_MISSES = {
    "rank 5": ("replace_broadcastable", lambda: combine("add_broadcastable", (1, 1, 4, 6, 5), (1, 1, 4, 1, 1)),
               "does not broadcast [1, 1, 4, 6, 5] and [1, 1, 4, 1, 1] (up to rank 4"),
    "both broadcast": ("replace_broadcastable", lambda: combine("add_broadcastable", (1, 4, 1, 1), (1, 1, 6, 5)),
                       "does not broadcast [1, 4, 1, 1] and [1, 1, 6, 5]"),
    "rows": ("replace_broadcastable", lambda: combine("multiply_broadcastable", X, (1, 1, 1, 5)), "does not broadcast"),
    "maximum over the image": ("replace_broadcastable", lambda: combine("max_broadcastable", X, (1, 1, 6, 5)),
                               "the axes BC, BCHW of the larger"),
    "a constant of rows": ("replace_broadcastable", lambda: combine("add_broadcastable", X, constant=draw(1, 1, 1, 5)),
                           "a scale or bias stores [C], [1, H, W] or [C, H, W]"),
    "a constant at rank 2": ("replace_broadcastable", lambda: combine("add_broadcastable", (2, 5), constant=draw(1, 5)),
                             "at rank 3 or more"),
    "a constant of larger rank": (
        "replace_broadcastable", lambda: combine("add_broadcastable", (4, 6, 5), constant=draw(1, 4, 6, 5)),
        "has a larger rank than the value"),
    "a constant that enlarges": (
        "replace_broadcastable", lambda: combine("add_broadcastable", (1, 1, 6, 5), constant=draw(1, 4, 1, 1)),
        "enlarges the value"),
    "a maximum with channels": ("replace_broadcastable", lambda: combine("max_broadcastable", X, constant=C),
                                "a classic max has no constant"),
    "a computed divisor": ("replace_divide", lambda: combine("divide_broadcastable", X, X), "adds an epsilon"),
    "a divisor of zero": ("replace_divide", lambda: combine("divide_broadcastable", X, constant=C - 1),
                          "zero, infinite or denormal"),
    "a computed exponent": ("replace_power", lambda: combine("pow_broadcastable", X, X), "not a constant"),
    "a remainder": ("keep_other_broadcastable", lambda: combine("mod_broadcastable", X, X),
                    "there is no classic layer for modBroad"),
    "concat of the width": ("replace_concat", lambda: _join(X, X, axis=3),
                            "it concatenates axis -1 of values of rank 4"),
    "concat at rank 2": ("replace_concat", lambda: _join((2, 3), (2, 3), axis=0),
                         "it concatenates axis -2 of values of rank 2"),
    "interleaved concat": ("replace_concat", lambda: _join(X, X, axis=1, interleave=True), "it interleaves"),
    "split of the batch": ("replace_split", lambda: apply("split_nd", (2, 4, 6, 5), outputs=("a", "b"), axis=0,
                                                          num_splits=2), "it splits axis -4"),
    "softmax of the width": ("replace_softmax", lambda: apply("softmax_nd", X, axis=-1), "runs over axis -1 of rank 4"),
    "transpose of rank 4": ("replace_transpose", lambda: apply("transpose", X, axes=(0, 2, 3, 1)), "permutes [0, 2, 3"),
    "transpose of the batch": ("replace_transpose", lambda: apply("transpose", (1, 2, 3, 4, 5), axes=(1, 0, 2, 3, 4)),
                               "leaves axis 1, the batch, in place"),
    "reshape of rank 4": ("replace_reshape", lambda: apply("reshape_static", X, output_shape=(1, 2, 12, 5)),
                          "the classic reshape has rank 5"),
    "reshape to rank 2": ("replace_reshape", lambda: apply("reshape_static", X, output_shape=(4, 30)),
                          "it changes the rank from 4 to 2"),
    "expand": ("keep_rank_changes", lambda: apply("expand_dims", (4, 5), axes=[0]), "expandDims changes the rank"),
    "squeeze": ("keep_rank_changes", lambda: apply("squeeze", X, axes=[0]), "squeeze changes the rank"),
    "a mean that drops axes": (
        "replace_reduction", lambda: apply("reduce_mean", X, axes=[2, 3], keepdims=False, reduce_all=False),
        "drops the axes"),
    "a sum over the batch": (
        "replace_reduction", lambda: apply("reduce_sum", X, axes=[0], keepdims=True, reduce_all=False),
        "reduces axes [-4] at rank 4"),
    "a stride of 3": ("replace_pooling", lambda: pool((3, 41, 30), (3, 3), (3, 3), exact=False), "not a power of two"),
    "a mean with overlap": ("replace_pooling", lambda: pool((3, 41, 30), (16, 16), (2, 2), "AVERAGE", exact=False),
                            "only unpadded windows side by side"),
    "a root of squares": ("replace_pooling", lambda: pool((3, 41, 30), (16, 16), (2, 2), "L2", exact=False),
                          "root sums of squares"),
    "padding of the same size": (
        "replace_pooling", lambda: pool((3, 41, 30), (16, 16), (1, 1), "MAX", "SAME", exact=False), "'same'"),
    "enlargement by 3": ("replace_upsampling", lambda: apply("upsample", (3, 5, 4), exact=False, scaling_factor_h=3,
                                                             scaling_factor_w=3, mode="NN"), "only powers of two"),
    "a window without end": ("replace_pooling", lambda: pool((3, 41, 30), (2001, 2), (1, 1), pads={
        "padding_top": 1000, "padding_bottom": 1000}, exact=False), "a chain of more than 8 poolings"),
    "a stride without end": ("replace_pooling", lambda: pool((3, 41, 30), (2, 2), (2**61, 1), exact=False),
                             "a chain of 61 poolings; expected at most 8"),
    "linear enlargement": ("replace_upsampling", lambda: apply(
        "upsample", (3, 5, 4), exact=False, scaling_factor_h=4, scaling_factor_w=4, mode="BILINEAR"),
        "twice by 2 is not one by 4"),
}


@pytest.mark.parametrize("exclude", [False, True])
def test_a_mean_beside_padding_counts_as_before(tmp_path, exclude):
    builder = make_builder(False, x=(3, 37, 30))
    builder.add_pooling("layer", 16, 3, 16, 2, "AVERAGE", "VALID", "x", "out", exclude_pad_area=exclude,
                        padding_left=1, padding_right=2)
    report, spec = rewrite(builder, tmp_path)
    assert report.status == "written" and get_kinds(spec) == ["pooling"] * 4 and not report.left_out_passes


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_near_misses_have_their_reason(case, tmp_path):
    name, make, reason = NEAR_MISSES[case]
    report, spec = rewrite(make(), tmp_path)
    assert report.status == "unchanged" and not report.changed
    assert (tmp_path / "out.mlmodel").read_bytes() == (tmp_path / "in.mlmodel").read_bytes()
    found = [miss for trace in report.traces if trace.rule == name for miss in trace.near_misses]
    assert len(found) == 1 and reason in found[0].note, found
    assert f"'layer' ({found[0].kind})" in str(report) and reason in str(report)
    assert found[0].code in get_layer_rules()


def test_a_quantized_constant_stays_as_stored(tmp_path):
    builder = combine("add_broadcastable", X, constant=C)
    constant = builder.spec.neuralNetwork.layers[0].loadConstantND
    constant.data.Clear()
    constant.data.rawValue = bytes([0, 1, 2, 3])
    constant.data.quantization.numberOfBits = 8
    constant.data.quantization.linearQuantization.scale.append(0.5)
    constant.data.quantization.linearQuantization.bias.append(1)
    report, spec = rewrite(builder, tmp_path)
    assert report.status == "unchanged" and "quantized constant, which is not changed" in str(report)


def test_every_rewrite_is_tested_with_a_match_or_a_reason():
    tested = {name for table in (REPLACED, NEAR_MISSES) for name, *_ in table.values()}
    assert set(get_layer_rewrites()) - tested - {"replace_constant", "undilate_convolution"} == set()
    for each in get_layer_rewrites().values():
        assert each.fixes in get_layer_rules() and each.summary.endswith(".")


def make_mixed(quantized=False):
    """A classifier with an image, a quantized convolution, layers to rewrite around it, and metadata."""
    builder = neural_network.NeuralNetworkBuilder([("image", datatypes.Array(3, 8, 8))], [("scores", None)],
                                                  mode="classifier", disable_rank5_shape_mapping=True)
    builder.add_load_constant_nd("mean", "m", draw(3, 1, 1), (3, 1, 1))
    builder.add_subtract_broadcastable("center", ["image", "m"], "a")
    builder.add_expand_dims("batch", "a", "b", [0])
    builder.add_convolution("conv", 3, 4, 3, 3, 1, 1, "same", 1, draw(3, 3, 3, 4), draw(4), True, input_name="b",
                            output_name="c")
    builder.add_multiply_broadcastable("square", ["c", "c"], "d")
    builder.add_reduce_mean("mean over the image", "d", "e", axes=[2, 3], keepdims=True, reduce_all=False)
    builder.add_softmax_nd("softmax", "e", "scores", 1)
    builder.set_class_labels(["a", "b", "c", "d"], prediction_blob="scores")
    builder.spec.description.metadata.author = "nobody"
    builder.spec.description.metadata.userDefined["key"] = "värde"
    spec = builder.spec
    if quantized:
        model = quantize_weights(ct.models.MLModel(spec, skip_model_load=True), 4, "linear_lut")
        spec = getattr(model, "get_spec", lambda: model)()
    return spec


@pytest.mark.parametrize("quantized", [False, True])
def test_all_that_no_rewrite_touches_stays(tmp_path, quantized):
    spec = make_mixed(quantized)
    (tmp_path / "in.mlmodel").write_bytes(spec.SerializeToString())
    report = ane.rewrite(tmp_path / "in.mlmodel", tmp_path / "out.mlmodel")
    made = ct.utils.load_spec(str(tmp_path / "out.mlmodel"))
    assert report.status == "written" and report.verify.equal
    assert made.description == spec.description and made.specificationVersion == spec.specificationVersion
    old, new = ({layer.name: layer for layer in each.neuralNetworkClassifier.layers} for each in (spec, made))
    replaced = {each.layer for trace in report.traces for each in trace.fired}
    kept = set(old) - replaced
    assert kept == {"conv", "batch", *(["mean", "center"] if quantized else [])}
    assert all(old[name].SerializeToString() == new[name].SerializeToString() for name in kept)
    kinds = [layer.WhichOneof("layer") for layer in made.neuralNetworkClassifier.layers]
    centering = ["loadConstantND", "subtractBroadcastable"] if quantized else ["bias"]
    assert kinds == [*centering, "expandDims", "convolution", "multiply", "pooling", "softmax"]
    for each in (spec, made):
        del each.neuralNetworkClassifier.layers[:]
    assert spec == made


def test_images_and_names_that_are_not_identifiers(tmp_path):
    builder = make_builder(**{"the image": (3, 8, 8)})
    builder.set_pre_processing_parameters(["the image"], is_bgr=True, red_bias=-120, image_scale=1 / 127)
    builder.add_subtract_broadcastable("a layer", ["the image", "the image"], "in the middle")
    builder.add_softmax_nd("soft max", "in the middle", "out", axis=-3)
    report, spec = rewrite(builder, tmp_path)
    assert report.status == "written" and report.verify.equal_bits
    assert get_kinds(spec) == ["activation", "add", "softmax"] and spec.description == builder.spec.description
    assert spec.neuralNetwork.preprocessing == builder.spec.neuralNetwork.preprocessing


def test_feeds_and_ranges_of_the_user_are_compared(tmp_path):
    feeds = {"x": draw(*X), "y": draw(*X)}
    report, _ = rewrite(REPLACED["difference"][1](), tmp_path, feeds=feeds, ranges={"x": (0.0, 1.0)})
    assert report.status == "written" and "given feeds" in {case.feeds for case in report.verify.cases}
    with pytest.raises(ane.InputError, match="no such input"):
        rewrite(REPLACED["difference"][1](), tmp_path, feeds={"z": draw(*X)}, overwrite=True)


def test_the_default_preset_changes_no_bits(tmp_path):
    chosen = {each.name for each in select_layer_rewrites("safe")}
    assert all(each.exactness.value == "bitwise" for each in select_layer_rewrites("safe"))
    assert "replace_divide" not in chosen and chosen < {each.name for each in select_layer_rewrites("full")}
    report, _ = rewrite(REPLACED["quotient with channels"][1](), tmp_path, preset="safe")
    assert report.status == "unchanged"
    assert "'layer' (divideBroadcastable): replace_divide replaces it, preset full" in str(report)


def test_specs_models_and_packages_are_rewritten_as_files_are(tmp_path):
    spec = make_mixed()
    raw = spec.SerializeToString()
    model = ct.models.MLModel(spec, skip_model_load=True)
    model.save(str(tmp_path / "held.mlpackage"))
    made = []
    for at, source in enumerate((spec, model, tmp_path / "held.mlpackage")):
        report = ane.rewrite(source, tmp_path / f"{at}.mlmodel", verify=False)
        assert report.status == "written" and not report.verified
        made.append(ct.utils.load_spec(str(tmp_path / f"{at}.mlmodel")))
        assert report.package == made[-1]
    assert made[0] == made[1] == made[2] and spec.SerializeToString() == raw


def test_named_passes_and_unknown_ones(tmp_path, capsys):
    ct.models.utils.save_spec(combine("add_broadcastable", X, X).spec, str(tmp_path / "in.mlmodel"))
    report = ane.rewrite(tmp_path / "in.mlmodel", tmp_path / "out.mlmodel", passes="replace_concat")
    assert report.status == "unchanged" and report.passes == ["replace_concat"]
    assert main(["rewrite", str(tmp_path / "in.mlmodel"), "-o", str(tmp_path / "x.mlmodel"), "--passes",
                 "replace_conca"]) == 2
    assert "no layer rewrite 'replace_conca'" in (err := capsys.readouterr().err) and "did you mean" in err


def test_a_wrong_rewrite_of_a_preset_is_left_out(tmp_path, monkeypatch):
    from mil_ane_passes.neuralnetwork import layer_rewriting
    from mil_ane_passes.neuralnetwork.layer_rewriting import LayerRewrite, Replacement
    from mil_ane_passes.neuralnetwork.network_view import make_layer
    from mil_ane_passes.passes.contract import Exactness

    def replace_by_cosine(layer, view):
        """Replace a sum by a cosine."""
        return Replacement([make_layer("cos", layer.name, layer.input[:1], layer.output, view, layer)], "wrong")

    wrong = LayerRewrite("a_wrong_one", ("addBroadcastable",), "NN101", Exactness.BITWISE, "safe", 0.0,
                         replace_by_cosine)
    get_layer_rewrites()
    monkeypatch.setitem(layer_rewriting._REWRITES, wrong.name, wrong)
    builder = make_builder(x=X)
    builder.add_add_broadcastable("layer", ["x", "x"], "a")
    builder.add_softmax_nd("softmax", "a", "out", 1)
    report, spec = rewrite(builder, tmp_path, preset="safe")
    (left_out,) = report.left_out_passes
    assert report.status == "written" and left_out.rule == "a_wrong_one" and "float64: " in left_out.reason
    assert get_kinds(spec) == ["add", "softmax"]
    (tmp_path / "out.mlmodel").unlink()
    report, spec = rewrite(builder, tmp_path, passes="a_wrong_one")
    assert report.status == "not verified" and spec is None and "nothing written" in str(report)


def test_the_command_prints_what_it_did(tmp_path, capsys):
    ct.models.utils.save_spec(make_mixed(), str(tmp_path / "in.mlmodel"))
    arguments = ["rewrite", str(tmp_path / "in.mlmodel"), "-o", str(tmp_path / "out.mlmodel")]
    assert main([*arguments, "--dry-run"]) == 0 and not (tmp_path / "out.mlmodel").exists()
    assert "dry run: nothing verified, nothing written" in capsys.readouterr().out
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "layers reported off the ANE: 6 -> 1" in out and "NN102  'batch' (expandDims): expandDims changes" in out
    assert main(arguments) == 2 and "exists already" in capsys.readouterr().err
    assert main([*arguments, "--overwrite", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["command"], found["format"]) == (1, "rewrite", "neuralNetwork")
    assert found["verified"] and found["off_ane"] == {"before": 6, "after": 1}
    fired = {each["layer"]: each for trace in found["traces"] for each in trace["fired"]}
    assert fired["center"]["made"] == [{"layer": "center", "kind": "bias"}]


@pytest.mark.parametrize("option", [["--diff"], ["--link"]])
def test_options_of_packages_are_refused(tmp_path, capsys, option):
    ct.models.utils.save_spec(make_mixed(), str(tmp_path / "in.mlmodel"))
    assert main(["rewrite", str(tmp_path / "in.mlmodel"), "-o", str(tmp_path / "o.mlmodel"), *option]) == 2
    assert f"{option[0]}: applies to packages only" in capsys.readouterr().err


def test_destinations_that_cannot_be_written(tmp_path, capsys):
    source = tmp_path / "in.mlmodel"
    ct.models.utils.save_spec(make_mixed(), str(source))
    ane.upgrade(make_mixed(), tmp_path / "program.mlpackage")
    (tmp_path / "folder.mlmodel").mkdir()
    for target, message in (
            (source, "is the source, which is never modified"), (tmp_path / "no/x.mlmodel", "does not exist"),
            (tmp_path / "folder.mlmodel", "is a folder"),
            (tmp_path / "program.mlpackage/x.mlmodel", "is inside the package")):
        assert main(["rewrite", str(source), "-o", str(target), "--overwrite"]) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1
    assert main(["rewrite", str(tmp_path / "program.mlpackage"), "-o", str(tmp_path / "x.mlmodel")]) == 2
    assert "is an ML Program already" in capsys.readouterr().err
    assert ct.utils.load_spec(str(source)) == ct.utils.load_spec(str(source))


@pytest.mark.parametrize("add", ["add_broadcastable", "subtract_broadcastable"])
def test_equal_flexible_shapes_are_equal(tmp_path, add):
    builder = make_builder(x=X)
    builder.add_activation("relu", "RELU", "x", "a")
    getattr(builder, f"add_{add}")("layer", ["x", "a"], "out")
    neural_network.flexible_shape_utils.set_multiarray_ndshape_range(builder.spec, "x", [1, 4, 2, 2], [1, 4, 9, -1])
    report, spec = rewrite(builder, tmp_path)
    assert report.status == "written" and get_kinds(spec)[-1] == "add" and report.verify.equal_bits
    assert spec.description == builder.spec.description


def test_different_flexible_shapes_may_broadcast(tmp_path):
    builder = combine("add_broadcastable", X, X)
    for name in "xy":
        neural_network.flexible_shape_utils.set_multiarray_ndshape_range(builder.spec, name, [1, 4, 1, 5], [1, 4, 9, 5])
    report, _ = rewrite(builder, tmp_path, passes="safe")
    assert report.status == "unchanged" and "[1, 4, any, 5]" in str(report)


def test_a_rewrite_whose_result_cannot_be_converted_is_left_out(tmp_path, monkeypatch):
    from mil_ane_passes.neuralnetwork import layer_rewriting
    from mil_ane_passes.neuralnetwork.layer_rewriting import LayerRewrite, Replacement
    from mil_ane_passes.neuralnetwork.network_view import make_layer
    from mil_ane_passes.passes.contract import Exactness

    def replace_by_nothing(layer, view):
        """Replace a sum by a layer without inputs."""
        return Replacement([make_layer("add", layer.name, [], layer.output, view, layer)], "wrong")

    wrong = LayerRewrite("a_wrong_one", ("addBroadcastable",), "NN101", Exactness.BITWISE, "safe", 0.0,
                         replace_by_nothing)
    get_layer_rewrites()
    monkeypatch.setitem(layer_rewriting._REWRITES, wrong.name, wrong)
    report, spec = rewrite(combine("add_broadcastable", X, X), tmp_path, preset="safe")
    assert report.status == "written" and get_kinds(spec) == ["add"]
    assert "no inputs" in report.left_out_passes[0].reason


def test_a_classic_constant_of_exact_ranks_has_rank_5(tmp_path):
    builder = make_builder(x=(1, 4, 6, 5))
    builder.add_load_constant("constant", "c", C, [4, 1, 1])
    builder.add_add_broadcastable("layer", ["x", "c"], "out")
    report, _ = rewrite(builder, tmp_path)
    assert report.status == "unchanged" and "has a larger rank than the value [1, 4, 6, 5]" in str(report)


def test_layers_in_loops_stay_with_a_reason(tmp_path):
    builder = make_builder(x=X)
    layer = builder.add_loop("loop", max_iterations=2)
    body = neural_network.NeuralNetworkBuilder(
        input_features=None, output_features=None, spec=None, nn_spec=layer.loop.bodyNetwork)
    body.add_add_broadcastable("inner", ["x", "x"], "y")
    builder.add_softmax_nd("softmax", "x", "out", 1)
    report, spec = rewrite(builder, tmp_path)
    assert get_kinds(spec) == ["loop", "softmax"] and report.verify.equal
    assert "'inner' (addBroadcastable): it is in the body of 'loop'" in str(report)


def make_pipeline():
    """Two networks, in sequence, each with a layer to rewrite."""
    first, second = make_builder(x=X, outputs=("middle",)), make_builder(middle=X)
    first.add_add_broadcastable("sum", ["x", "x"], "middle")
    second.add_softmax_nd("softmax", "middle", "out", 1)
    specs = [first.spec, second.spec]
    for spec, name in zip(specs, ("middle", "out")):
        spec.description.output[0].type.multiArrayType.shape.extend(X)
        spec.description.output[0].type.multiArrayType.dataType = ct.proto.FeatureTypes_pb2.ArrayFeatureType.FLOAT32
        assert spec.description.output[0].name == name
    made = ct.proto.Model_pb2.Model(specificationVersion=4)
    made.description.input.add().CopyFrom(specs[0].description.input[0])
    made.description.output.add().CopyFrom(specs[1].description.output[0])
    made.pipeline.models.extend(specs)
    made.pipeline.names.extend(["one", "two"])
    return made


def test_the_networks_of_a_pipeline_are_rewritten(tmp_path):
    spec = make_pipeline()
    (tmp_path / "in.mlmodel").write_bytes(spec.SerializeToString())
    report = ane.rewrite(tmp_path / "in.mlmodel", tmp_path / "out.mlmodel", seeds=1)
    made = ct.utils.load_spec(str(tmp_path / "out.mlmodel"))
    assert report.status == "written" and report.verify.equal_bits
    assert (report.off_ane_before, report.off_ane_after) == (2, 0)
    assert [get_kinds(model) for model in made.pipeline.models] == [["add"], ["softmax"]]
    assert made.description == spec.description and list(made.pipeline.names) == ["one", "two"]
    linted = ane.lint(tmp_path / "in.mlmodel")
    assert "is a pipeline of NeuralNetworks; read as" in str(linted.upgraded[0]) and linted.network.layers == 2
