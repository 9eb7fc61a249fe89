"""Find ops that compute on integers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
from coremltools.converters.mil.mil import Block, Builder, Operation, Program, Var, types

from ..ir.query import is_const
from ..passes.contract import BlockRule, Example, Hit, Miss, Vendor
from ..passes.evidence import cite_m4_study, cite_private_quirk, cite_private_route
from ..passes.examples import build_program, make_example, make_weight
from ..utils.text_format import format_count
from ._integer_ops import check_integer_support, describe_readers, find_integer_types, group_integer_ops
from ._unsupported_ops import make_unsupported_hit

_MAX_KINDS_NAMED = 4
"Most op types that a note names."
_INT32_MESSAGE = "Unsupported tensor data type: int32"


class Int32Ops(BlockRule):
    """An op that reads or makes int32 leaves the ANE, the casts to and from it, too.

    why     int32 is unsupported on the ANE. Core ML on an M4 rejects every op on it, one by one; bool, the int8 of
            quantize, and 16 bits where an op passes them on (the uint16 of topk, the int16 of a squeeze) are accepted.
            In the middle of a model such an op costs two transitions. Much of it nobody wrote: the preparation of
            indices, and sizes computed from shapes.
    when    A chain: ops of one block that hand integers to one another. One finding each, at its first op; the note
            says what it is computed for. A cast to int8 is unsupported, too. Casts to other narrow types and int64,
            uint32 and int4 were not measured, and are a guess. Constants, and shapes or axes that are constants, do not
            count; ops that are unsupported whatever they compute on have rules of their own.
    fix     Compute what is known at conversion beforehand; fixed input shapes fold most sizes. Pass positions, lengths
            and masks as fp16, which is exact up to 2048, and compare in fp16. Return indices, and use them outside.
    """

    code, slug = "ANE201", "int32-op"
    refuses, confidence = True, "high"
    advice = "Fold what is known at conversion, pass numbers as fp16 (exact up to 2048), and use indices outside."
    evidence = (
        cite_m4_study("any arithmetic on int32 is unsupported, and casts between fp16 and int32 and from fp16 to int8"),
        cite_m4_study("refused: cast, add, mul, select and greater_equal on int32; accepted: bool, quantize to int8, "
                      "uint16 indices of topk, squeeze of int16, gather_nd by int16", rows=True),
        Vendor("with int32 token ids 4 of 606 ops run on the CPU, those of the embedding lookup",
               source="apple/ml-ane-transformers README.md", date="2022-06"),
        cite_private_route("a cast to int32 is rejected on M1; those between fp16, fp32 and bool are taken", chip="M1"),
        cite_private_quirk("fp32, int32 and bf16 are not implemented"),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        found = {op: sure for op in block.operations if (sure := check_integer_support(op)) is not None}
        for members in group_integer_ops(block, found) if found else ():
            for sure in (True, False):
                ops = [op for op in members if found.get(op) is sure]
                if ops and sure:
                    yield make_unsupported_hit(
                        self, ops[0], _format_note(ops, members), message=_find_coreml_message(ops[0]), covers=ops
                    )
                elif ops:
                    yield Hit(ops[0], note=f"{_format_note(ops, members)}; not measured", sure=False, covers=ops)

    def reports_op(self, op: Operation) -> bool:
        return check_integer_support(op) is not None

    def examples(self) -> Iterable[Example]:
        yield Example("indices", _build_wrapped_gather)
        yield make_example("arithmetic", lambda i: Builder.mul(x=i, y=i, name="y"), dtype=types.int32, i=(3,))
        yield make_example("passed through", lambda i: Builder.identity(x=i, name="y"), dtype=types.int32, i=(3,))
        yield make_example("rounded to integers", lambda x: Builder.cast(x=x, dtype="int32", name="y"), x=(3,))
        yield make_example("to int8", lambda x: Builder.cast(x=x, dtype="int8", name="y"), x=(3,))
        yield make_example("to uint8", lambda x: Builder.cast(x=x, dtype="uint8", name="y"), x=(3,))
        yield make_example(
            "size of a flexible input",
            lambda x: Builder.cast(x=Builder.shape(x=x), dtype="fp16", name="y"),
            x=(None, 3),
        )
        yield make_example(
            "truth",
            lambda x: Builder.cast(x=Builder.greater(x=x, y=np.float16(0)), dtype="fp16", name="y"),
            reason="",
            x=(3,),
        )
        yield make_example(
            "constants",
            lambda x: Builder.gather(x=x, indices=np.array([2, 0], np.int32), axis=0, name="y"),
            reason="",
            x=(3, 4),
        )


def _format_note(ops: list[Operation], members: list[Operation]) -> str:
    most = Counter(op.op_type for op in ops).most_common()
    shown = ", ".join(f"{count} {kind}" for kind, count in most[:_MAX_KINDS_NAMED])
    more = f" and {len(most) - _MAX_KINDS_NAMED} kinds more" if len(most) > _MAX_KINDS_NAMED else ""
    kinds = sorted({types.builtin_to_string(kind) for op in ops for kind in find_integer_types(op)})
    ends = describe_readers(members)
    named = "int32" if "int32" in kinds else " and ".join(kinds)
    return f"{format_count(len(ops), 'op')} on {named} ({shown}{more}){f': {ends}' if ends else ''}"


def _find_coreml_message(op: Operation) -> str | None:
    """Return Core ML's message for such an op, for the forms that were measured; else None."""
    if types.int32 not in find_integer_types(op):
        return None
    if op.op_type in ("cast", "select"):
        return _INT32_MESSAGE
    if op.op_type == "greater_equal" and is_const(op.y):
        return 'Unable to resolve operation input "y".'
    if op.op_type == "add" and is_const(op.y):
        return 'Failed to extract constant value "add"' if op.y.rank else _INT32_MESSAGE
    return None


def _build_wrapped_gather() -> Program:
    """Build the ops that coremltools writes so that negative indices count from the end."""
    def body(ids: Var) -> Var:
        wrapped = Builder.add(x=ids, y=np.int32(16))
        ids = Builder.select(cond=Builder.greater_equal(x=ids, y=np.int32(0)), a=ids, b=wrapped)
        result: Var = Builder.gather(x=make_weight(16, 4), indices=Builder.cast(x=ids, dtype="int16"), axis=0, name="y")
        return result

    return build_program(body, dtype=types.int32, ids=(3,))
