"""Find ops whose results are indices in int32."""

from __future__ import annotations

from collections.abc import Iterable

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ..passes.contract import Example, Hit, Miss, Rule
from ..passes.evidence import cite_m4_study, cite_private_route
from ..passes.examples import build_program, make_example
from ._unsupported_ops import make_unsupported_hit

_INDEX_OUTPUTS = {"reduce_argmax": 0, "reduce_argmin": 0, "argsort": 0, "topk": 1, "non_maximum_suppression": 2}
"Ops with the number of the output that has indices."
_COREML_MESSAGES = {
    "reduce_argmax": "Output type int32 is not supported.",
    "argsort": "Unsupported tensor data type: int32",
}


class IndexResults(Rule):
    """The result is an index in int32, a type the ANE does not have.

    why     Core ML on an M4 rejects reduce_argmax and argsort for the type of what they return. topk is accepted there
            with indices of 16 bits, which is what coremltools makes for target iOS17 and later. The hardware can rank:
            the ANE's compiler, asked without Core ML, takes argmax on every generation, argsort and topk from M2 on,
            and non_maximum_suppression.
    when    reduce_argmax, reduce_argmin, argsort and non_maximum_suppression; topk whose indices are int32.
            With 16-bit indices an argmax or argmin lies between what is known, and is a guess.
    fix     Return the scores and rank outside the model. Where only the largest value is wanted, reduce_max gives the
            same bits. topk of one gives the same index, in 16 bits with target iOS17; but see topk-argmax.
    """

    code, slug = "ANE212", "index-result"
    roots = tuple(_INDEX_OUTPUTS)
    refuses, confidence = True, "high"
    advice = "Return the scores and rank them outside the model; reduce_max where only the value is wanted."
    evidence = (
        cite_m4_study(
            "reduce_argmax and argsort are unsupported for their int32 output; topk with uint16 indices is accepted",
            rows=True,
        ),
        cite_m4_study(
            "argsort and any op on int32 are unsupported; Core ML has messages of its own for argmax of other axes "
            "than "
            "channels or space, and for non_maximum_suppression of more than 2048 boxes"
        ),
        cite_private_route("argmax is taken everywhere, argsort and topk from M2 on, argmin from M3 on"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        indices = op.outputs[_INDEX_OUTPUTS[op.op_type]] if len(op.outputs) > _INDEX_OUTPUTS[op.op_type] else None
        if op.op_type == "topk" and indices is None:
            return Miss(op, "topk returns values only", near=False)
        kind = types.builtin_to_string(indices.dtype) if indices is not None else "int32"
        if kind == "int32":
            note = f"{op.op_type} returns indices in int32"
            if op.op_type == "topk":
                return Hit(op, note=f"{note}; with uint16 (target iOS17) it is accepted on M4", sure=False)
            return make_unsupported_hit(self, op, note, message=_COREML_MESSAGES.get(op.op_type))
        if op.op_type == "topk":
            return Miss(op, f"topk returns indices in {kind}", near=False)
        return Hit(op, note=f"{op.op_type} returns indices in {kind}; refused in int32, not measured so", sure=False)

    def examples(self) -> Iterable[Example]:
        yield make_example("argmax", lambda x: Builder.reduce_argmax(x=x, axis=-1, name="y"), x=(4, 8))
        yield make_example("argmin", lambda x: Builder.reduce_argmin(x=x, axis=0, name="y"), x=(4, 8))
        yield make_example("argsort", lambda x: Builder.argsort(x=x, axis=-1, name="y"), x=(4, 8))
        yield make_example("boxes", _build_nms, boxes=(1, 8, 4), scores=(1, 8, 2))
        yield make_example(
            "topk in int32", lambda x: Builder.topk(x=x, k=2, axis=-1)[1], opset=ct.target.iOS15, x=(4, 8)
        )
        yield Example("argmax in 16 bits", lambda: _build_uint16_indices("reduce_argmax"))
        yield Example("topk in 16 bits", lambda: _build_uint16_indices("topk"), reason="topk returns indices in uint16")
        yield make_example(
            "values of topk",
            lambda x: Builder.topk(x=x, k=2, axis=-1, return_indices=False),
            reason="topk returns values only",
            opset=ct.target.iOS16,
            x=(4, 8),
        )


def _build_nms(boxes: Var, scores: Var) -> Var:
    found: tuple[Var, ...] = Builder.non_maximum_suppression(
        boxes=boxes, scores=scores, max_boxes=2, iou_threshold=np.float16(0.5))
    return found[0]


def _build_uint16_indices(kind: str) -> Program:
    if kind == "topk":
        return build_program(lambda x: Builder.topk(x=x, k=2, axis=-1, output_indices_dtype="uint16")[1], x=(4, 8))
    return build_program(lambda x: Builder.reduce_argmax(x=x, axis=-1, output_dtype="uint16", name="y"), x=(4, 8))
