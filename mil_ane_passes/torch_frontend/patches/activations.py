"""`softplus` with a threshold, `reciprocal`, `gelu(approximate="tanh")` of torch.export, `expm1`, `asinh`, `acosh`.

coremltools ignores softplus' threshold, adds 1e-4 to the operand of a reciprocal, does not read the keyword of
torch.export's gelu, computes expm1 as exp(x) - 1, which loses the digits of small numbers, and lowers `asinh` and
`acosh` to ops that do not exist. These two are built by `ir/inverse_hyperbolic.py`, in formulas that stay in the range
of fp16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ...ir.inverse_hyperbolic import build_acosh, build_asinh
from ...passes.severity import Severity
from ..contract import Patch
from ..errors import NotConverted
from ..lowering import add_result, bind_arguments, cast_to, name_result, to_python, to_tensor
from ..probes import find_fault

PATCH = Patch(code="TORCH101", severity=Severity.WRONG,
              title="`softplus(threshold=1)`, `reciprocal`, exported tanh `gelu` are miscompiled",
              upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch
    from torch.nn.functional import gelu, softplus

    x = torch.tensor([0.01, 0.5, 2.0])
    return (find_fault(lambda x: softplus(x, 2.0, 1.0) + torch.reciprocal(x), x)
            or find_fault(lambda x: gelu(x, approximate="tanh"), -x, exporting=True)
            or find_fault(lambda x: torch.asinh(x) + torch.acosh(x + 1), x))


@PATCH.op("softplus")
def softplus(context: Any, node: Any) -> None:
    """Lower softplus(self, beta=1, threshold=20): log(1 + exp(beta·x)) / beta; x where beta·x > threshold."""
    inputs = bind_arguments(context, node, "self beta=1 threshold=20")
    beta, threshold = (
        float(to_python(inputs.beta, node, "beta")),
        float(to_python(inputs.threshold, node, "threshold")),
    )
    x = inputs.self
    if threshold >= 20:  # over 20, the logarithm and x are the same number in fp32
        _TORCH_OPS_REGISTRY.name_to_func_mapping["softplus"](context, node)
        return
    scaled = x if beta == 1 else mb.mul(x=x, y=cast_to(to_tensor(beta), x.dtype))
    soft = mb.softplus(x=scaled)
    soft = soft if beta == 1 else mb.mul(x=soft, y=cast_to(to_tensor(1 / beta), x.dtype))
    soft = mb.select(cond=mb.greater(x=scaled, y=cast_to(to_tensor(threshold), x.dtype)), a=x, b=soft)
    add_result(context, node, name_result(soft, node))


@PATCH.op("reciprocal")
def reciprocal(context: Any, node: Any) -> None:
    """Lower reciprocal(self)."""
    x = _to_float(bind_arguments(context, node, "self").self)
    add_result(context, node, mb.real_div(x=cast_to(to_tensor(1.0), x.dtype), y=x, name=node.name))


@PATCH.op("gelu")
def gelu(context: Any, node: Any) -> None:
    """Lower gelu(self, *, approximate='none')."""
    inputs = bind_arguments(context, node, "self approximate='none'")
    approximate = to_python(inputs.approximate, node, "approximate")
    if approximate not in ("none", "tanh"):
        raise NotConverted.at(node, f"approximate is {approximate!r}, expected 'none' or 'tanh'")
    mode = "EXACT" if approximate == "none" else "TANH_APPROXIMATION"
    add_result(context, node, mb.gelu(x=inputs.self, mode=mode, name=node.name))


@PATCH.op("expm1")
def expm1(context: Any, node: Any) -> None:
    """Lower expm1(self) to tanh(x / 2) * (exp(x) + 1), in which nothing cancels."""
    x = _to_float(bind_arguments(context, node, "self").self)
    half = mb.tanh(x=mb.mul(x=x, y=_make_number_like(0.5, x)))
    add_result(context, node, mb.mul(x=half, y=mb.add(x=mb.exp(x=x), y=_make_number_like(1, x)), name=node.name))


@PATCH.op("asinh")
def asinh(context: Any, node: Any) -> None:
    """Lower asinh(self)."""
    x = _to_float(bind_arguments(context, node, "self").self)
    add_result(context, node, build_asinh(x, name=node.name))


@PATCH.op("acosh")
def acosh(context: Any, node: Any) -> None:
    """Lower acosh(self)."""
    x = _to_float(bind_arguments(context, node, "self").self)
    add_result(context, node, build_acosh(x, name=node.name))


def _to_float(x: Var) -> Var:
    return x if types.is_float(x.dtype) else cast_to(x, types.fp32)


def _make_number_like(value: float, x: Var) -> Any:
    return types.nptype_from_builtin(x.dtype)(value) if x.dtype != types.fp32 else np.float32(value)
