"""Remove the wrapping of negative indices if none can be negative."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.integer_bounds import can_hold_integers, find_integer_bounds
from ...passes.contract import Exactness, Example, Hit, Miss, Rewrite, Vendor
from ...passes.evidence import cite_m4_study
from ...passes.examples import make_example, make_weight


class PlainIndices(Rewrite):
    """Remove the wrapping of negative indices if the ops that compute them exclude negative values.

    why     coremltools adds n to negative indices of gather: greater_equal, add and select on int32, which are
            unsupported on the ANE, with casts. Results of topk, argmax or a count of bools are never negative.
    when    select(i >= c, i, ...) where each i is at least c, because of its dtype (uint16), constants, or the ops that
            compute it: topk, argmax, argsort, shape, cumsum, sums and products, data movement of their results, and
            integer loop counters that increase from a constant to a constant. Also a cast to a wider integer type and
            back, or to a third one, which becomes one cast. Ids from an input may be negative; see `ane::index_by_mod`.
    exact   bitwise: the same integers.
    cost    lower: the preparation ops are removed.

    before
        %0: fp16[4, 2], %1: uint16[4, 2] = topk(x=%x, k=2, axis=1, output_indices_dtype=uint16)
        %2: int32[4, 2] = cast(x=%1, dtype=int32)
        %3: bool[4, 2] = greater_equal(x=%2, y=0)
        %4: int32[4, 2] = add(x=%2, y=8)
        %5: int32[4, 2] = select(cond=%3, a=%2, b=%4)
        %6: uint16[4, 2] = cast(x=%5, dtype=uint16)
        %y: fp16[4, 2, 3] = gather(x=<fp16[8, 3]>, indices=%6)
    after
        %0: fp16[4, 2], %1: uint16[4, 2] = topk(x=%x, k=2, axis=1, output_indices_dtype=uint16)
        %y: fp16[4, 2, 3] = gather(x=<fp16[8, 3]>, indices=%1)
    """

    code, slug = "ANE271", "needless-index-preparation"
    stage = "structure"
    exactness = Exactness.BITWISE
    preset = "full"
    confidence = "high"
    roots = ("select", "cast")
    evidence = (
        cite_m4_study("cast, greater_equal, add and select on int32 are unsupported; indices of topk in uint16 "
                      "are accepted", rows=True),
        Vendor("since iOS17 negative indices have to be converted by select(index >= 0, index, index + max_index)",
               source="https://apple.github.io/coremltools/source/coremltools.converters.mil.mil.ops.defs.html"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if op.op_type == "cast":
            return _match_cast(op)
        condition = op.cond.op
        if condition is None or condition.op_type != "greater_equal" or condition.x is not op.a \
                or not types.is_int(op.a.dtype):
            return Miss(op, "does not wrap indices", near=False)
        if list(op.a.shape) != list(op.outputs[0].shape):
            return Miss(op, "its result is larger than the indices")
        least, most = find_integer_bounds(op.a), find_integer_bounds(condition.y)
        if least is None or most is None or least[0] < most[1]:
            return Miss(op, "its indices may be negative")
        return Hit(op, note=f"the indices are at least {least[0]}", plain=op.a, kind="")

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Var:
        plain: Var = mb.cast(x=hit.plain, dtype=hit.kind) if hit.kind else hit.plain
        return plain

    def examples(self) -> Iterable[Example]:
        yield make_example("topk", _build_topk_lookup, x=(4, 8))
        yield make_example("argmax", lambda x: _build_wrapped_lookup(Builder.reduce_argmax(x=x, axis=1)), x=(4, 8))
        yield make_example("count", lambda x: _build_wrapped_lookup(Builder.cumsum(
            x=_build_casts(x, "bool", "int32"), axis=0, exclusive=True)), opset=ct.target.iOS15, x=(4, 8))
        yield make_example("wide and back", lambda i: Builder.cast(
            x=Builder.reverse(x=_build_casts(i, "int32", "int16"), axes=[0]), dtype="fp16", name="y"),
            dtype=types.int16, i=(3,))
        yield make_example("wide and on", lambda i: _build_casts(i, "int32", "uint16", name="y"),
                           dtype=types.int16, i=(3,))
        narrow = partial(make_example, reason="int16 may not represent its source", dtype=types.int32, i=(3,))
        yield narrow("narrow and on", lambda i: _build_casts(i, "int16", "uint16", name="y"))
        yield narrow("narrow and back", lambda i: _build_casts(i, "int16", "int32", name="y"))
        yield make_example("ids", lambda i: _build_wrapped_lookup(i), reason="its indices may be negative",
                           dtype=types.int32, i=(4,))
        yield make_example("numbers", lambda x: Builder.select(
            cond=Builder.greater_equal(x=x, y=np.float16(0)), a=x, b=np.float16(0), name="y"),
            reason="does not wrap indices", x=(4,))


def _match_cast(op: Operation) -> Hit | Miss:
    """Match the second of two casts of integers where the first preserves every value."""
    inner = op.x.op
    if inner is None or inner.op_type != "cast" or not all(
            types.is_int(var.dtype) for var in (inner.x, op.x, op.outputs[0])):
        return Miss(op, "is not a second cast of integers", near=False)
    between, result = (types.builtin_to_string(var.dtype) for var in (op.x, op.outputs[0]))
    if not can_hold_integers(op.x.dtype, find_integer_bounds(inner.x)):
        return Miss(op, f"{between} may not represent its source")
    if inner.x.dtype == op.outputs[0].dtype:
        return Hit(op, note=f"to {between} and back", plain=inner.x, kind="")
    return Hit(op, note=f"through {between} to {result}", plain=inner.x, kind=result)


def _build_topk_lookup(x: Var) -> Var:
    wide = Builder.cast(x=Builder.topk(x=x, k=2, axis=1, output_indices_dtype="uint16")[1], dtype="int32")
    return _build_wrapped_lookup(wide, narrow="uint16")


def _build_wrapped_lookup(indices: Var, narrow: str = "") -> Var:
    """Build a lookup in eight rows, whose indices are wrapped and cast to `narrow`."""
    is_valid = Builder.greater_equal(x=indices, y=np.int32(0))
    wrapped = Builder.select(cond=is_valid, a=indices, b=Builder.add(x=indices, y=np.int32(8)))
    if narrow:
        wrapped = Builder.cast(x=wrapped, dtype=narrow)
    result: Var = Builder.gather(x=make_weight(8, 3), indices=wrapped, axis=0, name="y")
    return result


def _build_casts(x: Var, between: str, to: str, **name: str) -> Var:
    """Cast `x` to `between` and then to `to`."""
    result: Var = Builder.cast(x=Builder.cast(x=x, dtype=between), dtype=to, **name)
    return result
