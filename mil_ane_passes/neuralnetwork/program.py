"""Conversion of a NeuralNetwork to a MIL program: inputs, layers, outputs."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Program, Var, types
from coremltools.converters.mil.mil.program import get_new_symbol
from coremltools.converters.mil.mil.types.symbolic import is_symbolic
from coremltools.proto import NeuralNetwork_pb2

from ..ir.scopes import make_layer_scopes
from ..package.names import make_free_name
from ..utils.errors import AnePassesError, InputError
from ..utils.option_spelling import format_option_values
from ..utils.text_format import escape_text
from . import layers as _layers
from .interface import Feature, make_identifiers, read_features
from .layer_converter import BUILDER_ERRORS, CONVERTERS, LayerContext, format_cause, get_layer_kind, refuse
from .layers.control_flow import convert_statements
from .weights import WeightReader

__all__ = ["NETWORK_KINDS", "PIPELINE_KINDS", "ConvertedNetwork", "Stage", "choose_newest_opset", "convert_network",
           "iterate_messages", "list_stages", "make_scores_name"]

NETWORK_KINDS = ("neuralNetwork", "neuralNetworkClassifier", "neuralNetworkRegressor")
"The kinds of models that hold a network, as fields of the Model proto."
PIPELINE_KINDS = ("pipeline", "pipelineClassifier", "pipelineRegressor")
# Pipelines may contain pipelines; the limit bounds the recursion for a damaged file.
_MAX_PIPELINE_DEPTH = 8

_PROGRAM_ADVICE = "; it is an ML Program already"
_STAGE_ADVICE = (": this part has no equivalent in an ML Program; upgrade the network of the pipeline by itself, and "
                 "join "
                 "the parts again with coremltools.utils.make_pipeline")

_REASONS = {
    "custom": ("it is a custom layer, whose code is in an app",
               "expected layers of the format: a custom layer has no equivalent in an ML Program"),
    "": ("its kind is unknown to this version", "expected one of the 158 kinds of the format: update the tool"),
}


@dataclass(frozen=True)
class Stage:
    """One network: the model itself, or a part of a pipeline. `where` is its name in errors, `spec` its Model proto."""

    where: str
    spec: Any

    @property
    def kind(self) -> str:
        return str(self.spec.WhichOneof("Type"))

    @property
    def network(self) -> Any:
        return getattr(self.spec, self.kind)


@dataclass(frozen=True)
class ConvertedNetwork:
    """The program of a network or of a pipeline of them, and the names in it of the model's inputs and outputs.

    `description` is that of the model, `layers` counts the layers by kind, `labels` are those of a classifier (None for
    other models), whose `probabilities` are the value of that name, and `expanded` lists the quantized vectors that
    were decompressed, with their sizes. Nothing here refers to the Model proto, whose weights can be released.
    """

    program: Program
    description: Any
    inputs: tuple[Feature, ...]
    outputs: tuple[Feature, ...]
    names: dict[str, str]
    layers: dict[str, int]
    labels: list[Any] | None = None
    probabilities: str | None = None
    expanded: dict[str, int] = field(default_factory=dict)
    values: dict[str, Var] = field(default_factory=dict, repr=False)
    "The vars of the values of the network, in a pipeline of its last one, by name."


def list_stages(spec: Any, where: str, depth: int = 0) -> list[Stage]:
    """List the networks of a model in the order in which they run.

    Raises InputError for a model that is neither a network nor a pipeline, and for a pipeline with other parts.
    """
    kind = spec.WhichOneof("Type")
    if spec.isUpdatable:
        raise InputError(
            f"{where}: the model is updatable (trained on the device), which ML Programs do not support; expected a "
            f"model for prediction: save it with isUpdatable off"
        )
    if kind in NETWORK_KINDS:
        return [Stage(where, spec)]
    if kind not in PIPELINE_KINDS:
        what = f"is of type {kind}" if kind else "has no type"
        raise InputError(
            f"{where}: the model {what}; expected a NeuralNetwork ({', '.join(NETWORK_KINDS)}), "
            "or a pipeline of them" + (_PROGRAM_ADVICE if kind == "mlProgram" else _STAGE_ADVICE if depth else "")
        )
    pipeline = getattr(spec, kind) if kind == "pipeline" else getattr(spec, kind).pipeline
    if not pipeline.models or depth >= _MAX_PIPELINE_DEPTH:
        raise InputError(f"{where}: a pipeline {'without models' if not pipeline.models else 'nested too deep'}; "
                         "expected one of networks: use a fresh copy of the model")
    found: list[Stage] = []
    for place, model in enumerate(pipeline.models):
        name = pipeline.names[place] if place < len(pipeline.names) else ""
        part = f"{where}: part {place + 1}" + (f" ('{escape_text(name)}')" if name else "")
        found += list_stages(model, part, depth + 1)
    return found


def iterate_messages(message: Any) -> Iterator[Any]:
    """Yield a message and all messages in it, except for those of maps."""
    yield message
    for part, value in message.ListFields():
        if part.message_type is not None and not part.message_type.GetOptions().map_entry:
            for inner in (value,) if hasattr(value, "DESCRIPTOR") else value:
                yield from iterate_messages(inner)


def choose_newest_opset(spec: Any) -> Any:
    """Return the newest opset to which all layers of a network can be converted."""
    old = any(each.DESCRIPTOR.name == "NonMaximumSuppressionLayerParams" for each in iterate_messages(spec))
    return ct.target.iOS16 if old else ct.target.iOS18


def convert_network(spec: Any, opset: Any, where: str) -> ConvertedNetwork:
    """Convert the network of `spec`, a Model proto, to a program at fp32 with one function `main`.

    The networks of a pipeline become one function, in which one passes its outputs to the next in the shapes that they
    declare. `opset` is the deployment target. Raises InputError for a layer that has no equivalent in an ML Program,
    with its name and kind, and for a network that contradicts itself.
    """
    _load_converters()
    stages = list_stages(spec, where)
    description = type(spec.description)()
    description.CopyFrom(spec.description)
    inputs, outputs = read_features(description.input, where), read_features(description.output, where)
    names = make_identifiers([*(each.name for each in inputs), *(each.name for each in outputs)])
    placeholders = {names[each.name]: _make_placeholder(each, where) for each in inputs}
    program = Program()
    features = {each.name: each for each in inputs}
    expanded: dict[str, int] = {}
    inner: dict[str, Var] = {}
    with Function(placeholders, opset_version=opset) as function:
        values = {each.name: function.inputs[names[each.name]] for each in inputs}
        for at, stage in enumerate(stages):
            if stage.kind == "neuralNetworkClassifier" and at < len(stages) - 1:
                raise InputError(f"{stage.where}: a classifier before the last part of a pipeline; expected networks "
                                 "there: upgrade the parts one by one")
            made, context = _convert_stage(stage, values, features, opset)
            values |= made
            features |= {each.name: each for each in read_features(stage.spec.description.output, stage.where)}
            expanded |= context.weights.expanded
            inner = context.values
        function.set_outputs(_name_outputs(outputs, values, names, where))
    program.add_function("main", function)
    kinds = Counter(get_layer_kind(layer) for stage in stages for layer in stage.network.layers)
    return ConvertedNetwork(program, description, inputs, outputs, names, dict(kinds.most_common()),
                            _read_labels(stages[-1]), _find_probabilities(stages[-1].network, stages[-1].kind),
                            expanded, inner)


def _read_labels(stage: Stage) -> list[Any] | None:
    """Return the labels of a classifier; None for other models."""
    if stage.kind != "neuralNetworkClassifier":
        return None
    kind = stage.network.WhichOneof("ClassLabels")
    return list(getattr(stage.network, kind).vector) if kind else []


def _convert_stage(
    stage: Stage, values: Mapping[str, Var], features: Mapping[str, Feature], opset: Any
) -> tuple[dict[str, Var], LayerContext]:
    """Convert one network; `values` holds the inputs of the model and the outputs of earlier networks, by name."""
    network, where = stage.network, stage.where
    classic = network.arrayInputShapeMapping == NeuralNetwork_pb2.RANK5_ARRAY_MAPPING
    context = LayerContext(classic, WeightReader(opset, where), opset)
    context.convert_layers = lambda listed: _convert_layers(listed, context, where)
    for each in read_features(stage.spec.description.input, where):
        var = _pass_on(each, values, features, where)
        context.values[each.name] = _prepare_input(each, var, network, classic)
    convert_statements(list(network.layers), context)
    outputs = read_features(stage.spec.description.output, where)
    return _make_outputs(outputs, _find_probabilities(network, stage.kind), context, where), context


def _pass_on(
    feature: Feature, values: Mapping[str, Var], features: Mapping[str, Feature], where: str
) -> Var:
    """Return the value of an input of a network in the form that it declares."""
    source, name = features.get(feature.name), escape_text(feature.name)
    if source is None:
        raise InputError(f"{where}: its input '{name}' is neither an input of the pipeline nor an output of an earlier "
                         "part; use a fresh copy of the model")
    var = values[feature.name]
    if source.proto == feature.proto:
        return var
    if source.image != feature.image:
        raise InputError(f"{where}: its input '{name}' is {_describe_feature(feature)} but it receives "
                         f"{_describe_feature(source)}; expected the same: upgrade the parts one by one")
    have, want = (tuple(None if is_symbolic(each) else int(each) for each in var.shape), feature.shape)
    if have == want or (None in (*have, *want) and len(have) == len(want)):
        return var
    known = [[each for each in sizes if each is not None] for sizes in (have, want)]
    if None in (*have, *want) or math.prod(known[0]) != math.prod(known[1]):
        raise InputError(f"{where}: its input '{name}' is of shape {want} but it receives shape {have}; expected the "
                         f"same number of elements: use a fresh copy of the model")
    result: Var = mb.reshape(x=var, shape=known[1])
    return result


def _describe_feature(feature: Feature) -> str:
    return f"an image ({feature.image})" if feature.image is not None else "an array"


def _load_converters() -> None:
    for module in pkgutil.iter_modules(_layers.__path__):
        importlib.import_module(f"{_layers.__name__}.{module.name}")


def _find_probabilities(network: Any, kind: str) -> str | None:
    """Return the name of the value with a classifier's probabilities; None for other models."""
    if kind != "neuralNetworkClassifier":
        return None
    return network.labelProbabilityLayerName or (network.layers[-1].output[0] if network.layers else "")


def _make_placeholder(feature: Feature, where: str) -> Any:
    if not feature.shape:
        raise InputError(f"{where}: the input '{escape_text(feature.name)}' has no shape; expected the sizes of an "
                         "array or of an image: use a fresh copy of the model")
    shape = [get_new_symbol() if extent is None else extent for extent in feature.shape]
    return mb.placeholder(shape=shape, dtype=types.int32 if feature.is_int else types.fp32)


def _prepare_input(feature: Feature, var: Var, network: Any, classic: bool) -> Var:
    """Return the value that layers read: a float, with the image's preprocessing, in the form of the array mapping."""
    if types.is_int(var.dtype):
        var = mb.cast(x=var, dtype="fp32")
    if feature.image is not None:
        return _apply_preprocessing(feature, var, network)
    if not classic:
        return var
    if var.rank == 1:
        return mb.expand_dims(x=var, axes=[0, 2, 3])
    if var.rank == 2:
        return mb.expand_dims(x=var, axes=[2, 3])
    if var.rank == 3:
        return mb.expand_dims(x=var, axes=[0])
    if var.rank == 5:
        return mb.reshape(x=var, shape=[-1, *(int(each) for each in var.shape[2:])])
    return var


def _apply_preprocessing(feature: Feature, x: Var, network: Any) -> Var:
    for each in network.preprocessing:
        if each.featureName not in ("", feature.name):
            continue
        kind = each.WhichOneof("preprocessor")
        if kind == "meanImage":
            mean = np.array(each.meanImage.meanImage, np.float32)
            shape = tuple(int(extent) for extent in feature.shape if extent is not None)
            if mean.size != int(np.prod(shape)):
                raise InputError(f"input '{escape_text(feature.name)}': its mean image has {mean.size} numbers; "
                                 f"expected {int(np.prod(shape))}: use a fresh copy of the model")
            x = mb.sub(x=x, y=mean.reshape(shape))
        elif kind == "scaler":
            scaler = each.scaler
            x = mb.mul(x=x, y=np.float32(scaler.channelScale or 1.0))
            biases = {"gray": [scaler.grayBias], "RGB": [scaler.redBias, scaler.greenBias, scaler.blueBias],
                      "BGR": [scaler.blueBias, scaler.greenBias, scaler.redBias]}[feature.channels]
            x = mb.add(x=x, y=np.array(biases, np.float32).reshape(1, -1, 1, 1))
    return x


def _convert_layers(layers: Sequence[Any], context: LayerContext, where: str) -> None:
    """Convert layers, and enter their outputs among the values."""
    for layer in layers:
        context.layer = layer
        kind = get_layer_kind(layer)
        context.weights.where = f"{where}: layer '{escape_text(layer.name)}' ({kind or 'of no kind'})"
        if kind not in CONVERTERS:
            raise InputError(f"{where}: {refuse(layer, *_REASONS.get(kind, _REASONS['']))}")
        try:
            with mb.scope(*make_layer_scopes(layer.name, kind)):
                found = CONVERTERS[kind](getattr(layer, kind), context)
        except AnePassesError as error:
            text = str(error)
            raise InputError(text if text.startswith(where) else f"{where}: {text}") from error
        except BUILDER_ERRORS as error:
            newer = "iOS15" in str(error)  # an op or a parameter that the opset lacks
            expected = format_option_values("deployment_target", "iOS16") if newer else (
                "a layer whose parameters fit its inputs")
            raise InputError(f"{context.weights.where}: coremltools rejects its op ({format_cause(error)}); expected "
                             f"{expected}") from error
        context.layer = layer
        results = list(found) if isinstance(found, (list, tuple)) else [] if found is None else [found]
        if len(results) < len(layer.output):
            raise InputError(f"{context.weights.where}: it has {len(layer.output)} outputs; expected at most "
                             f"{len(results)}")
        context.values.update(zip(layer.output, results))


def _make_outputs(
    outputs: Sequence[Feature], probabilities: str | None, context: LayerContext, where: str
) -> dict[str, Var]:
    """Return the outputs of a network in their declared form, by name."""
    made: dict[str, Var] = {}
    for each in outputs:
        if each.is_label:
            continue
        name = probabilities or each.name if each.is_dictionary else each.name
        if name not in context.values:
            what = "probabilities" if each.is_dictionary else "output"
            raise InputError(f"{where}: no layer computes the {what} '{escape_text(name)}'; use a fresh copy of the "
                             f"model")
        value = context.values[name]
        if each.is_dictionary:  # a classifier's probabilities: the value has the name of a layer's output
            made[each.name] = mb.reshape(x=value, shape=[-1])
            continue
        value = _shape_output(each, value, context.classic)
        made[each.name] = mb.cast(x=value, dtype="int32") if each.is_int else value
    return made


def _name_outputs(
    outputs: Sequence[Feature], values: Mapping[str, Var], names: dict[str, str], where: str
) -> list[Var]:
    """Return the outputs of the model under their names."""
    listed = [each.name for each in outputs if not each.is_label]
    if not listed:
        raise InputError(f"{where}: the model has no output that is an array or an image; expected at least one")
    for name in listed:
        if name not in values:
            raise InputError(f"{where}: no part computes the output '{escape_text(name)}'; use a fresh copy of the "
                             f"model")
    dictionaries = {each.name for each in outputs if each.is_dictionary}
    made: list[Var] = []
    for name in listed:
        var = values[name]
        if var.op is None or var.op.op_type == "const" or var.child_ops or var in made:
            var = mb.identity(x=var)
        var.set_name(make_scores_name(names) if name in dictionaries else names[name])
        made.append(var)
    return made


def make_scores_name(names: Mapping[str, str]) -> str:
    """Return the name of a classifier's probabilities in the program, where labels are not with them yet.

    It is none of `names`, which has the identifiers of inputs and outputs by name.
    """
    return make_free_name("scores", set(names.values()))


def _shape_output(feature: Feature, x: Var, classic: bool) -> Var:
    """Return `x` in the declared shape where it has as many elements; else, in the classic mapping, as [C, H, W]."""
    if feature.image is not None or not classic:
        return x
    extents = [int(each) if isinstance(each, (int, np.integer)) else None for each in x.shape]
    declared = feature.shape
    sizes, made = [each for each in declared if each is not None], [each for each in extents if each is not None]
    fixed = len(sizes) == len(declared) > 0 and len(made) == len(extents)
    if fixed and math.prod(sizes) == math.prod(made):
        return mb.reshape(x=x, shape=sizes)
    if extents[0] == 1:
        return mb.squeeze(x=x, axes=[0, 2, 3] if extents[2:] == [1, 1] else [0])
    return mb.expand_dims(x=x, axes=[1])  # [sequence, batch, C, H, W]
