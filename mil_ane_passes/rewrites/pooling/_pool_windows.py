"""Windows of pools: their pads, and the sizes that are too large for some chips."""

from __future__ import annotations

from collections.abc import Sequence

from coremltools.converters.mil.mil import Operation, types

from ...ane.limits import MAX_POOL_SIDE, find_exceeded_limit, find_limit
from ...ir.query import get_const_value, is_symbolic
from ...passes.contract import FP32_UNSUPPORTED_REASON, Miss
from ...passes.targets import Generation, format_generations, get_generations_between

__all__ = [
    "Pads",
    "describe_unsupported_window",
    "find_fully_covered_axes",
    "find_max_window_sides",
    "flatten_pads",
    "has_supported_strides",
    "match_large_window",
    "resolve_pool_pads",
]

Pads = list[tuple[int, int]]
_SMALL_POOL_CHIPS = get_generations_between(last="a13")


def resolve_pool_pads(op: Operation) -> Pads | str:
    """Return (before, after) for each axis for windows rounded down, or why the pads are not fixed numbers.

    Elements after the input that a last window of ceil_mode reads count as padding, too.
    """
    kind, ceil = get_const_value(op.pad_type), bool(get_const_value(op.ceil_mode, False))
    given = get_const_value(op.pad, [0] * 6) if kind == "custom" else [0] * 6
    pads: Pads = []
    for axis, size in enumerate(_read_kernel_sizes(op)):
        extent, count, stride = op.x.shape[2 + axis], op.outputs[0].shape[2 + axis], _read_strides(op)[axis]
        before, after = given[2 * axis:2 * axis + 2]
        if is_symbolic(extent):
            if stride > 1 and (ceil or kind.startswith("same")):
                return f"{'ceil_mode' if ceil else f'pad_type {kind}'} pads by the input's size, which is symbolic"
            before, after = _split_padding(size - 1, kind) if kind.startswith("same") else (before, after)
        else:
            total = (int(count) - 1) * stride + size - int(extent)
            if kind.startswith("same"):
                before, after = _split_padding(max(total, 0), kind)
            after = max(total - before, 0)
        if max(before, after) >= size:
            return "a window may lie in the padding alone"
        pads.append((before, after))
    return pads


def _read_kernel_sizes(op: Operation) -> list[int]:
    sizes: list[int] = get_const_value(op.kernel_sizes)
    return sizes


def _split_padding(total: int, kind: str) -> tuple[int, int]:
    small, large = total // 2, total - total // 2
    return (large, small) if kind == "same_lower" else (small, large)


def _read_strides(op: Operation) -> list[int]:
    strides: list[int] = get_const_value(op.strides, [1] * (op.x.rank - 2))
    return strides


def has_supported_strides(op: Operation, generations: Sequence[Generation], always: bool) -> bool:
    """Return whether `generations` support the strides of `op`.

    Limits of old chips only count where all of `generations` are old ones, or with `always`.
    """
    looked_at = [one for one in generations if one in _SMALL_POOL_CHIPS]
    old_only = len(looked_at) == len(generations)
    return not ((old_only or always) and find_exceeded_limit("pool-stride", max(_read_strides(op)), looked_at))


def find_max_window_sides(op: Operation, generations: Sequence[Generation], always: bool) -> list[int]:
    """Return the longest supported side of a window on each axis, the last axis being the width."""
    looked_at = [one for one in generations if one in _SMALL_POOL_CHIPS]
    old = find_limit("pool-kernel", looked_at) if always or len(looked_at) == len(generations) else None
    most = [min(MAX_POOL_SIDE, old.most if old else MAX_POOL_SIDE)] * (op.x.rank - 2)
    wide = find_limit("max-pool-width", generations) if op.op_type == "max_pool" else None
    if wide:
        most[-1] = min(most[-1], wide.most)
    return most


def describe_unsupported_window(op: Operation, generations: Sequence[Generation], always: bool) -> str | None:
    """Describe what is unsupported of the window or the stride of `op`.

    Return "" where it is unsupported on older chips only, and None where it is supported on all.
    """
    window = _read_kernel_sizes(op)
    found = [
        f"window {size} on axis {2 + axis}, {most} fit"
        for axis, (size, most) in enumerate(zip(window, find_max_window_sides(op, generations, always)))
        if size > most
    ]
    if not has_supported_strides(op, generations, always):
        found.append(f"stride {max(_read_strides(op))}")
    if found:
        return " and ".join(found)
    old = [one for one in generations if one in _SMALL_POOL_CHIPS]
    return (
        ""
        if find_exceeded_limit("pool-kernel", max(window), old)
        or find_exceeded_limit("pool-stride", max(_read_strides(op)), old)
        else None
    )


def match_large_window(op: Operation, generations: Sequence[Generation], always: bool) -> tuple[str, Pads] | Miss:
    """Return what of `op` is unsupported, and its pads; or a miss with the reason why it is not rewritten."""
    large = describe_unsupported_window(op, generations, always)
    if large is None:
        return Miss(op, "fits", near=False)
    if not large:
        return Miss(op, f"refused by {format_small_pool_chips()} only; name one of them as the target")
    if op.x.dtype != types.fp16:
        return Miss(op, FP32_UNSUPPORTED_REASON)
    pads = resolve_pool_pads(op)
    return Miss(op, pads) if isinstance(pads, str) else (large, pads)


def find_fully_covered_axes(op: Operation, pads: Pads) -> list[int]:
    """Return the axes (of x) on which one window covers all of the input."""
    found = []
    for axis, (size, (before, _)) in enumerate(zip(_read_kernel_sizes(op), pads)):
        extent, count = op.x.shape[2 + axis], op.outputs[0].shape[2 + axis]
        if not is_symbolic(extent) and count == 1 and size - before >= int(extent):
            found.append(2 + axis)
    return found


def flatten_pads(pads: Pads) -> list[int]:
    """Return pads as MIL stores them: before and after of each axis in one list."""
    return [amount for pair in pads for amount in pair]


def format_small_pool_chips() -> str:
    """Format the chips that support small pools only."""
    return format_generations(_SMALL_POOL_CHIPS)
