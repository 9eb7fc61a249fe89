"""Scripted sizes: `x.shape[1]`, `sizes[-1]` and `x.shape[1:]` of a list of numbers.

TorchScript reads them with `__getitem__` and `slice` from a list. coremltools represents a list of numbers as one rank
1 Var, rejects every index except 0, returns the whole list for 0 and takes the bounds of a slice for an axis.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.frontend.torch import ops
from coremltools.converters.mil.frontend.torch.utils import TorchFrontend
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from ...passes.severity import Severity
from ..contract import Patch
from ..lowering import add_result, bind_arguments, to_python
from ..probes import find_fault

PATCH = Patch(code="TORCH143", severity=Severity.WRONG,
              title="scripted `x.shape[1]` and `x.shape[1:]` are rejected, `x.shape[0]` is the entire shape",
              upstream=("none known",))

_NUMBER_LISTS = ("constant", "listconstruct", "size", "slice")
"The kinds of node whose Var of rank 1 represents a list of numbers, never a list of one tensor."


@PATCH.probe
def probe() -> str | None:
    import torch

    def sized(x: torch.Tensor) -> torch.Tensor:
        sizes = x.shape
        return x * sizes[1] + sizes[0]

    def sum_rows(x: torch.Tensor) -> torch.Tensor:
        return x.sum() * x.shape[0]

    def sum_shape(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(x.shape[1:]).sum()

    x = torch.ones(2, 3)
    return next(filter(None, (find_fault(torch.jit.script(each), x) for each in (sum_rows, sized, sum_shape))), None)


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


@PATCH.op("slice")
def slice_list(context: Any, node: Any) -> None:
    """Lower slice(list, start, end, step) of numbers, where the rank is known to MIL only; others are coremltools' own.
    """
    held = context[node.inputs[0]]
    is_list = context.frontend == TorchFrontend.TORCHSCRIPT and len(node.inputs) == 4  # that of a tensor has an axis
    if not (is_list and isinstance(held, Var) and held.rank == 1 and _is_number_list(held, node)):
        ops.slice(context, node)
        return
    inputs = bind_arguments(context, node, "list start=None end=None step=1")
    bounds = (None if each is None else to_python(each, node, name)
              for name, each in (("start", inputs.start), ("end", inputs.end), ("step", inputs.step)))
    picked = range(held.shape[0])[slice(*bounds)]
    if held.val is not None:
        found = mb.const(val=held.val[np.array(picked, int)], name=node.name)
    elif picked and picked.step > 0:
        found = mb.slice_by_index(x=held, begin=[picked.start], end=[picked.stop], stride=[picked.step], name=node.name)
    else:
        found = mb.gather(x=held, indices=np.array(picked, np.int32), axis=0, name=node.name)
    add_result(context, node, found)


@PATCH.op("listunpack")
def unpack_list(context: Any, node: Any) -> None:
    """Lower listunpack(list) of computed numbers that are no entire shape, which coremltools takes for one element."""
    numbers = context[node.inputs[0]]
    if not (isinstance(numbers, Var) and numbers.val is None and tuple(numbers.shape) == (len(node.outputs),)
            and _is_number_list(numbers, node)):
        ops.tupleunpack(context, node)
        return
    for place, name in enumerate(node.outputs):
        context.add(mb.slice_by_index(x=numbers, begin=[place], end=[place + 1], squeeze_mask=[True], name=name))


def _is_number_list(var: Var, node: Any) -> bool:
    if var.op is not None and var.op.op_type == "shape":
        return True
    nodes = getattr(node.parent, "nodes", ())
    return any(other.name == node.inputs[0] and other.kind in _NUMBER_LISTS for other in nodes)
