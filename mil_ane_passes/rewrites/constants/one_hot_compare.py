"""Make one-hot vectors by comparing indices with a constant range."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Var, types

from ...ir.builder import RewriteBuilder
from ...ir.query import get_const_value
from ...passes.contract import BlockRewrite, Exactness, Example, Hit, Miss
from ...passes.evidence import cite_ane_compiler, cite_m4_study
from ...passes.examples import make_example
from ...rules.unsupported_ops import MasksAtRunTime
from ._generated_constants import MAX_EXACT_INTEGER, build_shared_const, find_float_casts, replace_float_casts

_MAX_RANK = 5
"Largest rank of a value on the ANE."


class OneHotCompare(BlockRewrite):
    """Replace one_hot, which is unsupported on the ANE, by a comparison of fp16 indices with a constant range.

    why     one_hot is unsupported; equal and the cast of its bools are accepted. Only the cast of the int32 indices
            stays off the ANE, with one element per index.
    when    A static size of up to 2048, and a result of rank 5 or less, in fp16, fp32 or bool, or in integers whose
            users only cast them to floating point, as in torch's one_hot(...).float(); this cast is then merged.
            on_value and off_value may differ from 1 and 0 if off + 1 * (on - off) is exact.
    exact   bitwise for any indices: fp16 represents integers up to 2048, rounds larger ones to at least 2048, and a
            negative index matches no element, so that an index out of range gives no hot element, as before.
    cost    the cast of the indices, the comparison, and a cast of the result; size * 2 bytes. Values other than 1 and 0
            need a mul and an add more.

    before
        %0: int32[2, 4, 8] = one_hot(indices=%ids, one_hot_vector_size=8)
        %y: fp16[2, 4, 8] = cast(x=%0, dtype=fp16)
    after
        %0: fp16[2, 4] = cast(x=%ids, dtype=fp16)
        %1: fp16[2, 4, 1] = expand_dims(x=%0, axes=[2])
        %2: bool[2, 4, 8] = equal(x=%1, y=[[[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]]])
        %y: fp16[2, 4, 8] = cast(x=%2, dtype=fp16)
    """

    fixes = (MasksAtRunTime,)
    stage = "decompose"
    exactness = Exactness.BITWISE
    preset = "full"
    roots = ("one_hot",)
    evidence = (
        cite_m4_study("one_hot is unsupported, as are casts from int32; equal, and casts of its result, are accepted"),
        cite_ane_compiler("one_hot is unsupported on all generations, equal everywhere"),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        for op in block.operations:
            if op.op_type == "one_hot":
                yield self._match_op(op)

    def _match_op(self, op: Operation) -> Hit | Miss:
        size = get_const_value(op.one_hot_vector_size)
        if size is None:
            return Miss(op, "the size of the vectors is dynamic")
        if not 0 < size <= MAX_EXACT_INTEGER:
            return Miss(op, f"{size} elements: fp16 represents integers up to {MAX_EXACT_INTEGER}")
        if op.outputs[0].rank > _MAX_RANK:
            return Miss(op, f"its result has rank {op.outputs[0].rank}, and up to {_MAX_RANK} are supported on the ANE")
        is_integer = types.is_int(op.outputs[0].dtype)
        casts = find_float_casts(op) if is_integer else None
        if is_integer and casts is None:
            return Miss(op, "its vectors are read as integers, which are unsupported on the ANE")
        dtype = casts.dtype if casts else op.outputs[0].dtype
        on, off = (np.asarray(get_const_value(op.inputs[name])).astype(types.nptype_from_builtin(dtype))
                   for name in ("on_value", "off_value"))
        if dtype == types.bool and on == off:
            return Miss(op, "on_value and off_value are the same")
        if types.is_float(dtype) and not _is_exact(on, off):
            return Miss(op, f"off_value {off:g} and on_value {on:g} are not off and off + 1 * (on - off)")
        return Hit(op, note=f"{size} places", size=int(size), casts=casts, dtype=dtype, on=on, off=off)

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        vectors = _build_one_hot(hit, mb)
        return replace_float_casts(mb, hit.casts, vectors) if hit.casts else {hit.op.outputs[0]: vectors}

    def examples(self) -> Iterable[Example]:
        yield _make_one_hot_example("as torch has it", cast=True, size=8)
        yield _make_one_hot_example("first axis", size=6, axis=0, on_value=np.float16(1), off_value=np.float16(0))
        yield _make_one_hot_example("other values", size=6, axis=1, on_value=np.float16(-2), off_value=np.float16(3))
        yield _make_one_hot_example("truth", size=3, on_value=False, off_value=True)
        yield _make_one_hot_example("any number of indices", cast=True, size=5, shape=(None, 4))
        yield _make_one_hot_example("integers", size=8, reason=(
            "its vectors are read as integers, which are unsupported on the ANE"))
        yield _make_one_hot_example("many places", cast=True, size=2049,
                                    reason="2049 elements: fp16 represents integers up to 2048")
        yield _make_one_hot_example(
            "values apart", size=8, on_value=np.float16(0.001), off_value=np.float16(-100),
            reason="off_value -100 and on_value 0.0010004 are not off and off + 1 * (on - off)")
        yield make_example("size at run time", _build_dynamic_one_hot, dtype=types.int32, ids=(3,),
                           reason="the size of the vectors is dynamic")


def _is_exact(on: Any, off: Any) -> bool:
    """Return whether the difference times 0 and 1, plus `off`, gives the two values bit for bit at every precision."""
    if not np.isfinite(on) or not np.isfinite(off) or (off == 0 and np.signbit(off)) or (on == 0 and np.signbit(on)):
        return False
    step = on - off
    return bool(np.float64(step) == np.float64(on) - np.float64(off) and np.isfinite(step) and step + off == on)


def _build_one_hot(hit: Hit, mb: RewriteBuilder) -> Var:
    op, size = hit.op, hit.size
    axis = int(get_const_value(op.axis)) % op.outputs[0].rank
    shape = tuple(size if each == axis else 1 for each in range(op.outputs[0].rank))
    places = build_shared_const(mb, ("places", *shape), lambda: np.arange(size, dtype=np.float16).reshape(shape))
    number = mb.cast(x=op.indices, dtype="fp16")
    mask: Var = mb.equal(x=mb.expand_dims(x=number, axes=[axis]), y=places)
    if hit.dtype == types.bool:
        return mask if hit.on else mb.logical_not(x=mask)
    vectors: Var = mb.cast(x=mask, dtype=types.builtin_to_string(hit.dtype))
    if hit.on - hit.off != 1:
        vectors = mb.mul(x=vectors, y=hit.on - hit.off)
    return vectors if hit.off == 0 else mb.add(x=vectors, y=hit.off)


def _make_one_hot_example(
    name: str, size: int, cast: bool = False, shape: tuple[int | None, ...] = (2, 4), reason: str | None = None,
    **parameters: Any,
) -> Example:
    """Make an example of a one_hot that is the output, or is `cast` to it."""
    def build_body(ids: Var) -> Any:
        if not cast:
            return Builder.one_hot(indices=ids, one_hot_vector_size=size, name="y", **parameters)
        return Builder.cast(x=Builder.one_hot(indices=ids, one_hot_vector_size=size, **parameters), dtype="fp16",
                            name="y")

    return make_example(name, build_body, reason=reason, dtype=types.int32, ids=shape)


def _build_dynamic_one_hot(ids: Var) -> Any:
    size = Builder.reduce_max(x=ids, axes=[0], keep_dims=False)
    vectors = Builder.one_hot(indices=ids, one_hot_vector_size=size, on_value=np.float16(1), off_value=np.float16(0))
    return Builder.reduce_sum(x=vectors, axes=[0], name="y")
