"""A constant that is added to a linear or a convolution: the passes that fuse it into the bias.

coremltools' `fuse_linear_bias` asks for the last dimension of the constant, which a number does not have, so that
`nn.Linear(n, 1)(x) + 2.0` fails ("tuple index out of range"). A constant of higher rank than the linear or the
convolution, such as one of shape (1, 1, n) beside a linear of rank 2, is fused, too, and the result silently loses
dimensions. Here, both are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Operation, Var, types

from ...passes.examples import build_program
from ...passes.severity import Severity
from ..contract import Patch

PATCH = Patch(code="TORCH183", severity=Severity.WRONG,
              title="`nn.Linear(n, 1)(x) + 2.0` fails, and a constant of higher rank that is added to a linear or a "
                    "convolution silently loses dimensions", upstream=("none known",))
_PASSES = "coremltools.converters.mil.mil.passes.defs"


@PATCH.probe
def probe() -> str | None:
    """Add a number to a linear with one output, and constants of higher rank to a linear and to a convolution."""
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

    def add(constant: Any) -> Callable[[Var], Var]:
        def build(x: Var) -> Var:
            y = mb.linear(x=x, weight=np.ones((1, 3), np.float32)) if x.rank == 2 else (
                mb.conv(x=x, weight=np.ones((1, 3, 1), np.float32)))
            return mb.relu(x=mb.add(x=y, y=constant))

        return build

    cases = [("linear", (2, 3), np.float32(2)), ("linear", (2, 3), np.ones((1, 1, 1), np.float32)),
             ("conv", (2, 3, 4), np.ones((1, 1, 1, 1), np.float32))]
    for name, shape, constant in cases:
        program = build_program(add(constant), dtype=types.fp32, x=shape)
        try:
            PASS_REGISTRY[f"common::fuse_{name}_bias"](program)
        except (IndexError, ValueError) as error:
            return f"fails: {error}"
    return None


@PATCH.replace_function(f"{_PASSES}.optimize_linear", "fuse_linear_bias._try_to_transform")
def fuse_linear_bias(host: Callable[..., Any], linear: Operation, user: Operation, block: Any) -> Any:
    """Fuse a constant of at least one dimension if the result keeps its rank; returns whether it was fused."""
    has_number = any(operand.val is not None and operand.rank == 0 for operand in (user.x, user.y))
    return not has_number and _keeps_rank(linear, user) and host(linear, user, block)


@PATCH.replace_function(f"{_PASSES}.optimize_conv", "fuse_conv_bias._try_to_transform")
def fuse_conv_bias(host: Callable[..., Any], conv: Operation, user: Operation) -> Any:
    """Fuse a constant if the result keeps its rank; returns whether it was fused."""
    return _keeps_rank(conv, user) and host(conv, user)


@PATCH.replace_function(f"{_PASSES}.optimize_conv", "fuse_conv_bias._try_to_transform_transpose_pattern")
def fuse_bias_of_transposed(host: Callable[..., Any], conv: Operation, block: Any) -> Any:
    """Fuse a constant that is added to a transposed convolution if the result keeps its rank."""
    users = [user for moved in conv.outputs[0].child_ops for user in moved.outputs[0].child_ops]
    return all(_keeps_rank(conv, user) for user in users if user.op_type in ("add", "sub")) and host(conv, block)


def _keeps_rank(op: Operation, user: Operation) -> bool:
    return bool(user.outputs[0].rank == op.outputs[0].rank)
