"""Find the index of the largest element with comparisons in fp16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, get_consumers, is_symbolic
from ...passes.contract import FP32_UNSUPPORTED_REASON, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_m4_study
from ...passes.examples import build_program
from ...rules.indexing import IndexResults

_MAX_ELEMENTS = 1024
"Most elements of the axis. fp16 represents all integers up to twice this number."
_VALUE_REDUCTIONS = {"reduce_argmax": "reduce_max", "reduce_argmin": "reduce_min"}


class ArgmaxByMax(Rewrite):
    """Find the place of the largest (smallest) element with comparisons in fp16, where the place is used as fp16.

    why     reduce_argmax and reduce_argmin return int32, which the ANE does not have; the cast back is unsupported,
            too. In a model that goes on computing with the place both are on the CPU, in its middle.
    when    A cast to fp16 or fp32 of reduce_argmax or reduce_argmin over at most 1024 elements of fp16, which nobody
            reads but such casts. A place that the model returns in int32 needs a cast that is unsupported as well: it
            is left alone.
    exact   bitwise, the first place of all that are as large: the least of i - n at a NaN (which counts as the
            largest, and as the smallest, as in PyTorch), i where x is reduce_max(x), and n elsewhere, i counting the
            elements from 0 to n - 1; and n more where that is negative. All are whole numbers of at most 2048.
    cost    seven elementwise ops on x, five on the result (and a cast, to fp32) and two reductions, for a reduction
            and a cast.

    before
        %0: int32[3] = reduce_argmax(x=%x)
        %y: fp16[3] = cast(x=%0, dtype=fp16)
    after
        %0: fp16[3, 1] = reduce_max(x=%x, axes=[1], keep_dims=True)
        %1: bool[3, 6] = equal(x=%x, y=%0)
        %2: fp16[3, 6] = cast(x=%1, dtype=fp16)
        %3: fp16[3, 6] = mul(x=%2, y=[[-6.0, -5.0, -4.0, -3.0, -2.0, -1.0]])
        %4: bool[3, 6] = not_equal(x=%x, y=%x)
        %5: fp16[3, 6] = cast(x=%4, dtype=fp16)
        %6: fp16[3, 6] = mul(x=%5, y=[[-12.0, -11.0, -10.0, -9.0, -8.0, -7.0]])
        %7: fp16[3, 6] = add(x=%3, y=%6)
        %8: fp16[3] = reduce_min(x=%7, axes=[1])
        %9: fp16[3] = add(x=%8, y=6.0)
        %10: bool[3] = less(x=%9, y=0.0)
        %11: fp16[3] = cast(x=%10, dtype=fp16)
        %12: fp16[3] = mul(x=%11, y=6.0)
        %y: fp16[3] = add(x=%9, y=%12)
    """

    fixes = (IndexResults,)
    stage = "decompose"
    after = ("one_hot_compare",)
    preset = "full"
    roots = ("cast",)
    evidence = (
        cite_m4_study("reduce_argmax is unsupported: Output type int32 is not supported; reduce_max, equal, select "
                      "are accepted", rows=True),
    )

    def match(self, op: Operation) -> Hit | Miss:
        found = op.x.op
        if found is None or found.op_type not in _VALUE_REDUCTIONS or not types.is_float(op.outputs[0].dtype):
            return Miss(op, "no cast of a place to floating point", near=False)
        axis = get_const_value(found.axis, -1)
        extent = found.x.shape[axis]
        if not types.is_float(found.x.dtype):
            return Miss(op, "the place of an integer", near=False)
        if found.x.dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        if is_symbolic(extent):
            return Miss(op, "the place among elements whose number is known only at run time")
        if not 0 < extent <= _MAX_ELEMENTS:
            return Miss(
                op,
                f"the place among {extent} elements: with more than {_MAX_ELEMENTS} not every number is exact in fp16",
            )
        if found.outputs[0].consuming_blocks or not all(map(_is_cast_to_float, get_consumers(found.outputs[0]))):
            return Miss(op, "the int32 place is read as such, too")
        return Hit(op, note=f"the place among {extent} elements without int32", found=found, extent=int(extent),
                   axis=axis % found.x.rank)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        x, axis, extent = hit.found.x, hit.axis, hit.extent
        places = np.arange(extent, dtype=np.float16).reshape([-1 if each == axis else 1 for each in range(x.rank)])

        def chosen(at: Var, less: int) -> Var:
            """Build `places` minus `less` where `at` is true, elsewhere 0."""
            counted = mb.once(("places", extent, x.rank, axis, less), lambda: mb.const(val=places - np.float16(less)))
            return mb.mul(x=mb.cast(x=at, dtype="fp16"), y=counted)

        most = getattr(mb, _VALUE_REDUCTIONS[hit.found.op_type])(x=x, axes=[axis], keep_dims=True)
        key = mb.add(x=chosen(mb.equal(x=x, y=most), extent), y=chosen(mb.not_equal(x=x, y=x), 2 * extent))
        keep = get_const_value(hit.found.keep_dims, False)
        least = mb.add(x=mb.reduce_min(x=key, axes=[axis], keep_dims=keep), y=np.float16(extent))
        below = mb.cast(x=mb.less(x=least, y=np.float16(0)), dtype="fp16")
        built: Var = mb.add(x=least, y=mb.mul(x=below, y=np.float16(extent)))
        kind = hit.op.outputs[0].dtype  # fp32 where it is an output of a model for iOS15
        return built if kind == types.fp16 else mb.cast(x=built, dtype=types.builtin_to_string(kind))

    def examples(self) -> Iterable[Example]:
        yield Example("largest", lambda: _build_arg_reduction("reduce_argmax"))
        yield Example("smallest", lambda: _build_arg_reduction("reduce_argmin", axis=0, keep_dims=True))
        yield Example("in the middle", lambda: _build_arg_reduction("reduce_argmax", axis=1, shape=(2, 5, 3)))
        yield Example("returned in fp32", lambda: _build_arg_reduction("reduce_argmax", dtype="fp32"))
        yield Example(
            "of fp32", lambda: _build_arg_reduction("reduce_argmax", of=types.fp32), reason=FP32_UNSUPPORTED_REASON
        )
        yield Example("read as int32", lambda: _build_arg_reduction("reduce_argmax", shown=True),
                      reason="the int32 place is read as such, too")
        yield Example("many", lambda: _build_arg_reduction("reduce_argmax", shape=(1, 3000)),
                      reason="the place among 3000 elements: with more than 1024 not every number is exact in fp16")
        yield Example("flexible", lambda: _build_arg_reduction("reduce_argmax", shape=(2, None)),
                      reason="the place among elements whose number is known only at run time")


def _is_cast_to_float(op: Operation) -> bool:
    return op.op_type == "cast" and bool(types.is_float(op.outputs[0].dtype))


def _build_arg_reduction(kind: str, axis: int = -1, keep_dims: bool = False, shape: Any = (3, 6), shown: bool = False,
                         dtype: str = "fp16", of: type = types.fp16) -> Program:
    def body(x: Var) -> list[Var]:
        place = getattr(Builder, kind)(x=x, axis=axis, keep_dims=keep_dims, name="z")
        result = [Builder.cast(x=place, dtype=dtype, name="y")]
        return [*result, place] if shown else result

    return build_program(body, dtype=of, x=shape)
