"""Max pools with dilation or indices, `max_unpool2d`, average pools with a divisor, and windows that PyTorch drops.

A maximum over a window is computed along each axis in turn: the maximum of as many strided slices as the kernel is
long, of the tensor padded with -inf. A sum over a window is the average, padding included, times the window's size.
With ceil_mode and a stride above the kernel the last window may begin after the input: PyTorch drops it, MIL counts it.
Images without a batch get one for the pool. A pool over an entire flexible image is a reduction. With
`return_indices=True`, windows that do not overlap are reshaped to one axis, and `reduce_argmax` along it gives the
indices. `max_unpool2d` scatters to the indices.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types
from numpy.typing import NDArray

from ...passes.severity import Severity
from ..contract import Patch
from ..errors import NotConverted
from ..lowering import (
    add_result,
    bind_arguments,
    cast_to,
    get_dims,
    is_constant,
    is_same_size,
    lower_without_batch,
    name_result,
    to_python,
    to_size_vector,
)
from ..probes import find_fault

PATCH = Patch(code="TORCH128", severity=Severity.WRONG,
              title="max pools with dilation or indices, `max_unpool2d`, average pools with `divisor_override` and "
                    "pools without a batch are rejected; with ceil_mode a window after the input is counted",
              upstream=("none known",))

_MAX_PLACED_AXES = 2
"The most spatial axes of a pool with indices: the windows of three would have rank 7."


@PATCH.probe
def probe() -> str | None:
    import torch

    pools = torch.nn.functional
    return (find_fault(lambda x: pools.max_pool1d(x, 1, 2, ceil_mode=True), torch.arange(4.0).reshape(1, 1, 4))
            or find_fault(lambda x: pools.max_pool1d(x, 2, 1, dilation=2), torch.arange(5.0).reshape(1, 1, 5))
            or find_fault(lambda x: pools.avg_pool2d(x, 2, divisor_override=3), torch.arange(4.0).reshape(1, 1, 2, 2)))


@PATCH.op("max_pool1d", "max_pool2d", "max_pool3d", "max_pool1d_with_indices", "max_pool2d_with_indices",
          "max_pool3d_with_indices")
def max_pool(context: Any, node: Any) -> None:
    """Lower max_pool2d(self, kernel_size, stride=kernel_size, padding=0, dilation=1, ceil_mode=False)."""
    if _has_no_batch(context, node) and not _are_places_read(context, node):
        lower_without_batch(context, node, max_pool)
        return
    inputs = bind_arguments(context, node, "self kernel_size stride=None padding=0 dilation=1 ceil_mode=False")
    if _covers_image(inputs, node):
        _add_maxima(context, node, mb.reduce_max(x=inputs.self, axes=_list_axes(node), keep_dims=True))
        return
    count = int(node.kind.removeprefix("max_pool")[0])
    dilation = _read_per_axis(inputs.dilation, node, "dilation", count)
    if _are_places_read(context, node):
        _add_maxima_and_places(context, node, inputs, count)
        return
    if all(step == 1 for step in dilation) and len(node.inputs) > 2 and len(node.outputs) == 1:
        _convert_as_coremltools(context, node, inputs, count)
        return
    x, kernel = inputs.self, _read_per_axis(inputs.kernel_size, node, "kernel_size", count)
    stride = _read_per_axis(inputs.stride, node, "stride", count) if _is_stride_given(inputs.stride, node) else kernel
    padding, ceil = (
        _read_per_axis(inputs.padding, node, "padding", count),
        bool(to_python(inputs.ceil_mode, node, "ceil_mode")),
    )
    if all(step == 1 for step in dilation) and not ceil:
        pad = np.repeat(padding, 2)
        _add_maxima(context, node, mb.max_pool(x=x, kernel_sizes=kernel, strides=stride, pad_type="custom", pad=pad))
        return
    if not types.is_float(x.dtype) or not all(isinstance(size, int | np.integer) for size in x.shape[-count:]):
        option = "dilation" if any(step != 1 for step in dilation) else "ceil_mode=True with indices"
        raise NotConverted.at(node, f"{option} needs floats of static spatial sizes", "fix the sizes")
    for place in range(count):
        x = _compute_axis_maxima(
            x, x.rank - count + place, kernel[place], stride[place], padding[place], dilation[place], ceil
        )
    _add_maxima(context, node, x)


def _are_places_read(context: Any, node: Any) -> bool:
    """Return whether an op reads the indices of the maxima, or the graph returns them."""
    if not node.kind.endswith("with_indices"):
        return False
    graph = node.parent or context.torch_graph
    if len(node.outputs) > 1:
        return node.outputs[1] in graph.outputs or any(node.outputs[1] in each.inputs for each in graph.nodes)
    return any(each.kind == "getitem" and each.inputs[0] == node.name and each.inputs[1] == 1 for each in graph.nodes)


def _add_maxima_and_places(context: Any, node: Any, inputs: Any, count: int) -> None:
    """Add the maxima of windows that do not overlap, and their int32 indices in the flattened image, as torch does.

    Raises NotConverted for other windows and for flexible images.
    """
    x, kernel = inputs.self, _read_per_axis(inputs.kernel_size, node, "kernel_size", count)
    stride = _read_per_axis(inputs.stride, node, "stride", count) if _is_stride_given(inputs.stride, node) else kernel
    sizes = x.shape[-count:]
    padding, dilation = (_read_per_axis(getattr(inputs, name), node, name, count) for name in ("padding", "dilation"))
    is_static = all(isinstance(size, int | np.integer) for size in sizes)
    is_cut = is_static and any(size % window for size, window in zip(sizes, kernel, strict=True))
    if (stride != kernel or any(padding) or any(step != 1 for step in dilation) or not is_static
            or is_cut and to_python(inputs.ceil_mode, node, "ceil_mode") or count > _MAX_PLACED_AXES):
        raise NotConverted.at(node, "returns indices of maxima (return_indices=True) in windows that overlap, are "
                                    "padded, dilated, cut off (ceil_mode) or 3-D, or in a flexible image",
                              "use a stride equal to the kernel, no padding and a fixed size, or replace the unpooling "
                              "by another op, such as a nearest resize")
    width = int(sizes[-1])
    kept = [int(size) // window * window for size, window in zip(sizes, kernel, strict=True)]
    lead = get_dims(x)[:-count]
    if is_cut:
        axes = x.rank - count
        x = mb.slice_by_index(x=x, begin=[0] * x.rank, end=[0] * axes + kept,
                              end_mask=[True] * axes + [False] * count)
    counts = [size // window for size, window in zip(kept, kernel, strict=True)]
    pairs = [number for pair in zip(counts, kernel, strict=True) for number in pair]
    order = [0, *range(1, 2 * count, 2), *range(2, 2 * count + 1, 2)]
    windows = mb.transpose(x=mb.reshape(x=x, shape=[-1, *pairs]), perm=order)
    windows = mb.reshape(x=windows, shape=[-1, *counts, math.prod(kernel)])
    index = mb.reduce_argmax(x=windows, axis=-1, keep_dims=False)
    # the index of each window's first element in the image, and the distance of each element from it
    first = _list_places([range(0, size, window) for size, window in zip(kept, kernel, strict=True)], width)
    distances = _list_places([range(window) for window in kernel], width).reshape(-1)
    index = mb.add(x=mb.gather(x=distances, indices=index, axis=0), y=first[None])
    shape = to_size_vector([*lead, *counts])
    maxima = mb.reshape(x=mb.reduce_max(x=windows, axes=[-1], keep_dims=False), shape=shape, name=node.name)
    index = mb.reshape(x=index, shape=shape)
    if len(node.outputs) > 1:
        context.add(maxima, torch_name=node.outputs[0])
        context.add(index, torch_name=node.outputs[1])
    else:
        context.add((maxima, index), torch_name=node.name)


def _list_places(axes: list[range], width: int) -> NDArray[np.int32]:
    """Return the flat indices, in an image of `width` columns, of the elements at these indices of each axis."""
    indices = np.ix_(*axes)
    return np.asarray(indices[-1] + (indices[0] * width if len(axes) > 1 else 0), np.int32)


@PATCH.op("max_unpool2d")
def unpool_maxima(context: Any, node: Any) -> None:
    """Lower max_unpool2d(self, indices, output_size): scatter the elements of `self` into zeros."""
    inputs = bind_arguments(context, node, "self indices output_size")
    sizes = [int(size) for size in np.ravel(to_python(inputs.output_size, node, "output_size"))]
    x = inputs.self
    places = mb.reshape(x=cast_to(inputs.indices, types.int32), shape=[-1, math.prod(map(int, x.shape[-2:]))])
    values = mb.reshape(x=x, shape=mb.shape(x=places))
    # zeros computed from the indices, so that a flexible batch keeps its symbol
    zeros = mb.mul(x=mb.reduce_max(x=places, axes=[1], keep_dims=True), y=np.zeros((1, math.prod(sizes)), np.int32))
    filled = mb.scatter_along_axis(data=cast_to(zeros, x.dtype), indices=places, updates=values, axis=1, mode="update")
    add_result(context, node, mb.reshape(x=filled, shape=to_size_vector([*get_dims(x)[:-2], *sizes]), name=node.name))


def _add_maxima(context: Any, node: Any, x: Var) -> None:
    """Add the maxima as the result; their indices, a second output, have no value."""
    exported = node.kind.endswith("with_indices") and len(node.outputs) == 1
    context.add((name_result(x, node), None) if exported else name_result(x, node), torch_name=node.outputs[0])


def _compute_axis_maxima(x: Var, axis: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> Var:
    """Compute the maxima along one axis."""
    size, reach = int(x.shape[axis]), dilation * (kernel - 1) + 1
    places = (size + 2 * padding - reach + (stride - 1 if ceil else 0)) // stride + 1
    if ceil and (places - 1) * stride >= size + padding:
        places -= 1
    last = max((places - 1) * stride + reach - size - padding, 0)
    if padding or last:
        widths = [0] * (2 * axis) + [padding, last] + [0] * (2 * (x.rank - axis - 1))
        x = mb.pad(x=x, pad=widths, mode="constant", constant_val=types.nptype_from_builtin(x.dtype)(-np.inf))
    others = [place != axis for place in range(x.rank)]
    found = None
    for tap in range(kernel):
        begin, end = tap * dilation, tap * dilation + (places - 1) * stride + 1
        part = mb.slice_by_index(x=x, begin=[0 if other else begin for other in others], begin_mask=others,
                                 end=[0 if other else end for other in others], end_mask=others,
                                 stride=[1 if other else stride for other in others])
        found = part if found is None else mb.maximum(x=found, y=part)
    return found


@PATCH.op("avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool(context: Any, node: Any) -> None:
    """Lower avg_pool2d(self, kernel_size, stride, padding=0, ceil_mode=False, count_include_pad=True,
    divisor_override).
    """
    if _has_no_batch(context, node):
        lower_without_batch(context, node, avg_pool)
        return
    inputs = bind_arguments(
        context,
        node,
        "self kernel_size stride=None padding=0 ceil_mode=False count_include_pad=True divisor_override=None",
    )
    count = int(node.kind.removeprefix("avg_pool")[0])
    if _covers_image(inputs, node) and inputs.divisor_override is None:
        add_result(context, node, mb.reduce_mean(x=inputs.self, axes=_list_axes(node), keep_dims=True,
                                                 name=node.name))
        return
    divisor = to_python(inputs.divisor_override, node, "divisor_override")
    if divisor is None:
        _convert_as_coremltools(context, node, inputs, count)
        return
    if to_python(inputs.ceil_mode, node, "ceil_mode"):
        raise NotConverted.at(node, "divisor_override with ceil_mode is not supported", "pad the input instead")
    kernel = _read_per_axis(inputs.kernel_size, node, "kernel_size", count)
    stride = _read_per_axis(inputs.stride, node, "stride", count) if _is_stride_given(inputs.stride, node) else kernel
    padding = np.repeat(_read_per_axis(inputs.padding, node, "padding", count), 2)
    average = mb.avg_pool(x=inputs.self, kernel_sizes=kernel, strides=stride, pad_type="custom", pad=padding,
                          exclude_padding_from_average=False)
    add_result(context, node, mb.mul(x=average, y=np.float32(np.prod(kernel) / divisor), name=node.name))


def _list_axes(node: Any) -> list[int]:
    """Return the spatial axes of a pool, counted from the last one."""
    return list(range(-int(node.kind.split("_pool")[1][0]), 0))


def _has_no_batch(context: Any, node: Any) -> bool:
    return bool(context[node.inputs[0]].rank == len(_list_axes(node)) + 1)


def _covers_image(inputs: Any, node: Any) -> bool:
    """Return whether the kernel, which the model computes, has the sizes of the image."""
    kernel, count = inputs.kernel_size, len(_list_axes(node))
    if is_constant(kernel) or not isinstance(kernel, list) or len(kernel) != count:
        return False
    padding = to_python(inputs.padding, node, "padding")
    return not np.any(padding) and all(map(is_same_size, get_dims(inputs.self)[-count:], (
        size.val.item() if isinstance(size, Var) and size.val is not None else size for size in kernel)))


def _convert_as_coremltools(context: Any, node: Any, given: Any, count: int) -> None:
    """Convert with coremltools' own lowering, then drop the windows that lie after the input, as PyTorch does."""
    from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

    kernel = _read_per_axis(given.kernel_size, node, "kernel_size", count)
    stride = _read_per_axis(given.stride, node, "stride", count) if _is_stride_given(given.stride, node) else kernel
    padding = _read_per_axis(given.padding, node, "padding", count) if given.padding is not None else [0] * count
    ceil, sizes = bool(to_python(given.ceil_mode, node, "ceil_mode")), given.self.shape[-count:]
    if count == 3 and ceil and any(padding) and not all(isinstance(size, int | np.integer) for size in sizes):
        _pool_by_rounding_down(context, node, given, kernel, stride, padding)
        return
    # With padding MIL drops a window after the input as well, and a window within the kernel's reach begins inside.
    skips = [ceil and not pad and step > reach for pad, step, reach in zip(padding, stride, kernel)]
    if any(skip and not isinstance(size, int | np.integer) for skip, size in zip(skips, sizes)):
        if any(padding):
            raise NotConverted.at(node, "ceil_mode with padding and a stride above the kernel, on a flexible size",
                                  "fix the size, or pad the input and leave ceil_mode out")
        _pool_by_rounding_down(context, node, given, kernel, stride, padding)
        return
    _TORCH_OPS_REGISTRY.name_to_func_mapping[node.kind](context, node)
    behind = [int(skip and -(-(int(size) - reach) // step) * step >= size) if skip else 0
              for skip, size, reach, step in zip(skips, sizes, kernel, stride)]
    if any(behind):
        y = context[node.outputs[0]]
        kept = [size - extra for size, extra in zip(y.shape, [0] * (y.rank - count) + behind)]
        context.add(mb.slice_by_size(x=y, begin=[0] * y.rank, size=kept), torch_name=node.outputs[0], override=True)


def _pool_by_rounding_down(
    context: Any, node: Any, given: Any, kernel: list[int], stride: list[int], padding: list[int]
) -> None:
    """Pool flexible sizes in ceil_mode with as many windows as PyTorch has for every size.

    PyTorch counts min(ceil((n + 2 p - k) / s) + 1, ceil((n + p) / s)) windows, those that begin inside the input or the
    padding before it. Both are floor((n + p + after - k) / s) + 1, with p + s - 1 and k - 1 as the padding after: the
    smaller of the two gives the minimum. Padding is left out of averages, as PyTorch leaves out what ceil_mode adds.
    """
    if any(padding) and node.kind.startswith("avg") and to_python(given.count_include_pad, node, "count_include_pad"):
        raise NotConverted.at(node, "averages padding in ceil_mode, on a flexible size",
                              "pass count_include_pad=False, fix the size, or leave ceil_mode out")
    pads = [pad for before, reach, step in zip(padding, kernel, stride)
            for pad in (before, min(before + step, reach) - 1)]
    common = {"x": given.self, "kernel_sizes": kernel, "strides": stride, "pad_type": "custom", "pad": pads}
    if node.kind.startswith("max"):
        _add_maxima(context, node, mb.max_pool(**common))
    else:
        add_result(context, node, mb.avg_pool(**common, exclude_padding_from_average=True, name=node.name))


def _is_stride_given(value: Any, node: Any) -> bool:
    return value is not None and np.size(to_python(value, node, "stride")) > 0


def _read_per_axis(value: Any, node: Any, name: str, count: int) -> list[int]:
    """Return one number for each spatial axis."""
    numbers = [int(number) for number in np.ravel(to_python(value, node, name))]
    return numbers * count if len(numbers) == 1 else numbers
