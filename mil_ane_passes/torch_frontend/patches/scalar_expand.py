"""`expand` and `view` to no dimensions give a tensor of rank 0; `expand` to flexible sizes keeps those that are stated.

coremltools concatenates the sizes, which fails without any ("Concat got 0 values"), also for `expand_as` of two tensors
of rank 0 and for `broadcast_tensors` of such. A view of one element with no dimensions silently keeps those of its
operand, so that later ops broadcast to other shapes. A traced `flatten` of rank 0 is rejected, and `broadcast_to` is
not implemented. A constant of several dimensions that is squeezed to none keeps one ("Types should have zero-rank
ndarray input"), and an element of a constant bool or fp16 tensor is rejected ("Unable to convert type bool"). An
`expand` to a flexible size makes all sizes of the result unknown, so that later ops which need one are rejected
("Cannot convert expression to float").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from coremltools.converters.mil.frontend.torch import ops
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types
from coremltools.converters.mil.mil.ops.defs._utils import solve_slice_by_index_slice

from ...passes.severity import Severity
from ..contract import Patch
from ..lowering import (
    MAX_RANK,
    add_result,
    bind_arguments,
    broadcast_to,
    get_dims,
    has_static_shape,
    is_constant,
    name_result,
)
from ..probes import find_fault

PATCH = Patch(code="TORCH163", severity=Severity.WRONG,
              title="`view(())` silently keeps the dimensions of its operand; `expand` fails or loses sizes beside "
                    "flexible ones; `broadcast_to` is not implemented",
              upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    return find_fault(lambda x: x.view(()) + x[0], torch.ones(1, 1)) or find_fault(
        lambda x: x.sum().expand(()) + x, torch.arange(3.0)) or find_fault(
        lambda x: x[:, :1].expand(x.shape[0], 4).chunk(2, 1)[1], torch.ones(3, 4), flexible=(0,))


@PATCH.op("expand", "expand_copy", "expand_as", "broadcast_to")
def expand(context: Any, node: Any) -> None:
    """Lower expand(self, size, *, implicit=False), broadcast_to(self, size), expand_as(self, other).

    Those of fixed sizes of other ranks than 0 are coremltools' own. Where a size is flexible, it computes the repeats
    of all axes, so that also the stated sizes of the result are unknown to later ops.
    """
    inputs = bind_arguments(context, node, "self size")
    size = inputs.size
    rank = (size.rank if node.kind == "expand_as" else size.shape[0]) if isinstance(size, Var) else len(size)
    if inputs.self.rank == 0 and rank == 0:
        add_result(context, node, mb.identity(x=inputs.self, name=node.name))
        return
    wanted = get_dims(size) if node.kind == "expand_as" else size
    if isinstance(wanted, Var) and wanted.val is not None:
        wanted = wanted.val.tolist()
    is_fixed = isinstance(wanted, Var) or is_constant(wanted) and has_static_shape(inputs.self)
    if is_fixed or types.is_complex(inputs.self.dtype):
        ops.expand_as(context, node) if node.kind == "expand_as" else ops.expand(context, node)
        return
    own = [1] * (rank - inputs.self.rank) + get_dims(inputs.self)
    sizes = [_to_size(each) for each in wanted]
    result = broadcast_to(inputs.self, [mine if size == -1 else size for mine, size in zip(own, sizes, strict=True)])
    add_result(context, node, name_result(result, node, inputs.self))


def _to_size(given: Any) -> Any:
    """Return a size as an int where it is constant, else as the Var that computes it."""
    value = given.val if isinstance(given, Var) else given
    return given if value is None else int(value)


@PATCH.op("broadcast_tensors")
def broadcast_tensors(context: Any, node: Any) -> None:
    """Lower broadcast_tensors(tensors): those of rank 0 stay as they are; all others are coremltools' own."""
    tensors = bind_arguments(context, node, "tensors").tensors
    if isinstance(tensors, Var):  # numbers in a traced list are concatenated
        tensors = [mb.const(val=each) for each in tensors.val] if tensors.val is not None else mb.split(
            x=tensors, split_sizes=[1] * tensors.shape[0], axis=0)
        tensors = [each if each.rank == 0 else mb.squeeze(x=each, axes=[0]) for each in tensors]
    if all(not isinstance(each, Var) or each.rank == 0 for each in tensors):
        context.add(tensors, torch_name=node.name)
        return
    ops.broadcast_tensors(context, node)


@PATCH.op("view", "view_copy", "_unsafe_view", "reshape")
def view(context: Any, node: Any) -> None:
    """Lower view(self, size) and reshape(self, shape) to rank 0, and exported ones to ranks above 5.

    coremltools lowers all others.
    """
    inputs = bind_arguments(context, node, "self size")
    x, size = inputs.self, inputs.size
    if sizes := _find_exported_sizes(node, size):
        add_result(context, node, mb.reshape(x=x, shape=sizes, name=node.name))
        return
    if (size.shape != (0,) if isinstance(size, Var) else size != []) or x.rank == 0 or types.is_complex(x.dtype):
        ops.view(context, node)
        return
    add_result(context, node, mb.squeeze(x=x, axes=list(range(x.rank)), name=node.name))


def _find_exported_sizes(node: Any, size: Any) -> list[int]:
    """Return the sizes of an exported view to a rank above 5, with -1 for its only flexible size; [] for other views.

    In `view(b, h // 8, w // 8, 8, 8, -1)` of a flexible height MIL does not know the last size, but torch.export does.
    """
    known = getattr((getattr(node, "meta", None) or {}).get("val"), "shape", ())
    sizes = [each if isinstance(each, int) else -1 for each in known]
    is_high = isinstance(size, list) and len(size) == len(sizes) > MAX_RANK
    return sizes if is_high and sizes.count(-1) == 1 else []


@PATCH.replace_function("coremltools.converters.mil.mil.ops.defs.iOS15.tensor_transformation",
                        "squeeze.value_inference")
def infer_squeezed_value(host: Callable[..., Any], squeeze: Any) -> Any:
    """Infer the value of a squeezed constant, which is a number if no dimension is left."""
    x, axes = squeeze.x.val, None if squeeze.axes is None else tuple(squeeze.axes.val)
    if x is None or np.squeeze(x, axis=axes).ndim:
        return host(squeeze)
    return x.reshape(-1)[0]


@PATCH.replace_function("coremltools.converters.mil.mil.ops.defs.iOS15.tensor_transformation",
                        "slice_by_index.value_inference")
def infer_sliced_value(host: Callable[..., Any], read: Any) -> Any:
    """Infer the value of a slice of a constant, which is a number if all dimensions are squeezed."""
    x = read.x.val
    bounds = [None if each is None else each.val for each in (
        read.begin, read.end, read.stride, read.begin_mask, read.end_mask, read.squeeze_mask)]
    if x is None or x.dtype not in (np.bool_, np.float16) or bounds[0] is None or bounds[1] is None or (
            bounds[-1] is None or not all(bounds[-1])):
        return host(read)
    return x[solve_slice_by_index_slice(x.shape, *bounds)].reshape(-1)[0]


@PATCH.op("flatten")
def flatten(context: Any, node: Any) -> None:
    """Lower flatten(self, start_dim=0, end_dim=-1) of rank 0, which has one dimension; all others are coremltools'."""
    x = bind_arguments(context, node, "self start_dim=0 end_dim=-1").self
    if x.rank == 0 and not types.is_complex(x.dtype):
        add_result(context, node, mb.expand_dims(x=x, axes=[0], name=node.name))
        return
    ops.flatten(context, node)
