"""`rms_norm`, norms, `cosine_similarity`, `mse_loss` and `cross`: torch's formulas, with torch's default arguments.

coremltools requires all arguments, and torch.export omits those that are default. coremltools' `rms_norm` adds eps to a
scaled mean: other values, silently, and 0/0 for a row of zeros. Here x / sqrt(mean(x^2) + eps) = (x/m) /
sqrt(mean((x/m)^2) + eps/m^2) with m = max(1, max|x|): exact, and no square of a half-precision number overflows. A
cosine divides by each norm, at least eps, as torch does; a cross product is slices. torch computes norms made of
singular values, of constants only.
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
from ..creation import to_mil_type
from ..errors import NotConverted
from ..lowering import (
    add_result,
    bind_arguments,
    broadcast_to,
    cast_to,
    find_largest_magnitude,
    get_dims,
    has_static_shape,
    is_constant,
    name_result,
    normalize_axis,
    promote_operands,
    to_python,
)
from ..probes import find_fault
from .linear_algebra import compute_by_torch

PATCH = Patch(code="TORCH119", severity=Severity.WRONG,
              title="`rms_norm` misplaces eps, silently; norms, `cosine_similarity`, `mse_loss`, `cross` need every "
                    "argument",
              upstream=("https://github.com/apple/coremltools/issues/2821",))


@PATCH.probe
def probe() -> str | None:
    import torch

    if not hasattr(torch.nn.functional, "rms_norm"):
        return "unknown: this torch has no rms_norm"
    return find_fault(lambda x: torch.nn.functional.rms_norm(x, (4,), eps=1e-2), torch.arange(4.) / 8) \
        or find_fault(lambda x: torch.cross(x, x + 1), torch.arange(6.).reshape(2, 3)) \
        or find_fault(torch.linalg.matrix_norm, torch.eye(2), exporting=True)


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


@PATCH.op("norm", "norm.scalaropt_dim", "norm.scalaropt_dtype", "norm.scalaropt_dim_dtype")
def norm(context: Any, node: Any) -> None:
    """Lower norm.

    Overloads: (self, p=2), (self, p, *, dtype), (self, p, dim, keepdim=False), (self, p, dim, keepdim, *, dtype).
    """
    has_only_dtype = context.frontend == TorchFrontend.TORCHSCRIPT and len(node.inputs) == 3
    inputs = bind_arguments(context, node, "self p=2 dtype=None" if has_only_dtype else
                            "self p=2 dim=None keepdim=False dtype=None")
    dim, keepdim = (None, False) if has_only_dtype else (inputs.dim, inputs.keepdim)
    _lower_norm(context, node, inputs.self, 2 if inputs.p is None else inputs.p, dim, keepdim, inputs.dtype)


@PATCH.op("frobenius_norm", "frobenius_norm.dim")
def frobenius_norm(context: Any, node: Any) -> None:
    """Lower frobenius_norm(self, dim, keepdim=False)."""
    inputs = bind_arguments(context, node, "self dim=None keepdim=False")
    _lower_norm(context, node, inputs.self, 2, inputs.dim, inputs.keepdim, None)


@PATCH.op("nuclear_norm", "nuclear_norm.dim")
def nuclear_norm(context: Any, node: Any) -> None:
    """Lower nuclear_norm(self, dim=None, keepdim=False) of a constant."""
    _lower_by_singular_values(context, node, context[node.inputs[0]])


@PATCH.op("linalg_vector_norm")
def vector_norm(context: Any, node: Any) -> None:
    """Lower linalg_vector_norm(self, ord=2, dim=None, keepdim=False, *, dtype=None)."""
    inputs = bind_arguments(context, node, "self ord=2 dim=None keepdim=False dtype=None")
    _lower_norm(context, node, inputs.self, inputs.ord, inputs.dim, inputs.keepdim, inputs.dtype)


@PATCH.op("linalg_matrix_norm", "linalg_matrix_norm.str_ord")
def matrix_norm(context: Any, node: Any) -> None:
    """Lower linalg_matrix_norm(self, ord="fro", dim=[-2, -1], keepdim=False, *, dtype=None)."""
    inputs = bind_arguments(context, node, "self ord='fro' dim=[-2,-1] keepdim=False dtype=None")
    _lower_norm(context, node, inputs.self, inputs.ord, inputs.dim, inputs.keepdim, inputs.dtype, of_matrices=True)


@PATCH.op("linalg_norm", "linalg_norm.ord_str")
def linalg_norm(context: Any, node: Any) -> None:
    """Lower linalg_norm(self, ord=None, dim=None, keepdim=False, *, dtype=None).

    It is a matrix norm where it has an order and two axes.
    """
    inputs = bind_arguments(context, node, "self ord=None dim=None keepdim=False dtype=None")
    dim = to_python(inputs.dim, node, "dim")
    if inputs.ord is None:
        _lower_norm(context, node, inputs.self, 2, dim, inputs.keepdim, inputs.dtype)
        return
    axes = list(range(inputs.self.rank)) if dim is None else dim
    _lower_norm(context, node, inputs.self, inputs.ord, axes, inputs.keepdim, inputs.dtype,
                of_matrices=isinstance(axes, list) and len(axes) == 2)


def _lower_norm(context: Any, node: Any, x: Var, order: Any, dim: Any, keepdim: Any, dtype: Any,
                of_matrices: bool = False) -> None:
    """Lower a norm over the axes `dim`, of which None or none are all; "fro" is the root of the sum of squares."""
    order, dim = to_python(order, node, "ord"), to_python(dim, node, "dim")
    keep_dims = bool(to_python(keepdim, node, "keepdim"))
    if order == "nuc" or of_matrices and order in (2, -2):
        _lower_by_singular_values(context, node, x)
        return
    x = cast_to(x, to_mil_type(dtype, node, x.dtype))
    axes: Any = [dim] if isinstance(dim, int) else dim or None
    if x.rank == 0:
        x, axes, keep_dims = mb.reshape(x=x, shape=[1]), None, False
    if of_matrices and order != "fro":
        sums = mb.reduce_sum(x=mb.abs(x=x), axes=[axes[0 if abs(order) == 1 else 1]], keep_dims=True)
        reduce = mb.reduce_max if order > 0 else mb.reduce_min
        result = reduce(x=sums, axes=axes, keep_dims=keep_dims, name=node.name)
    elif order == 0:  # the number of elements that are not 0, which is a float
        counted = cast_to(mb.not_equal(x=x, y=types.nptype_from_builtin(x.dtype)(0)), types.int32)
        result = name_result(cast_to(mb.reduce_sum(x=counted, axes=axes, keep_dims=keep_dims), x.dtype), node, x)
    elif isinstance(order, int | float) and 0 < order < np.inf and order not in (1, 2):
        result = name_result(_compute_norm_of_parts(x, float(order), axes, keep_dims), node, x)
    else:
        result = ops._vector_norm(x=x, order=2 if order == "fro" else order, dim=axes, keep_dims=keep_dims,
                                  name=node.name)
    add_result(context, node, result)


def _compute_norm_of_parts(x: Var, order: float, axes: list[int] | None, keep_dims: bool) -> Var:
    """Compute a norm as that of x / m, times m, the largest magnitude.

    Powers of numbers up to 1 neither overflow nor vanish at fp16.
    """
    as_type = types.nptype_from_builtin(x.dtype)
    most = find_largest_magnitude(x, axes)
    powers = mb.pow(x=mb.abs(x=mb.real_div(x=x, y=most)), y=as_type(order))
    norm = mb.mul(x=mb.pow(x=mb.reduce_sum(x=powers, axes=axes, keep_dims=True), y=as_type(1 / order)), y=most)
    return norm if keep_dims else mb.squeeze(x=norm, axes=axes or list(range(x.rank)))


def _lower_by_singular_values(context: Any, node: Any, x: Var) -> None:
    if not is_constant(x):
        raise NotConverted.at(node, "is a norm made of singular values, which Core ML cannot compute",
                              "use another order, such as 'fro', or compute it outside of the model")
    compute_by_torch(context, node)
