"""`expand([])` and `expand(())`: a tensor of rank 0 expanded to rank 0 is itself.

coremltools concatenates no sizes: "Concat got 0 values". `expand_as` of two tensors of rank 0 is the same.
"""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from ..contract import Patch
from ..lowering import add_result, bind_arguments
from ..probes import find_fault

PATCH = Patch(code="TORCH163",
              title="`expand` to no dimensions fails", upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    return find_fault(lambda x: x.sum().expand(()) + x, torch.arange(3.))


@PATCH.op("expand", "expand_copy", "expand_as", "broadcast_to")
def expand(context: Any, node: Any) -> None:
    """Lower expand(self, size, *, implicit=False), expand_as(self, other); all others are coremltools' own."""
    inputs = bind_arguments(context, node, "self size")
    size = inputs.size
    rank = (size.rank if node.kind == "expand_as" else size.shape[0]) if isinstance(size, Var) else len(size)
    if inputs.self.rank == 0 and rank == 0:
        add_result(context, node, mb.identity(x=inputs.self, name=node.name))
        return
    from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

    _TORCH_OPS_REGISTRY.name_to_func_mapping[node.kind](context, node)
