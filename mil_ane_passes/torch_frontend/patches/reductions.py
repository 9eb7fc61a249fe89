"""`var`, `std` with any correction, `prod`, `median`, `kthvalue`, `argmax` over all axes.

coremltools treats every correction as 0 or 1, and that of a whole tensor as 0; `argmax` without a dimension reduces the
last one. Variance is the mean of the squared distances from the mean, times n / (n - correction). A standard deviation
is m times that of the distances divided by m, the largest of them, whose squares neither overflow nor vanish at fp16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ...passes.severity import Severity
from ..contract import Patch
from ..creation import to_mil_type
from ..lowering import (
    Size,
    add_result,
    bind_arguments,
    cast_to,
    find_largest_magnitude,
    get_dims,
    name_result,
    normalize_axis,
    to_python,
)
from ..probes import find_fault

PATCH = Patch(code="TORCH133", severity=Severity.WRONG,
              title="`var(correction=2)`, `std()`, `argmax()` are miscompiled; `prod` is not implemented",
              upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    x = torch.tensor([[1.0, 2.0, 4.0, 8.0], [9.0, 3.0, 5.0, 0.0], [7.0, 6.0, 2.0, 1.0]])
    return find_fault(lambda x: x.var(1, correction=2) + x.std() + x.argmax(), x) or find_fault(
        lambda x: x.prod(1) + x.median(), x)


_SPREAD_KINDS = ("var", "std", "var_mean", "std_mean")


@PATCH.op(*(kind + form for kind in _SPREAD_KINDS for form in ("", ".dim", ".correction")), "var_correction",
          "std_correction")
def lower_var_std(context: Any, node: Any) -> None:
    """Lower var and std.

    Overloads: (self, unbiased=True), .dim(self, dim, unbiased, keepdim), .correction(self, dim, correction, keepdim).
    """
    kind = node.kind.partition(".")[0].removesuffix("_correction")
    bare = node.kind == kind and len(node.inputs) <= 2 and not {"dim", "correction"} & set(node.kwinputs or {})
    if bare:
        inputs = bind_arguments(context, node, "self unbiased=True")
        dim, correction, keepdim = None, to_python(inputs.unbiased, node, "unbiased"), False
    else:
        third = "unbiased" if node.kind.endswith(".dim") else "correction"
        inputs = bind_arguments(context, node, f"self dim=None {third}=None keepdim=False")
        dim, keepdim = to_python(inputs.dim, node, "dim"), bool(to_python(inputs.keepdim, node, "keepdim"))
        correction = to_python(getattr(inputs, third), node, third)
    x = inputs.self
    axes = _read_axes(dim, x.rank)
    mean = mb.reduce_mean(x=x, axes=axes, keep_dims=True) if x.rank else x
    distance = mb.sub(x=x, y=mean)
    correction = 1.0 if correction is None else float(correction)
    scale = find_largest_magnitude(distance, axes) if kind.startswith("std") and x.rank else None
    variance = mb.square(x=distance if scale is None else mb.real_div(x=distance, y=scale))
    variance = mb.reduce_mean(x=variance, axes=axes, keep_dims=keepdim or scale is not None) if x.rank else variance
    variance = _apply_correction(variance, x, axes, correction)
    result = mb.sqrt(x=variance) if kind.startswith("std") else variance
    if scale is not None:
        result = mb.mul(x=result, y=scale)
        result = result if keepdim else mb.squeeze(x=result, axes=axes)
    if not kind.endswith("_mean"):
        add_result(context, node, name_result(result, node))
        return
    mean = mean if keepdim or not x.rank else mb.squeeze(x=mean, axes=axes)
    _add_two_results(context, node, result, mean)


def _read_axes(dim: Any, rank: int) -> list[int]:
    """Return the axes as written, so that a mean over the same axes is recognized as equal and computed once."""
    inputs = [] if dim is None else dim if isinstance(dim, list) else [dim]
    return [int(one) for one in inputs if rank] or list(range(rank))


def _apply_correction(variance: Var, x: Var, axes: list[int], correction: float) -> Var:
    """Multiply a mean of squares by n / max(n - correction, 0)."""
    if correction == 0:
        return variance
    sizes = [get_dims(x)[axis] for axis in axes]
    if all(isinstance(size, int) for size in sizes):
        count = float(np.prod(sizes))
        factor = np.float32(count / (count - correction)) if count > correction else np.float32(np.inf)
        return mb.mul(x=variance, y=cast_to(mb.const(val=factor), x.dtype))
    count = cast_to(mb.const(val=np.int32(1)), types.fp32)
    for size in sizes:
        count = mb.mul(x=count, y=np.float32(size) if isinstance(size, int) else cast_to(size, types.fp32))
    left = mb.maximum(x=mb.sub(x=count, y=np.float32(correction)), y=np.float32(0))
    # As 1 + correction / (n - correction), which is 1 where n is infinite at fp16, from 65520 on.
    factor = mb.add(x=mb.real_div(x=np.float32(correction), y=left), y=np.float32(1))
    return mb.mul(x=variance, y=cast_to(factor, x.dtype))


@PATCH.op("prod", "prod.dim_int")
def prod(context: Any, node: Any) -> None:
    """Lower prod(self, dtype=None), prod.dim_int(self, dim, keepdim=False, dtype=None); of ints and bools an int."""
    entire = node.kind == "prod" and len(node.inputs) <= 2
    inputs = bind_arguments(context, node, "self dtype=None" if entire else "self dim keepdim=False dtype=None")
    x = inputs.self
    x = cast_to(x, to_mil_type(inputs.dtype, node, x.dtype if types.is_float(x.dtype) else types.int32))
    axes = _read_axes(None if entire else to_python(inputs.dim, node, "dim"), x.rank)
    keepdim = False if entire else bool(to_python(inputs.keepdim, node, "keepdim"))
    add_result(
        context,
        node,
        mb.reduce_prod(x=x, axes=axes, keep_dims=keepdim, name=node.name) if x.rank else name_result(x, node),
    )


@PATCH.op("median", "median.dim", "kthvalue")
def lower_kth_value(context: Any, node: Any) -> None:
    """Lower median(self), median.dim(self, dim=-1, keepdim=False), kthvalue(self, k, dim=-1, keepdim=False)."""
    is_median = node.kind.startswith("median")
    entire = node.kind == "median" and len(node.inputs) == 1 and not node.kwinputs
    inputs = bind_arguments(context, node, "self dim=-1 keepdim=False" if is_median else "self k dim=-1 keepdim=False")
    x = mb.reshape(x=inputs.self, shape=[-1]) if entire or inputs.self.rank == 0 else inputs.self
    axis = normalize_axis(to_python(inputs.dim, node, "dim"), x.rank)
    count = None if is_median else int(to_python(inputs.k, node, "k"))
    picked = _pick_kth_value(x, axis, get_dims(x)[axis], count)
    if entire:
        add_result(context, node, name_result(picked[0], node))
        return
    if to_python(inputs.keepdim, node, "keepdim") and inputs.self.rank:
        picked = [mb.expand_dims(x=part, axes=[axis]) for part in picked]
    _add_two_results(context, node, *picked)


def _pick_kth_value(x: Var, axis: int, size: Size, count: int | None) -> list[Var]:
    """Pick the `count`-th smallest value along `axis`, and its index; None is half of the elements, rounded up."""
    if isinstance(size, int):
        count = (size + 1) // 2 if count is None else count
        smallest, indices = mb.topk(x=x, k=count, axis=axis, ascending=True)[:2]
    else:  # topk has a constant number of elements
        indices = mb.argsort(x=x, axis=axis, ascending=True)
        smallest = mb.gather_along_axis(x=x, indices=indices, axis=axis)
    place = np.int32(count - 1) if count is not None else mb.floor_div(
        x=mb.sub(x=size, y=np.int32(1)), y=np.int32(2))
    return [mb.gather(x=part, indices=place, axis=axis) for part in (smallest, indices)]


@PATCH.op("argmax", "argmin")
def argmax(context: Any, node: Any) -> None:
    """Lower argmax(self, dim=None, keepdim=False): without a dimension, the place in the flattened tensor."""
    inputs = bind_arguments(context, node, "self dim=None keepdim=False")
    x, dim = inputs.self, to_python(inputs.dim, node, "dim")
    x = cast_to(x, types.int32) if x.dtype == types.bool else x
    keepdim = bool(to_python(inputs.keepdim, node, "keepdim"))
    reduce = mb.reduce_argmax if node.kind == "argmax" else mb.reduce_argmin
    if dim is not None and x.rank:
        add_result(context, node, reduce(x=x, axis=normalize_axis(int(dim), x.rank), keep_dims=keepdim, name=node.name))
        return
    place = reduce(x=mb.reshape(x=x, shape=[-1]), axis=0, keep_dims=keepdim and x.rank > 0)
    add_result(
        context, node, name_result(mb.reshape(x=place, shape=[1] * x.rank) if keepdim and x.rank else place, node)
    )


def _add_two_results(context: Any, node: Any, first: Var, second: Var) -> None:
    """Add two results: with one name each in TorchScript, as a tuple for torch.export."""
    if len(node.outputs) == 2:
        for name, result in zip(node.outputs, (first, second), strict=True):
            context.add(result, torch_name=name)
    else:
        context.add((first, second), torch_name=node.name)
