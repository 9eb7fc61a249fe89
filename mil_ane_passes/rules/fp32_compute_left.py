"""Find partitions of ops that compute in fp32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Program, Var, types

from ..ir.large_values import list_groups, merge_groups
from ..ir.query import get_flat_inputs, get_type_info, is_computed_in_fp16, is_opaque, iterate_nested_ops
from ..passes.contract import BlockRule, Example, Hit, Miss, Vendor
from ..passes.evidence import cite_m4_study, cite_private_quirk
from ..passes.examples import build_program

_MAX_KINDS_NAMED = 4
"Most op types that a note names."
_EXEMPT_OPS = frozenset({"const", "cast", "classify"})
"Ops whose dtypes are not those of a computation; custom_layer reports classify."


class Fp32ComputeLeft(BlockRule):
    """Ops that compute in fp32 stay off the ANE, which knows fp16 only.

    why     Every op that reads or makes fp32 runs on the GPU or the CPU, and each transition costs time and
            may take its neighbours along.
    when    A partition: ops of one block that read or make fp32 and hand it to one another. One finding each, at its
            first op, with the number of ops. Constants and casts are no ops here, so the casts at the border of a
            model with fp32 inputs and outputs are no finding.
    fix     ane::fp16_compute turns the ops to fp16, keeps in fp32 those that lose more than asked on your feeds, and
            lists them; what is only moved ane::fp32_island moves in fp16, the same bits. With coremltools: convert
            with compute_precision FLOAT16, and look at what op_selector excludes.
    """

    code, slug = "ANE502", "fp32-compute-left"
    refuses, confidence = True, "high"
    evidence = (
        Vendor("the ANE does not support FLOAT32", date="2022-12",
               source="apple/ml-stable-diffusion python_coreml_stable_diffusion/torch2coreml.py"),
        Vendor("with fp32 precision, ops run on the GPU or the CPU; the ANE computes in fp16",
               source="https://apple.github.io/coremltools/docs-guides/source/typed-execution.html"),
        cite_m4_study("fp32 model inputs get a cast to fp16, and the rest runs on the ANE"),
        cite_private_quirk("fp32, int32 and bf16 are not implemented"),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        island = {op: [op] for op in block.operations if _computes_in_fp32(op)}
        for op in list(island):
            for var in get_flat_inputs(op):
                if var.op in island and get_type_info(var).dtype == types.fp32:
                    merge_groups(island, var.op, op)
        fix = "fp16_compute{mixed=true}" if island and _is_mixed_precision(block) else "fp16_compute"
        for members in list_groups(island):
            yield Hit(members[0], note=_format_note(members, fix), covers=members, fixed_by=fix)

    def examples(self) -> Iterable[Example]:
        yield Example("one partition", lambda: _build_chain(types.fp32, False))
        yield Example("inside fp16", lambda: _build_chain(types.fp16, True))
        yield Example("fp16", lambda: _build_chain(types.fp16, False), reason="")
        yield Example("casts at the border", _build_interface_casts, reason="")


def _computes_in_fp32(op: Operation) -> bool:
    if op.op_type in _EXEMPT_OPS or op.op_type.startswith("constexpr_") or is_opaque(op) or op.blocks:
        return False
    read = [var for var in get_flat_inputs(op) if var.op is None or var.op.op_type != "const"]
    return any(get_type_info(var).dtype == types.fp32 for var in [*op.outputs, *read])


def _is_mixed_precision(block: Block) -> bool:
    """Return whether the function of `block` also computes in fp16.

    ane::fp16_compute rewrites the fp32 ops of such a function only on request.
    """
    while block.outer_op is not None:
        block = block.outer_op.enclosing_block
    return any(map(is_computed_in_fp16, iterate_nested_ops(block)))


def _format_note(members: list[Operation], fix: str) -> str:
    kinds = Counter(op.op_type for op in members).most_common()
    shown = ", ".join(f"{count} {kind}" for kind, count in kinds[:_MAX_KINDS_NAMED])
    more = f" and {len(kinds) - _MAX_KINDS_NAMED} kinds more" if len(kinds) > _MAX_KINDS_NAMED else ""
    if len(members) == 1:
        return f"{shown} computes in fp32; ane::{fix} turns it to fp16"
    return f"{len(members)} ops compute in fp32 ({shown}{more}); ane::{fix} turns them to fp16"


def _build_chain(dtype: object, island: bool) -> Program:
    def body(x: Var) -> Var:
        inner = Builder.cast(x=x, dtype="fp32") if island else x
        inner = Builder.exp(x=Builder.relu(x=inner))
        result: Var = Builder.cast(x=inner, dtype="fp16", name="y") if island else Builder.abs(x=inner, name="y")
        return result

    return build_program(body, dtype=dtype, x=(2, 3))


def _build_interface_casts() -> Program:
    def body(x: Var) -> Var:
        inner = Builder.add(x=Builder.cast(x=x, dtype="fp16"), y=np.float16(1))
        result: Var = Builder.cast(x=inner, dtype="fp32", name="y")
        return result

    return build_program(body, dtype=types.fp32, x=(2, 3))
