"""`log_softmax` and `logcumsumexp` of any numbers: no sum of exponentials overflows, no probability becomes 0.

coremltools computes log_softmax as the logarithm of a softmax, which is never below -103.3 in fp32, and logcumsumexp as
the logarithm of a running sum of exponentials, which is infinite from 88 on. Here log_softmax(x) is d -
log(sum(exp(d))) with d = x - max(x); a running log-sum-exp is made of pairs, max(a, b) + log(1 + exp(-|a - b|)), in
log2(n) steps of slices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ...passes.severity import Severity
from ..contract import Patch
from ..creation import to_mil_type
from ..errors import NotConverted
from ..lowering import (
    MAX_RANK,
    add_result,
    bind_arguments,
    cast_to,
    get_dims,
    make_range,
    normalize_axis,
    to_python,
)
from ..probes import find_fault
from ..slice_assignment import scan_axis

PATCH = Patch(code="TORCH164", severity=Severity.WRONG,
              title="`log_softmax` ends at -103.3, `logcumsumexp` is infinite from 88 on, both silently",
              upstream=("https://github.com/apple/coremltools/issues/2728",))


@PATCH.probe
def probe() -> str | None:
    import torch

    return find_fault(lambda x: (torch.log_softmax(x, -1), torch.logcumsumexp(x, -1)), torch.tensor([[0., 800., 400.]]))


@PATCH.op("log_softmax", "_log_softmax")
def log_softmax(context: Any, node: Any) -> None:
    """Lower log_softmax(self, dim, dtype=None), _log_softmax(self, dim, half_to_float)."""
    inputs = bind_arguments(context, node, "self dim dtype=None")
    own = inputs.self.dtype if types.is_float(inputs.self.dtype) else types.fp32
    dtype = own if node.kind.startswith("_") else to_mil_type(inputs.dtype, node, own)
    x = cast_to(inputs.self, dtype)
    if x.rank == 0:
        add_result(context, node, mb.mul(x=x, y=cast_to(mb.const(val=np.float32(0)), dtype), name=node.name))
        return
    axes = [normalize_axis(to_python(inputs.dim, node, "dim"), x.rank)]
    shifted = mb.sub(x=x, y=mb.reduce_max(x=x, axes=axes, keep_dims=True))
    total = mb.reduce_log_sum_exp(x=shifted, axes=axes, keep_dims=True)
    add_result(context, node, mb.sub(x=shifted, y=total, name=node.name))


@PATCH.op("logcumsumexp", "_logcumsumexp")
def lower_logcumsumexp(context: Any, node: Any) -> None:
    """Lower logcumsumexp(self, dim)."""
    inputs = bind_arguments(context, node, "self dim")
    x = inputs.self
    if x.rank == 0:
        add_result(context, node, mb.identity(x=x, name=node.name))
        return
    axis = normalize_axis(to_python(inputs.dim, node, "dim"), x.rank)
    if isinstance(x.shape[axis], int | np.integer):
        add_result(context, node, mb.identity(x=scan_axis(x, axis, _compute_logaddexp), name=node.name))
    elif x.rank < MAX_RANK:  # the matrix of pairs adds one axis
        add_result(context, node, _compute_by_pair_matrix(x, axis, node.name))
    else:
        raise NotConverted.at(node, f"runs along a flexible dimension of a tensor of rank {x.rank}", "fix the size")


def _compute_logaddexp(x: Var, y: Var) -> Var:
    """Compute log(exp(x) + exp(y)); two equal infinities give the same infinity, though their difference is NaN."""
    most, same = mb.maximum(x=x, y=y), cast_to(mb.equal(x=x, y=y), x.dtype)
    apart = mb.select(cond=mb.equal(x=x, y=y), a=mb.mul(x=same, y=_make_number_like(0, x)),
                      b=mb.sub(x=mb.minimum(x=x, y=y), y=most))
    return mb.add(x=most, y=mb.log(x=mb.add(x=mb.exp(x=apart), y=_make_number_like(1, x))))


def _compute_by_pair_matrix(x: Var, axis: int, name: str) -> Var:
    """Compute a running log-sum-exp with a matrix of all pairs of positions.

    Each row contains the numbers so far, and the lowest fp32 number at later positions.
    """
    numbers = make_range(get_dims(x)[axis])
    so_far = mb.less_equal(x=mb.expand_dims(x=numbers, axes=[0]), y=mb.expand_dims(x=numbers, axes=[1]))
    limits = mb.mul(
        x=mb.sub(x=cast_to(so_far, x.dtype), y=_make_number_like(0.5, x)),
        y=_make_number_like(float(np.finfo(np.float32).max), x),
    )
    limits = mb.mul(x=limits, y=_make_number_like(2, x))
    if x.rank - 1 > axis:
        limits = mb.expand_dims(x=limits, axes=list(range(2, x.rank - axis + 1)))
    kept = mb.minimum(x=mb.expand_dims(x=x, axes=[axis]), y=limits)
    return mb.reduce_log_sum_exp(x=kept, axes=[axis + 1], keep_dims=False, name=name)


def _make_number_like(value: float, like: Var) -> Var:
    return cast_to(mb.const(val=np.float32(value)), like.dtype)
