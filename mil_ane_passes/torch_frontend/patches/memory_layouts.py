"""An exported program whose example inputs are channels-last or transposed in memory.

torch.export notes the layout of its examples. It does not change the values of a program, which has no views of memory,
and inputs of Core ML are dense. coremltools rejects any other layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..contract import Patch
from ..errors import NotConverted
from ..probes import find_refused_input

PATCH = Patch(code="TORCH190", title="exported programs with channels-last or transposed example inputs are rejected",
              upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch
    from torch.export.graph_signature import TensorArgument

    return find_refused_input(TensorArgument("x"), torch.empty(2, 3).t())


@PATCH.replace_function("coremltools.converters.mil.frontend.torch.exir_utils", "_extract_inputs_from_exir_program")
def extract_inputs(host: Callable[..., Any], exported_program: Any) -> Any:
    """Extract the inputs with coremltools, as if the examples were dense; the program is not changed."""
    import torch

    kept, buffers = [], exported_program.graph_signature.inputs_to_buffers
    tensors = [(node, node.meta["val"]) for node in exported_program.graph_module.graph.nodes
               if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)]
    for node, value in tensors:  # before the first change of the program
        if value.layout != torch.strided:
            name = buffers.get(node.name, node.name)
            raise NotConverted(f"'{name}' is a sparse tensor, which Core ML does not have, even if no op reads it; "
                               f"make it dense before the export, as with module.{name} = module.{name}.to_dense()")
    for node, value in tensors:
        if value.dim_order() != tuple(range(value.dim())):
            kept.append((node, value))
            node.meta["val"] = value.contiguous()
    try:
        return host(exported_program)
    finally:
        for node, value in kept:
            node.meta["val"] = value
