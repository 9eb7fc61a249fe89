"""Fold a gather of a constant at constant indices."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import (
    get_const_value,
    get_consumers,
    get_flat_inputs,
    get_itemsize,
    get_static_shape,
    get_type_info,
    is_const,
    is_opaque,
)
from ...passes.contract import Exactness, Example, Hit, Miss, Rewrite
from ...passes.evidence import cite_m4_study
from ...passes.examples import build_program, make_example, make_weight
from ...rules.indexing import ConstantGather
from ..indexing._constant_gathers import GATHER_OPS, evaluate_gather, find_out_of_range_index

__all__ = ["propagate_constant"]

_MAX_ELEMENTS = 1 << 16
"Most elements of a value that is inferred."
_UNFOLDABLE_PREFIXES = (
    "const",
    "random_",
    "read_state",
    "coreml_update_state",
    "write_state",
    "custom_layer",
    "classify",
)


class FoldConstantGather(Rewrite):
    """Fold a gather whose table and places are both constant.

    why     coremltools works out a gather of constants, but not gather_nd, by which masks that a model makes of
            positions arrive; what is computed of it stays, too, most of it in int32, which is unsupported on the ANE.
            The rows of a table of positions are computed at each run. What is read from the constant is known then,
            too: `ane::fold_constants`, which runs next, folds masks as a whole.
    when    gather, gather_nd and gather_along_axis of a constant at constant places. The result takes `max_bytes` at
            most, or no more than its table, where nothing else reads that.
    exact   bitwise: elements are moved, none is computed with.
    cost    the bytes of the result; those of the table go where nothing else reads it.

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
    level, confidence = "note", "medium"
    roots = GATHER_OPS
    evidence = (
        cite_m4_study(
            "cast, comparisons and arithmetic on int32 are unsupported, which is what such masks are made of"
        ),
    )

    max_bytes: int = 1 << 20
    "The most bytes of a new constant whose table has other readers, or is smaller."

    def match(self, op: Operation) -> Hit | Miss:
        if not is_const(op.indices):
            return Miss(op, "its indices are computed", near=False)
        if not is_const(op.x):
            return Miss(op, "its table is no constant", near=False)
        shape = get_static_shape(op.outputs[0])
        if shape is None or not np.prod(shape):
            return Miss(op, "it gives nothing, or a shape that is not known")
        reason = find_out_of_range_index(op)
        if reason:
            return Miss(op, reason)
        size = int(np.prod(shape)) * get_itemsize(op.outputs[0])
        alone = get_consumers(op.x) == [op] and not op.x.consuming_blocks
        most = max(self.max_bytes, int(np.prod(op.x.shape)) * get_itemsize(op.x) if alone else 0)
        if size > most:
            return Miss(op, f"its result takes {size} bytes, above {most}")
        return Hit(op, note=f"{op.op_type} of a constant at {op.indices.val.size} constant places: {size} bytes")

    def rewrite(self, hit: Hit, mb: RewriteBuilder) -> Any:
        op = hit.op
        propagate_constant(op, evaluate_gather(op))
        indices = np.asarray(op.indices.val)
        form = (
            op.op_type,
            get_const_value(op.inputs.get("axis")),
            get_const_value(op.inputs.get("batch_dims")),
            indices.shape,
        )
        key = hashlib.sha256(repr(form).encode() + indices.astype(np.int64).tobytes()).hexdigest()[:16]
        if op.outputs[0].rank:
            return mb.weight(op.x, f"at_{key}", lambda: evaluate_gather(op))

        def scalar() -> Any:
            with mb.at(mb.find_insertion_point(op.x), op.x.name):
                return mb.const(val=evaluate_gather(op).reshape(-1)[0])

        return mb.once((op.x, key), scalar)

    def examples(self) -> Iterable[Example]:
        yield Example("positions", lambda: _build_scaled_gather(lambda: Builder.gather(
            x=make_weight(16, 5), indices=np.arange(2, 6, dtype=np.int32), axis=0)))
        yield Example("points", lambda: _build_scaled_gather(lambda: Builder.gather_nd(
            x=make_weight(4, 5), indices=np.array([[[0, -1], [1, 2], [3, 0]]] * 4, np.int32))))
        yield Example("one number", lambda: _build_scaled_gather(lambda: Builder.gather(
            x=make_weight(5), indices=np.array(-2, np.int32), axis=0), ct.target.iOS15))
        yield Example("along an axis", lambda: _build_scaled_gather(lambda: Builder.gather_along_axis(
            x=make_weight(4, 5), indices=np.array([[0, 4, 1]] * 4, np.int32), axis=1)))
        yield Example("batches", lambda: _build_scaled_gather(lambda: Builder.gather(
            x=make_weight(4, 5), indices=np.array([[0, 4, 1]] * 4, np.int32), axis=1, batch_dims=1)))
        yield Example("integers", lambda: _build_scaled_gather(lambda: Builder.cast(x=Builder.gather_nd(
            x=np.arange(5, dtype=np.uint16), indices=np.array([[[4], [2], [0]]] * 4, np.uint16)), dtype="fp16")))
        yield Example("larger", lambda: _build_scaled_gather(lambda: Builder.gather(
            x=make_weight(2, 3), indices=np.array([0, 1, 1, 0], np.int32), axis=0)), options={"max_bytes": 16},
            reason="its result takes 24 bytes, above 16")
        yield Example("outside", lambda: _build_scaled_gather(lambda: Builder.gather_nd(
            x=make_weight(2, 3), indices=np.array([[0], [1], [2]], np.int32))),
            reason="place 2 is outside of the 2 there are")
        yield make_example(
            "table of the model's",
            lambda x: Builder.gather(x=x, indices=np.array([1], np.int32), axis=0, name="y"),
            reason="its table is no constant",
            x=(4, 3),
        )
        yield make_example(
            "embedding",
            lambda i: Builder.gather(x=make_weight(4, 3), indices=i, axis=0, name="y"),
            reason="its indices are computed",
            dtype=types.int32,
            i=(2,),
        )


def _build_scaled_gather(gather: Any, opset: Any = ct.target.iOS17) -> Program:
    return build_program(lambda x: Builder.mul(x=Builder.reduce_max(x=x), y=gather(), name="y"), opset=opset, x=(4, 3))


def propagate_constant(op: Operation, value: np.ndarray[Any, Any]) -> None:
    """Set the value of the only output of `op`, and infer the values of its consumers.

    coremltools infers values only while it builds an op, so that this has to be done anew.
    """
    told = op.outputs[0]
    _set_value(told, value if told.rank else value.reshape(-1)[0])
    pending = list(get_consumers(told))
    while pending:
        reader = pending.pop()
        if _infer_output_values(reader):
            pending.extend(op for var in reader.outputs for op in get_consumers(var))


def _set_value(var: Var, value: Any) -> None:
    held = var.sym_type()
    held.val = value
    var._sym_val = held


def _infer_output_values(op: Operation) -> bool:
    """Infer the values of the outputs of `op`; return whether they were unknown and are known now."""
    if op.blocks or is_opaque(op) or op.op_type.startswith(_UNFOLDABLE_PREFIXES) or not op.outputs:
        return False
    for var in op.outputs:
        shape = get_type_info(var).shape
        if (
            types.is_list(var.sym_type)
            or var._sym_val is not None
            or shape is None
            or int(np.prod(shape)) > _MAX_ELEMENTS
        ):
            return False
    if any(types.is_list(var.sym_type) or var._sym_val is None or var.val is None for var in get_flat_inputs(op)):
        return False
    found = op._auto_val(tuple(var.sym_type for var in op.outputs))
    for var, held in zip(op.outputs, found):
        var._sym_val = held
    return all(held is not None for held in found)
