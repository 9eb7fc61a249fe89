"""Small .mlmodel files (NeuralNetwork) for the fuzzer, and what a try does with a damaged one: it is upgraded."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import coremltools as ct
from coremltools import proto
from coremltools.models import datatypes, neural_network
from coremltools.models.neural_network.quantization_utils import quantize_weights
from google.protobuf.message import DecodeError

import mil_ane_passes as ane
from mil_ane_passes.neuralnetwork.upgrade import upgrade_model

from . import files
from .fixtures import Files, make_normal
from .protos import is_map_field
from .tries import Tries

FILE = "model.mlmodel"
MAX_SECONDS = 8.0
"What an upgrade may take of the processor's time; that of an undamaged fixture takes up to a second."
_MAX_PARTS = 100
"Layers and their inputs in a file: coremltools' passes take a second for each hundred ops, and a try repeats some."


def _make_builder(exact: bool = False, mode: str | None = None, **inputs: tuple[int, ...]) -> Any:
    features = [(name, datatypes.Array(*shape)) for name, shape in inputs.items()]
    return neural_network.NeuralNetworkBuilder(features, [("out", None)], mode, disable_rank5_shape_mapping=exact)


def _make_image_classifier() -> Any:
    builder = _make_builder(mode="classifier", data=(3, 8, 8))
    weight = make_normal(3, 3, 3, 4)
    builder.add_convolution("conv", 3, 4, 3, 3, 2, 2, "same", 1, weight, make_normal(4), True, input_name="data",
                            output_name="a")
    builder.add_batchnorm("norm", 4, *(abs(make_normal(4)) for _ in range(4)), input_name="a", output_name="b")
    builder.add_activation("act", "PRELU", "b", "c", make_normal(4))
    builder.add_pooling("pool", 2, 2, 1, 1, "AVERAGE", "INCLUDE_LAST_PIXEL", "c", "d")
    builder.add_flatten("flat", 0, "d", "e")
    builder.add_inner_product("linear", make_normal(3, 36), make_normal(3), 36, 3, True, "e", "f")
    builder.add_softmax("softmax", "f", "out")
    builder.set_class_labels(["cat", "dog", "owl"], predicted_feature_name="animal", prediction_blob="out")
    builder.set_pre_processing_parameters(["data"], is_bgr=True, red_bias=1.0, image_scale=0.5)
    return builder.spec


def _make_scaler() -> Any:
    builder = _make_builder(data=(4, 6, 6))
    builder.add_upsample("up", 2, 2, "data", "a", mode="BILINEAR")
    builder.add_crop("crop", 1, 1, 1, 1, [0, 0], ["a"], "b")
    builder.add_padding("pad", 1, 1, 1, 1, input_name="b", output_name="c", padding_type="reflection")
    builder.add_lrn("lrn", "c", "d", 1e-4, 0.75, 5)
    builder.add_reorganize_data("depth", "d", "e", mode="SPACE_TO_DEPTH", block_size=2)
    builder.add_permute("permute", [0, 2, 3, 1], "e", "f")
    builder.add_split("split", "f", ["g", "h"])
    builder.add_elementwise("concat", ["g", "h"], "i", "CONCAT")
    builder.add_scale("scale", make_normal(1), make_normal(1), True, "i", "j")
    builder.add_convolution("deconv", 6, 2, 2, 2, 2, 2, "valid", 1, make_normal(2, 2, 6, 2), None, False, True,
                            input_name="j", output_name="k")
    builder.add_mvn("mvn", "k", "l")
    builder.add_reduce("reduce", "l", "out", "HW", "sum")
    return builder.spec


def _make_shapes() -> Any:
    builder = _make_builder(exact=True, data=(2, 3, 4), more=(4,))
    builder.add_add_broadcastable("add", ["data", "more"], "a")
    builder.add_expand_dims("expand", "a", "b", [0])
    builder.add_tile("tile", "b", "c", [2, 1, 1, 2])
    builder.add_slice_static("slice", "c", "d", [0, 0, 0, 0], [2, 2, 3, 6], [1, 1, 1, 2],
                             [False] * 4, [False] * 4)
    builder.add_transpose("transpose", [0, 2, 1, 3], "d", "e")
    builder.add_get_shape("shape", "e", "f")
    builder.add_fill_dynamic("fill", "f", "g", 2.0)
    builder.add_multiply_broadcastable("mul", ["e", "g"], "h")
    builder.add_reduce_sum("sum", "h", "i", [1], True)
    builder.add_load_constant_nd("const", "j", make_normal(2, 1, 2, 3), [2, 1, 2, 3])
    builder.add_concat_nd("concat", ["i", "j"], "k", axis=1)
    builder.add_constant_pad("pad", ["k"], "l", 1.0, False, [0, 0, 1, 0, 0, 0, 0, 1])
    builder.add_reshape_static("reshape", "l", "m", (2, 3, 2, 4))
    builder.add_topk("topk", ["m"], ["n", "o"], k=2, axis=-1)
    builder.add_argsort("sort", "n", "p", axis=1)
    builder.add_one_hot("hot", ["p"], "q", one_hot_vector_size=3)
    builder.add_range_static("range", "s", end=3, start=0, step=1)
    builder.add_gather("gather", ["q", "s"], "t", axis=-1)
    builder.add_cumsum("cumsum", ["t"], "u", axis=0)
    builder.add_reduce_max("max", "u", "v", [1], False)
    builder.add_layer_normalization("norm", "v", "w", (3,), make_normal(3), make_normal(3))
    builder.add_softmax_nd("softmax", "w", "out", axis=-1)
    return builder.spec


def _make_loop() -> Any:
    builder = _make_builder(exact=True, data=(1,))
    builder.add_copy("start", "data", "out")
    loop = builder.add_loop("loop", max_iterations=10)
    body = neural_network.NeuralNetworkBuilder(nn_spec=loop.loop.bodyNetwork, disable_rank5_shape_mapping=True)
    body.add_elementwise("double", ["out"], "next", "MULTIPLY", alpha=2.0)
    body.add_copy("assign", "next", "out")
    body.add_greater_than("large", ["out"], "is_large", alpha=20.0)
    branch = body.add_branch("stop", "is_large")
    inner = neural_network.NeuralNetworkBuilder(nn_spec=branch.branch.ifBranch, disable_rank5_shape_mapping=True)
    inner.add_loop_break("leave")
    return builder.spec


def _make_recurrent() -> Any:
    steps, inner, hidden = 3, 4, 2
    builder = _make_builder(exact=True, data=(steps, 1, inner, 1, 1))

    def four(rows: int, columns: int) -> list[Any]:
        return [make_normal(rows, columns) for _ in range(4)]

    builder.add_bidirlstm("lstm", four(hidden, hidden), four(hidden, inner), None, four(hidden, hidden),
                          four(hidden, inner), None, hidden, inner, ["data"], ["a"], output_all=True)
    builder.add_gru("gru", four(3, 3)[:3], four(3, 2 * hidden)[:3], [make_normal(3)] * 3, 3, 2 * hidden, ["a"], ["b"],
                    output_all=True)
    builder.add_simple_rnn("rnn", make_normal(2, 2), make_normal(2, 3), None, 2, 3, "TANH", ["b"], ["out"])
    return builder.spec


def _make_embedding() -> Any:
    builder = _make_builder(exact=True, ids=(1, 5, 1))
    builder.add_embedding_nd("table", "ids", "a", 10, 4, make_normal(4, 10))
    builder.add_batched_mat_mul("product", ["a"], "b", W=make_normal(4, 6), weight_matrix_rows=4,
                                weight_matrix_columns=6, bias=make_normal(6))
    builder.add_gelu("gelu", "b", "out", "EXACT")
    return builder.spec


def _quantize(bits: int, mode: str) -> Any:
    # The classifier is not taken: coremltools cannot fold its batch norm with this numpy.
    made = quantize_weights(ct.models.MLModel(_make_embedding(), skip_model_load=True), bits, mode)
    return made if hasattr(made, "SerializeToString") else made.get_spec()


def _quantize_by_table() -> Any:
    """A convolution with a lookup table of 4 numbers."""
    spec = _make_image_classifier()
    weights = spec.neuralNetworkClassifier.layers[0].convolution.weights
    count = len(weights.floatValue)
    weights.Clear()
    weights.rawValue = bytes(count // 4)
    weights.quantization.numberOfBits = 2
    weights.quantization.lookupTableQuantization.floatValue.extend([0.0, 1.0, 2.0, 3.0])
    return spec


def _make_pipeline() -> Any:
    inner = _make_builder(data=(4, 6, 6))
    inner.add_activation("act", "RELU", "data", "out")
    whole = proto.Model_pb2.Model(specificationVersion=4)
    last = _make_builder(out=(4, 6, 6))
    last.add_activation("act", "TANH", "out", "end")
    last.spec.description.output[0].name = "end"
    whole.pipeline.models.extend([inner.spec, last.spec])
    whole.description.input.extend(inner.spec.description.input)
    whole.description.output.extend(last.spec.description.output)
    return whole


BUILDERS: dict[str, Callable[[], Any]] = {
    "image": _make_image_classifier, "scaler": _make_scaler, "shapes": _make_shapes, "loop": _make_loop,
    "recurrent": _make_recurrent, "embedding": _make_embedding, "linear8": lambda: _quantize(8, "linear_symmetric"),
    "table2": _quantize_by_table, "pipeline": _make_pipeline,
}


def build_networks(names: list[str] | None = None) -> dict[str, Files]:
    """Return the networks called `names` (all of them by default), each as its file."""
    return {name: {FILE: BUILDERS[name]().SerializeToString()} for name in names or BUILDERS}


def _count_parts(data: bytes) -> int:
    """Count the layers of a file and their inputs, those in branches and loops included; 0 for what is no model."""
    try:
        waiting: list[Any] = [proto.Model_pb2.Model.FromString(data)]
    except DecodeError:
        return 0
    count = 0
    while waiting:
        message = waiting.pop()
        for field, value in message.ListFields():
            if field.message_type is not None and not is_map_field(field):
                waiting += value if field.is_repeated else [value]
        count += len(message.input) if message.DESCRIPTOR.name == "NeuralNetworkLayer" else 0
    return count


class NetworkTries(Tries):
    """Makes tries of .mlmodel files: bytes, fields or values are changed, or the file is cut; then it is upgraded."""

    model = FILE
    max_seconds = MAX_SECONDS

    def __init__(self, fixtures: Mapping[str, Files], seed: int, folder: Path) -> None:
        super().__init__(fixtures, seed, folder)
        self._source, self._saved = folder / FILE, folder / "saved.mlpackage"

    def make(self, number: int) -> Path:
        """Make the damaged file of try `number`."""
        rng = random.Random(f"{self._seed}:{number}")
        which = rng.randrange(len(self._fixtures))
        data, draw = self._fixtures[which][FILE], rng.random()
        if draw < 0.70:
            data = self._protos.mutate(which, rng)
        elif draw < 0.85:
            data = files.mutate_fields(data, rng)
        elif draw < 0.93:
            data = files.mutate_bytes(data, rng)
        elif draw < 0.98:
            data = data[:rng.randrange(len(data))]
        self.remove()
        if _count_parts(data) > _MAX_PARTS:
            data = files.mutate_bytes(self._fixtures[which][FILE], rng)
        self._source.write_bytes(data)
        if draw >= 0.98:
            files.replace_by_special_file(self._source, self._outside, rng)
        return self._source

    def _use(self, further: bool) -> None:
        upgraded = upgrade_model(self._source, "iOS18" if further else "iOS16")
        if further:
            ane.save(upgraded.package, self._saved)
            ane.lint(self._saved).to_dict()
