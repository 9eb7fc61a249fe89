"""A network as rewrites and rules of layers see it: shapes and constants by the names of values, and who reads them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from coremltools.proto import NeuralNetwork_pb2

from ..passes.coremltools_setup import silence_coremltools
from .layer_converter import get_layer_kind
from .program import Stage, choose_newest_opset, convert_network, list_stages
from .weights import is_quantized

__all__ = [
    "NetworkView",
    "iterate_nested_layers",
    "list_views",
    "make_layer",
    "read_floats",
    "write_floats",
]

Shape = tuple[int | None, ...]
Array = np.ndarray[Any, Any]


@dataclass
class NetworkView:
    """The layers of a network with what the conversion found out about their values.

    `classic` says that the network has the classic array mapping, in which every value has rank 5. `shapes` are those
    of values that one layer makes, outside of loops and branches; a size is None where it is flexible. In the classic
    mapping a shape is [N, C, H, W], where N stands for sequence and batch, one of which is 1.
    """

    network: Any
    classic: bool
    shapes: dict[str, Shape]
    symbols: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    "Shapes with a symbol for each flexible size; equal symbols are equal sizes."
    constants: dict[str, Any] = field(default_factory=dict)
    outputs: frozenset[str] = frozenset()
    _names: set[str] = field(default_factory=set)

    def get_shape(self, name: str) -> Shape | None:
        """Return the shape of a value; None where it is not known, as in loops."""
        return self.shapes.get(name)

    def get_fixed_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a value without flexible sizes; None otherwise."""
        found = self.shapes.get(name)
        return None if found is None or None in found else tuple(size for size in found if size is not None)

    def have_equal_shapes(self, one: str, other: str) -> bool:
        """Return whether two values have the same shape in every run."""
        return one in self.symbols and self.symbols[one] == self.symbols.get(other)

    def get_constant(self, name: str) -> Array | None:
        """Return the numbers of a constant in its shape; None for other values and for quantized ones."""
        layer = self.constants.get(name)
        if layer is None:
            return None
        params = getattr(layer, get_layer_kind(layer))
        shape = tuple(int(size) for size in params.shape)
        if get_layer_kind(layer) == "loadConstant" and not self.classic:
            shape = (1, 1, *shape)
        numbers = read_floats(params.data)
        return None if numbers is None or numbers.size != int(np.prod(shape)) else numbers.reshape(shape)

    def make_name(self, base: str) -> str:
        """Return a name that no layer and no value has."""
        for number in itertools.count():
            name = f"{base}_{number}" if number else base
            if name not in self._names:
                self._names.add(name)
                return name
        raise AssertionError


def list_views(spec: Any, where: str) -> list[NetworkView]:
    """Make the view of the network in a Model proto, or of each in a pipeline.

    Raises InputError for a model that is neither, and for networks that cannot be converted.
    """
    return [_view_stage(stage) for stage in list_stages(spec, where)]


def _view_stage(stage: Stage) -> NetworkView:
    spec, network = stage.spec, stage.network
    with silence_coremltools():
        converted = convert_network(spec, choose_newest_opset(spec), stage.where)
    layers = list(network.layers)
    made = Counter(name for layer in iterate_nested_layers(layers) for name in layer.output)
    made.update(feature.name for feature in spec.description.input)
    symbols = {name: tuple(var.shape) for name, var in converted.values.items() if made[name] == 1}
    shapes = {name: _read_shape(shape) for name, shape in symbols.items()}
    constants = {layer.output[0]: layer for layer in layers
                 if get_layer_kind(layer) in ("loadConstant", "loadConstantND") and made[layer.output[0]] == 1}
    outputs = {feature.name for feature in spec.description.output}
    if converted.probabilities:
        outputs.add(converted.probabilities)
    names = {*made, *(layer.name for layer in iterate_nested_layers(layers))}
    classic = network.arrayInputShapeMapping == NeuralNetwork_pb2.RANK5_ARRAY_MAPPING
    return NetworkView(network, classic, shapes, symbols, constants, frozenset(outputs), names)


def iterate_nested_layers(layers: Sequence[Any]) -> Iterator[Any]:
    """Yield all layers, with those in the bodies of branches and loops after the layer that holds them."""
    for layer in layers:
        yield layer
        kind = get_layer_kind(layer)
        if kind in ("branch", "loop"):
            for name in ("ifBranch", "elseBranch") if kind == "branch" else ("conditionNetwork", "bodyNetwork"):
                yield from iterate_nested_layers(getattr(getattr(layer, kind), name).layers)


def read_floats(params: Any) -> Array | None:
    """Return the numbers of WeightParams as float32; None where they are quantized or of odd size."""
    if is_quantized(params):
        return None
    if params.floatValue:
        return np.array(params.floatValue, np.float32)
    if len(params.float16Value) % 2:
        return None
    return np.frombuffer(params.float16Value, np.float16).astype(np.float32)


def write_floats(params: Any, numbers: Array, like: Any) -> None:
    """Store numbers in WeightParams, in fp16 where `like` is stored so and fp16 holds them exactly."""
    half = numbers.astype(np.float16)
    if like.float16Value and np.array_equal(half.astype(np.float32), numbers):
        params.float16Value = half.tobytes()
    else:
        params.floatValue.extend(numbers.astype(np.float32).ravel().tolist())


def make_layer(
    kind: str, name: str, inputs: Sequence[str], outputs: Sequence[str], view: NetworkView, like: Any,
) -> Any:
    """Make a layer of a kind; declared shapes of its values are filled in where the layer `like` declares its own."""
    layer = NeuralNetwork_pb2.NeuralNetworkLayer(name=name, input=inputs, output=outputs)
    getattr(layer, kind).SetInParent()
    if like.inputTensor or like.outputTensor:
        for names, tensors in ((inputs, layer.inputTensor), (outputs, layer.outputTensor)):
            shapes = [view.get_shape(each) for each in names]
            if all(shape is not None for shape in shapes):
                for shape in shapes:
                    assert shape is not None
                    tensors.add(rank=len(shape), dimValue=[-1 if size is None else size for size in shape])
    return layer


def _read_shape(shape: Sequence[Any]) -> Shape:
    return tuple(int(size) if isinstance(size, (int, np.integer)) else None for size in shape)
