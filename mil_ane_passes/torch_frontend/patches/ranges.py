"""`arange` and `linspace` of torch's dtype, consts where all arguments are constants.

coremltools ignores `dtype`: `torch.arange(4, dtype=torch.float32)` stays int, its mean is rounded down silently and its
softmax fails. It rejects a `linspace` of a computed number of steps, as of the width of a flexible image.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.frontend.torch import ops
from coremltools.converters.mil.frontend.torch.utils import TorchFrontend
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ...passes.severity import Severity
from ..contract import Patch
from ..creation import make_constant, read_sizes, to_mil_type
from ..errors import NotConverted
from ..lowering import (
    add_result,
    bind_arguments,
    cast_to,
    find_written_literal,
    is_constant,
    make_range,
    name_result,
    to_python,
    to_tensor,
)
from ..probes import find_fault

PATCH = Patch(code="TORCH130", severity=Severity.WRONG,
              title="`dtype` of `arange` and `linspace` is ignored", upstream=("none known",))

#: a range of more elements is computed by the program, which costs no bytes in the package
_MAX_CONST_ELEMENTS = 1 << 20


@PATCH.probe
def probe() -> str | None:
    import torch

    return find_fault(lambda x: x + torch.arange(4, dtype=torch.float32).mean(), torch.zeros(1))


@PATCH.op("arange", "arange.start", "arange.start_step")
def arange(context: Any, node: Any) -> None:
    """Lower arange(start=0, end, step=1, dtype=int64, or float32 when any of them is a float)."""
    inputs = bind_arguments(context, node, _make_signature(context, node))
    numbers = [getattr(inputs, name, default) for name, default in (("start", 0), ("end", None), ("step", 1))]
    dtype = to_mil_type(inputs.dtype, node, types.fp32 if any(map(_is_float, numbers)) else types.int32)
    if is_constant(numbers):
        start, end, step = (_read_number(number, node) for number in numbers)
        count = max(int(np.ceil((end - start) / step)), 0) if step else 0
        if not step:
            raise NotConverted.at(node, "the step is 0")
        if count <= _MAX_CONST_ELEMENTS:
            values = np.arange(count, dtype=np.float64 if isinstance(start + step, float) else np.int64) * step + start
            add_result(context, node, make_constant(values, dtype))
            return
    ops._arange(context, node.name, *(to_tensor(number) for number in numbers))
    context.add(cast_to(context[node.name], dtype), torch_name=node.name, override=True)


def _make_signature(context: Any, node: Any) -> str:
    """Return the signature of the overload.

    TorchScript's overloads differ by the number of arguments, the last four of which are dtype, layout, device, pin.
    """
    if context.frontend == TorchFrontend.TORCHSCRIPT:
        count = len(node.inputs) - 4 if len(node.inputs) > 4 else len(node.inputs)
    else:
        count = {"arange": 1, "arange.start": 2, "arange.start_step": 3}[node.kind]
    return {1: "end dtype=None", 2: "start end dtype=None", 3: "start end step=1 dtype=None"}[count]


@PATCH.op("linspace")
def linspace(context: Any, node: Any) -> None:
    """Lower linspace(start, end, steps, dtype=float32)."""
    inputs = bind_arguments(context, node, "start end steps dtype=None")
    dtype = to_mil_type(inputs.dtype, node, types.fp32)
    if (
        is_constant([inputs.start, inputs.end, inputs.steps])
        and to_python(inputs.steps, node, "steps") <= _MAX_CONST_ELEMENTS
    ):
        steps = int(to_python(inputs.steps, node, "steps"))
        values = np.linspace(_read_number(inputs.start, node), _read_number(inputs.end, node), steps)
        add_result(context, node, make_constant(np.trunc(values) if dtype == types.int32 else values, dtype))
        return
    (steps,) = read_sizes(inputs.steps, node)
    if isinstance(steps, Var):
        start, end = (cast_to(to_tensor(each), types.fp32) for each in (inputs.start, inputs.end))
        values = _make_flexible_linspace(start, end, steps)
        add_result(context, node, name_result(cast_to(values, dtype), node))
        return
    ops.linspace(context, node)
    context.add(cast_to(context[node.name], dtype), torch_name=node.name, override=True)


def _make_flexible_linspace(start: Var, end: Var, steps: Var) -> Var:
    """Make `steps` numbers (rank 0 int32) from `start` to `end`, counted from the nearer end, as torch does."""
    places = make_range(steps)
    before_last = mb.sub(x=steps, y=np.int32(1))
    distance = mb.real_div(x=mb.sub(x=end, y=start),
                           y=cast_to(mb.maximum(x=before_last, y=np.int32(1)), types.fp32))
    first = mb.add(x=start, y=mb.mul(x=distance, y=cast_to(places, types.fp32)))
    last = mb.sub(x=end, y=mb.mul(x=distance, y=cast_to(mb.sub(x=before_last, y=places), types.fp32)))
    half = mb.floor_div(x=mb.add(x=steps, y=np.int32(1)), y=np.int32(2))
    return mb.select(cond=mb.less(x=places, y=half), a=first, b=last)


def _is_float(value: Any) -> bool:
    return types.is_float(value.dtype) if isinstance(value, Var) else isinstance(value, float)


def _read_number(value: Any, node: Any) -> Any:
    """Return the Python number as written in the model."""
    number = to_python(value, node, "start, end or step")
    return find_written_literal(number, node) if isinstance(number, float) else int(number)
