"""Compute running sums on the ANE by a triangle of ones, or by convs with ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ...ane.limits import find_limit
from ...ir.builder import RewriteBuilder
from ...ir.query import get_itemsize, get_static_shape, is_symbolic
from ...passes.contract import FP32_UNSUPPORTED_REASON, Community, Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_m4_study
from ...passes.examples import build_program
from ...rules.unsupported_ops import Cumsum
from ._cumulative_sums import (
    build_doubling_windows,
    build_triangle_matmul,
    build_window_convs,
    choose_window_sizes,
    is_bool_mask,
    plan_conv_layout,
    read_cumsum_settings,
    split_shape_at_axis,
)

__all__ = ["iterate_cumsum_examples"]

_MAX_INPUT = 150.0
"Largest input magnitude: every partial sum of the elements is then within the range of fp16."


class TriangleCumsum(Rewrite):
    """Replace cumsum, which is unsupported on the ANE, by convs with ones or by a matmul with a triangle of ones.

    why     cumsum runs on the CPU, and cheap ops beside it go with it. Convs, products and adds are taken.
    when    fp16. form=windows: a conv with k ones and k - 1 zeros in front gives the sum of the last k elements
            everywhere; a second one over every k-th of those (a reshape lays them along an axis) gives the sum of the
            last k * k; and so on until the window holds the axis: one conv up to 13 elements, two up to 169, three up
            to 2197 (15, 225 and 3375 where no chip before M4 is looked at). Zeros stand on the other side for reverse;
            exclusive moves the window by one. form=triangle: x @ U for the last axis, L @ x for another, U being 1 on
            and above the diagonal (above it for exclusive) and L the same below; reverse swaps the two. form=auto takes
            the triangle for masks (x cast from bool) of no fewer elements than it has, windows for all else. An axis of
            symbolic length needs `longest`: one conv, and adds of the value and itself moved by 13, 26, 52, ...
    exact   rounding: the same sums in another order. Windows read no element that the sum does not have: an infinite
            or NaN element reaches the sums that hold it and no other. Beyond one conv the sum of a window is stored in
            fp16, which it fits while all sums stay below 32752. A triangle multiplies the other elements by 0: with
            form=triangle an infinite or NaN one makes all sums of its row NaN. A mask has none.
    cost    windows: a conv and a reshape for each factor of up to 13, each a pass over the data; k ones a channel.
            triangle: 2 * n * n bytes. As many operations on the CPU take longer than a cumsum: a model too small to
            enter the ANE is faster as it was.

    before
        %y: fp16[1, 8, 100] = cumsum(x=%x, axis=-1)
    after
        %0: fp16[1, 8, 1, 100] = expand_dims(x=%x, axes=[2])
        %1: fp16[1, 8, 1, 100] = conv(x=%0, weight=<fp16[8, 1, 1, 10]>, pad_type=custom, pad=[0, 0, 9, 0], groups=8)
        %2: fp16[1, 8, 10, 10] = reshape(x=%1, shape=[1, 8, 10, 10])
        %3: fp16[1, 8, 10, 10] = conv(x=%2, weight=<fp16[8, 1, 10, 1]>, pad_type=custom, pad=[9, 0, 0, 0], groups=8)
        %y: fp16[1, 8, 100] = reshape(x=%3, shape=[1, 8, 100])
    """

    fixes = (Cumsum,)
    stage = "decompose"
    exactness = Exactness.ROUNDING
    bound = "2^-11 of the sum of magnitudes up to there for each conv, a triangle half a unit in the last place. " \
            "Normal draws, share of the largest sum: 5.9e-4 for 16 elements, 4.6e-4 for 128, 6.7e-4 for 1024, " \
            "8.7e-4 for 8192; one rounding 3.7e-4, 2.7e-4, 3.7e-4, 4.4e-4"
    preset = "full"
    roots = ("cumsum",)
    evidence = (
        cite_m4_study("cumsum is unsupported; conv, matmul, add, pad and reshape are accepted"),
        Community("at odds with all sums: in convs and products a partial sum of 32768 is infinite for good",
                  source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/numerics.md", chip="M4, M6",
                  date="2026-10-02"),
    )

    form: Literal["auto", "windows", "triangle"] = "auto"
    "windows lets no infinity or NaN into other sums; triangle does, and rounds once; auto uses it for masks."
    longest: int = 0
    "The largest extent of an axis of symbolic length; 0 skips such axes."
    max_bytes: int = 2 << 20
    "The most bytes of ones for one cumsum."

    def match(self, op: Operation) -> Hit | Miss:
        if not types.is_float(op.x.dtype):
            return Miss(op, "computes on integers", near=False)
        if op.x.rank == 0 or op.axis.val is None:
            return Miss(op, "has no axis to sum along")
        if op.x.dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        asked = read_cumsum_settings(op)
        extent = op.x.shape[asked.axis]
        if is_symbolic(extent):
            return self._match_symbolic_axis(op, asked.axis)
        return self._match_triangle(op, int(extent)) if self._is_triangle(op) else self._match_windows(op, int(extent))

    def _is_triangle(self, op: Operation) -> bool:
        """Return whether to use a triangle: by `form`, or for a mask x with at least as many elements, so that reading
        the triangle costs no more than reading x."""
        shape = get_static_shape(op.x)
        mask = is_bool_mask(op.x)
        return self.form == "triangle" or (
            self.form == "auto" and mask and shape is not None
            and shape[read_cumsum_settings(op).axis]**2 <= min(math.prod(shape), self.max_bytes // 2))

    def _match_triangle(self, op: Operation, count: int) -> Hit | Miss:
        axis, rank = read_cumsum_settings(op).axis, op.x.rank
        needed = count * count * get_itemsize(op.x)
        if needed > self.max_bytes:
            return Miss(op, f"a triangle of {count} x {count} is {needed} bytes, above max_bytes={self.max_bytes}; "
                            "form=windows needs none")
        if axis < rank - 2 and sum(map(is_symbolic, op.x.shape)) > 1:
            return Miss(op, "several axes are of symbolic size: no reshape can say which is which")
        return Hit(op, note=f"{count} elements by a triangle of ones", taps=None,
                   keeps_nonfinite=is_bool_mask(op.x))

    def _match_windows(self, op: Operation, count: int) -> Hit | Miss:
        asked, (widest, *most) = read_cumsum_settings(op), self._limits()
        inner = max(split_shape_at_axis(op, asked.axis)[2], 1)
        chosen = choose_window_sizes(count, inner, widest, most[1], int(asked.exclusive))
        if chosen is None:
            return Miss(op, f"{count} elements, {inner} apart, cannot be laid on two axes of up to {most[1]}")
        taps, extent = chosen
        laid = plan_conv_layout(
            op.x.shape, get_itemsize(op.x), asked.axis, max(taps), self.max_bytes, most, reshaped=len(taps) > 1
        )
        if isinstance(laid, str):
            return Miss(op, laid)
        return Hit(op, note=f"{count} elements by windows of {' x '.join(map(str, taps))}", laid=laid, taps=taps,
                   extent=extent)

    def _match_symbolic_axis(self, op: Operation, axis: int) -> Hit | Miss:
        if self.longest < 1 or self.form == "triangle":
            return Miss(op, "sums along an axis of symbolic length; form=windows with longest=N takes up to N elements")
        widest, *most = self._limits()
        tap = min(widest, self.longest)
        laid = plan_conv_layout(op.x.shape, get_itemsize(op.x), axis, tap, self.max_bytes, most, reshaped=False)
        if isinstance(laid, str):
            return Miss(op, laid)
        return Hit(op, note=f"up to {self.longest} elements by windows that double", laid=laid, taps=(tap,), extent=0,
                   largest_size=self.longest)

    def _limits(self) -> list[int]:
        """Return the widest kernel, the most channels and the largest extent that every generation supports."""
        bounds = [find_limit(name, self.generations) for name in ("conv-kernel-width", "channels", "spatial")]
        return [bound.most for bound in bounds if bound is not None]

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        if hit.taps is None:
            return build_triangle_matmul(mb, hit.op)
        if not hit.extent:
            return build_doubling_windows(mb, hit.op, hit.laid, hit.taps[0], self.longest)
        return build_window_convs(mb, hit.op, hit.laid, hit.taps, hit.extent)

    def examples(self) -> Iterable[Example]:
        return iterate_cumsum_examples()


def iterate_cumsum_examples() -> Iterator[Example]:
    yield Example("two convs", lambda: _build_cumsum((1, 8, 100), axis=-1), within=_MAX_INPUT)
    yield Example("one conv", lambda: _build_cumsum((2, 4, 8), axis=2))
    yield Example("exclusive", lambda: _build_cumsum((2, 30, 4), axis=1, exclusive=True), within=_MAX_INPUT)
    yield Example("exclusive, last axis", lambda: _build_cumsum((2, 3, 12), axis=-1, exclusive=True))
    yield Example("a mask, exclusive", lambda: _build_mask_cumsum(axis=-1, exclusive=True))
    yield Example("backwards", lambda: _build_cumsum((40, 3), axis=0, reverse=True), within=_MAX_INPUT)
    yield Example("both", lambda: _build_cumsum((2, 2, 3, 17), axis=3, reverse=True, exclusive=True), within=_MAX_INPUT)
    yield Example("three convs", lambda: _build_cumsum((2, 200), axis=1), within=_MAX_INPUT)
    yield Example("a vector", lambda: _build_cumsum((5,), axis=0))
    yield Example("rank 5", lambda: _build_cumsum((2, 3, 14, 2, 3), axis=2), within=_MAX_INPUT)
    yield Example("a mask", _build_mask_cumsum)
    yield Example(
        "any length up to", lambda: _build_cumsum((2, None), axis=1), options={"longest": 100}, within=_MAX_INPUT
    )
    yield Example("any length backwards", lambda: _build_cumsum((None, 3), axis=0, reverse=True, exclusive=True),
                  options={"longest": 40}, within=_MAX_INPUT)
    yield Example("any length", lambda: _build_cumsum((2, None), axis=1), reason=(
        "sums along an axis of symbolic length; form=windows with longest=N takes up to N elements"))
    yield Example("large triangle", lambda: _build_cumsum((2, 2000), axis=1), options={"form": "triangle"}, reason=(
        "a triangle of 2000 x 2000 is 8000000 bytes, above max_bytes=2097152; form=windows needs none"))
    yield Example("fp32", lambda: _build_cumsum((2, 5), dtype=types.fp32, axis=1), reason=FP32_UNSUPPORTED_REASON)
    yield Example("integers", lambda: _build_cumsum((2, 5), dtype=types.int32, axis=1), reason="computes on integers")


def _build_cumsum(shape: tuple[int | None, ...], dtype: Any = types.fp16, **asked: Any) -> Program:
    return build_program(lambda x: Builder.cumsum(x=x, name="y", **asked), dtype=dtype, x=shape)


def _build_mask_cumsum(axis: int = 1, **asked: bool) -> Program:
    def body(x: Var) -> Var:
        mask = Builder.cast(x=Builder.greater(x=x, y=np.float16(0)), dtype="fp16")
        result: Var = Builder.cumsum(x=mask, axis=axis, name="y", **asked)
        return result

    return build_program(body, x=(3, 5, 4))
