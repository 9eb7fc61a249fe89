"""Gathers, slices and rankings: ops that read or return indices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Function, Operation, Program, Var, types

from ..ane.op_support import BEFORE_M4, M1_TO_M5, find_dynamic_inputs
from ..ane.partitions import iterate_rows_by_function
from ..ir.query import get_consumers, is_compressed, is_const, is_used
from ..passes.contract import Community, Example, Hit, Miss, PlanRule, Rule, Severity, Vendor
from ..passes.evidence import cite_2020_layer_list, cite_m1_gpt_notes, cite_m4_study, cite_private_route
from ..passes.examples import build_program, make_example, make_weight
from ..passes.plan import Plan
from ._plan_rules import format_op_name
from ._transitive_readers import find_transitive_readers
from ._unsupported_ops import format_chips, is_any_admitted, make_unsupported_hit

_OTHER_GATHERS = ("gather_nd", "gather_along_axis")
_POSITION_INPUTS = {
    "slice_by_index": ("begin", "end", "stride"), "slice_by_size": ("begin", "size"),
    "slice_update": ("begin", "end", "stride"), "torch_tensor_assign": ("begin", "end", "stride"),
}
_INDEX_OUTPUTS = {"reduce_argmax": 0, "reduce_argmin": 0, "argsort": 0, "topk": 1, "non_maximum_suppression": 2}
"Ops with the number of the output that has indices."
_COREML_MESSAGES = {
    "reduce_argmax": "Output type int32 is not supported.",
    "argsort": "Unsupported tensor data type: int32",
}
_GATHER_OPS = ("gather", "gather_along_axis", "gather_nd")


class ConstantGather(Rule):
    """Before the M4 nobody saw a gather at constant indices on the ANE.

    why     Sources disagree. In 2020 gather was listed among the layers that leave the ANE; comments of Apple's say
            that it resides there, and on an M4 it is accepted. What decides, the chip or the system, nobody says.
    when    gather, gather_nd and gather_along_axis of numbers with constant indices, on generations before the M4.
    fix     Slices and a concat give the same bits; one slice_by_index does where the places are evenly apart. For many
            places, a matmul with a constant matrix of zeros and ones: exact where all values are finite.
    """

    code, slug = "ANE220", "constant-gather"
    roots = ("gather", "gather_nd", "gather_along_axis")
    targets = BEFORE_M4
    refuses, confidence, severity = True, "low", Severity.SUGGESTION
    advice = "Slice and concat: the same bits; a matmul with a constant matrix of zeros and ones for many places."
    evidence = (
        cite_2020_layer_list("gather does not run on the ANE"),
        Vendor("contradicts it: scatter falls off the ANE, while gather resides there",
               source="https://github.com/apple/coremltools/blob/9.0/coremltools/converters/mil/frontend/torch/ops.py"),
        cite_m4_study("contradicts it: gather with constant indices is accepted", rows=True),
        cite_private_route("contradicts it: gather is taken in a narrow form on M1, and by the hardware from M2 on"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if find_dynamic_inputs(op, "indices"):
            return Miss(op, "its indices are computed", near=False)
        if not types.is_float(op.x.dtype):
            return Miss(op, "gathers integers", near=False)
        return Hit(op, note=f"{op.op_type} at constant indices is accepted on M4; on earlier chips sources disagree",
                   sure=False)

    def examples(self) -> Iterable[Example]:
        yield make_example(
            "channels", lambda x: Builder.gather(x=x, indices=np.array([2, 0], np.int32), axis=1, name="y"), x=(1, 3, 4)
        )
        yield make_example(
            "places", lambda x: Builder.gather_nd(x=x, indices=np.array([[0, 1]], np.int32), name="y"), x=(3, 4)
        )
        yield make_example(
            "computed",
            lambda ids: Builder.gather(x=np.ones((3, 4), np.float16), indices=ids, axis=0, name="y"),
            reason="its indices are computed",
            dtype=types.int32,
            ids=(2,),
        )
        yield make_example(
            "slice", lambda x: Builder.slice_by_size(x=x, begin=[1, 0], size=[1, 4], name="y"), reason="", x=(3, 4)
        )


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


class TopkArgmax(Rule):
    """An argmax in fp16 may pick the wrong element on the newest devices, and a topk costs more than it looks.

    why     Two reports of one device: an argmax in fp16 is wrong on half of all pixels without a word, and a model with
            topk and gather returns other numbers. The same op on an fp32 operand, and topk of one in place of argmax,
            were right, but slow. A topk on the ANE was measured at 200 times its estimate. Indices are int32, which
            is unsupported on the ANE: what computes with them runs on the CPU.
    when    topk, reduce_argmax and reduce_argmin of an fp16 value, wherever they stand.
    fix     Return the scores and rank them outside the model. Where that cannot be, cast the operand to fp32 before an
            argmax, and compare with a run on the CPU alone on the device in question. Reported for Core AI packages;
            that Core ML's are struck is predicted, not reported.
    """

    code, slug = "ANE320", "topk-argmax"
    severity = Severity.WRONG
    roots = ("topk", "reduce_argmax", "reduce_argmin")
    advice = "Return the scores and rank them outside the model, or compare with a run on the CPU of that device."
    evidence = (
        Community(
            "argmax over 19 classes in fp16: 198,442 of 409,600 pixels differ from the CPU's; topk of one was "
            "right (366 ms for 3.7), so was the argmax of an fp32 operand (Core AI)",
            source="https://github.com/apple/coreai-torch/issues/116",
            chip="iPhone 17 Pro",
            os="iOS 27.0 (24A437)",
            date="2026-09-20",
        ),
        Community(
            "an fp16 pose model with topk and gather returns wrong numbers silently; a detection model with the "
            "same head is right, so the author holds the graph responsible and not topk as such (Core AI)",
            source="https://github.com/apple/coreai-torch/issues/115",
            chip="iPhone 17 Pro",
            os="iOS 27.0",
            date="2026-09-18",
        ),
        Community(
            "a topk costs 1.75 ms wherever the rest is on the ANE, 0.05 ms on the GPU (Core AI)",
            source="https://github.com/apple/coreai-torch/issues/66",
            chip="iPhone 17 Pro",
            os="iOS 27.0 beta 6 (24A5418b)",
            date="2026-08-25",
        ),
        cite_m4_study(
            "topk is accepted (k = 40 of 32000); a model with one took 8.00 ms with the ANE allowed and 6.23 ms "
            "without: about 200 times the estimate"
        ),
        cite_private_route("topk and argmin are unsupported on M1, argmax is taken", chip="M1"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if op.x.dtype != types.fp16:
            kind = "fp32, where it was right" if op.x.dtype == types.fp32 else types.builtin_to_string(op.x.dtype)
            return Miss(op, f"ranks {kind}")
        if op.op_type == "topk":
            return Hit(op, note=_describe_topk(op))
        what = op.op_type.removeprefix("reduce_")
        return Hit(op, note=f"{what} of fp16 numbers: reported wrong in Core AI on an iPhone 17 Pro with iOS 27")

    def examples(self) -> Iterable[Example]:
        yield make_example("argmax", lambda x: Builder.reduce_argmax(x=x, axis=-1, name="y"), x=(4, 8))
        yield make_example("argmin", lambda x: Builder.reduce_argmin(x=x, axis=0, name="y"), x=(4, 8))
        yield make_example("topk", lambda x: Builder.topk(x=x, k=2, axis=-1)[0], x=(4, 8))
        yield make_example("values of topk", lambda x: Builder.topk(x=x, k=2, axis=-1, return_indices=False), x=(4, 8))
        yield Example("topk and gather", _build_topk_gather)
        yield make_example(
            "fp32",
            lambda x: Builder.reduce_argmax(x=x, axis=-1, name="y"),
            reason="ranks fp32, where it was right",
            dtype=types.fp32,
            x=(4, 8),
        )
        yield make_example("no ranking", lambda x: Builder.reduce_max(x=x, axes=[-1], name="y"), reason="", x=(4, 8))


def _describe_topk(op: Operation) -> str:
    indices = op.outputs[1] if len(op.outputs) > 1 else None
    if indices is None or not is_used(indices):
        return "topk, only its values are read: slow on the ANE"
    gathers = [reader for reader in find_transitive_readers(indices) if reader.op_type in _GATHER_OPS]
    if gathers:
        return f"topk whose indices a {gathers[0].op_type} reads: the form that was reported wrong in Core AI"
    where = "the model's output" if not get_consumers(indices) else "computed with"
    return f"topk whose indices are {where}: slow on the ANE"


def _build_topk_gather() -> Program:
    def body(x: Var) -> Var:
        _, indices = Builder.topk(x=x, k=2, axis=-1)
        table = np.arange(32, dtype=np.float16).reshape(4, 8)
        result: Var = Builder.gather_along_axis(x=Builder.mul(x=x, y=table), indices=indices, axis=-1, name="y")
        return result

    return build_program(body, x=(4, 8))


class TopkInTheMiddle(PlanRule):
    """A topk with parts on the ANE before and after it costs more than Core ML believes.

    why     On an M4 a model with one topk took 8.00 ms with the ANE allowed and 6.23 ms on the CPU alone: the segmenter
            underestimates topk on the ANE about 200 times, and so keeps it there. An iPhone spent 1.75 ms on one where
            the GPU took 0.05 ms. The estimate shown for such an op is what Core ML believes, not what it takes.
    when    A topk that is read inside the model, with ops predicted on the ANE both before and after it. Whether the
            numbers are right is ANE320's question.
    fix     Return the scores and rank them outside the model, in a second part if need be. Where it must stay, compare
            the times with and without the ANE on the device.
    """

    code, slug = "ANE514", "topk-in-the-middle"
    advice = "Split the model at the topk and rank outside, or measure it with and without the ANE."
    evidence = (
        cite_m4_study(
            "a model with one topk: 8.00 ms with the ANE allowed, 6.23 ms on the CPU alone; the estimate is about "
            "200 times too low"
        ),
        Community(
            "a topk costs 1.75 ms where the rest is on the ANE, 0.05 ms on the GPU (Core AI)",
            source="https://github.com/apple/coreai-torch/issues/66",
            chip="iPhone 17 Pro",
            os="iOS 27.0 beta 6 (24A5418b)",
            date="2026-08-25",
        ),
    )

    def match_plan(self, plan: Plan) -> Iterator[Hit | Miss]:
        for _, rows in iterate_rows_by_function(plan):
            places = [at for at, row in enumerate(rows) if row.backend == "ane" and row.op.op_type != "topk"]
            for at, row in enumerate(rows):
                if row.op.op_type != "topk":
                    continue
                before = sum(place < at for place in places[:1])
                after = sum(place > at for place in places[-1:])
                if before and after:
                    yield Hit(
                        row.op,
                        note=f"{format_op_name(row.op)} is predicted on the {row.backend.upper()}, between parts "
                        "on the ANE; measured 8.00 ms against 6.23 ms without the ANE (M4)",
                    )
                elif places:
                    yield Miss(row.op, "topk with the ANE on one side only", near=False)

    def examples(self) -> Iterable[Example]:
        yield Example("between", lambda: _build_topk_chain("ttttkttttttttt"))
        yield Example("at the end", lambda: _build_topk_chain("ttttk"), reason="topk with the ANE on one side only")
        yield Example("none", lambda: _build_topk_chain("tttt"), reason="")


def _build_topk_chain(spec: str) -> Program:
    def body(x: Var) -> Var:
        for number, kind in enumerate(spec):
            label = f"{kind}{number}"
            x = Builder.tanh(x=x, name=label) if kind == "t" else Builder.topk(x=x, k=500, axis=-1, name=label)[0]
        return x

    return build_program(body, x=(1, 64, 512, 512))
