"""Replace range_1d by a constant."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_symbolic
from ...passes.contract import BlockRewrite, Exactness, Example, Hit, Miss
from ...passes.evidence import cite_m4_study, cite_xcode_notes
from ...passes.examples import make_example
from ...rules.unsupported_ops import Range1d
from ._generated_constants import (
    AxisSize,
    FloatCasts,
    build_shared_const,
    cut_const_to_length,
    describe_size_excess,
    extract_axis_line,
    find_float_casts,
    replace_float_casts,
    trace_shape_sources,
)


class ConstantRange(BlockRewrite):
    """Replace range_1d by a constant, from which a slice takes the first numbers if the length is dynamic.

    why     range_1d, to which torch.arange is converted, runs on the CPU only, and so does the arithmetic on its
            integers.
    when    start, end and step are constant; or, with `longest`, a range from 0 with step 1 whose end is the length of
            an axis of another value, and which is floating point or only cast to it. Ranges with numbers that their
            dtype rounds, and empty ranges, are skipped.
    exact   bitwise. To take the first n of N numbers, a concat appends n elements of the value with that axis to the
            constant, and a slice drops the last N elements, including these. Both ops have constant parameters, whereas
            a slice with a computed end leaves the ANE. Results for axes longer than `longest` are wrong.
    cost    the constant; for a dynamic length a slice, a concat and a slice, and a cast if the length is that of an
            integer value.

    before
        %0: int32[2] = shape(x=%x)
        %1: int32 = gather(x=%0, indices=1)
        %2: int32[s0] = range_1d(end=%1, start=0, step=1)
        %relu_0: fp16[2, s0] = relu(x=%x)
        %y: fp16[s0] = cast(x=%2, dtype=fp16)
    after
        %0: fp16[1, s0] = slice_by_index(x=%x, begin=[0, 0], end=[1, 0], begin_mask=[False, True], end_mask=[False, True])
        %1: fp16[s0] = reshape(x=%0, shape=[-1])
        %2: fp16[s1] = concat(values=(<fp16[64]>, %1), axis=0)
        %y: fp16[s2] = slice_by_index(x=%2, begin=[0], end=[-64], end_mask=[False])
        %relu_0: fp16[2, s0] = relu(x=%x)
    """  # noqa: E501

    fixes = (Range1d,)
    stage = "decompose"
    exactness = Exactness.BITWISE
    preset = "full"
    roots = ("range_1d",)
    evidence = (
        cite_m4_study("range_1d is unsupported, on the GPU, too; slice_by_index and concat are accepted"),
        cite_xcode_notes("range_1d, which is torch.arange, runs on the CPU only"),
    )

    longest: int = 0
    "The longest range of dynamic length that is replaced; 0 skips such ranges."
    max_bytes: int = 1 << 20
    "Maximum bytes of one constant."

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        for op in block.operations:
            if op.op_type == "range_1d":
                yield self._match_op(op)

    def _match_op(self, op: Operation) -> Hit | Miss:
        start, end, step = (get_const_value(op.inputs[name]) for name in ("start", "end", "step"))
        if start is None or step is None or is_symbolic(start) or is_symbolic(step):
            return Miss(op, "its start or step is dynamic")
        count = op.outputs[0].shape[0]
        if end is None or is_symbolic(count):
            return self._match_flexible(op, start, step)
        if count < 1:
            return Miss(op, "an empty range cannot be stored")
        return self._match_numbers(op, int(count), start, step)

    def _match_flexible(self, op: Operation, start: float, step: float) -> Hit | Miss:
        sources = trace_shape_sources(op.end)
        size = sources[0] if sources and len(sources) == 1 else None
        if not isinstance(size, AxisSize):
            return Miss(op, "its end is computed, but not the length of an axis")
        if (start, step) != (0, 1):
            return Miss(op, f"from {start:g} in steps of {step:g} to a dynamic length; only a range from 0 with step "
                            f"1 can be sliced from a constant")
        if self.longest < 1:
            return Miss(op, "its end is a dynamic length; longest=N slices a constant of N elements to it")
        casts = find_float_casts(op) if types.is_int(op.outputs[0].dtype) else None
        if types.is_int(op.outputs[0].dtype) and casts is None:
            return Miss(op, "its numbers are read as integers, which are unsupported on the ANE")
        return self._match_numbers(op, self.longest, 0, 1, casts, size)

    def _match_numbers(
        self, op: Operation, count: int, start: float, step: float, casts: FloatCasts | None = None,
        size: AxisSize | None = None,
    ) -> Hit | Miss:
        """Match `count` numbers, of which as many are taken as `size` says, and which replace `casts`."""
        dtype = casts.dtype if casts else op.outputs[0].dtype
        nptype = types.nptype_from_builtin(dtype)
        nbytes = count * np.dtype(nptype).itemsize
        if nbytes > self.max_bytes:  # checked before the numbers are computed, because a package may declare any count
            return Miss(op, describe_size_excess(nbytes, self.max_bytes))
        exact = start + np.arange(count, dtype=np.float64) * step
        numbers = exact.astype(nptype)
        if not np.array_equal(numbers.astype(np.float64), exact):
            return Miss(op, f"{types.builtin_to_string(dtype)} does not represent all of its numbers")
        return Hit(op, note=f"{'up to ' if size else ''}{count} numbers", dtype=dtype, numbers=numbers, casts=casts,
                   size=size, largest_size=math.inf if size is None else self.longest)

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        numbers = hit.numbers
        key = ("numbers", len(numbers), numbers.dtype.name, numbers.tobytes())
        value = build_shared_const(mb, key, lambda: numbers)
        if hit.size is not None:
            like = extract_axis_line(mb, hit.size, 1, 0)
            if like.dtype != hit.dtype:
                like = mb.cast(x=like, dtype=types.builtin_to_string(hit.dtype))
            value = cut_const_to_length(mb, value, like, 0)
        return replace_float_casts(mb, hit.casts, value) if hit.casts else {hit.op.outputs[0]: value}

    def examples(self) -> Iterable[Example]:
        inexact = "fp16 does not represent all of its numbers"
        yield make_example("of the length of an axis", _build_positions, options={"longest": 64}, x=(2, None))
        yield _make_range_example("fixed", np.float16(1), np.float16(4), np.float16(0.5))
        yield _make_range_example("integers", np.int32(0), np.int32(12), np.int32(2))
        yield _make_range_example("downwards", np.float16(3), np.float16(-3), np.float16(-1))
        yield make_example("no bound", _build_positions, x=(2, None), reason=(
            "its end is a dynamic length; longest=N slices a constant of N elements to it"))
        yield make_example("too long for fp16", _build_positions, options={"longest": 3000}, reason=inexact,
                           x=(2, None))
        yield _make_range_example("tenths", np.float16(0), np.float16(0.55), np.float16(0.1), reason=inexact)


def _make_range_example(name: str, start: Any, end: Any, step: Any, **settings: Any) -> Example:
    """Make an example of a fixed range; integers are cast to fp16."""
    def build_body(x: Var) -> list[Var]:
        numbers = Builder.range_1d(start=start, end=end, step=step)
        numbers = Builder.cast(x=numbers, dtype="fp16") if isinstance(start, np.int32) else numbers
        return [Builder.expand_dims(x=numbers, axes=[0], name="y"), Builder.relu(x=x)]

    return make_example(name, build_body, x=(2, 3), **settings)


def _build_positions(x: Var) -> list[Var]:
    """Build the ops that torch.arange(x.shape[1]).half() is converted to."""
    length = Builder.gather(x=Builder.shape(x=x), indices=np.int32(1), axis=0)
    numbers = Builder.range_1d(start=np.int32(0), end=length, step=np.int32(1))
    return [Builder.relu(x=x), Builder.cast(x=numbers, dtype="fp16", name="y")]
