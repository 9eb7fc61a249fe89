"""`torch.tensor(5, dtype=torch.int64)` and `torch.as_tensor` in scripts: any dtype, rank 0, numbers the model computes.

Scripts write `x[0] = 5` as a copy of `torch.tensor(5, ...)`. The host knows the dtype fp32 only, and takes the device's
name for a shape: the result has as many elements as "cpu" has letters.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..contract import Patch
from ..creation import constant, mil_type
from ..lowering import add, bind, cast, is_known, named, python, tensor
from ..probing import converted

PATCH = Patch(code="TORCH145",
              title="torch.tensor in scripts: only fp32, and of the wrong shape", upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    scripted = torch.jit.ScriptModule()
    scripted.define("def forward(self, x):\n    return x + torch.tensor(5, dtype=(x > 0).dtype, device=x.device)\n")
    try:
        converted(scripted.eval(), torch.zeros(2))
    except Exception as error:
        return f"fails: {error}"
    return None


@PATCH.op("tensor", "as_tensor")
def make(context: Any, node: Any) -> None:
    """tensor(data, dtype, device, requires_grad): data a number, a nested list of numbers, or a tensor."""
    given = bind(context, node, "data dtype=None device=None requires_grad=False")
    if is_known(given.data):
        value = np.asarray(python(given.data, node, "data"))
        add(context, node, named(constant(value, mil_type(given.dtype, node, _default(value))), node, given.data))
        return
    stacked = _stacked(given.data)
    add(context, node, named(cast(stacked, mil_type(given.dtype, node, stacked.dtype)), node, given.data))


def _default(value: np.ndarray[Any, Any]) -> Any:
    """The dtype torch infers."""
    return {"b": types.bool, "i": types.int32, "u": types.int32}.get(value.dtype.kind, types.fp32)


def _stacked(data: Any) -> Var:
    """A list of numbers, some of them computed, as a tensor."""
    if not isinstance(data, list):
        return data if isinstance(data, Var) else tensor(data)
    rows = [_stacked(item) for item in data]
    dtype = types.fp32 if any(row.dtype in (types.fp16, types.fp32) for row in rows) else rows[0].dtype
    return mb.stack(values=[cast(row, dtype) for row in rows], axis=0)
