"""Find the index of the largest element with comparisons in fp16."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, get_consumers, is_symbolic
from ...passes.contract import FP32_UNSUPPORTED_REASON, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_m4_study
from ...passes.examples import make_example
from ...rules.indexing import IndexResults

_MAX_ELEMENTS = 1024
"Maximum elements of the axis: compared keys reach twice this number, and fp16 represents all integers up to 2048."
_VALUE_REDUCTIONS = {"reduce_argmax": "reduce_max", "reduce_argmin": "reduce_min"}
"The reduction that finds the value whose index an op returns."


class ArgmaxByMax(Rewrite):
    """Compute the index of the largest (smallest) element with comparisons in fp16, if the index is used as a float.

    why     reduce_argmax and reduce_argmin return int32, which is unsupported on the ANE, as is the cast back. In a
            model that computes with the index both run on the CPU, in the middle of the model.
    when    A cast to fp16 or fp32 of reduce_argmax or reduce_argmin over at most 1024 elements of fp16, if all users of
            the index are such casts. An index that the model returns in int32 is skipped, because it needs an
            unsupported cast.
    exact   bitwise: the first of equal elements, as before. Each index i from 0 to n - 1 gets a key: i - n if the
            element is NaN (the largest and also the smallest value, as in PyTorch), i if it is equal to reduce_max(x),
            otherwise n. The result is the minimum of the keys, plus n if it is negative. All keys are integers of
            magnitude up to 2048.
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
        search = op.x.op
        if search is None or search.op_type not in _VALUE_REDUCTIONS or not types.is_float(op.outputs[0].dtype):
            return Miss(op, "not a cast of an index to floating point", near=False)
        axis = get_const_value(search.axis, -1)
        extent = search.x.shape[axis]
        if not types.is_float(search.x.dtype):
            return Miss(op, "the index of an integer", near=False)
        if search.x.dtype != types.fp16:
            return Miss(op, FP32_UNSUPPORTED_REASON)
        if is_symbolic(extent):
            return Miss(op, "the axis has a dynamic number of elements")
        if not 0 < extent <= _MAX_ELEMENTS:
            return Miss(
                op,
                f"the axis has {extent} elements: with more than {_MAX_ELEMENTS} not every index is exact in fp16",
            )
        if search.outputs[0].consuming_blocks or not all(map(_is_cast_to_float, get_consumers(search.outputs[0]))):
            return Miss(op, "the int32 index has other users")
        return Hit(op, note=f"index of one of {extent} elements without int32", search=search, extent=int(extent),
                   axis=axis % search.x.rank)

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        x, axis, extent = hit.search.x, hit.axis, hit.extent
        indices = np.arange(extent, dtype=np.float16).reshape([-1 if each == axis else 1 for each in range(x.rank)])

        def select_keys(mask: Var, offset: int) -> Var:
            """Build `indices` minus `offset` where `mask` is true, elsewhere 0."""
            keys = mb.once(("places", extent, x.rank, axis, offset), lambda: mb.const(val=indices - np.float16(offset)))
            return mb.mul(x=mb.cast(x=mask, dtype="fp16"), y=keys)

        extreme = getattr(mb, _VALUE_REDUCTIONS[hit.search.op_type])(x=x, axes=[axis], keep_dims=True)
        # A NaN, which differs from itself, has a lower key than any element equal to the extreme.
        key = mb.add(x=select_keys(mb.equal(x=x, y=extreme), extent),
                     y=select_keys(mb.not_equal(x=x, y=x), 2 * extent))
        keep_dims = get_const_value(hit.search.keep_dims, False)
        index = mb.add(x=mb.reduce_min(x=key, axes=[axis], keep_dims=keep_dims), y=np.float16(extent))
        is_nan = mb.cast(x=mb.less(x=index, y=np.float16(0)), dtype="fp16")
        result: Var = mb.add(x=index, y=mb.mul(x=is_nan, y=np.float16(extent)))
        dtype = hit.op.outputs[0].dtype  # fp32 where it is an output of a model for iOS15
        return result if dtype == types.fp16 else mb.cast(x=result, dtype=types.builtin_to_string(dtype))

    def examples(self) -> Iterable[Example]:
        yield _make_arg_example("largest")
        yield _make_arg_example("smallest", "reduce_argmin", axis=0, keep_dims=True)
        yield _make_arg_example("in the middle", axis=1, x=(2, 5, 3))
        yield _make_arg_example("returned in fp32", cast_to="fp32")
        yield _make_arg_example("of fp32", dtype=types.fp32, reason=FP32_UNSUPPORTED_REASON)
        yield _make_arg_example("read as int32", returned=True, reason="the int32 index has other users")
        yield _make_arg_example(
            "many", x=(1, 3000),
            reason="the axis has 3000 elements: with more than 1024 not every index is exact in fp16")
        yield _make_arg_example(
            "flexible", x=(2, None), reason="the axis has a dynamic number of elements")


def _is_cast_to_float(op: Operation) -> bool:
    return op.op_type == "cast" and bool(types.is_float(op.outputs[0].dtype))


def _make_arg_example(
    name: str, op_type: str = "reduce_argmax", axis: int = -1, keep_dims: bool = False, cast_to: str = "fp16",
    returned: bool = False, x: tuple[int | None, ...] = (3, 6), **settings: Any,
) -> Example:
    """Make an example of an index that is cast to `cast_to`, and also `returned` in int32."""
    def build_body(x: Var) -> list[Var]:
        index = getattr(Builder, op_type)(x=x, axis=axis, keep_dims=keep_dims, name="z")
        outputs = [Builder.cast(x=index, dtype=cast_to, name="y")]
        return [*outputs, index] if returned else outputs

    return make_example(name, build_body, x=x, **settings)
