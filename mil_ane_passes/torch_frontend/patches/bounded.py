"""`hardtanh` and `elu` with arguments that torch omits or passes as ints.

coremltools requires all three arguments of `hardtanh`, of which torch.export omits the defaults, and requires bounds
and slopes that are floats: `hardtanh(x, -1, 1)` and `elu_(x)` of a trace raise a type error.
"""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

from ..contract import Patch
from ..lowering import add_result, bind_arguments, cast_to, to_python, to_tensor
from ..probes import find_fault

PATCH = Patch(code="TORCH106",
              title="`hardtanh` and `elu` fail with default or int arguments", upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch
    from torch.nn.functional import hardtanh

    return find_fault(lambda x: torch.nn.functional.elu_(hardtanh(x, -1, 1) * 2), torch.tensor([-3.0, 0.5, 2.0]))


@PATCH.op("hardtanh")
def hardtanh(context: Any, node: Any) -> None:
    """Lower hardtanh(self, min_val=-1, max_val=1)"""
    inputs = bind_arguments(context, node, "self min_val=-1 max_val=1")
    x = inputs.self
    low, high = to_python(inputs.min_val, node, "min_val"), to_python(inputs.max_val, node, "max_val")
    if x.dtype in (types.fp16, types.fp32):
        add_result(context, node, mb.clip(x=x, alpha=float(low), beta=float(high), name=node.name))
        return
    above = mb.maximum(x=x, y=cast_to(to_tensor(low), x.dtype))
    add_result(context, node, mb.minimum(x=above, y=cast_to(to_tensor(high), x.dtype), name=node.name))


@PATCH.op("elu")
def elu(context: Any, node: Any) -> None:
    """Lower elu(self, alpha=1, scale=1, input_scale=1): scale · (x, or alpha · (exp(input_scale · x) - 1) below 0)."""
    inputs = bind_arguments(context, node, "self alpha=1 scale=1 input_scale=1")
    x = inputs.self
    names = ("alpha", "scale", "input_scale")
    alpha, scale, inner = (float(to_python(getattr(inputs, name), node, name)) for name in names)
    if scale == inner == 1:
        add_result(context, node, mb.elu(x=x, alpha=alpha, name=node.name))
        return
    below = mb.elu(x=mb.mul(x=x, y=cast_to(to_tensor(inner), x.dtype)), alpha=alpha)
    chosen = mb.select(cond=mb.greater(x=x, y=cast_to(to_tensor(0.0), x.dtype)), a=x, b=below)
    add_result(context, node, mb.mul(x=chosen, y=cast_to(to_tensor(scale), x.dtype), name=node.name))
