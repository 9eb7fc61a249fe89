"""`mean`, `sum` with a dtype, `all`, `any` of floats.

coremltools reduces in the operand's dtype and ignores the requested one: the mean of ints is truncated to an int, and
`x.sum(dtype=...)` in a trace uses the dtype's number as an axis. `all` and `any` of floats are computed with ints,
where 0.25 is 0. Here numbers are cast before they are reduced, and `all` and `any` are the minimum and maximum of x !=
0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.frontend.torch.utils import NUM_TO_DTYPE_STRING
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ...passes.severity import Severity
from ..contract import Patch
from ..errors import NotConverted
from ..lowering import add_result, bind_arguments, cast_to, to_python, to_tensor
from ..probes import find_fault

PATCH = Patch(code="TORCH132", severity=Severity.WRONG,
              title="`mean` and `sum` ignore their dtype, `all` and `any` treat fractions as 0",
              upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    x = torch.tensor([[0.25, 2.0]])
    return find_fault(lambda x: x.all(1).float(), x) or find_fault(lambda x: x.int().mean(1, dtype=torch.float32), x)


@PATCH.op("mean", "mean.dim", "sum", "sum.dim_intlist")
def reduce_numbers(context: Any, node: Any) -> None:
    """Lower mean and sum (self, *, dtype=None), or (self, dim, keepdim=False, *, dtype=None)."""
    inputs = _bind_reduction(context, node, "dtype=None")
    x = to_tensor(inputs.self)
    dtype = _to_reduction_type(to_python(inputs.dtype, node, "dtype"), node)
    if dtype is None:
        dtype = x.dtype if types.is_float(x.dtype) else types.int32
    reduce = mb.reduce_mean if node.kind.startswith("mean") else mb.reduce_sum
    add_result(context, node, _reduce_axes(reduce, cast_to(x, dtype), inputs, node, node.name))


@PATCH.op("all", "all.dim", "all.dims", "any", "any.dim", "any.dims")
def reduce_to_bool(context: Any, node: Any) -> None:
    """Lower all and any (self), or (self, dim, keepdim=False)."""
    inputs = _bind_reduction(context, node, "")
    x = to_tensor(inputs.self)
    if x.dtype != types.bool:
        x = mb.not_equal(x=x, y=types.nptype_from_builtin(x.dtype)(0))
    dim = to_python(inputs.dim, node, "dim")
    if dim is not None and np.size(dim) == 0:  # over no axis, unlike sum, for which an empty list means all axes
        add_result(context, node, mb.identity(x=x, name=node.name))
        return
    reduce = mb.reduce_min if node.kind.startswith("all") else mb.reduce_max
    found = _reduce_axes(reduce, cast_to(x, types.fp32), inputs, node, f"{node.name}_number")
    add_result(context, node, mb.cast(x=found, dtype="bool", name=node.name))


def _bind_reduction(context: Any, node: Any, more: str) -> Any:
    """Bind the arguments.

    A reduction over all axes has no `dim`: the overload's name or, in a trace, the number of arguments decides.
    """
    entire = "." not in node.kind and len(node.inputs) <= (2 if more else 1) and "dim" not in (node.kwinputs or {})
    inputs = bind_arguments(context, node, f"self {'' if entire else 'dim=None keepdim=False'} {more}")
    if entire:
        inputs.dim, inputs.keepdim = None, False
    return inputs


def _reduce_axes(reduce: Any, x: Var, given: Any, node: Any, name: str) -> Var:
    axes = to_python(given.dim, node, "dim")
    axes = None if axes is None or np.size(axes) == 0 else np.atleast_1d(axes).astype(np.int32)
    if x.rank == 0:
        return mb.identity(x=x, name=name)
    return reduce(x=x, axes=axes, keep_dims=bool(to_python(given.keepdim, node, "keepdim")), name=name)


def _to_reduction_type(given: Any, node: Any) -> Any:
    """Return the MIL type of a torch.dtype or its number; None for None."""
    if given is None:
        return None
    name = NUM_TO_DTYPE_STRING.get(given) if isinstance(given, int) else str(given).removeprefix("torch.")
    named = {"int64": "int32", "int16": "int32", "float32": "fp32", "float64": "fp32", "float16": "fp16"}
    name = named.get(str(name), str(name))
    if name not in ("int32", "fp32", "fp16", "bool"):
        raise NotConverted.at(node, f"the dtype {given} is not one of a reduction's", "use a float dtype or int32")
    return types.string_to_builtin(name)
