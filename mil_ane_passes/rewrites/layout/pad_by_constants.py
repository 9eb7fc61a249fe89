"""Replace pads with a nonzero constant."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.block_editor import get_first_op
from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import get_const_value, get_consumers, is_symbolic
from ...passes.contract import FP32_UNSUPPORTED_REASON, Community, Exactness, Example, Hit, Miss, Rewrite
from ...passes.examples import make_example
from ...rules.resizing import PadConstantNonzero
from ._pad_amounts import PadAmounts, read_pad_amounts

_FP16_BYTES = 2
"Bytes of an fp16 number."


class PadByConstants(Rewrite):
    """Replace a pad with a nonzero constant by a concat of constant blocks, or by a zero pad and a constant border.

    why     Core ML contains a message that the ANE pads with zero only; its conditions are unknown.
    when    pad with mode constant, a nonzero fill and constant amounts, in fp16. The value is concatenated with
            constant blocks, axis by axis. If these have a symbolic size, or more than `max_bytes`, the value is padded
            with zero, and a constant with the fill in the border and -0.0 inside is added; if neither is possible, the
            op is skipped. A pad of minus infinity whose users are all max_pools becomes the padding of these.
    exact   bitwise: elements are moved, and x + -0.0 is x for every x, including zeros of both signs, infinities and
            NaN. The border is added to zeros, and 0 + fill is the fill. A max_pool pads with minus infinity.
    cost    the constants: blocks of the padded size, or a border of the size of one output slice. A concat per axis, or
            a pad and an add. None for a max_pool.

    before
        %y: fp16[1, 4, 10, 11] = pad(x=%x, pad=[1, 1, 1, 2], constant_val=1.0)
    after
        %0: fp16[1, 4, 10, 8] = concat(values=(<fp16[1, 4, 1, 8]>, %x, <fp16[1, 4, 1, 8]>), axis=2)
        %y: fp16[1, 4, 10, 11] = concat(values=(<fp16[1, 4, 10, 1]>, %0, <fp16[1, 4, 10, 2]>), axis=3)
    """

    fixes = (PadConstantNonzero,)
    stage = "decompose"
    exactness = Exactness.BITWISE
    preset = "full"
    roots = ("pad", "max_pool")
    evidence = (
        Community('a string in Core ML: "Constnt Pad fill mode with non-zero values is not supported on ANE"; no model '
                  "that was unsupported for it is published",
                  source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/coreml_dispatch.md", date="2026"),
    )

    max_bytes: int = 1 << 20
    "Maximum bytes of constants that one pad may add."

    def match(self, op: Operation) -> Hit | Miss:
        if op.op_type == "max_pool":
            result = _match_padded_pool(op)
            if isinstance(result, Hit) and not _is_read_by_pools_only(op.x):
                return Miss(op, "the pad before it has other users", near=False)
            return result
        if get_const_value(op.mode, "constant") != "constant":
            return Miss(op, "repeats values", near=False)
        fill = get_const_value(op.constant_val, 0.0)
        if fill == 0:
            return Miss(op, "pads with zero", near=False)
        if op.x.dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        padded = read_pad_amounts(op)
        if padded is None:
            return Miss(op, "the amount of padding is dynamic")
        if _is_read_by_pools_only(op.outputs[0]):
            return Miss(op, "all users are max_pools, which pad with minus infinity themselves", near=False)
        sizes = {"a border": _count_border_bytes(op.x, padded), "blocks": _count_slab_bytes(op.x, padded)}
        fits = [form for form, size in sizes.items() if size is not None and size <= self.max_bytes]
        if not fits:
            known = [size for size in sizes.values() if size is not None]
            if not known:
                return Miss(op, "the padding has a dynamic size")
            return Miss(op, f"the constants take {min(known)} bytes, max_bytes={self.max_bytes}")
        form = fits[-1]  # blocks are preferred: no pad and no addition over the output
        return Hit(op, note=f"pads with {fill:g}: {form} of {sizes[form]} bytes", form=form, padded=padded, fill=fill)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        op = hit.op
        if op.op_type == "max_pool":
            return rebuild_op(mb, op, x=op.x.op.x, pad_type="custom", pad=hit.pad)
        if hit.form == "blocks" or not hit.padded:
            return _concat_slabs(mb, op.x, hit.padded, hit.fill)
        zeros = mb.pad(x=op.x, pad=get_const_value(op.pad), mode="constant", constant_val=np.float16(0))
        filled: Var = mb.add(x=zeros, y=_build_border_const(mb, op.x, hit.padded, hit.fill))
        return filled

    def examples(self) -> Iterable[Example]:
        yield _make_pad_example("an image", (1, 4, 8, 8), [1, 1, 1, 2], 1.0)
        yield _make_pad_example("a sequence", (1, 3, 8), [0, 0, 0, 0, 2, 1], -1e4, opset=ct.target.iOS15)
        yield _make_pad_example("on one side", (2, 8), [3, 0], np.inf)
        yield _make_pad_example("three axes", (2, 3, 4, 5), [1, 0, 0, 2, 1, 1], -0.5)
        yield _make_pad_example("flexible batch", (None, 3, 4), [1, 1, 2, 0], 2.0)
        yield _make_pad_example("flexible length", (1, 3, None), [1, 2], 2.0)
        yield _make_pad_example("nothing", (2, 3), [0, 0, 0, 0], 2.0)
        yield make_example("before a max_pool", partial(_build_padded_pool, pad=[1, 1, 1, 1]), x=(1, 2, 7, 8))
        yield make_example("more than its windows", partial(_build_padded_pool, pad=[1, 3, 0, 0]), x=(1, 2, 7, 8))
        yield _make_pad_example("all flexible", (None, 3, None), [1, 2], 2.0,
                                reason="the padding has a dynamic size")
        yield _make_pad_example("large", (1, 2, 4, 4), [1, 1, 1, 2], 1.0, options={"max_bytes": 64},
                                reason="the constants take 84 bytes, max_bytes=64")
        yield _make_pad_example("a border", (4, 8, 4, 4), [1, 1, 1, 2], 1.0, options={"max_bytes": 84})
        yield _make_pad_example("zeros", (2, 3), [1, 1], 0, reason="pads with zero")
        yield _make_pad_example("fp32", (2, 3), [1, 1], 1.0, dtype=types.fp32, reason=FP32_UNSUPPORTED_REASON)


def _match_padded_pool(op: Operation) -> Hit | Miss:
    """Return a hit where `op` is a max_pool that can pad itself as the pad before it does, else a miss."""
    pad = op.x.op if op.op_type == "max_pool" else None
    if (
        pad is None
        or pad.op_type != "pad"
        or get_const_value(pad.mode, "constant") != "constant"
        or get_const_value(pad.constant_val, 0.0) != -math.inf
    ):
        return Miss(op, "its input was not padded with minus infinity", near=False)
    padded = read_pad_amounts(pad)
    if (
        padded is None
        or min(padded, default=2) < 2  # batch or channels, which a pool does not pad
        or get_const_value(op.pad_type) not in ("valid", "custom")
        or get_const_value(op.ceil_mode, False)
    ):
        return Miss(op, "its own pads and those of the pad before it are not constant")
    own = get_const_value(op.pad) if get_const_value(op.pad_type) == "custom" else [0] * 2 * (op.x.rank - 2)
    sizes = get_const_value(op.kernel_sizes)
    total = [own[2 * axis + side] + padded.get(axis + 2, (0, 0))[side] for axis in range(len(sizes)) for side in (0, 1)]
    if any(amount >= sizes[number // 2] for number, amount in enumerate(total)):
        return Miss(op, f"padded by {max(total)}, more than its windows of {max(sizes)} cover")
    return Hit(op, note="pads with minus infinity itself", pad=total)


def _is_read_by_pools_only(var: Var) -> bool:
    """Return whether all readers of `var` are max_pools that can pad themselves."""
    readers = [] if var.consuming_blocks else get_consumers(var)
    return bool(readers) and all(isinstance(_match_padded_pool(each), Hit) for each in readers)


def _count_border_bytes(x: Var, padded: PadAmounts) -> int | None:
    """Count the bytes of `_build_border_const`; None where an axis that is padded is symbolic."""
    extents = [x.shape[axis] for axis in padded]
    if any(map(is_symbolic, extents)):
        return None
    return _FP16_BYTES * math.prod(int(extent) + sum(pair) for extent, pair in zip(extents, padded.values()))


def _count_slab_bytes(x: Var, padded: PadAmounts) -> int | None:
    """Count the bytes that `_concat_slabs` adds; None where the extent of another axis of a slab is symbolic."""
    total, extents = 0, list(x.shape)
    for axis, pair in padded.items():
        beside = [extent for number, extent in enumerate(extents) if number != axis]
        if any(map(is_symbolic, beside)):
            return None
        total += _FP16_BYTES * sum(set(pair)) * math.prod(map(int, beside))
        extents[axis] += sum(pair)
    return total


def _concat_slabs(mb: RewriteBuilder, x: Var, padded: PadAmounts, fill: float) -> Var:
    """Concat blocks of `fill` to `x`, one axis after the other."""
    for axis, (before, behind) in padded.items():
        shape = [int(extent) if number != axis else 0 for number, extent in enumerate(x.shape)]
        values = [*_build_slab(mb, shape, axis, before, fill), x, *_build_slab(mb, shape, axis, behind, fill)]
        x = mb.concat(values=values, axis=axis)
    return x


def _build_slab(mb: RewriteBuilder, beside: Sequence[int], axis: int, amount: int, fill: float) -> list[Var]:
    """Build a block `amount` thick along `axis`, or none for 0."""
    if not amount:
        return []
    shape = tuple(amount if number == axis else extent for number, extent in enumerate(beside))
    key = ("slab", _encode_fill_bits(fill), shape)
    return [_build_shared_const(mb, key, lambda: np.full(shape, fill, np.float16))]


def _encode_fill_bits(fill: float) -> bytes:
    """Return the bits of `fill`, which differ for 0.0 and -0.0 and are equal for NaN and itself."""
    return np.float16(fill).tobytes()


def _build_shared_const(mb: RewriteBuilder, key: Any, make: Callable[[], np.ndarray[Any, Any]]) -> Var:
    """Return the constant called `key`, shared by all its users in this block."""

    def build_const() -> Any:
        with mb.at(get_first_op(mb.block), key[0]):
            return mb.const(val=make())

    constant: Var = mb.once(key, build_const)
    return constant


def _build_border_const(mb: RewriteBuilder, x: Var, padded: PadAmounts, fill: float) -> Var:
    """Build a constant of `fill` around -0.0, which changes no number when added, zeros of both signs included."""
    shape = tuple(int(x.shape[axis]) + sum(padded[axis]) if axis in padded else 1 for axis in range(x.rank))

    def make_border() -> np.ndarray[Any, Any]:
        border = np.full(shape, fill, np.float16)
        middle = [slice(None)] * len(shape)
        for axis, (before, behind) in padded.items():
            middle[axis] = slice(before, shape[axis] - behind)
        border[tuple(middle)] = -0.0
        return border

    return _build_shared_const(mb, ("border", _encode_fill_bits(fill), shape, tuple(padded.items())), make_border)


def _make_pad_example(
    name: str,
    x: tuple[int | None, ...],
    pad: list[int],
    fill: float,
    *,
    opset: Any = ct.target.iOS17,
    dtype: Any = types.fp16,
    reason: str | None = None,
    options: dict[str, Any] | None = None,
) -> Example:
    number = types.nptype_from_builtin(dtype)(fill)
    return make_example(name, lambda x: Builder.pad(x=x, pad=pad, mode="constant", constant_val=number, name="y"),
                        reason=reason, options=options, opset=opset, dtype=dtype, x=x)


def _build_padded_pool(x: Var, pad: list[int]) -> Var:
    padded = Builder.pad(x=x, pad=pad, mode="constant", constant_val=np.float16(-np.inf))
    result: Var = Builder.max_pool(x=padded, kernel_sizes=[3, 3], strides=[2, 2], pad_type="valid", name="y")
    return result
