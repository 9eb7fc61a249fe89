"""A constant that is added to a linear or a convolution: the passes that fuse it into the bias.

coremltools' `fuse_linear_bias` asks for the last dimension of the constant, which a number does not have, so that
`nn.Linear(n, 1)(x) + 2.0` fails ("tuple index out of range"). A constant of higher rank than the linear or the
convolution, such as one of shape (1, 1, n) beside a linear of rank 2, is fused, too, and the result silently loses
dimensions. Here, a number is fused as a constant of one element, and an expand_dims comes before a constant of higher
rank.
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
    """Add constants of higher rank to a linear and to a convolution, and a number to a linear with one output."""
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

    def add(constant: Any) -> Callable[[Var], Var]:
        def build(x: Var) -> Var:
            y = mb.linear(x=x, weight=np.ones((1, 3), np.float32)) if x.rank == 2 else (
                mb.conv(x=x, weight=np.ones((1, 3, 1), np.float32)))
            return mb.add(x=y, y=constant)

        return build

    cases = [("linear", (2, 3), np.ones((1, 1, 1), np.float32)), ("conv", (2, 3, 4), np.ones((1, 1, 1, 1), np.float32)),
             ("linear", (2, 3), np.float32(2))]
    for name, shape, constant in cases:
        program = build_program(add(constant), dtype=types.fp32, x=shape)
        (rank,) = (var.rank for var in program.functions["main"].outputs)
        try:
            PASS_REGISTRY[f"common::fuse_{name}_bias"](program)
        except IndexError as error:
            return f"fails: {error}"
        if program.functions["main"].outputs[0].rank != rank:
            return f"silently miscompiled: the sum of a {name} and a constant of rank {rank} has rank {rank - 1}"
    return None


@PATCH.replace_function(f"{_PASSES}.optimize_linear", "fuse_linear_bias._try_to_transform")
def fuse_linear_bias(host: Callable[..., Any], linear: Operation, user: Operation, block: Any) -> Any:
    """Fuse a constant, a number too, if the result keeps its rank; returns whether it was fused."""
    if _raise_rank(linear, user):
        return False
    number = next((each for each in (user.x, user.y) if each.val is not None and each.rank == 0), None)
    if number is not None and linear.outputs[0].shape[-1] == 1:
        user = _replace_operand(user, number, mb.const(val=np.reshape(number.val, (1,)), before_op=user))
    return host(linear, user, block)


@PATCH.replace_function(f"{_PASSES}.optimize_conv", "fuse_conv_bias._try_to_transform")
def fuse_conv_bias(host: Callable[..., Any], conv: Operation, user: Operation) -> Any:
    """Fuse a constant if the result keeps its rank; returns whether it was fused."""
    return not _raise_rank(conv, user) and host(conv, user)


@PATCH.replace_function(f"{_PASSES}.optimize_conv", "fuse_conv_bias._try_to_transform_transpose_pattern")
def fuse_bias_of_transposed(host: Callable[..., Any], conv: Operation, block: Any) -> Any:
    """Fuse a constant that is added to a transposed convolution if the result keeps its rank."""
    moved = [child for child in conv.outputs[0].child_ops if child.op_type == "transpose"]
    users = [(op, user) for op in moved for user in op.outputs[0].child_ops if user.op_type in ("add", "sub")]
    return not any([_raise_rank(*pair) for pair in users]) and host(conv, block)


def _raise_rank(op: Operation, user: Operation) -> bool:
    """Insert an expand_dims between `op` and a `user` whose result has a higher rank; returns whether it has one.

    The passes do not match the ops then, later runs on the package without this patch included.
    """
    result = op.outputs[0]
    if user.outputs[0].rank == result.rank:
        return False
    axes = list(range(user.outputs[0].rank - result.rank))
    _replace_operand(user, result, mb.expand_dims(x=result, axes=axes, before_op=user))
    return True


def _replace_operand(user: Operation, old: Var, new: Var) -> Operation:
    """Replace an add or a sub by one with another operand of the same values, and return it."""
    operands = {name: new if operand is old else operand for name, operand in (("x", user.x), ("y", user.y))}
    result = user.outputs[0]
    made = getattr(mb, user.op_type)(**operands, before_op=user, name=result.name)
    user.enclosing_block.replace_uses_of_var_after_op(anchor_op=user, old_var=result, new_var=made)
    user.enclosing_block.remove_ops([user])
    return made.op
