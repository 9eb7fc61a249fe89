"""Compute products over axes by multiplying halves."""

from __future__ import annotations

import math
from collections.abc import Iterable

from coremltools.converters.mil.mil import Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, is_symbolic
from ...passes.contract import FP32_UNSUPPORTED_REASON, Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_m4_study
from ...passes.examples import make_op_example
from ...rules.unsupported_ops import Product


class ProductByParts(Rewrite):
    """Split the axes of a reduce_prod in halves and multiply them: the ANE has no product along an axis.

    why     Core ML on an M4 rejects reduce_prod, and so does the ANE's compiler on M1 to M5 when queried without Core
            ML. split and mul are supported.
    when    reduce_prod of fp16 values over a static number of at most `max_parts` elements. Other axes may be symbolic.
    exact   rounding: of n elements n - 1 products are rounded, each by half a unit in the last place: up to (n - 1) /
            2048 of the result, 0.34 % of a product of 8 (in 20000 draws between 0.5 and 2 at most 0.20 %). Signs,
            zeros, NaN and infinities among the elements count as before. A partial product above 65504 is infinite, and
            one below 2^-14 loses bits (2^-25 is 0), even if the entire product is in range; 0 times such an infinity is
            NaN. The first cannot happen if no magnitude is above 1, the second if none is below 1.
    cost    floor(log2 n) splits along each axis, and one to two products per split; the data halves with each split.

    before
        %y: fp16[2] = reduce_prod(x=%x, axes=[-1])
    after
        %0: fp16[2, 2], %1: fp16[2, 2], %2: fp16[2, 1] = split(x=%x, split_sizes=[2, 2, 1], axis=1)
        %3: fp16[2, 2] = mul(x=%0, y=%1)
        %4: fp16[2, 1], %5: fp16[2, 1] = split(x=%3, split_sizes=[1, 1], axis=1)
        %6: fp16[2, 1] = mul(x=%4, y=%5)
        %7: fp16[2, 1] = mul(x=%6, y=%2)
        %y: fp16[2] = squeeze(x=%7, axes=[1])
    """

    fixes = (Product,)
    stage = "decompose"
    exactness = Exactness.ROUNDING
    bound = "(n - 1) / 2048 of a product of n elements, while partial products stay between 2^-14 and 65504"
    preset = "full"
    roots = ("reduce_prod",)
    evidence = (
        cite_m4_study("reduce_prod is unsupported; split and mul are accepted"),
    )

    max_parts: int = 8
    "Maximum number of elements of a product; each one except the first adds a rounding."

    def match(self, op: Operation) -> Hit | Miss:
        if not types.is_float(op.x.dtype):
            return Miss(op, "computes on integers", near=False)
        if op.x.dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        axes = _read_reduced_axes(op)
        symbolic = [axis for axis in axes if is_symbolic(op.x.shape[axis])]
        if symbolic:
            return Miss(op, f"the number of elements along axis {symbolic[0]} is dynamic")
        count = math.prod(int(op.x.shape[axis]) for axis in axes)
        if count > self.max_parts:
            return Miss(op, f"a product of {count} elements, rounded {count - 1} times; max_parts={self.max_parts}")
        return Hit(op, note=f"a product of {count} elements, rounded {max(count - 1, 0)} times", axes=axes)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        op, product = hit.op, hit.op.x
        for axis in hit.axes:
            product = _multiply_along_axis(mb, product, axis)
        if get_const_value(op.keep_dims, False) or not hit.axes:
            return product
        squeezed: Var = mb.squeeze(x=product, axes=hit.axes)
        return squeezed

    def examples(self) -> Iterable[Example]:
        yield make_op_example("odd", "reduce_prod", (2, 5), {"axes": [-1]}, within=8.0)
        yield make_op_example("even", "reduce_prod", (2, 8, 3), {"axes": [1], "keep_dims": True}, within=4.0)
        yield make_op_example("all", "reduce_prod", (2, 3), within=6.0)
        yield make_op_example("all, kept", "reduce_prod", (2, 3), {"keep_dims": True}, within=6.0)
        yield make_op_example("apart", "reduce_prod", (2, 5, 3), {"axes": [2, 0]}, within=6.0)
        yield make_op_example("one element", "reduce_prod", (4, 1), {"axes": [1]})
        yield make_op_example("one element, kept", "reduce_prod", (4, 1), {"axes": [1], "keep_dims": True})
        yield make_op_example("long", "reduce_prod", (3, 37), {"axes": [1]}, options={"max_parts": 64}, within=1.0)
        yield make_op_example("too long", "reduce_prod", (2, 9), {"axes": [1]},
                              reason="a product of 9 elements, rounded 8 times; max_parts=8")
        yield make_op_example("flexible", "reduce_prod", (2, None), {"axes": [1]},
                              reason="the number of elements along axis 1 is dynamic")
        yield make_op_example("fp32", "reduce_prod", (2, 3), dtype=types.fp32, reason=FP32_UNSUPPORTED_REASON)
        yield make_op_example("integers", "reduce_prod", (2, 3), {"axes": [0]}, dtype=types.int32,
                              reason="computes on integers")


def _read_reduced_axes(op: Operation) -> list[int]:
    """Return the axes that `op` reduces, each once, counted from the front; an empty list of axes reduces none."""
    rank, axes = op.x.rank, get_const_value(op.axes)
    return sorted({axis % rank for axis in (range(rank) if axes is None else axes)})


def _multiply_along_axis(mb: RewriteBuilder, x: Var, axis: int) -> Var:
    """Build the products along `axis`, which keeps one element: halves are multiplied, and odd elements at the end."""
    odd_elements: list[Var] = []
    while x.shape[axis] > 1:
        half, odd = divmod(int(x.shape[axis]), 2)
        first, second, *rest = mb.split(x=x, split_sizes=[half, half, 1] if odd else [half, half], axis=axis)
        odd_elements += rest
        x = mb.mul(x=first, y=second)
    for element in odd_elements:
        x = mb.mul(x=x, y=element)
    return x
