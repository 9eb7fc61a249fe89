"""Pad with other numbers than zero by constants."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ...ir.builder import RewriteBuilder, rebuild_op
from ...ir.query import get_const_value, get_consumers
from ...passes.contract import FP32_UNSUPPORTED_REASON, Community, Exactness, Example, Hit, Miss, Rewrite
from ...passes.examples import build_program
from ...rules.pad_constant_nonzero import PadConstantNonzero
from . import _pad_constants as slabs


class PadByConstants(Rewrite):
    """Pad with a number other than zero by joining constant blocks, or by adding a constant border.

    why     Core ML holds a message that the ANE pads with zero only. When it says so is not known.
    when    pad with mode constant, another fill than zero and known amounts, in fp16. The value is joined with constant
            blocks, one axis after the other. Where these have a symbolic size, or more than `max_bytes`, it is padded
            with zero, and a border is added that holds the fill, and -0.0 in the middle; where neither fits, the pad
            stays. A pad of minus infinity that only max_pools read becomes their own.
    exact   bitwise: elements are moved, and x + -0.0 is x for every x, zeros of both signs, infinities and NaN. The
            border meets zeros only, and 0 + fill is the fill. A max_pool pads with minus infinity.
    cost    the constants: the blocks are as large as what is added, a border as one slice of the output. A concat for
            each axis, or a pad and an addition. Nothing for a max_pool.

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
    "The most bytes of constants that one pad may add."

    def match(self, op: Operation) -> Hit | Miss:
        if op.op_type == "max_pool":
            answer = _match_padded_pool(op)
            alone = isinstance(answer, Miss) or _is_read_by_pools_only(op.x)
            return answer if alone else Miss(op, "the pad before it has other readers", near=False)
        if get_const_value(op.mode, "constant") != "constant":
            return Miss(op, "repeats values", near=False)
        fill = get_const_value(op.constant_val, 0.0)
        if fill == 0:
            return Miss(op, "pads with zero", near=False)
        if op.x.dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        padded = slabs.read_pad_amounts(op)
        if padded is None:
            return Miss(op, "how much is padded is known only at run time")
        if _is_read_by_pools_only(op.outputs[0]):
            return Miss(op, "read by max_pools only, which pad with minus infinity themselves", near=False)
        sizes = {"a border": slabs.count_border_bytes(op.x, padded), "blocks": slabs.count_slab_bytes(op.x, padded)}
        fits = [form for form, size in sizes.items() if size is not None and size <= self.max_bytes]
        if not fits:
            known = [size for size in sizes.values() if size is not None]
            return Miss(op, f"what is added takes {min(known)} bytes, max_bytes={self.max_bytes}" if known else
                        "what is added has a size that is known only at run time")
        form = fits[-1]
        return Hit(op, note=f"pads with {fill:g}: {form} of {sizes[form]} bytes", form=form, padded=padded, fill=fill)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        op = hit.op
        if op.op_type == "max_pool":
            return rebuild_op(mb, op, x=op.x.op.x, pad_type="custom", pad=hit.pad)
        if hit.form == "blocks" or not hit.padded:
            return slabs.concat_slabs(mb, op.x, hit.padded, hit.fill)
        zeros = mb.pad(x=op.x, pad=get_const_value(op.pad), mode="constant", constant_val=np.float16(0))
        filled: Var = mb.add(x=zeros, y=slabs.build_border_const(mb, op.x, hit.padded, hit.fill))
        return filled

    def examples(self) -> Iterable[Example]:
        yield Example("an image", lambda: _build_pad((1, 4, 8, 8), [1, 1, 1, 2], 1.0))
        yield Example("a sequence", lambda: _build_pad((1, 3, 8), [0, 0, 0, 0, 2, 1], -1e4, ct.target.iOS15))
        yield Example("on one side", lambda: _build_pad((2, 8), [3, 0], np.inf))
        yield Example("three axes", lambda: _build_pad((2, 3, 4, 5), [1, 0, 0, 2, 1, 1], -0.5))
        yield Example("flexible batch", lambda: _build_pad((None, 3, 4), [1, 1, 2, 0], 2.0))
        yield Example("flexible length", lambda: _build_pad((1, 3, None), [1, 2], 2.0))
        yield Example("nothing", lambda: _build_pad((2, 3), [0, 0, 0, 0], 2.0))
        yield Example("before a max_pool", lambda: _build_padded_pool([1, 1, 1, 1]))
        yield Example("more than its windows", lambda: _build_padded_pool([1, 3, 0, 0]))
        yield Example("all flexible", lambda: _build_pad((None, 3, None), [1, 2], 2.0),
                      reason="what is added has a size that is known only at run time")
        yield Example("large", lambda: _build_pad((1, 2, 4, 4), [1, 1, 1, 2], 1.0), options={"max_bytes": 64},
                      reason="what is added takes 84 bytes, max_bytes=64")
        yield Example("a border", lambda: _build_pad((4, 8, 4, 4), [1, 1, 1, 2], 1.0), options={"max_bytes": 84})
        yield Example("zeros", lambda: _build_pad((2, 3), [1, 1], 0), reason="pads with zero")
        yield Example("fp32", lambda: _build_pad((2, 3), [1, 1], 1.0, dtype=types.fp32), reason=FP32_UNSUPPORTED_REASON)


def _match_padded_pool(op: Operation) -> Hit | Miss:
    """Return a hit where `op` is a max_pool that can pad itself as the pad before it does, else a miss."""
    pad = op.x.op if op.op_type == "max_pool" else None
    if pad is None or pad.op_type != "pad" or get_const_value(pad.mode, "constant") != "constant" \
            or get_const_value(pad.constant_val, 0.0) != -math.inf:
        return Miss(op, "pools nothing that was padded with minus infinity", near=False)
    padded = slabs.read_pad_amounts(pad)
    if padded is None or min(padded, default=2) < 2 or get_const_value(op.pad_type) not in ("valid", "custom") \
            or get_const_value(op.ceil_mode, False):
        return Miss(op, "its own pads are not those of the pad before it and known numbers")
    own = get_const_value(op.pad) if get_const_value(op.pad_type) == "custom" else [0] * 2 * (op.x.rank - 2)
    sizes = get_const_value(op.kernel_sizes)
    whole = [own[2 * axis + side] + padded.get(axis + 2, (0, 0))[side] for axis in range(len(sizes)) for side in (0, 1)]
    if any(amount >= sizes[place // 2] for place, amount in enumerate(whole)):
        return Miss(op, f"padded by {max(whole)}, more than its windows of {max(sizes)} reach")
    return Hit(op, note="pads with minus infinity itself", pad=whole)


def _is_read_by_pools_only(var: Var) -> bool:
    """Return whether all readers of `var` are max_pools that can pad themselves."""
    readers = [] if var.consuming_blocks else get_consumers(var)
    return bool(readers) and all(isinstance(_match_padded_pool(each), Hit) for each in readers)


def _build_pad(shape: tuple[int | None, ...], pad: list[int], fill: float, opset: Any = ct.target.iOS17,
               dtype: Any = types.fp16) -> Program:
    number = np.float32(fill) if dtype == types.fp32 else np.float16(fill)
    return build_program(
        lambda x: Builder.pad(x=x, pad=pad, mode="constant", constant_val=number, name="y"),
        opset=opset,
        dtype=dtype,
        x=shape,
    )


def _build_padded_pool(pad: list[int]) -> Program:
    def body(x: Var) -> Var:
        padded = Builder.pad(x=x, pad=pad, mode="constant", constant_val=np.float16(-np.inf))
        result: Var = Builder.max_pool(x=padded, kernel_sizes=[3, 3], strides=[2, 2], pad_type="valid", name="y")
        return result

    return build_program(body, x=(1, 2, 7, 8))
