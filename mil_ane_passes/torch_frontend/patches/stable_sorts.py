"""`sort` and `argsort` with the argument `stable`: equal elements keep their order; `topk(sorted=False)`.

Core ML does not define the order in which `argsort` returns equal elements, so a stable order takes a second one: each
element of the first order gets the number of its group of equal elements, counted from the front, and the integer keys
group * size + index are sorted. No two keys are equal, and they fit int32 for up to 32,768 elements; a larger static
size is rejected. The order of several NaN among each other is undefined. With `stable=False` the lowering is
coremltools' own.

`topk(sorted=False)`, which coremltools rejects before iOS16, may return its elements in any order: here they are
sorted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil._deployment_compatibility import AvailableTarget
from coremltools.converters.mil.frontend.torch import ops
from coremltools.converters.mil.frontend.torch.utils import TorchFrontend
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types
from coremltools.converters.mil.mil.block import is_current_opset_version_compatible_with

from ..contract import Patch
from ..errors import NotConverted
from ..lowering import Size, add_result, add_results, bind_arguments, cast_to, get_dims, normalize_axis, to_python
from ..probes import find_fault
from ..slice_assignment import slice_axis

PATCH = Patch(code="TORCH178",
              title="`sort` and `argsort` with the argument `stable` are rejected, and `topk(sorted=False)` before "
                    "iOS16",
              upstream=("https://github.com/apple/coremltools/pull/2782",))

_LARGEST_SIZE = 1 << 15
"Keys of this many elements are below 2^30, and their indices fit int16, to which coremltools may convert indices."


@PATCH.probe
def probe() -> str | None:
    import torch

    return find_fault(lambda x: torch.argsort(x, stable=True), torch.tensor([2.0, 1.0, 2.0, 1.0]))


@PATCH.op("sort", "argsort", "sort.stable", "argsort.stable")
def sort(context: Any, node: Any) -> None:
    """Lower sort(self, *, stable, dim=-1, descending=False) and argsort of the same arguments."""
    only_indices = node.kind.startswith("argsort")
    scripted = context.frontend == TorchFrontend.TORCHSCRIPT
    if len(node.inputs) < 4 if scripted else not node.kind.endswith(".stable"):
        (ops.argsort if only_indices else ops.sort)(context, node)
        return
    inputs = bind_arguments(context, node, "self stable=False dim=-1 descending=False")
    x = inputs.self
    stable, descending = (bool(to_python(getattr(inputs, name), node, name)) for name in ("stable", "descending"))
    if x.rank == 0:
        values, indices = x, mb.const(val=np.int32(0))
    else:
        axis = normalize_axis(to_python(inputs.dim, node, "dim"), x.rank)
        numbers = cast_to(x, types.int32) if x.dtype == types.bool else x
        indices = mb.argsort(x=numbers, axis=axis, ascending=not descending)
        values = mb.gather_along_axis(x=numbers, indices=indices, axis=axis)
        if stable:
            indices = _order_equal_elements(values, indices, axis, node)
        values = cast_to(values, x.dtype)
    if only_indices:
        add_result(context, node, mb.identity(x=indices, name=node.name))
    else:
        add_results(context, node, [values, indices])


@PATCH.op("topk")
def topk(context: Any, node: Any) -> None:
    """Lower topk(self, k, dim=-1, largest=True, sorted=True), sorted where the opset has no other order."""
    if is_current_opset_version_compatible_with(AvailableTarget.iOS16):
        ops.topk(context, node)
        return
    inputs = bind_arguments(context, node, "self k dim=-1 largest=True sorted=True")
    dim, largest = (to_python(getattr(inputs, name), node, name) for name in ("dim", "largest"))
    add_results(context, node, list(mb.topk(x=inputs.self, k=inputs.k, axis=int(dim), ascending=not largest)))


def _order_equal_elements(values: Var, indices: Var, axis: int, node: Any) -> Var:
    """Sort the indices of equal elements; `values` are sorted, and `indices` are those of their elements."""
    size: Size = get_dims(values)[axis]
    if isinstance(size, int):
        if size > _LARGEST_SIZE:
            raise NotConverted.at(node, f"sorts {size:,} elements in a stable order; at most {_LARGEST_SIZE:,} are "
                                        "supported",
                                  "sort without stable=True, if the order of equal elements does not matter")
        if size <= 1:
            return indices
    changes = cast_to(mb.not_equal(x=slice_axis(values, axis, 1, None), y=slice_axis(values, axis, None, -1)),
                      types.int32)
    first = mb.mul(x=slice_axis(indices, axis, 0, 1), y=np.int32(0))
    groups = mb.cumsum(x=mb.concat(values=[first, changes], axis=axis), axis=axis)
    keys = mb.add(x=mb.mul(x=groups, y=size), y=indices)
    return mb.gather_along_axis(x=indices, indices=mb.argsort(x=keys, axis=axis, ascending=True), axis=axis)
