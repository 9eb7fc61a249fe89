"""A buffer or a parameter that holds NaN, in a traced or scripted model.

coremltools reads each tensor of the model twice and asserts that both are equal, which NaN never is. Here tensors with
NaN at the same places are equal, while it lowers the graph. Models of torch.export are read once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..contract import Patch
from ..probes import find_fault

PATCH = Patch(code="TORCH159",
              title="a buffer or parameter that holds NaN is rejected in a traced or scripted model",
              upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    layer = torch.nn.Linear(2, 2).requires_grad_(False)
    layer.bias[0] = math.nan
    x = torch.ones(1, 2)
    return find_fault(layer, x, captured=torch.jit.trace(layer, x, check_trace=False))


def _compare(mode: Any, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
    """Call a function of torch; `torch.equal` accepts NaN at the same places."""
    found = function(*arguments, **(named or {}))
    if found is not False or function is not torch.equal:
        return found
    one, other = arguments
    return one.shape == other.shape and one.dtype == other.dtype and bool(
        ((one == other) | ((one != one) & (other != other))).all())


_NanEquality: Any = type("_NanEquality", (TorchFunctionMode,), {"__torch_function__": _compare})
"A mode of torch, which applies to this thread only."


@PATCH.replace_function("coremltools.converters.mil.frontend.torch.torchscript_utils", "_jit_pass_lower_graph")
def lower_graph(host: Callable[..., Any], graph: Any, module: Any) -> Any:
    """Lower the graph as coremltools does, and accept tensors that hold NaN."""
    with _NanEquality():
        return host(graph, module)
