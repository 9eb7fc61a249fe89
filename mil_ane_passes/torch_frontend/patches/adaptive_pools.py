"""Adaptive pools of flexible sizes, and in 3-D.

coremltools lowers 2-D adaptive pools of flexible sizes to one element (a global pool) and rejects those to several
elements, 1-D ones, pools along one of two axes, those of a flexible batch, and all in 3-D. Here a pool to one element
is a reduction, one whose windows all have the same size a plain pool, and any other a reduction for each window. An
axis that keeps its size (None in torch) can be flexible in all of them.

The windows of a flexible size (pyramid pooling of PSPNet and UperNet) are slices whose bounds are computed in int32:
four ops for each window. Averages and maxima are separable, so each axis needs as many windows as its output size. Two
alternatives are worse. A matrix product with computed weights needs fewer ops for many windows, but cannot compute a
maximum, rounds the weights to fp16, and makes infinite elements NaN in the windows that do not contain them. A gather
of all windows needs one more axis: rank 6 for volumes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from coremltools.converters.mil.frontend.torch import ops
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from ...ir.query import is_symbolic
from ..contract import Patch
from ..lowering import add_result, bind_arguments, get_dims, has_static_shape, is_same_size, name_result, to_python
from ..probes import find_fault

PATCH = Patch(code="TORCH175",
              title="adaptive pools of a flexible length, of a flexible image to several elements, and all in 3-D, are "
                    "rejected",
              upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    pool = torch.nn.functional
    return find_fault(lambda x: pool.adaptive_avg_pool1d(x, 1), torch.ones(1, 2, 4), flexible=(2,)) or find_fault(
        lambda x: pool.adaptive_avg_pool1d(x, 2), torch.ones(1, 2, 4), flexible=(0,)) or find_fault(
        lambda x: pool.adaptive_avg_pool2d(x, 2), torch.ones(1, 2, 4, 4), flexible=(2, 3)) or find_fault(
        lambda x: pool.adaptive_avg_pool3d(x, 2), torch.ones(1, 2, 4, 4, 4))


@PATCH.op("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d",
          "adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_pool(context: Any, node: Any) -> None:
    """Lower adaptive_avg_pool1d(self, output_size) to adaptive_max_pool3d(self, output_size)."""
    inputs = bind_arguments(context, node, "self output_size")
    x, count, maxima = inputs.self, int(node.kind[-2]), node.kind.startswith("adaptive_max")
    given = inputs.output_size
    if isinstance(given, list | tuple):  # in place of None, torch reads the size of the input
        kept = _find_kept_axes(context, node, count)
        given = [None if isinstance(size, Var) and (is_kept or is_same_size(own, size)) else size
                 for own, size, is_kept in zip(get_dims(x)[-count:], given, kept, strict=True)]
    given = to_python(given, node, "output_size")
    asked = [None if size is None else int(size) for size in np.ravel(given)]
    sizes = [own if size is None else size for size, own in zip(asked, x.shape[-count:], strict=True)]
    changed = [axis for axis, size in zip(range(-count, 0), sizes, strict=True) if not _is_size(x.shape[axis], size)]
    if any(sizes[axis] != 1 for axis in changed):
        if count < 3 and None not in asked and has_static_shape(x):
            getattr(ops, node.kind)(context, node)
            return
        result = _pool_windows(x, sizes, maxima)
    elif changed:
        result = (mb.reduce_max if maxima else mb.reduce_mean)(x=x, axes=changed, keep_dims=True)
    else:
        result = x
    add_result(context, node, name_result(result, node, x))


def _find_kept_axes(context: Any, node: Any, count: int) -> list[bool]:
    """Return, for each of the last `count` axes, whether torch.export records the size of the input for the result.

    MIL's symbols cannot show it: an exported program computes the size of a layer's result from that of the program's
    input, for which MIL has another symbol. All are False where no shapes are recorded, as in traces.
    """
    source = next((each for each in context.torch_graph.nodes if each.name == node.inputs[0]), None)
    pooled, own = (getattr((getattr(each, "meta", None) or {}).get("val"), "shape", None) for each in (node, source))
    if pooled is None or own is None:
        return [False] * count
    # as texts: a comparison of torch's symbols adds a guard to the program
    return [str(size) == str(mine) for size, mine in zip(pooled[-count:], own[-count:], strict=True)]


def _is_size(own: Any, size: Any) -> bool:
    return own is size or isinstance(own, int | np.integer) and int(own) == size


def _pool_windows(x: Var, sizes: list[Any], maxima: bool) -> Var:
    """Build one pool if all windows of an axis have the same size, else a reduction for each window of each axis."""
    own = x.shape[-len(sizes):]
    changed = [(each, size) for each, size in zip(own, sizes, strict=True) if not _is_size(each, size)]
    if any(is_symbolic(each) or each % size for each, size in changed):
        first = x.rank - len(sizes)
        for axis, (extent, size) in enumerate(zip(get_dims(x)[first:], sizes, strict=True), start=first):
            x = _pool_axis(x, axis, extent, size, mb.reduce_max if maxima else mb.reduce_mean)
        return x
    steps = [1 if _is_size(each, size) else int(each) // size for each, size in zip(own, sizes, strict=True)]
    missing = len(sizes) + 2 - x.rank
    batch = mb.expand_dims(x=x, axes=list(range(missing))) if missing else x
    common = {"x": batch, "kernel_sizes": steps, "strides": steps, "pad_type": "valid"}
    result = mb.max_pool(**common) if maxima else mb.avg_pool(**common)
    return mb.squeeze(x=result, axes=list(range(missing))) if missing else result


def _pool_axis(x: Var, axis: int, extent: Any, size: int, reduce: Any) -> Var:
    """Reduce `size` windows along an axis, which overlap where `size` does not divide it.

    `extent` is the size of the axis: a number, or a Var where it is flexible.
    """
    if _is_size(x.shape[axis], size):
        return x
    if size == 1 and isinstance(extent, Var):  # one window, the entire axis
        entire: Var = reduce(x=x, axes=[axis], keep_dims=True)
        return entire
    others = [other != axis for other in range(x.rank)]
    windows = []
    for begin, end in _find_bounds(extent, size, axis, x.rank):
        window = mb.slice_by_index(x=x, begin=begin, end=end, begin_mask=others, end_mask=others)
        windows.append(reduce(x=window, axes=[axis], keep_dims=True))
    joined: Var = mb.concat(values=windows, axis=axis)
    return joined


def _find_bounds(extent: Any, size: int, axis: int, rank: int) -> Iterator[tuple[Any, Any]]:
    """Yield `begin` and `end` of `slice_by_index` for each window: int32 [rank], zero for the other axes.

    Window i is from floor(i * extent / size) to ceil((i + 1) * extent / size). The bounds of a flexible extent are
    computed together, as the rows of one matrix. Products stay below 2^31 for extents up to 2^31 / size.
    """
    factors = np.zeros((2 * size, rank), np.int32)
    factors[:, axis] = [place for window in range(size) for place in (window, window + 1)]
    rounding = np.tile(np.array([[0], [size - 1]], np.int32), (size, 1))
    if not isinstance(extent, Var):
        bounds = (factors * extent + rounding) // size
        yield from zip(bounds[0::2], bounds[1::2], strict=True)
        return
    computed = mb.floor_div(x=mb.add(x=mb.mul(x=extent, y=factors), y=rounding), y=np.int32(size))
    for row in range(0, 2 * size, 2):
        begin, end = (mb.slice_by_index(x=computed, begin=[place, 0], end=[place + 1, 0], end_mask=[False, True],
                                        squeeze_mask=[True, False]) for place in (row, row + 1))
        yield begin, end
