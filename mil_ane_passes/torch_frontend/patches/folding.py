"""`fold` of overlapping blocks and `unfold` of images: (transposed) convolutions with a kernel of ones and zeros.

Each position in the kernel is a channel of its own; a transposed convolution puts it in its place and adds up overlaps.
Elements at the far edges that no block reaches are zero. `fold` supports flexible output sizes, `unfold` a flexible
batch, height and width. coremltools folds only blocks that do not overlap, to constant sizes. It unfolds with a weight
of all channels by all channels, in which all but one are zero, and rejects a flexible batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..contract import Patch
from ..errors import NotConverted
from ..lowering import Size, add_result, bind_arguments, get_dims, to_python, to_size_vector
from ..probes import find_fault

PATCH = Patch(code="TORCH118",
              title="`fold` of overlapping blocks or to a flexible size, and `unfold` of a flexible batch are rejected",
              upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    overlapping, images = torch.arange(8.).reshape(1, 4, 2), torch.arange(6.).reshape(1, 1, 2, 3)
    return find_fault(lambda x: torch.nn.functional.fold(x, (2, 3), 2), overlapping) or find_fault(
        lambda x: torch.nn.functional.unfold(x, 2), images, flexible=(0,))


@PATCH.op("im2col")
def unfold_image(context: Any, node: Any) -> None:
    """Lower im2col(self, kernel_size, dilation, padding, stride) of [N, C, H, W] or [C, H, W], flexible but for C."""
    inputs = bind_arguments(context, node, "self kernel_size dilation padding stride")
    kernel, dilation, padding, stride = (_read_numbers(inputs, node, name)
                                         for name in ("kernel_size", "dilation", "padding", "stride"))
    x = inputs.self
    batched = x.rank == 4
    if not isinstance(x.shape[-3], int | np.integer):
        raise NotConverted.at(node, "needs a static number of channels", "fix the size")
    if not batched:
        x = mb.expand_dims(x=x, axes=[0])
    channels, taps = int(x.shape[1]), int(np.prod(kernel))
    weight = np.tile(np.eye(taps, dtype=types.nptype_from_builtin(x.dtype)).reshape(taps, 1, *kernel),
                     (channels, 1, 1, 1))
    blocks = mb.conv(x=x, weight=weight, strides=stride, dilations=dilation, groups=channels, pad_type="custom",
                     pad=np.repeat(padding, 2))
    sizes = [get_dims(x)[0]] if batched else []
    add_result(context, node, mb.reshape(x=blocks, shape=to_size_vector([*sizes, channels * taps, -1]), name=node.name))


def _read_numbers(inputs: Any, node: Any, name: str) -> list[int]:
    return [int(number) for number in np.ravel(to_python(getattr(inputs, name), node, name))]


@PATCH.op("col2im")
def fold(context: Any, node: Any) -> None:
    """Lower col2im(self, output_size, kernel_size, dilation, padding, stride)."""
    inputs = bind_arguments(context, node, "self output_size kernel_size dilation padding stride")
    kernel, dilation, padding, stride = (_read_numbers(inputs, node, name)
                                         for name in ("kernel_size", "dilation", "padding", "stride"))
    size = _read_output_sizes(inputs, node)
    x = inputs.self
    batched = x.rank == 3
    if not isinstance(x.shape[-2], int | np.integer):
        raise NotConverted.at(node, "needs a static number of channels", "fix the size")
    if not batched:
        x = mb.expand_dims(x=x, axes=[0])
    taps = int(np.prod(kernel))
    channels = int(x.shape[1]) // taps
    grid: list[Any] = [_count_blocks(*each) for each in zip(size, padding, dilation, kernel, stride, strict=True)]
    if isinstance(grid[0], Var) or isinstance(grid[1], Var):  # one count follows from the number of blocks
        grid[0 if isinstance(grid[0], Var) else 1] = -1
    x = mb.reshape(x=x, shape=to_size_vector([get_dims(x)[0], channels * taps, *grid]))
    weight = np.tile(np.eye(taps, dtype=np.float32).reshape(taps, 1, *kernel), (channels, 1, 1, 1))
    x = mb.conv_transpose(x=x, weight=weight, strides=stride, dilations=dilation, groups=channels, pad_type="valid")
    rest = [by - 1 if isinstance(entire, Var) else  # the most elements at the end that no block reaches
            max(entire + 2 * pad - (count - 1) * by - step * (width - 1) - 1, 0)
            for entire, pad, count, by, step, width in zip(size, padding, grid, stride, dilation, kernel, strict=True)]
    if any(rest):
        x = mb.pad(x=x, pad=[0, 0, 0, 0, 0, rest[0], 0, rest[1]], mode="constant", constant_val=np.float32(0))
    cut = [pad > 0 or isinstance(entire, Var) and more > 0
           for pad, entire, more in zip(padding, size, rest, strict=True)]
    if any(cut):
        ends = [mb.add(x=entire, y=np.int32(pad)) if isinstance(entire, Var) else entire + pad
                for entire, pad in zip(size, padding, strict=True)]
        x = mb.slice_by_index(x=x, begin=[0, 0, *padding], end=to_size_vector([0, 0, *ends]),
                              begin_mask=[True, True, False, False],
                              end_mask=[True, True, *(not each for each in cut)])
    add_result(context, node, mb.identity(x=x if batched else mb.squeeze(x=x, axes=[0]), name=node.name))


def _read_output_sizes(inputs: Any, node: Any) -> list[Size]:
    given = inputs.output_size
    if isinstance(given, Var) and given.val is None:
        known = np.ravel(given.sym_val) if given.sym_val is not None else [None, None]
        given = [int(size) if isinstance(size, int | np.integer) else
                 mb.slice_by_index(x=given, begin=[place], end=[place + 1], squeeze_mask=[True])
                 for place, size in enumerate(known)]
    if not isinstance(given, list | tuple):
        return list(_read_numbers(inputs, node, "output_size"))
    return [size if isinstance(size, Var) and size.val is None else int(to_python(size, node, "output_size"))
            for size in given]


def _count_blocks(entire: Size, pad: int, step: int, width: int, by: int) -> Size:
    """Return the number of blocks along an axis of this output size."""
    reach = 2 * pad - step * (width - 1) - 1
    if not isinstance(entire, Var):
        return (entire + reach) // by + 1
    count: Var = mb.add(x=mb.floor_div(x=mb.add(x=entire, y=np.int32(reach)), y=np.int32(by)), y=np.int32(1))
    return count
