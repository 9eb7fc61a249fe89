"""`affine_grid` as a separate value, and with `align_corners=False`, torch's default.

coremltools does not compute the grid; it fuses `affine_grid` and `grid_sample` into the op `affine`. That op does not
support `align_corners=False` (as documented), but coremltools emits it anyway, and the image is silently wrong; padding
modes other than zeros, and other users of the grid, are rejected. Here `affine` is used only where it is correct;
otherwise the grid is computed by a product of a constant with theta, or, for a flexible image, by sums of theta's
columns times the places along each axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.frontend.torch import ops
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ...passes.severity import Severity
from ..contract import Patch
from ..creation import read_sizes
from ..lowering import (
    Size,
    add_result,
    bind_arguments,
    cast_to,
    is_constant,
    make_range,
    name_result,
    to_python,
    to_tensor,
)
from ..probes import find_fault

PATCH = Patch(code="TORCH172", severity=Severity.WRONG,
              title="`affine_grid` is miscompiled with `align_corners=False`, and rejected as a separate value",
              upstream=("none known",))

_IMAGE_RANK = 4
_FUSED_SETTINGS = [0, 0, True]
"Arguments of `grid_sample` that the op `affine` has: bilinear, zeros outside, `align_corners`."


@PATCH.probe
def probe() -> str | None:
    import torch

    def sample(image: Any) -> Any:
        grid = functional.affine_grid(torch.tensor([[[1.0, 0.2, 0.1], [0.1, 1.0, 0.3]]]), [1, 1, 4, 4],
                                      align_corners=False)
        return functional.grid_sample(image, grid, align_corners=False)

    def make_value(theta: Any) -> Any:
        return functional.affine_grid(theta, [1, 1, 2, 3], align_corners=False) * 2

    functional = torch.nn.functional
    return find_fault(sample, torch.arange(16.0).reshape(1, 1, 4, 4)) or find_fault(make_value, torch.ones(1, 2, 3))


@PATCH.op("affine_grid_generator")
def affine_grid_generator(context: Any, node: Any) -> None:
    """Lower affine_grid_generator(theta, size, align_corners)."""
    inputs = bind_arguments(context, node, "theta size align_corners")
    extents = read_sizes(inputs.size, node)
    align_corners = bool(to_python(inputs.align_corners, node, "align_corners"))
    if not all(isinstance(extent, int) for extent in extents):
        add_result(context, node, name_result(_make_flexible_grid(inputs.theta, extents[2:], align_corners), node))
        return
    # coremltools looks a computed theta up by its name in MIL, which it has in the trace as well, or not.
    if len(extents) == _IMAGE_RANK and _is_one_op(node, align_corners) and (
            is_constant(inputs.theta) or inputs.theta.name in context):
        ops.affine_grid_generator(context, node)
        return
    places = _make_places(extents[2:], align_corners)
    places = places.astype(types.nptype_from_builtin(inputs.theta.dtype))
    flat = mb.matmul(x=places, y=inputs.theta, transpose_y=True)
    add_result(context, node, mb.reshape(x=flat, shape=[extents[0], *extents[2:], len(extents) - 2], name=node.name))


def _make_flexible_grid(theta: Var, extents: Sequence[Size], align_corners: bool) -> Var:
    """Make the grid of an image or a volume of `extents` (..., y, x), in [batch, *extents, len(extents)]."""
    rank = len(extents)

    def get_column(number: int) -> Var:
        column = mb.slice_by_index(x=theta, begin=[0, 0, number], end=[0, 0, number + 1],
                                   begin_mask=[True, True, False], end_mask=[True, True, False],
                                   squeeze_mask=[False, False, True])
        return mb.expand_dims(x=column, axes=[*range(1, rank + 1)])

    grid = get_column(rank)
    for number, extent in enumerate(reversed(extents)):
        shape = [1] * (rank + 2)
        shape[rank - number] = -1
        places = mb.reshape(x=cast_to(_make_flexible_places(extent, align_corners), theta.dtype), shape=shape)
        grid = mb.add(x=grid, y=mb.mul(x=get_column(number), y=places))
    return grid


def _make_flexible_places(extent: Size, align_corners: bool) -> Var:
    """Make the places along an axis as fp32: (2 i - n + 1) / n, or by n - 1 with `align_corners`; a single one is 0."""
    before_last = mb.sub(x=extent, y=np.int32(1))
    places = mb.sub(x=mb.mul(x=make_range(extent), y=np.int32(2)), y=before_last)
    count = mb.maximum(x=before_last, y=np.int32(1)) if align_corners else extent
    return mb.real_div(x=cast_to(places, types.fp32), y=cast_to(to_tensor(count), types.fp32))


def _is_one_op(node: Any, align_corners: bool) -> bool:
    """Return whether the op that coremltools makes of a grid and of what samples at it is right, in a trace."""
    if node.parent is None or not align_corners:  # an exported program has no parent
        return False
    readers = [each for each in node.parent.nodes if node.name in each.inputs]
    literals = {each.name: each.attr.get("value") for each in node.parent.nodes if each.kind == "constant"}
    return (bool(readers) and node.name not in node.parent.outputs
            and all(each.kind == "grid_sampler" and each.inputs[1] == node.name
                    and [literals.get(name) for name in each.inputs[2:]] == _FUSED_SETTINGS for each in readers))


def _make_places(extents: list[int], align_corners: bool) -> np.ndarray[Any, Any]:
    """Make the places of an image as rows (x, y, 1), or of a volume as rows (x, y, z, 1), in [1, places, rank + 1]."""
    axes = [np.linspace(-1, 1, extent) * (1 if align_corners else (extent - 1) / extent) if extent > 1 else np.zeros(1)
            for extent in extents]
    found = np.meshgrid(*axes, indexing="ij")
    rows = np.stack([*reversed(found), np.ones(extents)], axis=-1)
    return rows.reshape(1, -1, len(extents) + 1)
