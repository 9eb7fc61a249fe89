"""`Tensor.unfold(dim, size, step)`: the windows of one dimension, with the elements of a window as last dimension.

With a constant size, the result is a concat of slices: whole windows, or every step-th element where that needs fewer
slices. With a flexible size, or very many windows, it is `sliding_windows`. Windows of a tensor of rank 5 have rank 6,
which `ane.convert` computes with fewer axes where their users allow it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..contract import Patch
from ..lowering import add_result, bind_arguments, cast_to, name_result, normalize_axis, to_python

PATCH = Patch(code="TORCH149",
              title="`Tensor.unfold` is not implemented", upstream=("none known",))

#: the most slices of one concat; for more windows `sliding_windows` is used
_MAX_SLICES = 64


@PATCH.op("unfold", "unfold_copy")
def unfold(context: Any, node: Any) -> None:
    """Lower unfold(self, dimension, size, step)."""
    inputs = bind_arguments(context, node, "self dimension size step")
    x = inputs.self
    size, step = to_python(inputs.size, node, "size"), to_python(inputs.step, node, "step")
    if x.rank == 0:
        add_result(context, node, mb.expand_dims(x=x, axes=[0], name=node.name))
        return
    axis = normalize_axis(to_python(inputs.dimension, node, "dimension"), x.rank)
    to_last = [place for place in range(x.rank + 1) if place != axis + 1] + [axis + 1]
    length = x.shape[axis]
    count = (int(length) - size) // step + 1 if isinstance(length, int | np.integer) else None
    if count is None or min(count, size) > _MAX_SLICES:
        entire = cast_to(x, types.int32) if x.dtype == types.bool else x
        windows = mb.transpose(x=mb.sliding_windows(x=entire, axis=axis, size=size, stride=step), perm=to_last)
        windows = cast_to(windows, x.dtype)
    elif count <= size:
        slices = [_slice_strided(x, axis, place * step, size, 1) for place in range(count)]
        windows = mb.transpose(x=mb.stack(values=slices, axis=axis), perm=to_last)
    else:
        windows = mb.stack(values=[_slice_strided(x, axis, place, count, step) for place in range(size)], axis=x.rank)
    add_result(context, node, name_result(windows, node))


def _slice_strided(x: Var, axis: int, start: int, count: int, step: int) -> Var:
    """Return `count` elements from `start` on, every `step`-th."""
    here = [place == axis for place in range(x.rank)]
    return mb.slice_by_index(x=x, begin=[start if this else 0 for this in here],
                             end=[start + (count - 1) * step + 1 if this else 0 for this in here],
                             stride=[step if this else 1 for this in here], end_mask=[not this for this in here])
