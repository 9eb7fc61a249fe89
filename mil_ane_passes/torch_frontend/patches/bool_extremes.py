"""`max`, `min`, `amax`, `amin`, `maximum` and `minimum` of bools, which coremltools rejects.

MIL has extremes of numbers only: bools are cast to integers, and the result to bools. The positions that `max` and
`min` along a dimension return as well are those of the integers. `torch._check_tensor_all`, as in transformers, is
exported with `_is_all_true`, which is implemented here; an op of which only assertions read the result is removed.
"""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.frontend.torch import ops
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..contract import Patch
from ..lowering import add_result, bind_arguments, cast_to
from ..probes import find_fault

PATCH = Patch(code="TORCH188", title="`max`, `min`, `amax`, `maximum`, ... of bools, and exported checks, are rejected",
              upstream=("none known",))

_ELEMENTWISE = {"max.other": "maximum", "min.other": "minimum"}


@PATCH.probe
def probe() -> str | None:
    import torch

    return find_fault(lambda x: torch.maximum(x > 0, x > 2).amax(1).float(), torch.arange(6.0).reshape(2, 3))


@PATCH.op("_is_all_true", "_is_any_true")
def lower_truth(context: Any, node: Any) -> None:
    """Lower _is_all_true(self) and _is_any_true(self): a bool of rank 0."""
    x = cast_to(bind_arguments(context, node, "self").self, types.int32)
    reduce = mb.reduce_min if node.kind.startswith("_is_all_true") else mb.reduce_max
    add_result(context, node, mb.cast(x=reduce(x=x, keep_dims=False) if x.rank else x, dtype="bool", name=node.name))


@PATCH.op("max", "min", "max.dim", "min.dim", "max.other", "min.other", "amax", "amin", "maximum", "minimum")
def lower_extremes(context: Any, node: Any) -> None:
    """Lower max(self), max(self, dim, keepdim), max(self, other), amax(self, dim, keepdim), and so on."""
    operands = {name: context[name] for name in node.inputs[:2] if isinstance(name, str) and name in context}
    bools = {name: var for name, var in operands.items() if isinstance(var, Var) and var.dtype == types.bool}
    for name, var in bools.items():
        context.add(cast_to(var, types.int32), torch_name=name, override=True)
    getattr(ops, _ELEMENTWISE.get(node.kind, node.kind.partition(".")[0]))(context, node)
    for name, var in bools.items():
        context.add(var, torch_name=name, override=True)
    numbers = [var for var in operands.values() if isinstance(var, Var) and var.rank and var.dtype != types.bool]
    if bools and not numbers:
        found = context[node.outputs[0]]
        first = cast_to(found[0] if isinstance(found, tuple) else found, types.bool)
        context.add((first, *found[1:]) if isinstance(found, tuple) else first, torch_name=node.outputs[0],
                    override=True)
