"""`pad`: circular, with negative widths (which crop), with computed widths, of integers and of bools.

MIL pads floats with a constant, by reflection and by repetition of the edge, with widths of 0 and more. A negative
width is a slice. Circular padding is a concat of the far end, the tensor and the near end, after the crop by negative
widths, one axis after the other. Integers and bools get blocks of the constant by concat. Reflection and repetition
work on the last two axes only (Core ML rejects others when it loads the model): on the others the slices that torch
repeats are concatenated. Core ML's `pad` fails with computed widths at run time, according to a comment in coremltools:
for widths that the model computes, such as those to a multiple of a window, mode constant concatenates blocks of the
constant, and other modes gather by computed indices. All other cases are left to coremltools, whose pass for
reflections overlooks that a concat may have the same tensor twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ...utils.text_format import add_article
from ..contract import Patch
from ..creation import make_filled, read_sizes
from ..errors import NotConverted
from ..lowering import Size, add_result, bind_arguments, cast_to, get_dims, is_constant, to_python, to_size_vector
from ..probes import find_fault

PATCH = Patch(
    code="TORCH127",
    title="`pad` does not support circular mode, negative or computed widths, integers and bools",
    upstream=("https://github.com/apple/coremltools/issues/2576",),
)

_REPEATED_OFFSETS: dict[str, Any] = {
    "reflect": lambda width: range(1, width + 1),
    "replicate": lambda width: [0] * width,
}
"""The distances from the edge of the slices that are repeated, nearest to the edge first."""


@PATCH.probe
def probe() -> str | None:
    import torch

    return find_fault(lambda x: torch.nn.functional.pad(x, (-1, 2)), torch.arange(4.)) \
        or find_fault(lambda x: torch.nn.functional.pad(x, (1, 2), mode="circular"), torch.arange(8.).reshape(1, 2, 4))


@PATCH.replace_function("coremltools.converters.mil.mil.passes.defs.optimize_tensor_operation",
                        "use_reflection_padding._match_pattern")
def match_reflection(host: Callable[..., bool], concat: Any, block: Any) -> bool:
    """Replace a concat of slices by a reflection with coremltools, if it has the entire tensor once.

    coremltools takes circular padding by the size of the tensor, which has it twice, for a reflection of no width.
    """
    values = list(concat.inputs["values"]) if concat.op_type == "concat" else []
    return values.count(values[len(values) // 2] if values else None) <= 1 and host(concat, block)


@PATCH.op("pad", "constant_pad_nd")
def pad(context: Any, node: Any) -> None:
    """Lower pad(self, pad, mode="constant", value=0), constant_pad_nd(self, pad, value=0)."""
    constant = node.kind.startswith("constant")
    inputs = bind_arguments(context, node, "self pad value=0" if constant else "self pad mode='constant' value=0")
    mode = "constant" if constant else to_python(inputs.mode, node, "mode")
    x = inputs.self
    if not is_constant(inputs.pad):
        _lower_computed_widths(context, node, x, read_sizes(inputs.pad, node), mode, inputs.value)
        return
    flat = [int(width) for width in np.ravel(to_python(inputs.pad, node, "pad"))]
    widths = [(0, 0)] * (x.rank - len(flat) // 2) + list(zip(flat[-2::-2], flat[-1::-2], strict=True))
    if mode == "circular":
        x = _crop_negative_widths(x, widths)
        for axis, (before, after) in enumerate(widths):
            x = _pad_circular(x, axis, before, after, node)
    elif mode in _REPEATED_OFFSETS and min(flat) >= 0 and (any(map(any, widths[:-2])) or not types.is_float(x.dtype)):
        for axis, (before, after) in enumerate(widths):
            parts = [_slice_axis(x, axis, place, place + 1) for place in _REPEATED_OFFSETS[mode](before)[::-1]]
            ends = [_slice_axis(x, axis, -1 - place, -place) for place in _REPEATED_OFFSETS[mode](after)]
            x = mb.concat(values=[*parts, x, *ends], axis=axis) if parts or ends else x
    elif min(flat, default=0) >= 0 and types.is_float(x.dtype) and _has_vars(inputs.pad):
        number = types.nptype_from_builtin(x.dtype)(to_python(inputs.value, node, "value") or 0)
        x = mb.pad(x=x, pad=[width for pair in widths for width in pair], mode=mode, constant_val=number)
    elif min(flat, default=0) >= 0 and types.is_float(x.dtype):
        _lower_with_coremltools(context, node)
        return
    elif mode == "constant":
        x = _pad_constant(_crop_negative_widths(x, widths), widths, to_python(inputs.value, node, "value") or 0)
    else:
        raise NotConverted.at(node, f"pads {add_article(types.builtin_to_string(x.dtype))} with widths {flat} in "
                              f"mode '{mode}'",
                              "slice first, then pad")
    add_result(context, node, mb.identity(x=x, name=node.name))


def _has_vars(widths: Any) -> bool:
    """Return whether widths are vars, if constant ones, which coremltools takes to be computed."""
    return isinstance(widths, list | tuple) and any(isinstance(each, Var) for each in widths)


def _lower_computed_widths(
    context: Any, node: Any, x: Var, flat: Sequence[Size], mode: str, value: Any
) -> None:
    """Pad by widths of which some are computed; a negative one crops."""
    if mode != "constant":
        for place in range(0, len(flat), 2):
            if flat[place] != 0 or flat[place + 1] != 0:
                x = _select_padded(x, x.rank - 1 - place // 2, flat[place], flat[place + 1], mode)
        add_result(context, node, mb.identity(x=x, name=node.name))
        return
    number = to_python(value, node, "value") or 0
    for place in range(0, len(flat), 2):
        axis = x.rank - 1 - place // 2
        before, after = flat[place], flat[place + 1]
        if is_constant(before) and is_constant(after):
            widths = [(0, 0)] * x.rank
            widths[axis] = before, after
            x = _pad_constant(_crop_negative_widths(x, widths), widths, number)
            continue
        x = _append_block(x, axis, after, number, node, in_front=False)
        x = _append_block(x, axis, before, number, node, in_front=True)
    add_result(context, node, mb.identity(x=x, name=node.name))


def _select_padded(x: Var, axis: int, before: Size, after: Size, mode: str) -> Var:
    """Build `x` padded along an axis in mode reflect, replicate or circular: a gather by computed indices."""
    extent = mb.gather(x=mb.shape(x=x), indices=np.int32(axis), axis=0)
    before, after = (np.int32(width) if is_constant(width) else width for width in (before, after))
    last = mb.sub(x=extent, y=np.int32(1))
    places = mb.range_1d(start=mb.sub(x=np.int32(0), y=before), end=mb.add(x=extent, y=after), step=np.int32(1))
    if mode == "reflect":
        places = mb.sub(x=last, y=mb.abs(x=mb.sub(x=last, y=mb.abs(x=places))))
    elif mode == "replicate":
        places = mb.minimum(x=mb.maximum(x=places, y=np.int32(0)), y=last)
    else:
        cropped, after = (mb.maximum(x=mb.sub(x=np.int32(0), y=width), y=np.int32(0)) for width in (before, after))
        kept = mb.sub(x=mb.sub(x=extent, y=cropped), y=after)
        places = mb.add(x=mb.mod(x=mb.add(x=mb.sub(x=places, y=cropped), y=kept), y=kept), y=cropped)
    return mb.gather(x=x, indices=places, axis=axis)


def _append_block(x: Var, axis: int, width: Size, value: Any, node: Any, *, in_front: bool) -> Var:
    """Put a block of the value in front of `x`, or after it.

    The block is one element longer, and the result is cut: Core ML has no tensors without elements, and a computed
    width may be 0, or negative, as in padding to a length that `x` exceeds.
    """
    if is_constant(width):
        if width < 0:
            raise NotConverted.at(node, f"pads by computed widths and crops by {-width}", "slice first, then pad")
        if width == 0:
            return x
    dims = get_dims(x)
    one, zero = np.int32(1), np.int32(0)
    added = width if is_constant(width) else mb.maximum(x=width, y=zero)
    cropped = 0 if is_constant(width) else mb.maximum(x=mb.sub(x=zero, y=width), y=zero)
    one_more, cut = (each + 1 if is_constant(each) else mb.add(x=each, y=one) for each in (added, cropped))
    block = make_filled([*dims[:axis], one_more, *dims[axis + 1:]], value, x.dtype)
    joined = mb.concat(values=[block, x] if in_front else [x, block], axis=axis)
    place, masks = [0] * x.rank, [each != axis for each in range(x.rank)]
    entire = [True] * x.rank
    if in_front:
        begin = to_size_vector([*place[:axis], cut, *place[axis + 1:]])
        return mb.slice_by_index(x=joined, begin=begin, end=place, begin_mask=masks, end_mask=entire)
    back = -cut if is_constant(cut) else mb.sub(x=zero, y=cut)
    end = to_size_vector([*place[:axis], back, *place[axis + 1:]])
    return mb.slice_by_index(x=joined, begin=place, end=end, begin_mask=entire, end_mask=masks)


def _lower_with_coremltools(context: Any, node: Any) -> None:
    from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

    _TORCH_OPS_REGISTRY.name_to_func_mapping["pad"](context, node)


def _slice_axis(x: Var, axis: int, begin: int, end: int) -> Var:
    """Return `x[begin:end]` along the axis; an end of 0 is the end of the axis."""
    begins, ends, rest = [0] * x.rank, [0] * x.rank, [True] * x.rank
    size = x.shape[axis]
    if end == 0 and isinstance(size, int | np.integer):
        end = int(size)  # a pass of coremltools 8.3 fails for a slice without any end
    begins[axis], ends[axis], rest[axis] = begin, end, end == 0
    return mb.slice_by_index(x=x, begin=begins, end=ends, begin_mask=[each == 0 for each in begins], end_mask=rest)


def _pad_circular(x: Var, axis: int, before: int, after: int, node: Any) -> Var:
    """Put the last `before` elements in front and the first `after` elements at the end.

    Raises NotConverted for a width above the size.
    """
    size = x.shape[axis]
    if isinstance(size, int | np.integer) and max(before, after) > size:
        raise NotConverted.at(node, f"pads by {max(before, after)} in circular mode, more than the {size} elements of "
                                    "the axis")
    parts = [_slice_axis(x, axis, -before, 0)] if before > 0 else []
    parts += [x, _slice_axis(x, axis, 0, after)] if after > 0 else [x]
    return mb.concat(values=parts, axis=axis) if len(parts) > 1 else x


def _crop_negative_widths(x: Var, widths: Sequence[tuple[int, int]]) -> Var:
    """Crop `x` by negative widths."""
    for axis, (before, after) in enumerate(widths):
        if min(before, after) < 0:
            x = _slice_axis(x, axis, max(-before, 0), min(after, 0))
    return x


def _pad_constant(x: Var, widths: Sequence[tuple[int, int]], value: Any) -> Var:
    """Pad `x` with the value where a width is positive, in the dtype of `x`."""
    flat = [max(width, 0) for pair in widths for width in pair]
    if not any(flat):
        return x
    if x.dtype == types.bool:
        return cast_to(_pad_constant(cast_to(x, types.int32), widths, bool(value)), types.bool)
    if types.is_float(x.dtype):
        return mb.pad(x=x, pad=flat, mode="constant", constant_val=types.nptype_from_builtin(x.dtype)(value))
    for axis, pair in enumerate(widths):
        before, after = (
            [make_filled([*get_dims(x)[:axis], width, *get_dims(x)[axis + 1 :]], value, x.dtype)] if width > 0 else []
            for width in pair
        )
        x = mb.concat(values=[*before, x, *after], axis=axis) if before or after else x
    return x
