"""Find slices at dynamic indices."""

from __future__ import annotations

from collections.abc import Iterable

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Function, Operation, Program, types

from ..ane.op_support import M1_TO_M5, find_dynamic_inputs
from ..passes.contract import Community, Example, Hit, Miss, Rule, Vendor
from ..passes.evidence import cite_m4_study, cite_private_route
from ..passes.examples import make_example, make_weight
from ._unsupported_ops import make_unsupported_hit

_POSITION_INPUTS = {
    "slice_by_index": ("begin", "end", "stride"), "slice_by_size": ("begin", "size"),
    "slice_update": ("begin", "end", "stride"), "torch_tensor_assign": ("begin", "end", "stride"),
}


class RuntimeSlice(Rule):
    """A slice whose place is computed runs on the CPU.

    why     Core ML on an M4 rejects a slice_by_size that begins at an input in int32; the ANE's compiler folds a place
            that is fixed into the layout, and has no other form. In a network the same op was once listed as accepted,
            in a plan that is odd in other respects.
    when    slice_by_index and slice_by_size with a begin, end, stride or size that is no constant. slice_update and
            assignments to a window likewise, but there sources disagree, and the finding is a guess.
    fix     Fixed places give the same bits: one function for each, where there are few. Else take the whole, multiply
            by a mask that is an input, and sum: exact where the values are finite. A cache: return the new row, and
            let the program outside write it.
    """

    code, slug = "ANE215", "runtime-slice"
    roots = tuple(_POSITION_INPUTS)
    refuses, confidence = True, "high"
    advice = "Fix the place (one function for each), or multiply by a mask that is an input, and sum."
    evidence = (
        cite_m4_study("a slice that begins at a computed place is unsupported, for its int32 begin", rows=True),
        cite_m4_study(
            "at odds with it: the same op between convolutions is listed as accepted, in a plan that lists the GPU, "
            "too, and gives some ops no device",
            rows=True,
        ),
        cite_private_route("only a slice at a fixed place has a form"),
        Vendor(
            "an assignment to a window may reside on the ANE",
            source="https://github.com/apple/coremltools/blob/9.0/coremltools/converters/mil/frontend/torch/ops.py",
        ),
        Community(
            "at odds with it: a decoder that updates its cache in the model is rejected by the ANE's compiler",
            source="https://github.com/FluidInference/mobius/pull/77",
            chip="M5 Pro",
            date="2026-07-16",
        ),
    )

    def match(self, op: Operation) -> Hit | Miss:
        computed = find_dynamic_inputs(op, *_POSITION_INPUTS[op.op_type])
        if not computed:
            return Miss(op, "its place is fixed", near=False)
        note = f"the {' and '.join(computed)} of a {op.op_type} {'are' if len(computed) > 1 else 'is'} computed"
        if op.op_type in ("slice_update", "torch_tensor_assign"):
            return Hit(op, note=f"{note}; sources disagree on whether it is supported on the ANE", sure=False)
        return make_unsupported_hit(self, op, note, seen=M1_TO_M5, message=_find_coreml_message(op))

    def examples(self) -> Iterable[Example]:
        yield make_example(
            "begin",
            lambda at: Builder.slice_by_size(x=make_weight(4, 6), begin=at, size=[1, 2], name="y"),
            dtype=types.int32,
            at=(2,),
        )
        yield make_example(
            "end",
            lambda at: Builder.slice_by_index(x=make_weight(4, 6), begin=[0, 0], end=at, name="y"),
            dtype=types.int32,
            at=(2,),
        )
        yield Example("a row of a cache", _build_slice_update)
        yield make_example(
            "fixed",
            lambda x: Builder.slice_by_size(x=x, begin=[1, 0], size=[1, 2], name="y"),
            reason="its place is fixed",
            x=(4, 6),
        )
        yield make_example(
            "masked",
            lambda x, m: Builder.reduce_sum(x=Builder.mul(x=x, y=m), axes=[0], name="y"),
            reason="",
            x=(4, 6),
            m=(4, 1),
        )


def _find_coreml_message(op: Operation) -> str | None:
    """Return the message that was measured for a begin that is a model input in int32, else None."""
    begin = op.inputs.get("begin")
    given = begin is not None and begin.op is None and begin.dtype == types.int32
    return "Unsupported tensor data type: int32" if given and op.op_type == "slice_by_size" else None


def _build_slice_update() -> Program:
    inputs = {"x": Builder.placeholder(shape=(4, 6), dtype=types.fp16),
              "at": Builder.placeholder(shape=(2,), dtype=types.int32)}
    with Function(inputs, opset_version=ct.target.iOS18) as function:
        end = Builder.add(x=function.inputs["at"], y=np.array([1, 6], np.int32))
        row = np.ones((1, 6), np.float16)
        function.set_outputs([Builder.slice_update(x=function.inputs["x"], update=row, begin=function.inputs["at"],
                                                   end=end, name="y")])
    built = Program()
    built.add_function("main", function)
    return built
