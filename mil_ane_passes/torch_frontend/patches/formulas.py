"""`rms_norm`, `cosine_similarity`, `mse_loss` and `cross`: torch's formulas, with torch's default arguments.

coremltools requires all arguments, and torch.export omits those that are default. coremltools' `rms_norm` adds eps to a
scaled mean: other values, silently, and 0/0 for a row of zeros. Here x / sqrt(mean(x^2) + eps) = (x/m) /
sqrt(mean((x/m)^2) + eps/m^2) with m = max(1, max|x|): exact, and no square of a half-precision number overflows. A
cosine divides by each norm, at least eps, as torch does; a cross product is slices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from ...passes.severity import Severity
from ..contract import Patch
from ..errors import NotConverted
from ..lowering import (
    add_result,
    bind_arguments,
    broadcast_to,
    get_dims,
    has_static_shape,
    normalize_axis,
    promote_operands,
    to_python,
)
from ..probes import find_fault

PATCH = Patch(code="TORCH119", severity=Severity.WRONG,
              title="`rms_norm` misplaces eps, silently; `cosine_similarity`, `mse_loss`, `cross` need every argument",
              upstream=("https://github.com/apple/coremltools/issues/2821",))


@PATCH.probe
def probe() -> str | None:
    import torch

    if not hasattr(torch.nn.functional, "rms_norm"):
        return "unknown: this torch has no rms_norm"
    return find_fault(lambda x: torch.nn.functional.rms_norm(x, (4,), eps=1e-2), torch.arange(4.) / 8) \
        or find_fault(lambda x: torch.cross(x, x + 1), torch.arange(6.).reshape(2, 3))


@PATCH.op("rms_norm")
def rms_norm(context: Any, node: Any) -> None:
    """Lower rms_norm(input, normalized_shape, weight=None, eps=None): the default of eps is that of float32."""
    inputs = bind_arguments(context, node, "input normalized_shape weight=None eps=None")
    x, shape = inputs.input, to_python(inputs.normalized_shape, node, "normalized_shape")
    axes = list(range(-len(shape), 0))
    eps = to_python(inputs.eps, node, "eps")
    root = np.float32(np.sqrt(np.finfo(np.float32).eps if eps is None else eps))
    most = mb.maximum(x=mb.reduce_max(x=mb.abs(x=x), axes=axes, keep_dims=True), y=np.float32(1))
    scaled = mb.real_div(x=x, y=most)
    mean = mb.reduce_mean(x=mb.square(x=scaled), axes=axes, keep_dims=True)
    added = mb.square(x=mb.real_div(x=root, y=most))
    normed = mb.real_div(x=scaled, y=mb.sqrt(x=mb.add(x=mean, y=added)))
    if inputs.weight is not None:
        normed = mb.mul(x=normed, y=inputs.weight)
    add_result(context, node, mb.identity(x=normed, name=node.name))


@PATCH.op("cosine_similarity")
def cosine_similarity(context: Any, node: Any) -> None:
    """Lower cosine_similarity(x1, x2, dim=1, eps=1e-8)."""
    inputs = bind_arguments(context, node, "x1 x2 dim=1 eps=1e-08")
    x, y = _broadcast_pair(*promote_operands(inputs.x1, inputs.x2))
    axis, eps = (
        normalize_axis(to_python(inputs.dim, node, "dim"), x.rank),
        np.float32(to_python(inputs.eps, node, "eps")),
    )

    def to_unit(vector: Var) -> Var:
        norm = mb.reduce_l2_norm(x=vector, axes=[axis], keep_dims=True)
        return mb.real_div(x=vector, y=mb.maximum(x=norm, y=eps))

    add_result(
        context, node, mb.reduce_sum(x=mb.mul(x=to_unit(x), y=to_unit(y)), axes=[axis], keep_dims=False, name=node.name)
    )


@PATCH.op("mse_loss")
def mse_loss(context: Any, node: Any) -> None:
    """Lower mse_loss(self, target, reduction=1): 0 none, 1 mean, 2 sum."""
    inputs = bind_arguments(context, node, "self target reduction=1")
    x, y = promote_operands(inputs.self, inputs.target)
    reduction = to_python(inputs.reduction, node, "reduction")
    squares = mb.square(x=mb.sub(x=x, y=y))
    if reduction == 0:
        add_result(context, node, mb.identity(x=squares, name=node.name))
        return
    reduce = mb.reduce_mean if reduction == 1 else mb.reduce_sum
    add_result(context, node, reduce(x=squares, axes=list(range(squares.rank)), keep_dims=False, name=node.name))


@PATCH.op("cross", "linalg_cross")
def cross(context: Any, node: Any) -> None:
    """Lower cross(self, other, dim=the first of size 3), linalg_cross(self, other, *, dim=-1)."""
    inputs = bind_arguments(context, node, f"self other dim={'None' if node.kind == 'cross' else '-1'}")
    x, y = _broadcast_pair(*promote_operands(inputs.self, inputs.other))
    dim = to_python(inputs.dim, node, "dim")
    if dim is None:
        dim = next((place for place, size in enumerate(x.shape) if size == 3), None)
    if dim is None:
        raise NotConverted.at(node, "no dimension has size 3")
    axis = normalize_axis(dim, x.rank)
    (a, b, c), (d, e, f) = (mb.split(x=each, num_splits=3, axis=axis) for each in (x, y))
    parts = [mb.sub(x=mb.mul(x=one, y=last), y=mb.mul(x=other, y=first))
             for one, last, other, first in ((b, f, c, e), (c, d, a, f), (a, e, b, d))]
    add_result(context, node, mb.concat(values=parts, axis=axis, name=node.name))


def _broadcast_pair(x: Var, y: Var) -> tuple[Var, Var]:
    """Expand both tensors to the shape to which they broadcast; axes of flexible sizes are taken to be equal."""
    if has_static_shape(x) and has_static_shape(y):
        shape = np.broadcast_shapes(x.shape, y.shape)
        return broadcast_to(x, shape), broadcast_to(y, shape)
    rank = max(x.rank, y.rank)
    sizes = [[1] * (rank - each.rank) + get_dims(each) for each in (x, y)]
    first, second = ([other if isinstance(own, int) and own == 1 else own for own, other in zip(*pair, strict=True)]
                     for pair in (sizes, sizes[::-1]))
    return broadcast_to(x, first), broadcast_to(y, second)
