"""Clamps between tensors, of ints, and with one bound of another dtype.

torch takes the larger of the value and the lower bound, then the smaller of that and the upper bound: where the bounds
cross, the result is the upper one. coremltools applies tensors as bounds in the other order, so the result is silently
the lower one. It adds the missing bound of a clamp as a float, so that ints become floats, which round above 2^24. Two
constant tensors, and `clamp_min(0)` of floats, are rejected.
"""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.frontend.torch import ops
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

from ...passes.severity import Severity
from ..contract import Patch
from ..lowering import add_result, bind_arguments, cast_to, is_constant, name_result, result_type, to_tensor
from ..probes import find_fault

PATCH = Patch(code="TORCH174", severity=Severity.WRONG,
              title="`clamp` of ints becomes a float, and returns the lower bound if tensor bounds cross",
              upstream=("none known",))

_SIGNATURES = {"clamp_min": "self min", "clamp_max": "self max"}


@PATCH.probe
def probe() -> str | None:
    import torch

    return find_fault(lambda x: x.clamp(x + 2, x * 0), torch.arange(3.0))


@PATCH.op("clamp", "clip", "clamp_min", "clamp_max")
def clamp(context: Any, node: Any) -> None:
    """Lower clamp(self, min=None, max=None), clamp_min(self, min) and clamp_max(self, max)."""
    kind = node.kind.partition(".")[0].rstrip("_")
    inputs = bind_arguments(context, node, _SIGNATURES.get(kind, "self min=None max=None"))
    low, high = (None if bound is None else to_tensor(bound)
                 for bound in (getattr(inputs, "min", None), getattr(inputs, "max", None)))
    bounds = [bound for bound in (low, high) if bound is not None]
    dtype = result_type(inputs.self, *bounds)
    if (kind not in _SIGNATURES and types.is_float(dtype)
            and all(is_constant(bound) and bound.rank == 0 for bound in bounds)):
        ops.clamp(context, node)
        return
    x = cast_to(inputs.self, dtype)
    if low is not None:
        x = mb.maximum(x=x, y=cast_to(low, dtype))
    if high is not None:
        x = mb.minimum(x=x, y=cast_to(high, dtype))
    add_result(context, node, name_result(x, node))
