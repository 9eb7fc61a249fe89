"""Scripted sizes: `x.shape[1]`, `sizes[-1]` of a list of numbers.

TorchScript reads them with `__getitem__` from a list. coremltools represents a list of numbers as one rank 1 Var,
rejects every index except 0 and returns the whole list for 0.
"""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.frontend.torch import ops
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from ...passes.severity import Severity
from ..contract import Patch
from ..lowering import add_result, bind_arguments, to_python
from ..probes import find_fault

PATCH = Patch(code="TORCH143", severity=Severity.WRONG,
              title="scripted `x.shape[1]` is rejected, `x.shape[0]` is the entire shape", upstream=("none known",))

_NUMBER_LISTS = ("constant", "listconstruct", "size")
"The kinds of node whose Var of rank 1 represents a list of numbers, never a list of one tensor."


@PATCH.probe
def probe() -> str | None:
    import torch

    def sized(x: torch.Tensor) -> torch.Tensor:
        sizes = x.shape
        return x * sizes[1] + sizes[0]

    def sum_rows(x: torch.Tensor) -> torch.Tensor:
        return x.sum() * x.shape[0]

    x = torch.ones(2, 3)
    return find_fault(torch.jit.script(sum_rows), x) or find_fault(torch.jit.script(sized), x)


@PATCH.op("getitem")
def getitem(context: Any, node: Any) -> None:
    """Lower __getitem__(list, idx)."""
    inputs = bind_arguments(context, node, "list idx")
    numbers = inputs.list
    if not (isinstance(numbers, Var) and numbers.rank == 1 and _is_number_list(numbers, node)):
        ops.getitem(context, node)
        return
    index = to_python(inputs.idx, node, "idx")
    if numbers.val is not None:
        add_result(context, node, mb.const(val=numbers.val[index], name=node.name))
        return
    begin = index % numbers.shape[0]
    add_result(context, node, mb.slice_by_index(x=numbers, begin=[begin], end=[begin + 1], squeeze_mask=[True],
                                                name=node.name))


def _is_number_list(var: Var, node: Any) -> bool:
    if var.op is not None and var.op.op_type == "shape":
        return True
    nodes = getattr(node.parent, "nodes", ())
    return any(other.name == node.inputs[0] and other.kind in _NUMBER_LISTS for other in nodes)
