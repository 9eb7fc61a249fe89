"""`torch.tensor(5, dtype=torch.int64)`, `torch.as_tensor` and `x.to(y.dtype)` in scripts.

Scripts write `x[0] = 5` as a copy of `torch.tensor(5, ...)`. coremltools supports only the dtype fp32, and uses the
device's name as a shape: the result has as many elements as "cpu" has letters. Here any dtype, rank 0 and numbers that
the model computes are supported. coremltools' `x.dtype` is the name of a MIL type, which its casts cannot read; here it
is torch's number of the dtype.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.frontend.torch.utils import TORCH_DTYPE_TO_NUM
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..contract import Patch, describe_fault
from ..creation import make_constant, to_mil_type
from ..lowering import add_result, bind_arguments, cast_to, is_constant, name_result, to_python, to_tensor
from ..probes import convert_to_mil

PATCH = Patch(code="TORCH145",
              title="in scripts, `torch.tensor` is fp32 only and of the wrong shape, and `x.to(y.dtype)` fails",
              upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return (x + torch.tensor(5, dtype=(x > 0).dtype, device=x.device)).to(x.dtype)

    model = type("Filled", (torch.nn.Module,), {"forward": forward})().eval()
    try:
        convert_to_mil(torch.jit.script(model), torch.zeros(2))
    except Exception as error:
        return f"fails: {describe_fault(error)}"
    return None


@PATCH.op("dtype")
def lower_dtype(context: Any, node: Any) -> None:
    """Lower prim::dtype(a): torch's number; that of an int32 is int64's, because Core ML has no int64."""
    import torch

    x = to_tensor(bind_arguments(context, node, "a").a)
    dtype = torch.int64 if x.dtype == types.int32 else getattr(torch, types.nptype_from_builtin(x.dtype)().dtype.name)
    add_result(context, node, mb.const(val=np.int32(TORCH_DTYPE_TO_NUM[dtype]), name=node.name))


@PATCH.op("tensor", "as_tensor")
def lower_tensor(context: Any, node: Any) -> None:
    """Lower tensor(data, dtype, device, requires_grad): data a number, a nested list of numbers, or a tensor."""
    inputs = bind_arguments(context, node, "data dtype=None device=None requires_grad=False")
    if is_constant(inputs.data):
        value = np.asarray(to_python(inputs.data, node, "data"))
        add_result(
            context,
            node,
            name_result(make_constant(value, to_mil_type(inputs.dtype, node, _infer_dtype(value))), node, inputs.data),
        )
        return
    stacked = _stack_numbers(inputs.data)
    add_result(
        context, node, name_result(cast_to(stacked, to_mil_type(inputs.dtype, node, stacked.dtype)), node, inputs.data)
    )


def _infer_dtype(value: np.ndarray[Any, Any]) -> Any:
    """Infer the dtype as torch does."""
    return {"b": types.bool, "i": types.int32, "u": types.int32}.get(value.dtype.kind, types.fp32)


def _stack_numbers(data: Any) -> Var:
    """Convert a list of numbers, some of them dynamic, to a tensor."""
    if not isinstance(data, list):
        return data if isinstance(data, Var) else to_tensor(data)
    rows = [_stack_numbers(item) for item in data]
    dtype = types.fp32 if any(row.dtype in (types.fp16, types.fp32) for row in rows) else rows[0].dtype
    return mb.stack(values=[cast_to(row, dtype) for row in rows], axis=0)
