"""Conversion of a NeuralNetwork to a MIL program: inputs, layers, outputs."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Program, Var, types
from coremltools.converters.mil.mil.program import get_new_symbol
from coremltools.proto import NeuralNetwork_pb2

from ..utils.errors import AnePassesError, InputError
from ..utils.text_format import escape_text
from . import layers as _layers
from .interface import Feature, make_identifiers, read_features
from .layer_converter import CONVERTERS, LayerContext, get_layer_kind, refuse
from .layers.control_flow import convert_statements
from .weights import WeightReader

__all__ = ["NETWORK_KINDS", "ConvertedNetwork", "convert_network"]

NETWORK_KINDS = ("neuralNetwork", "neuralNetworkClassifier", "neuralNetworkRegressor")
"The kinds of models that hold a network, as fields of the Model proto."

_REASONS = {
    "custom": ("it is a custom layer, whose code is in an app",
               "expected layers of the format: a custom layer has no form in an ML Program"),
    "": ("it has no kind that this version knows", "expected one of the 158 kinds of the format: update the tool"),
}


@dataclass(frozen=True)
class ConvertedNetwork:
    """The program of a network, and the names in it of the model's inputs and outputs."""

    program: Program
    inputs: tuple[Feature, ...]
    outputs: tuple[Feature, ...]
    names: dict[str, str]
    probabilities: str | None = None
    expanded: dict[str, int] = field(default_factory=dict)


def convert_network(spec: Any, opset: Any, where: str) -> ConvertedNetwork:
    """Convert the network of `spec`, a Model proto, to a program at fp32 with one function `main`.

    `opset` is the deployment target. Raises InputError for a layer that has no form in an ML Program, with its name and
    kind, and for a network that contradicts itself.
    """
    _load_converters()
    kind = spec.WhichOneof("Type")
    network = getattr(spec, kind)
    if spec.isUpdatable:
        raise InputError(
            f"{where}: the model is updatable (trained on the device), which ML Programs are not; expected "
            "a model for predictions: save it with isUpdatable off"
        )
    classic = network.arrayInputShapeMapping == NeuralNetwork_pb2.RANK5_ARRAY_MAPPING
    inputs, outputs = read_features(spec.description.input, where), read_features(spec.description.output, where)
    probabilities = _find_probabilities(network, kind)
    names = make_identifiers([*(each.name for each in inputs), *(each.name for each in outputs)])
    placeholders = {names[each.name]: _make_placeholder(each) for each in inputs}
    program = Program()
    with Function(placeholders, opset_version=opset) as function:
        context = LayerContext(classic, WeightReader(opset, where), opset)
        context.convert_layers = lambda listed: _convert_layers(listed, context, where)
        for each in inputs:
            context.values[each.name] = _prepare_input(each, function.inputs[names[each.name]], network, classic)
        convert_statements(list(network.layers), context)
        function.set_outputs(_make_outputs(outputs, probabilities, context, names, where))
    program.add_function("main", function)
    return ConvertedNetwork(program, inputs, outputs, names, probabilities, context.weights.expanded)


def _load_converters() -> None:
    for module in pkgutil.iter_modules(_layers.__path__):
        importlib.import_module(f"{_layers.__name__}.{module.name}")


def _find_probabilities(network: Any, kind: str) -> str | None:
    """Return the name of the value with a classifier's probabilities; None for other models."""
    if kind != "neuralNetworkClassifier":
        return None
    return network.labelProbabilityLayerName or (network.layers[-1].output[0] if network.layers else "")


def _make_placeholder(feature: Feature) -> Any:
    shape = [get_new_symbol() if extent is None else extent for extent in feature.shape]
    return mb.placeholder(shape=shape, dtype=types.int32 if feature.is_int else types.fp32)


def _prepare_input(feature: Feature, var: Var, network: Any, classic: bool) -> Var:
    """Return the value that layers read: a float, with the image's preprocessing, in the form of the array mapping."""
    if feature.is_int:
        var = mb.cast(x=var, dtype="fp32")
    if feature.image is not None:
        return _preprocess(feature, var, network)
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


def _preprocess(feature: Feature, x: Var, network: Any) -> Var:
    for each in network.preprocessing:
        if each.featureName not in ("", feature.name):
            continue
        kind = each.WhichOneof("preprocessor")
        if kind == "meanImage":
            mean = np.array(each.meanImage.meanImage, np.float32)
            shape = tuple(int(extent) for extent in feature.shape if extent is not None)
            if mean.size != int(np.prod(shape)):
                raise InputError(f"input '{escape_text(feature.name)}': its mean image has {mean.size} numbers; "
                                 f"expected {int(np.prod(shape))}: take a fresh copy of the model")
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
            found = CONVERTERS[kind](getattr(layer, kind), context)
        except AnePassesError as error:
            text = str(error)
            raise InputError(text if text.startswith(where) else f"{where}: {text}") from error
        except (ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError, ArithmeticError,
                AssertionError, RuntimeError) as error:
            # coremltools' builder checks shapes and types of ops with all of these.
            raise InputError(f"{context.weights.where}: coremltools rejects its op ({error}); expected a layer whose "
                             "parameters fit its inputs") from error
        context.layer = layer
        results = list(found) if isinstance(found, (list, tuple)) else [] if found is None else [found]
        if len(results) < len(layer.output):
            raise InputError(f"{context.weights.where}: it has {len(layer.output)} outputs; expected at most "
                             f"{len(results)}")
        context.values.update(zip(layer.output, results))


def _make_outputs(
    outputs: Sequence[Feature], probabilities: str | None, context: LayerContext, names: dict[str, str], where: str
) -> list[Var]:
    """Make the vars of the model's outputs, in the declared form and under their names."""
    made = []
    for each in outputs:
        if each.is_label:
            continue
        if each.is_dictionary:  # a classifier's probabilities: the value has the name of a layer's output
            value = context.values.get(probabilities or each.name)
            if value is None:
                raise InputError(f"{where}: no layer makes the probabilities "
                                 f"'{escape_text(probabilities or each.name)}'; take a fresh copy of the model")
            flat = mb.reshape(x=value, shape=[-1])
            made.append(mb.identity(x=flat, name=names[each.name]))
            continue
        if each.name not in context.values:
            raise InputError(f"{where}: no layer makes the output '{escape_text(each.name)}'; take a fresh copy of the "
                             "model")
        value = _shape_output(each, context.values[each.name], context.classic)
        if each.is_int:
            value = mb.cast(x=value, dtype="int32")
        made.append(mb.identity(x=value, name=names[each.name]))
    if not made:
        raise InputError(f"{where}: the model has no output that is an array or an image; expected at least one")
    return made


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



