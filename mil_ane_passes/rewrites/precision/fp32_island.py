"""Move data in fp16 that is only moved in fp32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Program, Var, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ...ir.builder import RewriteBuilder
from ...ir.clone import clone_op, infer_outputs, map_inputs
from ...ir.large_values import list_groups, merge_groups
from ...ir.query import get_consumers, get_flat_inputs, is_const, is_opaque
from ...passes.contract import BlockRewrite, Exactness, Example, Hit, Miss
from ...passes.examples import build_program, make_example
from ...rules.dtypes import Fp32ComputeLeft
from ...utils.text_format import format_count

__all__ = ["convert_to_fp16", "is_cast_to_fp16", "is_fp32_data_movement", "match_region"]

_DATA_MOVEMENT_OPS = frozenset({
    "concat", "depth_to_space", "expand_dims", "gather", "identity", "pixel_shuffle", "pixel_unshuffle", "reshape",
    "reverse", "select", "slice_by_index", "slice_by_size", "space_to_depth", "split", "squeeze", "stack", "tile",
    "transpose",
})
"Ops that compute nothing: they only move their input."
_MAX_CONST_BYTES = 4096
"Largest size in bytes of an fp32 constant among the moved values that is stored in fp16 instead."


class Fp32Island(BlockRewrite):
    """Cast before what is only moved in fp32, not behind it: a rounding is the same wherever it is made.

    why     fp32 is unsupported on the ANE: every op that reads or makes it runs on the CPU or the GPU. Where a model
            takes fp32 inputs, or was kept in fp32 in part, reshapes, slices and concats stand before the cast to fp16.
    when    Ops that only move elements, in fp32, all of whose results end in casts to fp16: they move fp16 instead, and
            what they read is cast. A cast from fp16 to fp32 before them goes. Not where more elements would be cast
            than are now: a slice of a large input stays. Nor with a constant that fp16 does not hold, or of more than
            4096 bytes. What is computed in fp32 is ane::fp16_compute's.
    exact   bitwise: each element is rounded once, as before.
    cost    none: half the bytes are moved.

    before
        %0: fp32[1, 2, 8] = expand_dims(x=%x, axes=[0])
        %1: fp32[2, 1, 8] = transpose(x=%0, perm=[1, 0, 2])
        %2: fp16[2, 1, 8] = cast(x=%1, dtype=fp16)
        %tanh_0: fp16[2, 1, 8] = tanh(x=%2)
    after
        %0: fp16[2, 8] = cast(x=%x, dtype=fp16)
        %1: fp16[1, 2, 8] = expand_dims(x=%0, axes=[0])
        %2: fp16[2, 1, 8] = transpose(x=%1, perm=[1, 0, 2])
        %tanh_0: fp16[2, 1, 8] = tanh(x=%2)
    """

    fixes = (Fp32ComputeLeft,)
    stage = "precision"
    after = ("fp16_compute",)
    exactness = Exactness.BITWISE
    preset = "full"

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        ends: dict[Operation, bool] = {}
        for op in reversed(block.operations):
            if is_fp32_data_movement(op):
                readers = [reader for var in op.outputs for reader in get_consumers(var)]
                ends[op] = bool(readers) and not any(var.consuming_blocks for var in op.outputs) and all(
                    is_cast_to_fp16(reader) or ends.get(reader, False) for reader in readers)
        islands: dict[Operation, list[Operation]] = {}
        for op in [each for each in block.operations if ends.get(each)] if any(ends.values()) else []:
            islands[op] = [op]
            for var in get_flat_inputs(op):
                if var.op in islands:
                    merge_groups(islands, var.op, op)
        yield from map(match_region, list_groups(islands))

    def rewrite_block(self, hit: Hit, mb: RewriteBuilder) -> dict[Var, Var]:
        halves, replaced = dict[Var, Var](), dict[Var, Var]()
        for op in hit.members:
            for var in get_flat_inputs(op):
                if var.dtype == types.fp32 and var not in halves:
                    halves[var] = convert_to_fp16(mb, var)
            with mb.at(op):
                made = mb.insert(infer_outputs(clone_op(op, map_inputs(op, halves)), op))
            halves.update(zip(op.outputs, made))
            for var in op.outputs:
                replaced.update(
                    {reader.outputs[0]: halves[var] for reader in get_consumers(var) if is_cast_to_fp16(reader)}
                )
        return replaced

    def examples(self) -> Iterable[Example]:
        yield Example("turned before it is cast", lambda: _build_moved(lambda x: Builder.transpose(
            x=Builder.expand_dims(x=x, axes=[0]), perm=[1, 0, 2])))
        yield Example("split", lambda: _build_moved(lambda x: Builder.split(x=x, num_splits=2, axis=1)))
        yield Example("between two casts", _build_between_fp16)
        yield Example("with a constant", lambda: _build_moved(lambda x: Builder.concat(
            values=[x, np.ones((1, 8), np.float32)], axis=0)))
        yield Example(
            "a part of it",
            lambda: _build_moved(lambda x: Builder.slice_by_index(x=x, begin=[0, 0], end=[2, 3])),
            reason="16 elements would be cast, 6 are now",
        )
        yield Example("computed", lambda: _build_moved(lambda x: Builder.exp(x=x)), reason="")
        yield make_example(
            "read in fp32",
            lambda x: Builder.reshape(x=x, shape=[4, 4], name="y"),
            reason="",
            dtype=types.fp32,
            x=(2, 8),
        )


def _build_moved(move: Any) -> Program:
    def body(x: Var) -> list[Var]:
        made = move(x)
        parts = made if isinstance(made, (list, tuple)) else [made]
        return [Builder.tanh(x=Builder.cast(x=part, dtype="fp16")) for part in parts]

    return build_program(body, dtype=types.fp32, x=(2, 8))


def _build_between_fp16() -> Program:
    def body(x: Var) -> Var:
        wide = Builder.cast(x=Builder.tanh(x=x), dtype="fp32")
        turned = Builder.transpose(x=wide, perm=[1, 0])
        result: Var = Builder.cast(x=Builder.concat(values=[turned, turned], axis=1), dtype="fp16", name="y")
        return result

    return build_program(body, x=(2, 8))


def is_fp32_data_movement(op: Operation) -> bool:
    if op.op_type not in _DATA_MOVEMENT_OPS or is_opaque(op) or any(var.dtype != types.fp32 for var in op.outputs):
        return False
    return op.op_type != "gather" or is_const(op.indices)


def is_cast_to_fp16(op: Operation) -> bool:
    return op.op_type == "cast" and bool(op.outputs[0].dtype == types.fp16)


def _is_cast_from_fp16(var: Var) -> bool:
    return var.op is not None and var.op.op_type == "cast" and bool(var.op.x.dtype == types.fp16)


def match_region(members: list[Operation]) -> Hit | Miss:
    made = {var for op in members for var in op.outputs}
    read = {var for op in members for var in get_flat_inputs(op) if var.dtype == types.fp32 and var not in made}
    heavy = next(
        (
            var
            for var in read
            if var.op is not None
            and var.op.op_type.startswith("const")
            and not (
                is_const(var)
                and var.val.nbytes <= _MAX_CONST_BYTES
                and np.array_equal(_round_to_fp16(var), var.val, equal_nan=True)
            )
        ),
        None,
    )
    if heavy is not None:
        return Miss(members[0], f"it moves the constant '{heavy.name}', which fp16 does not hold, or which is large")
    before = sum(_count_elements(var) for var in made if any(map(is_cast_to_fp16, get_consumers(var))))
    after = sum(_count_elements(var) for var in read if not _is_cast_from_fp16(var) and not is_const(var))
    if after > before:
        return Miss(members[0], f"{after} elements would be cast, {before} are now")
    return Hit(members[0], note=f"{format_count(len(members), 'op')} that move fp32", members=members,
               covers=members)


def _count_elements(var: Var) -> int:
    return math.prod(int(size) for size in var.shape if not is_symbolic(size))


def _round_to_fp16(var: Var) -> np.ndarray[Any, Any]:
    with np.errstate(over="ignore"):
        return np.asarray(var.val).astype(np.float16)


def convert_to_fp16(mb: RewriteBuilder, var: Var) -> Var:
    if _is_cast_from_fp16(var):
        return var.op.x
    if is_const(var):
        made: Var = mb.once(("half", var), lambda: mb.const(val=_round_to_fp16(var)[()], name=f"{var.name}_fp16"))
        return made
    with mb.at(mb.find_insertion_point(var), var.name):
        made = mb.once(("half", var), lambda: mb.cast(x=var, dtype="fp16"))
    return made
