"""Divisions that round, and remainders: `x % 1`, `x // 1`, `torch.div(x, 1, rounding_mode="floor")`.

coremltools' pass noop_elimination treats `floor_div` by 1 as a no-op, which it is for ints only: `x // 1` becomes `x`
and `x % 1`, lowered as `x - (x // 1) * 1`, becomes 0. Here the pass skips floats, and a division of floats by a const 1
is `floor` itself, so that the program also stays correct in coremltools' passes without this patch. `remainder` by 1 is
`x - floor(x)`, by any other divisor `mod`, which MIL defines as floored, as torch does. Ints stay ints (coremltools
makes them fp32, exact up to 2**24 only): trunc(x / y) = sign(x) * sign(y) * (|x| // |y|).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ...passes.severity import Severity
from ..contract import Patch
from ..errors import NotConverted
from ..lowering import add_result, bind_arguments, cast_to, promote_operands, to_python
from ..probes import find_fault

_NOOP_MODULE = "coremltools.converters.mil.mil.passes.defs.cleanup.noop_elimination"

PATCH = Patch(code="TORCH110", severity=Severity.WRONG,
              title="float `x // 1` becomes x and `x % 1` becomes 0; rounded divisions of ints become floats",
              upstream=(
        "https://github.com/apple/coremltools/issues/2761",
        "https://github.com/apple/coremltools/pull/2762",
        "https://github.com/apple/coremltools/issues/2836",
        "https://github.com/apple/coremltools/issues/2733",
    ))


@PATCH.probe
def probe() -> str | None:
    import torch
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

    from ..probes import convert_to_mil, trace_function

    x = torch.tensor([0.5, -1.5])
    program = convert_to_mil(trace_function(lambda x: torch.abs(x // 1), x), x)
    PASS_REGISTRY["common::noop_elimination"](program)
    if len(program.find_ops(op_type="floor_div") + program.find_ops(op_type="floor")) == 0:
        return "silently miscompiled"
    return find_fault(lambda i: torch.div(i, 3, rounding_mode="floor"), torch.tensor([2 ** 30 + 1]))


@PATCH.replace_function(_NOOP_MODULE, "noop_elimination._match_pattern")
def match_pattern(host: Callable[[Any], Any], op: Any) -> Any:
    """Return coremltools' function for removing a no-op, or None.

    `floor_div` of floats is not a no-op.
    """
    return None if op.op_type == "floor_div" and not types.is_int(op.outputs[0].dtype) else host(op)


@PATCH.op("div", "truediv", "true_divide", "div.scalar_mode")
def div(context: Any, node: Any) -> None:
    """Lower div(self, other, *, rounding_mode=None)."""
    inputs = bind_arguments(context, node, "self other rounding_mode=None")
    mode = to_python(inputs.rounding_mode, node, "rounding_mode")
    if mode is None:
        x, y = (cast_to(operand, types.fp32) if not types.is_float(operand.dtype) else operand
                for operand in promote_operands(inputs.self, inputs.other))
        add_result(context, node, mb.real_div(x=x, y=y, name=node.name))
        return
    if mode not in ("floor", "trunc"):
        raise NotConverted.at(node, f"rounding_mode is {mode!r}, expected None, 'floor' or 'trunc'")
    x, y = promote_operands(inputs.self, inputs.other)
    add_result(context, node, (_floor_div if mode == "floor" else _trunc_div)(x, y, node.name))


@PATCH.op("floor_divide", "floordiv")
def floor_divide(context: Any, node: Any) -> None:
    """Lower floor_divide(self, other), and `//` of numbers."""
    inputs = bind_arguments(context, node, "self other")
    x, y = promote_operands(inputs.self, inputs.other)
    add_result(context, node, _floor_div(x, y, node.name))


@PATCH.op("remainder", "remainder.scalar_tensor", "mod")
def remainder(context: Any, node: Any) -> None:
    """Lower remainder(self, other): of the divisor's sign."""
    inputs = bind_arguments(context, node, "self other")
    x, y = promote_operands(inputs.self, inputs.other)
    if _is_one(y):
        add_result(context, node, mb.sub(x=x, y=_floor_div(x, y, f"{node.name}_whole"), name=node.name))
    else:
        add_result(context, node, mb.mod(x=x, y=y, name=node.name))


def _floor_div(x: Var, y: Var, name: str) -> Var:
    if types.is_float(x.dtype) and _is_one(y):
        return mb.floor(x=x, name=name)
    return mb.floor_div(x=x, y=y, name=name)


def _trunc_div(x: Var, y: Var, name: str) -> Var:
    if types.is_float(x.dtype):
        quotient = mb.real_div(x=x, y=y)
        return mb.mul(x=mb.floor(x=mb.abs(x=quotient)), y=mb.sign(x=quotient), name=name)
    entire = mb.floor_div(x=mb.abs(x=x), y=mb.abs(x=y))
    return mb.mul(x=entire, y=mb.mul(x=mb.sign(x=x), y=mb.sign(x=y)), name=name)


def _is_one(y: Var) -> bool:
    """Return whether `y` is a const 1 that does not broadcast."""
    return y.val is not None and y.rank == 0 and bool(np.all(y.val == 1))
