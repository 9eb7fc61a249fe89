"""Fold a gather of a constant at constant indices."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value, get_consumers, get_itemsize, get_static_shape, is_const
from ...passes.contract import Exactness, Example, Hit, Miss, Rewrite, Severity
from ...passes.evidence import cite_m4_study
from ...passes.examples import make_example, make_weight
from ...rules.indexing import ConstantGather
from ..indexing._constant_gathers import GATHER_OPS, evaluate_gather, find_out_of_range_index
from ._compile_time_constants import propagate_constant


class FoldConstantGather(Rewrite):
    """Fold a gather whose table and indices are constant.

    why     coremltools folds a gather of constants, but not gather_nd, which masks made from positions contain; ops
            that use it also stay, mostly in int32, which is unsupported on the ANE. Rows of a position table are
            gathered in each run. After this fold `ane::fold_constants`, which runs next, folds entire masks.
    when    gather, gather_nd and gather_along_axis of a constant at constant indices. The result has at most
            `max_bytes`, or at most the size of its table if that has no other users.
    exact   bitwise: data movement only.
    cost    the bytes of the result; a table without other users is removed.

    before
        %0: fp16 = reduce_max(x=%x)
        %1: fp16[4, 5] = gather(x=<fp16[16, 5]>, indices=[2, 3, 4, 5])
        %y: fp16[4, 5] = mul(x=%0, y=%1)
    after
        %0: fp16 = reduce_max(x=%x)
        %y: fp16[4, 5] = mul(x=%0, y=<fp16[4, 5]>)
    """

    fixes = (ConstantGather,)
    stage = "structure"
    exactness = Exactness.BITWISE
    preset = "full"
    severity, confidence = Severity.SUGGESTION, "medium"
    roots = GATHER_OPS
    evidence = (
        cite_m4_study(
            "cast, comparisons and arithmetic on int32, with which such masks are computed, are unsupported"
        ),
    )

    max_bytes: int = 1 << 20
    "Maximum bytes of a new constant whose table has other users, or is smaller."

    def match(self, op: Operation) -> Hit | Miss:
        if not is_const(op.indices):
            return Miss(op, "its indices are computed", near=False)
        if not is_const(op.x):
            return Miss(op, "its table is not constant", near=False)
        shape = get_static_shape(op.outputs[0])
        if shape is None or not np.prod(shape):
            return Miss(op, "its result is empty, or of dynamic shape")
        reason = find_out_of_range_index(op)
        if reason:
            return Miss(op, reason)
        size = int(np.prod(shape)) * get_itemsize(op.outputs[0])
        removes_table = get_consumers(op.x) == [op] and not op.x.consuming_blocks
        limit = max(self.max_bytes, int(np.prod(op.x.shape)) * get_itemsize(op.x) if removes_table else 0)
        if size > limit:
            return Miss(op, f"its result takes {size} bytes, above {limit}")
        return Hit(op, note=f"{op.op_type} of a constant at {op.indices.val.size} constant indices: {size} bytes")

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Any:
        op = hit.op
        propagate_constant(op, evaluate_gather(op))
        key = _make_key(op)
        if op.outputs[0].rank:
            return mb.weight(op.x, f"at_{key}", lambda: evaluate_gather(op))

        def make_scalar() -> Any:
            with mb.at(mb.find_insertion_point(op.x), op.x.name):
                return mb.const(val=evaluate_gather(op).reshape(-1)[0])

        return mb.once((op.x, key), make_scalar)

    def examples(self) -> Iterable[Example]:
        rows = np.array([[0, 4, 1]] * 4, np.int32)
        yield _make_scaled_example("positions", lambda: Builder.gather(
            x=make_weight(16, 5), indices=np.arange(2, 6, dtype=np.int32), axis=0))
        yield _make_scaled_example("points", lambda: Builder.gather_nd(
            x=make_weight(4, 5), indices=np.array([[[0, -1], [1, 2], [3, 0]]] * 4, np.int32)))
        yield _make_scaled_example("one number", lambda: Builder.gather(
            x=make_weight(5), indices=np.array(-2, np.int32), axis=0), opset=ct.target.iOS15)
        yield _make_scaled_example("along an axis", lambda: Builder.gather_along_axis(
            x=make_weight(4, 5), indices=rows, axis=1))
        yield _make_scaled_example("batches", lambda: Builder.gather(
            x=make_weight(4, 5), indices=rows, axis=1, batch_dims=1))
        yield _make_scaled_example("integers", lambda: Builder.cast(x=Builder.gather_nd(
            x=np.arange(5, dtype=np.uint16), indices=np.array([[[4], [2], [0]]] * 4, np.uint16)), dtype="fp16"))
        yield _make_scaled_example("larger", lambda: Builder.gather(
            x=make_weight(2, 3), indices=np.array([0, 1, 1, 0], np.int32), axis=0), options={"max_bytes": 16},
            reason="its result takes 24 bytes, above 16")
        yield _make_scaled_example("outside", lambda: Builder.gather_nd(
            x=make_weight(2, 3), indices=np.array([[0], [1], [2]], np.int32)),
            reason="index 2 is out of range for 2 elements")
        yield make_example(
            "table of the model's",
            lambda x: Builder.gather(x=x, indices=np.array([1], np.int32), axis=0, name="y"),
            reason="its table is not constant",
            x=(4, 3),
        )
        yield make_example(
            "embedding",
            lambda i: Builder.gather(x=make_weight(4, 3), indices=i, axis=0, name="y"),
            reason="its indices are computed",
            dtype=types.int32,
            i=(2,),
        )


def _make_key(op: Operation) -> str:
    """Return a digest of what `op` reads of its table: gathers that read the same share a const."""
    indices = np.asarray(op.indices.val)
    parameters = [get_const_value(op.inputs.get(name)) for name in ("axis", "batch_dims")]
    form = repr((op.op_type, *parameters, indices.shape))
    return hashlib.sha256(form.encode() + indices.astype(np.int64).tobytes()).hexdigest()[:16]


def _make_scaled_example(name: str, gather: Callable[[], Any], **settings: Any) -> Example:
    return make_example(
        name, lambda x: Builder.mul(x=Builder.reduce_max(x=x), y=gather(), name="y"), x=(4, 3), **settings)
