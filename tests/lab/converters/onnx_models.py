"""Models in ONNX, converted by onnx2coreml; values are those of ONNX Runtime.

onnx2coreml has no argument for a pipeline, so its packages are rewritten. This file imports onnx, onnxruntime and
onnx2coreml at its top: import it inside functions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx2coreml
import onnxruntime
from onnx import ModelProto, TensorProto, checker, helper, numpy_helper, shape_inference

from .cases import PLAIN, Array, Case

_OPSET = 17


def _draw(seed: int, *shape: int, scale: float = 1.0) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


class GraphBuilder:
    """Nodes and weights of a graph that grows by one op a call."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []

    def add(self, op_type: str, *inputs: str | Array, outputs: int = 1, **attributes: Any) -> Any:
        """Add an op on names and arrays; returns the name of its output, or of all its `outputs`."""
        names = [each if isinstance(each, str) else self._store(each) for each in inputs]
        made = [f"{op_type.lower()}_{len(self.nodes)}_{number}" for number in range(outputs)]
        self.nodes.append(helper.make_node(op_type, names, made, **attributes))
        return made[0] if outputs == 1 else made

    def _store(self, array: Array) -> str:
        name = f"weight_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def make_model(self, feed: Array, *outputs: str, ids: bool = False) -> ModelProto:
        """The model of one input x, of the shape of `feed`."""
        dtype = TensorProto.INT64 if ids else TensorProto.FLOAT
        given = helper.make_tensor_value_info("x", dtype, feed.shape)
        made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "graph", [given], made, self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=9)
        model = shape_inference.infer_shapes(model)
        checker.check_model(model)
        return model


def make_conv_net(feed: Array) -> ModelProto:
    """Strided and grouped convs, instance norm, a pool over a wide window, a softmax."""
    graph = GraphBuilder()
    y = graph.add("Conv", "x", _draw(0, 16, 3, 7, 7, scale=0.1), _draw(1, 16), strides=[2, 2], pads=[3] * 4)
    y = graph.add("Softplus", graph.add("InstanceNormalization", y, np.ones(16, np.float32), np.zeros(16, np.float32)))
    y = graph.add("Conv", y, _draw(2, 16, 1, 3, 3, scale=0.3), _draw(3, 16), pads=[1] * 4, group=16)
    y = graph.add("MaxPool", y, kernel_shape=[15, 15], strides=[1, 1], pads=[7] * 4)
    y = graph.add("Flatten", graph.add("GlobalAveragePool", y))
    return graph.make_model(feed, graph.add("LogSoftmax", graph.add("MatMul", y, _draw(4, 16, 10)), axis=-1))


def make_recurrent(feed: Array) -> ModelProto:
    """An embedding, then an LSTM in both directions over 12 steps of 2 sequences."""
    graph, width = GraphBuilder(), 16
    y = graph.add("Gather", _draw(0, 64, width), "x")
    gates = [_draw(seed, 2, 4 * width, width, scale=0.3) for seed in (1, 2)]
    y = graph.add("LSTM", y, *gates, _draw(3, 2, 8 * width, scale=0.1), outputs=3, hidden_size=width,
                  direction="bidirectional")[0]
    return graph.make_model(feed, graph.add("ReduceMax", y, axes=[1], keepdims=0), ids=True)


def make_attention(feed: Array) -> ModelProto:
    """Self-attention of 4 heads with a causal mask as a constant, and layer norm."""
    graph, (_, length, width) = GraphBuilder(), feed.shape
    y = graph.add("LayerNormalization", "x", np.ones(width, np.float32), np.zeros(width, np.float32), axis=-1)
    heads = []
    for seed in range(3):
        part = graph.add("MatMul", y, _draw(seed, width, width, scale=width**-0.5))
        part = graph.add("Reshape", part, np.array([1, length, 4, width // 4]))
        heads.append(graph.add("Transpose", part, perm=[0, 2, 3, 1] if seed == 1 else [0, 2, 1, 3]))
    scores = graph.add("Mul", graph.add("MatMul", heads[0], heads[1]), np.float32((width // 4) ** -0.5))
    scores = graph.add("Add", scores, np.triu(np.full((length, length), -np.inf, np.float32), 1))
    mixed = graph.add("MatMul", graph.add("Softmax", scores, axis=-1), heads[2])
    mixed = graph.add("Transpose", mixed, perm=[0, 2, 1, 3])
    return graph.make_model(feed, graph.add("Add", "x", graph.add("Reshape", mixed, np.array([1, length, width]))))


def make_vocoder(feed: Array) -> ModelProto:
    """A wide 1-D conv, snake, and a transposed conv with a bias."""
    graph = GraphBuilder()
    y = graph.add("Conv", "x", _draw(0, 16, 16, 31, scale=0.05), _draw(1, 16), pads=[15, 15])
    sine = graph.add("Sin", y)
    y = graph.add("Add", y, graph.add("Mul", sine, sine))
    y = graph.add("ConvTranspose", y, _draw(2, 16, 8, 8, scale=0.1), _draw(3, 8), strides=[4], pads=[2, 2])
    return graph.make_model(feed, graph.add("Tanh", y))


def make_top(feed: Array) -> ModelProto:
    """The largest of each row, and what stands at their places in another tensor."""
    graph = GraphBuilder()
    values, places = graph.add("TopK", "x", np.array([5]), outputs=2, axis=-1)
    return graph.make_model(feed, values, graph.add("GatherElements", graph.add("Tanh", "x"), places, axis=-1))


MODELS: dict[str, tuple[Callable[[Array], ModelProto], Callable[[int], Array]]] = {
    "conv net": (make_conv_net, lambda seed: _draw(seed, 1, 3, 32, 32)),
    "embedding and LSTM": (make_recurrent, lambda seed: np.random.default_rng(seed).integers(0, 64, (12, 2))),
    "attention": (make_attention, lambda seed: _draw(seed, 1, 16, 32)),
    "vocoder": (make_vocoder, lambda seed: _draw(seed, 1, 16, 128)),
    "top-k": (make_top, lambda seed: _draw(seed, 4, 64)),
}


def make_cases() -> list[Case]:
    cases = []
    for name, (make, draw) in MODELS.items():
        model = make(draw(0))
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        cases.append(Case("onnx2coreml", name, draw, partial(_call, session), partial(_convert, model), (PLAIN,)))
    return cases


def _call(session: Any, feed: Array) -> list[Array]:
    return [np.asarray(each) for each in session.run(None, {"x": feed})]


def _convert(model: ModelProto, way: str, **settings: Any) -> Any:
    return onnx2coreml.convert(model, minimum_deployment_target="iOS18")
