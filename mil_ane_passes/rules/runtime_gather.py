"""Find gathers at dynamic indices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Function, Operation, Program, Var, types

from ..ane.op_support import BEFORE_M4, find_dynamic_inputs
from ..ir.query import is_compressed, is_const, is_used
from ..passes.contract import Community, Example, Hit, Miss, Rule, Vendor
from ..passes.evidence import cite_2020_layer_list, cite_m1_gpt_notes, cite_m4_study, cite_private_route
from ..passes.examples import build_program, make_example, make_weight
from ._unsupported_ops import format_chips, is_any_admitted, make_unsupported_hit

_OTHER_GATHERS = ("gather_nd", "gather_along_axis")


class RuntimeGather(Rule):
    """A gather at computed indices, such as an embedding lookup, runs on the CPU.

    why     Core ML on an M4 rejects gather unless its indices are constants; so it was listed in 2020 and seen on an
            M1 Pro, and Apple's transformers leave the lookup of the embedding there. gather_nd and gather_along_axis
            are themselves accepted on an M4; what prepares their indices is not (see int32-op).
    when    gather whose indices are no constant; gather_nd and gather_along_axis with int32 indices, and with others
            on generations before the M4, where nobody saw them accepted.
    fix     Cut the model behind the lookup, `edit --split-at` with the value it gives: the first package looks up, the
            second takes the rows as they come, fp16, and is the one for the ANE. Several lookups: all their values.
            Or look up outside, and pass the rows in. A small table: a one-hot row, passed in or compared in fp16,
            times the table: exact where the table is finite and its sums stay below 32768. A row to be chosen by
            position: multiply by a mask and sum.
    no fix  Which rows are taken is known only when the model runs, and no op supported on the ANE goes by that;
            without the lookup the model has other inputs.
    """

    code, slug = "ANE214", "runtime-gather"
    roots = ("gather", *_OTHER_GATHERS)
    refuses, confidence = True, "high"
    advice = ("Make the lookup a model of its own (edit --split-at, behind the value that it gives); or multiply a "
              "one-hot row by a small table.")
    evidence = (
        cite_m4_study(
            "gather with computed indices is unsupported, for the type of its indices; gather_nd is accepted", rows=True
        ),
        cite_m4_study("gather_along_axis is accepted; the int32 ops that prepare indices are unsupported"),
        Vendor(
            "the lookup of an embedding runs on the CPU: 4 of 606 ops",
            source="apple/ml-ane-transformers README.md",
            date="2022-06",
        ),
        cite_m1_gpt_notes("the gather of GPT models runs on the CPU"),
        cite_2020_layer_list("gather does not run on the ANE"),
        Community(
            "of RF-DETR only topk and the expand_dims, tile and gather_along_axis that use its indices leave the ANE",
            source="https://github.com/roboflow/rf-detr/pull/1495",
            chip="M3 Pro",
            os="macOS 27.0",
            date="2026-09-21",
        ),
        cite_private_route(
            "gather and gather_along_axis are taken in a narrow form on M1 and by the hardware from M2 on"
        ),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if not find_dynamic_inputs(op, "indices"):
            return Miss(op, "its indices are constant", near=False)
        kind = types.builtin_to_string(op.indices.dtype)
        if op.op_type == "gather":
            what = "embedding lookup" if is_const(op.x) or is_compressed(op.x) else "gather"
            message = "Unsupported gather index type" if kind == "int16" else None
            behind = [(var.name,) for var in op.outputs if is_used(var) and isinstance(op.enclosing_block, Function)]
            return make_unsupported_hit(
                self, op, f"{what} at computed indices ({kind})", message=message, split_at=behind
            )
        if kind == "int32":
            return make_unsupported_hit(
                self, op, f"{op.op_type} reads int32 indices; those of 16 bits (target iOS17) pass on M4"
            )
        if not is_any_admitted(BEFORE_M4, tuple(self.generations)):
            return Miss(op, f"{op.op_type} is accepted on M4", near=False)
        where = format_chips(tuple(one for one in self.generations if BEFORE_M4.includes(one)))
        return Hit(op, note=f"{op.op_type} at computed indices is accepted on M4, not measured on {where}", sure=False)

    def examples(self) -> Iterable[Example]:
        yield Example("embedding", lambda: _build_gather(make_weight(16, 4)))
        yield Example("first opset", lambda: _build_gather(make_weight(16, 4), ct.target.iOS15))
        yield make_example(
            "16 bits",
            lambda x, ids: Builder.gather_along_axis(
                x=make_weight(3, 4), indices=Builder.cast(x=ids, dtype="uint16"), axis=1, name="y"
            ),
            dtype=types.int32,
            x=(1,),
            ids=(3, 2),
        )
        yield make_example(
            "32 bits",
            lambda ids: Builder.gather_nd(x=make_weight(3, 4), indices=ids, name="y"),
            dtype=types.int32,
            ids=(2, 1),
        )
        yield make_example(
            "constant indices",
            lambda x: Builder.gather(x=x, indices=np.array([2, 0], np.int32), axis=0, name="y"),
            reason="its indices are constant",
            x=(3, 4),
        )
        yield make_example(
            "slice", lambda x: Builder.slice_by_size(x=x, begin=[1, 0], size=[1, 4], name="y"), reason="", x=(3, 4)
        )


def _build_gather(table: np.ndarray[Any, Any], opset: object = ct.target.iOS17) -> Program:
    def body(ids: Var) -> Var:
        result: Var = Builder.gather(x=table, indices=ids, axis=0, name="y")
        return result

    return build_program(body, opset=opset, dtype=types.int32, ids=(3,))
