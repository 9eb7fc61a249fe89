"""A failure of a lowering names the op, the module path and the source line, and suggests what to do.

coremltools raises the error of its lowering (`KeyError: np.int32(2)` for a bicubic `grid_sample`), and "convert
function not implemented" for an op without a lowering; the module is only in its log, and the line nowhere. Here both
become `NotConverted`, with the exception as its `__cause__`. A lowering that leaves out a result (the indices of a max
pool) fails where that result is read, as "Torch var 12 not found in context"; here the op that has it is named. A
shape in `inputs=` that is not the one of the traced example is named beside the failure that it may have caused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from coremltools.converters.mil.frontend.torch.utils import TorchFrontend

from ..contract import Patch
from ..errors import NotConverted
from ..failures import (
    describe_input_shapes,
    find_producer,
    format_cause,
    is_reported_unchanged,
    record_model,
    record_node,
)

PATCH = Patch(code="TORCH160",
              title="failures name no module and no line", upstream=("none known",))
_TORCH_FRONTEND = "coremltools.converters.mil.frontend.torch"
_ADVICE_UNKNOWN = ("write it with ops that Core ML has, compute it outside of the model, or register a lowering "
                   "(coremltools.converters.mil.frontend.torch.register_torch_op)")
_ADVICE_FAILS = ("use other arguments or another op for the same, or register a lowering "
                 "(coremltools.converters.mil.frontend.torch.register_torch_op)")
_ADVICE_REGION = ("export the model without it: choose with torch.where, write loops of a known length in Python, or "
                  "convert torch.jit.script(model), whose branches and loops are supported")
_ADVICE_MISSING = "use its other results only, or compute this one with other ops"


@PATCH.probe
def probe() -> str | None:
    """Return coremltools' message for an unknown op, or None when it names the module."""
    from coremltools.converters.mil.frontend.torch.internal_graph import InternalTorchIRNode
    from coremltools.converters.mil.frontend.torch.ops import convert_single_node

    node = InternalTorchIRNode(kind="no_such_op", inputs=[], outputs=["made"], model_hierarchy="layer(Layer)",
                               meta={"source": "model.py:1"})
    try:
        convert_single_node(SimpleNamespace(), node)
    except Exception as error:
        return None if "layer" in str(error) else f"of a module 'layer': {str(error).splitlines()[0]}"
    return None


@PATCH.replace_function(f"{_TORCH_FRONTEND}.converter", "TorchConverter.__init__")
def initialize_converter(
    host: Callable[..., None], self: Any, loaded_model: Any, inputs: Any = None, *more: Any, **named: Any
) -> None:
    """Initialize coremltools' converter; record the model, so that failures name inputs of unexpected shapes."""
    record_model(loaded_model, inputs)
    host(self, loaded_model, inputs, *more, **named)


@PATCH.replace_function(f"{_TORCH_FRONTEND}.ops", "convert_single_node")
def convert_single_node(host: Callable[..., None], context: Any, node: Any) -> None:
    """Convert one node; errors name its location."""
    record_node(node)
    try:
        host(context, node)
    except Exception as error:
        if is_reported_unchanged(error):
            raise
        raise _make_located_error(node, error) from error


@PATCH.replace_function(f"{_TORCH_FRONTEND}.internal_graph", "InternalTorchIRNode.from_exir_node")
def from_exir_node(host: Callable[..., Any], cls: Any, node: Any) -> Any:
    """Read one node of an exported program; errors name its location.

    coremltools rejects unknown ops of exported programs at this point.
    """
    try:
        return host(cls, node)
    except Exception as error:
        if is_reported_unchanged(error):
            raise
        raise _make_located_error(SimpleNamespace(kind=str(node.target), meta=node.meta), error) from error


@PATCH.replace_function(f"{_TORCH_FRONTEND}.internal_graph", "InternalTorchIRGraph.from_exir")
def from_exir(host: Callable[..., Any], cls: Any, exir: Any, *more: Any, **named: Any) -> Any:
    """Read an exported program; an op with regions (`cond`, `while_loop`, `scan`) is an error that names its location.
    """
    import torch

    for node in exir.graph_module.graph.nodes:
        held = [getattr(exir.graph_module, each.target, None) for each in node.all_input_nodes if each.op == "get_attr"]
        if node.op == "call_function" and any(isinstance(each, torch.nn.Module) for each in held):
            raise NotConverted.at(SimpleNamespace(kind=str(node.target), meta=node.meta),
                                  "has regions, which coremltools does not read", _ADVICE_REGION)
    return host(cls, exir, *more, **named)


@PATCH.replace_function(f"{_TORCH_FRONTEND}.converter", "TranscriptionContext.__getitem__")
def get_value(host: Callable[..., Any], context: Any, name: str) -> Any:
    """Return the value of this name; for a result that a lowering left out, the error names the op that has it."""
    try:
        return host(context, name)
    except ValueError as error:
        producer = find_producer(name)
        if producer is None or name not in (producer.outputs or ())[1:]:
            raise
        raise _make_missing_result_error(producer, producer.outputs.index(name)) from error


@PATCH.replace_function(f"{_TORCH_FRONTEND}.ops", "_get_bindings")
def get_bindings(host: Callable[..., list[Any]], context: Any, names: Any) -> list[Any]:
    """Return the values of names; TorchScript has no text among them, so a name without a value is an error."""
    if context.frontend == TorchFrontend.TORCHSCRIPT:
        for name in names:
            if isinstance(name, str) and name not in context:
                context[name]
    return host(context, names)


def _make_missing_result_error(node: Any, index: int) -> NotConverted:
    return NotConverted.at(node, f"the lowering leaves out its result {index + 1}", _ADVICE_MISSING)


def _make_located_error(node: Any, error: Exception) -> NotConverted:
    from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

    if node.kind == "getitem" and isinstance(node.inputs[1], int) and (parent := find_producer(node.inputs[0])):
        return _make_missing_result_error(parent, node.inputs[1])
    lowering = None
    if not isinstance(node, SimpleNamespace):
        lowering = _TORCH_OPS_REGISTRY.get_func(node.kind)
    if lowering is None:
        return NotConverted.at(node, "is not implemented", _ADVICE_UNKNOWN)
    while isinstance(lowering, functools.partial):  # a patch wraps it
        lowering = lowering.args[0]
    maker = "coremltools" if lowering.__module__.startswith("coremltools.") else lowering.__module__
    shapes = describe_input_shapes(error)
    return NotConverted.at(node, f"cannot be converted; the lowering of {maker} fails: {format_cause(error)}",
                           f"{shapes}; otherwise {_ADVICE_FAILS}" if shapes else _ADVICE_FAILS)
