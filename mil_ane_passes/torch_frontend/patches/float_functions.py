"""Functions of ints and bools: `sqrt`, `exp`, `sin`, `sigmoid`, ... compute in floats, `floor`, `relu`, ... keep ints.

MIL's functions support floats only, and coremltools passes operands on unchanged: most functions fail, `log` and
`logsumexp` of ints convert to other values. torch computes such a function of ints in its default float dtype, fp32,
and rounding ints is a no-op. Here coremltools' own lowering receives the operands as floats.
`one_hot` of ints without `num_classes`, which the values determine, is rejected with this reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ...passes.severity import Severity
from ..contract import Patch
from ..errors import NotConverted
from ..lowering import add_result, bind_arguments, cast_to, is_constant, name_result, to_python, to_tensor
from ..probes import find_fault, is_lowered_by_coremltools

PATCH = Patch(code="TORCH116", severity=Severity.WRONG,
              title="`sqrt`, `exp`, `sin`, `log`, ... of ints are rejected or miscompiled",
              upstream=("none known",))

_FLOAT_ONLY_KINDS = (
    "acos",
    "asin",
    "atan",
    "atanh",
    "cos",
    "cosh",
    "erf",
    "exp",
    "exp2",
    "log",
    "log10",
    "log1p",
    "log2",
    "logsumexp",
    "rsqrt",
    "sigmoid",
    "sin",
    "sinh",
    "softmax",
    "sqrt",
    "tan",
    "tanh",
)


@PATCH.probe
def probe() -> str | None:
    import torch

    x = torch.tensor([1, 2, 5], dtype=torch.int32)
    return find_fault(lambda x: torch.logsumexp(x, 0), x) or find_fault(
        lambda x: torch.sqrt(x) + torch.log(x + 1), x)


def cast_operands_to_float(host: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Wrap coremltools' lowering: it receives its int and bool operands as fp32."""
    def lower_as_float(context: Any, node: Any) -> None:
        changed = copy.copy(node)
        changed.inputs = [_cast_to_float(context, node, name, place) for place, name in enumerate(node.inputs)]
        host(context, changed)
    return lower_as_float


for _kind in filter(is_lowered_by_coremltools, _FLOAT_ONLY_KINDS):
    PATCH.op(_kind)(cast_operands_to_float(_TORCH_OPS_REGISTRY.name_to_func_mapping[_kind]))


def _cast_to_float(context: Any, node: Any, name: Any, place: int) -> Any:
    """Return the name of an operand, or of its cast to fp32.

    Only the first operand is cast: the second operand of `logsumexp` is its axes.
    """
    value = context[name] if isinstance(name, str) and name in context else None
    if not isinstance(value, Var) or types.is_float(value.dtype) or place > 0:
        return name
    as_float = f"{node.name}_float{place}"
    context.add(cast_to(value, types.fp32), as_float)
    return as_float


@PATCH.op("floor", "ceil", "round", "round.decimals")
def lower_rounding(context: Any, node: Any) -> None:
    """Lower floor(self), ceil(self), round(self, *, decimals=0): ints are whole."""
    inputs = bind_arguments(context, node, "self decimals=0")
    x, decimals = to_tensor(inputs.self), to_python(inputs.decimals, node, "decimals")
    if node.kind.startswith("round") and types.is_float(x.dtype):
        scale = types.nptype_from_builtin(x.dtype)(10.0 ** abs(decimals))
        to, back = (mb.mul, mb.real_div) if decimals > 0 else (mb.real_div, mb.mul)
        rounded = back(x=mb.round(x=to(x=x, y=scale)), y=scale) if decimals else mb.round(x=x)
        add_result(context, node, name_result(rounded, node, x))
    elif types.is_float(x.dtype):
        _TORCH_OPS_REGISTRY.name_to_func_mapping[node.kind](context, node)
    else:
        add_result(context, node, mb.identity(x=x, name=node.name))


@PATCH.op("relu", "relu6")
def relu(context: Any, node: Any) -> None:
    """Lower relu(self) and relu6(self)."""
    x = to_tensor(bind_arguments(context, node, "self").self)
    kind = node.kind.rstrip("_")
    if types.is_float(x.dtype):
        _TORCH_OPS_REGISTRY.name_to_func_mapping[kind](context, node)
        return
    result = mb.maximum(x=cast_to(x, types.int32), y=0)
    add_result(context, node, name_result(result if kind == "relu" else mb.minimum(x=result, y=6), node, x))


@PATCH.op("one_hot")
def one_hot(context: Any, node: Any) -> None:
    """Lower one_hot(self, num_classes=-1); raise NotConverted where the values determine the number of classes."""
    count = bind_arguments(context, node, "self num_classes=-1").num_classes
    if is_constant(count) and to_python(count, node, "num_classes") == -1:
        raise NotConverted.at(node, "computes the number of classes from the values", "give num_classes")
    _TORCH_OPS_REGISTRY.name_to_func_mapping["one_hot"](context, node)
