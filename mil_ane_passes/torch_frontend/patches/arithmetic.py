"""`trunc`, `hypot`, `cdist`, `bucketize`: short formulas in MIL's own ops.

trunc(x) = sign(x) · floor(|x|); hypot(x, y) = m · sqrt(1 + (n / m)²) with m the larger and n the smaller of |x|, |y|,
which does not overflow where x² does; bucketize counts the boundaries below each element.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..contract import Patch
from ..errors import NotConverted
from ..lowering import add_result, bind_arguments, cast_to, name_result, promote_operands, to_python, to_tensor

PATCH = Patch(code="TORCH103",
              title="`trunc`, `hypot`, `cdist`, `bucketize` are not implemented", upstream=("none known",))


@PATCH.op("trunc")
def trunc(context: Any, node: Any) -> None:
    """Lower trunc(self)."""
    x = bind_arguments(context, node, "self").self
    entire = x if not types.is_float(x.dtype) else mb.mul(x=mb.sign(x=x), y=mb.floor(x=mb.abs(x=x)))
    add_result(context, node, name_result(entire, node))


@PATCH.op("hypot")
def hypot(context: Any, node: Any) -> None:
    """Lower hypot(self, other)."""
    inputs = bind_arguments(context, node, "self other")
    x, y = (mb.abs(x=operand) for operand in promote_operands(inputs.self, inputs.other))
    larger, smaller = mb.maximum(x=x, y=y), mb.minimum(x=x, y=y)
    nothing = cast_to(mb.equal(x=larger, y=_make_number_like(0, larger)), larger.dtype)
    ratio = mb.real_div(x=smaller, y=mb.add(x=larger, y=nothing))
    root = mb.sqrt(x=mb.add(x=mb.mul(x=ratio, y=ratio), y=_make_number_like(1, ratio)))
    add_result(context, node, mb.mul(x=larger, y=root, name=node.name))


@PATCH.op("cdist", "_cdist_forward")
def cdist(context: Any, node: Any) -> None:
    """Lower cdist(x1, x2, p=2, compute_mode=None): distances between the rows of x1 and those of x2."""
    inputs = bind_arguments(context, node, "x1 x2 p=2.0")
    x, y = promote_operands(inputs.x1, inputs.x2)
    power = float(to_python(inputs.p, node, "p"))
    if max(x.rank, y.rank) > 4:
        raise NotConverted.at(node, "needs a rank of 6 to compare every two rows", "merge the batch dimensions")
    distance = mb.abs(x=mb.sub(x=mb.expand_dims(x=x, axes=[-2]), y=mb.expand_dims(x=y, axes=[-3])))
    if power == 1:
        result = mb.reduce_sum(x=distance, axes=[-1])
    elif power == 2:
        result = mb.sqrt(x=mb.reduce_sum(x=mb.mul(x=distance, y=distance), axes=[-1]))
    elif power > 1e38:  # coremltools writes inf as the largest fp32 number
        result = mb.reduce_max(x=distance, axes=[-1])
    elif power == 0:
        differs = cast_to(mb.not_equal(x=distance, y=_make_number_like(0, distance)), distance.dtype)
        result = mb.reduce_sum(x=differs, axes=[-1])
    else:
        total = mb.reduce_sum(x=mb.pow(x=distance, y=_make_number_like(power, distance)), axes=[-1])
        result = mb.pow(x=total, y=_make_number_like(1 / power, total))
    add_result(context, node, name_result(result, node))


@PATCH.op("bucketize")
def bucketize(context: Any, node: Any) -> None:
    """Lower bucketize(self, boundaries, out_int32=False, right=False): count the boundaries below each element."""
    inputs = bind_arguments(context, node, "self boundaries out_int32=False right=False")
    x, boundaries = promote_operands(inputs.self, inputs.boundaries)
    if x.rank > 4:
        raise NotConverted.at(node, "supports ranks up to 4", "reshape it first")
    below = mb.less_equal if to_python(inputs.right, node, "right") else mb.less
    column = mb.expand_dims(x=x, axes=[x.rank]) if x.rank else x
    counted = mb.reduce_sum(x=cast_to(below(x=boundaries, y=column), types.int32), axes=[-1])
    add_result(context, node, name_result(counted, node))


def _make_number_like(value: float, x: Var) -> Var:
    return cast_to(to_tensor(value), x.dtype) if types.is_float(x.dtype) else to_tensor(np.int32(value))
