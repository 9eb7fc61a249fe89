"""Windows of pools: their pads, and the sizes that are too large for some chips."""

from __future__ import annotations

from collections.abc import Sequence

from coremltools.converters.mil.mil import Operation, types

from ...ane.limits import MAX_POOL_SIDE, find_exceeded_limit, find_limit
from ...ir.query import get_const_value, is_symbolic
from ...passes.contract import FP32_UNSUPPORTED_REASON, Miss
from ...passes.targets import Generation, format_generations, get_generations_between

Pads = list[tuple[int, int]]
_SMALL_POOL_CHIPS = get_generations_between(last="a13")
"The chips that support small pools only."


def match_large_window(op: Operation, generations: Sequence[Generation], always: bool) -> tuple[str, Pads] | Miss:
    """Return what of `op` is unsupported, and its pads; or a miss with the reason why it is not rewritten."""
    unsupported = _describe_unsupported_window(op, generations, always)
    if unsupported is None:
        return Miss(op, "fits", near=False)
    if not unsupported:
        return Miss(op, f"unsupported on {format_generations(_SMALL_POOL_CHIPS)} only; choose one of them as the "
                        f"target")
    if op.x.dtype != types.fp16:
        return Miss(op, FP32_UNSUPPORTED_REASON)
    pads = _resolve_pads(op)
    return Miss(op, pads) if isinstance(pads, str) else (unsupported, pads)


def _describe_unsupported_window(op: Operation, generations: Sequence[Generation], always: bool) -> str | None:
    """Describe what is unsupported of the window or the stride of `op`.

    Return "" where it is unsupported on older chips only, and None where it is supported on all.
    """
    window, strides = read_kernel_sizes(op), read_strides(op)
    unsupported = [
        f"window {size} on axis {2 + axis}, the limit is {most}"
        for axis, (size, most) in enumerate(zip(window, find_max_window_sides(op, generations, always)))
        if size > most
    ]
    if not has_supported_strides(op, generations, always):
        unsupported.append(f"stride {max(strides)}")
    if unsupported:
        return " and ".join(unsupported)
    old = _select_small_pool_chips(generations)
    exceeded = find_exceeded_limit("pool-kernel", max(window), old) or find_exceeded_limit(
        "pool-stride", max(strides), old)
    return "" if exceeded else None


def find_max_window_sides(op: Operation, generations: Sequence[Generation], always: bool) -> list[int]:
    """Return the longest supported side of a window on each axis, the last axis being the width."""
    old = _select_small_pool_chips(generations)
    old_limit = find_limit("pool-kernel", old) if always or len(old) == len(generations) else None
    sides = [min(MAX_POOL_SIDE, old_limit.most if old_limit else MAX_POOL_SIDE)] * (op.x.rank - 2)
    width_limit = find_limit("max-pool-width", generations) if op.op_type == "max_pool" else None
    if width_limit:
        sides[-1] = min(sides[-1], width_limit.most)
    return sides


def has_supported_strides(op: Operation, generations: Sequence[Generation], always: bool) -> bool:
    """Return whether `generations` support the strides of `op`.

    Limits of old chips only count where all of `generations` are old ones, or with `always`.
    """
    old = _select_small_pool_chips(generations)
    counts = always or len(old) == len(generations)
    return not (counts and find_exceeded_limit("pool-stride", max(read_strides(op)), old))


def _select_small_pool_chips(generations: Sequence[Generation]) -> list[Generation]:
    return [generation for generation in generations if generation in _SMALL_POOL_CHIPS]


def read_kernel_sizes(op: Operation) -> list[int]:
    sizes: list[int] = get_const_value(op.kernel_sizes)
    return sizes


def read_strides(op: Operation) -> list[int]:
    strides: list[int] = get_const_value(op.strides, [1] * (op.x.rank - 2))
    return strides


def read_custom_pads(op: Operation) -> list[int]:
    """Return the pads that `op` states, before and after each axis in one list; zeros for another pad_type."""
    zeros = [0] * 6  # of up to three axes
    pads: list[int] = get_const_value(op.pad, zeros) if get_const_value(op.pad_type) == "custom" else zeros
    return pads


def _resolve_pads(op: Operation) -> Pads | str:
    """Return (before, after) for each axis for windows rounded down, or why the pads are not fixed numbers.

    Elements after the input that a last window of ceil_mode reads count as padding, too.
    """
    pad_type, ceil = get_const_value(op.pad_type), bool(get_const_value(op.ceil_mode, False))
    is_same = pad_type.startswith("same")
    custom_pads, pads = read_custom_pads(op), Pads()
    for axis, (size, stride) in enumerate(zip(read_kernel_sizes(op), read_strides(op))):
        extent, count = op.x.shape[2 + axis], op.outputs[0].shape[2 + axis]
        before, after = custom_pads[2 * axis:2 * axis + 2]
        if is_symbolic(extent):
            if stride > 1 and (ceil or is_same):
                return (f"{'ceil_mode' if ceil else f'pad_type {pad_type}'} depends on the input's size, which is "
                        f"symbolic")
            if is_same:
                before, after = _split_padding(size - 1, pad_type)
        else:
            total = (int(count) - 1) * stride + size - int(extent)
            if is_same:
                before, _ = _split_padding(max(total, 0), pad_type)
            after = max(total - before, 0)
        if max(before, after) >= size:
            return "a window may be entirely in the padding"
        pads.append((before, after))
    return pads


def _split_padding(total: int, pad_type: str) -> tuple[int, int]:
    small, large = total // 2, total - total // 2
    return (large, small) if pad_type == "same_lower" else (small, large)


def find_fully_covered_axes(op: Operation, pads: Pads) -> list[int]:
    """Return the axes (of x) on which one window covers all of the input."""
    covered = []
    for axis, (size, (before, _)) in enumerate(zip(read_kernel_sizes(op), pads), start=2):
        extent, count = op.x.shape[axis], op.outputs[0].shape[axis]
        if not is_symbolic(extent) and count == 1 and size - before >= int(extent):
            covered.append(axis)
    return covered
