"""Bool inputs of traced models whose declared type is an integer or a float, as that of every Core ML input is.

A trace records that a mask was bool, and `~mask`, `mask & other` and `x[mask]` of bools: coremltools computes them
with the declared type. `~1` is then -2, which is true, silently; the others are rejected, or take the mask for indices.
Where a model has such an op, its bool inputs are cast to bool first: all but 0 is true. Exported programs have that
cast already, and scripts do not state the types of their inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.converters.mil.mil.scope import ScopeInfo, ScopeSource

from ...passes.severity import Severity
from ..contract import Patch
from ..probes import convert_to_mil, trace_function

PATCH = Patch(code="TORCH180", severity=Severity.WRONG,
              title="`~mask`, `mask & other` and `x[mask]` of a traced bool input are miscompiled or rejected",
              upstream=("none known",))

_CONVERTER_MODULE = "coremltools.converters.mil.frontend.torch.converter"
_BITWISE = {"and", "or", "xor", "not", "iand", "ior", "ixor", "invert"}
_INDEXING = {"index", "index_put", "masked_select"}
"Ops that do something else for bools than for the integers 0 and 1; others are not worth a cast on the ANE."


@PATCH.probe
def probe() -> str | None:
    from ...runtime import Runtime

    mask = torch.tensor([True, False])
    program = convert_to_mil(trace_function(lambda x: ~x, mask), mask.int())
    found, = Runtime(program, precision="float64")({next(iter(program.functions["main"].inputs)): mask.int().numpy()}
                                                   ).values()
    return None if (found.astype(bool) == ~mask.numpy()).all() else "silently miscompiled"


@PATCH.replace_function(_CONVERTER_MODULE, "TorchConverter.__init__")
def initialize_converter(
    host: Callable[..., None], self: Any, loaded_model: Any, *arguments: Any, **named: Any
) -> None:
    """Initialize coremltools' converter, and note which inputs the trace has as bools."""
    host(self, loaded_model, *arguments, **named)
    self.traced_bool_inputs = _list_bool_inputs(self.graph, loaded_model)


@PATCH.replace_function(_CONVERTER_MODULE, "TorchConverter.convert_const")
def convert_constants(host: Callable[..., None], self: Any) -> None:
    """Cast the noted inputs, which coremltools has just added to the context, and convert the constants."""
    for name in self.traced_bool_inputs:
        declared = self.context[name]
        if declared.dtype != types.bool:
            with mb.scope(ScopeInfo(source=ScopeSource.TORCHSCRIPT_MODULE_TYPE, data="placeholder"),
                          ScopeInfo(source=ScopeSource.TORCHSCRIPT_MODULE_NAME, data=name)):
                self.context.add(mb.cast(x=declared, dtype="bool"), torch_name=name, override=True)
    host(self)


def _list_bool_inputs(graph: Any, model: Any) -> list[str]:
    """List the inputs of a converter's graph that are bools in the trace, if an op needs them as bools."""
    if not isinstance(model, torch.jit.ScriptModule):
        return []
    traced = list(model.graph.inputs())[1:]
    names = list(graph.inputs)
    if len(traced) != len(names) or not any(map(_needs_bools, _iterate_nodes(graph.nodes))):
        return []
    return [name for name, value in zip(names, traced)
            if isinstance(value.type(), torch.TensorType) and value.type().scalarType() == "Bool"]


def _needs_bools(node: Any) -> bool:
    kind = node.kind.partition(".")[0].strip("_")
    return kind.removeprefix("bitwise_") in _BITWISE or kind in _INDEXING


def _iterate_nodes(nodes: Iterable[Any]) -> Iterator[Any]:
    for node in nodes:
        yield node
        for block in node.blocks or ():
            yield from _iterate_nodes(block.nodes)
