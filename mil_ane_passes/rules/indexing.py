"""Ops that read or return indices: gathers, slices, argmax, topk and sorting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Function, Operation, Program, Var, types

from ..ane.op_support import BEFORE_M4, M1_TO_M5, find_dynamic_inputs
from ..ane.partitions import iterate_rows_by_function
from ..ir.integer_bounds import can_hold_integers, find_integer_bounds
from ..ir.query import get_consumers, is_compressed, is_const, is_symbolic, is_used
from ..passes.contract import Community, Example, Hit, Miss, PlanRule, Rule, Severity, Vendor
from ..passes.evidence import cite_2020_layer_list, cite_ane_compiler, cite_m1_gpt_notes, cite_m4_study
from ..passes.examples import build_program, make_example, make_weight
from ..passes.plan import Plan
from ._plan_rules import format_op_name
from ._transitive_readers import DATA_MOVEMENT_OPS, find_transitive_readers, is_integer_or_bool
from ._unsupported_ops import format_chips, is_any_admitted, make_unsupported_hit

_OTHER_GATHERS = ("gather_nd", "gather_along_axis")
_POSITION_INPUTS = {
    "slice_by_index": ("begin", "end", "stride"), "slice_by_size": ("begin", "size"),
    "slice_update": ("begin", "end", "stride"), "torch_tensor_assign": ("begin", "end", "stride"),
}
_INDEX_OUTPUTS = {"reduce_argmax": 0, "reduce_argmin": 0, "argsort": 0, "topk": 1, "non_maximum_suppression": 2}
"Ops and the position of their output with indices."
_COREML_MESSAGES = {
    "reduce_argmax": "Output type int32 is not supported.",
    "argsort": "Unsupported tensor data type: int32",
}
_GATHER_OPS = ("gather", "gather_along_axis", "gather_nd")


class ConstantGather(Rule):
    """A gather with constant indices has no report of ANE support before M4.

    why     Sources disagree. A list of 2020 includes gather in the layers that leave the ANE. Comments by Apple say
            that it runs there, and an M4 accepts it. No source states whether the chip or the OS decides.
    when    gather, gather_nd and gather_along_axis of floats with constant indices, on generations before M4.
    fix     Use slices and a concat (the same bits), or one slice_by_index if the indices are evenly spaced. For many
            indices, use a matmul with a constant 0/1 matrix, which is exact if all values are finite.
    """

    code, slug = "ANE220", "constant-gather"
    roots = ("gather", "gather_nd", "gather_along_axis")
    targets = BEFORE_M4
    refuses, confidence, severity = True, "low", Severity.SUGGESTION
    advice = "Slice and concat: the same bits; for many indices, a matmul with a constant 0/1 matrix."
    evidence = (
        cite_2020_layer_list("gather does not run on the ANE"),
        Vendor("contradicts it: scatter falls off the ANE, while gather resides there",
               source="https://github.com/apple/coremltools/blob/9.0/coremltools/converters/mil/frontend/torch/ops.py"),
        cite_m4_study("contradicts it: gather with constant indices is accepted", rows=True),
        cite_ane_compiler("contradicts it: gather is supported in a restricted form on M1, and by the hardware from "
                           "M2 on"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if find_dynamic_inputs(op, "indices"):
            return Miss(op, "its indices are computed", near=False)
        if not types.is_float(op.x.dtype):
            return Miss(op, "gathers integers", near=False)
        return Hit(op, note=f"{op.op_type} with constant indices is accepted on M4; on earlier chips sources disagree",
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
    """A gather with computed indices, such as an embedding lookup, is unsupported on the ANE.

    why     Core ML on an M4 rejects gather unless its indices are constant. A list of 2020 and a report from an M1 Pro
            agree, and the embedding lookup of Apple's transformers runs on the CPU. gather_nd and gather_along_axis are
            accepted on an M4, but not the ops that prepare their indices (see int32-op).
    when    gather with computed indices; gather_nd and gather_along_axis with int32 indices, and with other indices on
            generations before M4, for which no measurement exists.
    fix     Split the model after the lookup with `edit --split-at` and its output: the first package does the lookup,
            the second one reads the rows in fp16 and runs on the ANE. With several lookups, name all their outputs. Or
            look up in the caller, and pass the rows. For a small table, multiply a one-hot row by the table; this is
            exact if the table is finite and the partial sums are below 32768. To select a row by position, multiply by
            a mask and sum.
    no fix  The rows depend on data, and no op that is supported on the ANE selects rows by data. Without the lookup the
            model would have other inputs.
    """

    code, slug = "ANE214", "runtime-gather"
    roots = ("gather", *_OTHER_GATHERS)
    refuses, confidence = True, "high"
    advice = ("Split off the lookup as a separate model (edit --split-at with its output); or multiply a one-hot row "
              "by a small table.")
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
        cite_ane_compiler(
            "gather and gather_along_axis are supported in a restricted form on M1 and by the hardware from M2 on"
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
                self, op, f"{what} with computed indices ({kind})", message=message, split_at=behind
            )
        if kind == "int32":
            return make_unsupported_hit(
                self, op, f"{op.op_type} reads int32 indices; 16-bit ones (deployment target iOS17) are accepted on M4"
            )
        if not is_any_admitted(BEFORE_M4, tuple(self.generations)):
            return Miss(op, f"{op.op_type} is accepted on M4", near=False)
        where = format_chips(tuple(one for one in self.generations if BEFORE_M4.includes(one)))
        return Hit(op, note=f"{op.op_type} with computed indices is accepted on M4, not measured on "
                            f"{where}", sure=False)

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
    def build_body(ids: Var) -> Var:
        result: Var = Builder.gather(x=table, indices=ids, axis=0, name="y")
        return result

    return build_program(build_body, opset=opset, dtype=types.int32, ids=(3,))


class RuntimeSlice(Rule):
    """A slice with computed bounds is unsupported on the ANE.

    why     Core ML on an M4 rejects a slice_by_size whose begin is an int32 input. The ANE's compiler folds constant
            bounds into the layout, and has no other form. One compute plan of a network lists the same op as accepted,
            but that plan is inconsistent in other respects, too.
    when    slice_by_index and slice_by_size with a begin, end, stride or size that is not constant. Also slice_update
            and window assignments; there sources disagree, and the finding is a guess.
    fix     Use constant bounds, with one function for each if there are few: the same bits. Otherwise multiply the
            entire tensor by a mask that is an input, and sum: exact if the values are finite. For a cache, return the
            new row, and write it in the caller.
    """

    code, slug = "ANE215", "runtime-slice"
    roots = tuple(_POSITION_INPUTS)
    refuses, confidence = True, "high"
    advice = "Use constant bounds (one function for each), or multiply by a mask that is an input, and sum."
    evidence = (
        cite_m4_study("a slice with a computed begin is unsupported, because of its int32 begin", rows=True),
        cite_m4_study(
            "contradicts it: the same op between convolutions is listed as accepted, in a plan that also lists the "
            "GPU, and lists no device for some ops",
            rows=True,
        ),
        cite_ane_compiler("only slices with constant bounds have an equivalent"),
        Vendor(
            "an assignment to a window may reside on the ANE",
            source="https://github.com/apple/coremltools/blob/9.0/coremltools/converters/mil/frontend/torch/ops.py",
        ),
        Community(
            "contradicts it: a decoder that updates its cache in the model is rejected by the ANE's compiler",
            source="https://github.com/FluidInference/mobius/pull/77",
            chip="M5 Pro",
            date="2026-07-16",
        ),
    )

    def match(self, op: Operation) -> Hit | Miss:
        computed = find_dynamic_inputs(op, *_POSITION_INPUTS[op.op_type])
        if not computed:
            return Miss(op, "its bounds are constant", near=False)
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
            reason="its bounds are constant",
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
    """The result is an int32 index, and int32 is unsupported on the ANE.

    why     Core ML on an M4 rejects reduce_argmax and argsort because of their output dtype. It accepts topk with
            16-bit indices, which coremltools makes for deployment target iOS17 and later. The hardware can rank: the
            ANE's compiler, queried without Core ML, supports argmax on every generation, argsort and topk from M2 on,
            and non_maximum_suppression.
    when    reduce_argmax, reduce_argmin, argsort and non_maximum_suppression; topk whose indices are int32.
            An argmax or argmin with 16-bit indices was not measured; the finding is a guess.
    fix     Return the scores and rank in the caller. If only the largest value is needed, use reduce_max: the same
            bits. topk with k=1 returns the same index, in 16 bits with deployment target iOS17; but see topk-argmax.
    """

    code, slug = "ANE212", "index-result"
    roots = tuple(_INDEX_OUTPUTS)
    refuses, confidence = True, "high"
    advice = "Return the scores and rank them in the caller; use reduce_max if only the value is needed."
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
        cite_ane_compiler("argmax is supported on all generations, argsort and topk from M2 on, argmin from M3 on"),
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
        return Hit(op, note=f"{op.op_type} returns indices in {kind}; unsupported in int32, not measured in "
                            f"{kind}", sure=False)

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
    """An argmax in fp16 may return a wrong index on the newest devices, and topk is slower than estimated.

    why     Two reports from one device: an argmax in fp16 is silently wrong for half of all pixels, and a model with
            topk and gather returns wrong values. The same op on an fp32 operand, and topk with k=1 instead of argmax,
            were right, but slow. A topk on the ANE was measured at 200 times its estimate. Indices are int32, which is
            unsupported on the ANE, so ops on them run on the CPU.
    when    topk, reduce_argmax and reduce_argmin of an fp16 value, at any position.
    fix     Return the scores and rank them in the caller. If that is not possible, cast the operand to fp32 before an
            argmax, and compare with a CPU-only run on the device in question. This was reported for Core AI packages;
            for Core ML it is predicted.
    """

    code, slug = "ANE320", "topk-argmax"
    severity = Severity.WRONG
    roots = ("topk", "reduce_argmax", "reduce_argmin")
    advice = "Return the scores and rank them in the caller, or compare with a CPU-only run on that device."
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
        cite_ane_compiler("topk and argmin are unsupported on M1, argmax is supported", chip="M1"),
    )

    def match(self, op: Operation) -> Hit | Miss:
        if op.x.dtype != types.fp16:
            kind = "fp32, where it was right" if op.x.dtype == types.fp32 else types.builtin_to_string(op.x.dtype)
            return Miss(op, f"ranks {kind}")
        if op.op_type == "topk":
            return Hit(op, note=_describe_topk(op))
        what = op.op_type.removeprefix("reduce_")
        return Hit(op, note=f"{what} in fp16: reported wrong in Core AI on an iPhone 17 Pro with iOS 27")

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
        return "topk of which only the values are used: slow on the ANE"
    gathers = [reader for reader in find_transitive_readers(indices) if reader.op_type in _GATHER_OPS]
    if gathers:
        return f"topk whose indices a {gathers[0].op_type} reads: the pattern that was reported wrong in Core AI"
    where = "the model's output" if not get_consumers(indices) else "computed with"
    return f"topk whose indices are {where}: slow on the ANE"


def _build_topk_gather() -> Program:
    def build_body(x: Var) -> Var:
        _, indices = Builder.topk(x=x, k=2, axis=-1)
        table = np.arange(32, dtype=np.float16).reshape(4, 8)
        result: Var = Builder.gather_along_axis(x=Builder.mul(x=x, y=table), indices=indices, axis=-1, name="y")
        return result

    return build_program(build_body, x=(4, 8))


class NarrowedIds(Rule):
    """Ids are cast to 16 bits, and then select rows of a table with more rows than 16 bits can count.

    why     coremltools' pass add_int16_cast casts int32 operands of squeeze, gather and topk to int16 at float16 and
            for iOS17, whatever their values are. A token id of 40,000 becomes -25,536 and selects another row. In one
            report such a cast did not change the value on a Mac, so that the result may depend on the backend.
    when    A cast of int32 to int16 or uint16 whose result reaches the indices of a gather, also through ops that move
            elements, casts, and the wrapping of negative indices, if the table has more than 32,768 rows (int16) or
            65,536 (uint16), and the values before the cast may be larger.
    fix     Convert with mil_ane_passes.convert, or remove common::add_int16_cast from the pass pipeline: the ids stay
            int32.
    """

    code, slug = "ANE323", "ids-cast-to-16-bits"
    severity = Severity.WRONG
    roots = ("cast",)
    confidence = "medium"
    advice = "Convert with mil_ane_passes.convert, or without the pass common::add_int16_cast."
    evidence = (
        Community(
            "the x of a gather is cast from int32 to int16, which should overflow; the reporter's prediction did not",
            source="https://github.com/apple/coremltools/issues/2222",
            date="2024-05-16",
        ),
        Community(
            "a pass pipeline that keeps int32 data out of add_int16_cast: only constants and indices of a bounded axis "
            "are narrowed",
            source="https://github.com/kasper0406/stablehlo-coreml/pull/107",
            date="2026-09-08",
        ),
    )

    def match(self, op: Operation) -> Hit | Miss:
        kind = op.outputs[0].dtype
        if op.x.dtype != types.int32 or kind not in _LARGEST_OF_16_BITS:
            return Miss(op, "is no cast of int32 to 16 bits", near=False)
        rows, largest = _count_selected_rows(op.outputs[0]), _LARGEST_OF_16_BITS[kind]
        if rows <= largest + 1:
            return Miss(op, "selects no row beyond 16 bits", near=False)
        if can_hold_integers(kind, find_integer_bounds(op.x)):
            return Miss(op, "its values fit 16 bits")
        return Hit(op, note=f"the ids select one of {rows:,} rows, and {types.builtin_to_string(kind)} ends at "
                            f"{largest:,}")

    def examples(self) -> Iterable[Example]:
        yield Example("squeezed ids", lambda: _build_narrowed_lookup(40_000))
        yield Example("more than uint16", lambda: _build_narrowed_lookup(70_000, "uint16"))
        yield Example("a small table", lambda: _build_narrowed_lookup(32_768),
                      reason="selects no row beyond 16 bits")
        yield Example("a table that uint16 counts", lambda: _build_narrowed_lookup(40_000, "uint16"),
                      reason="selects no row beyond 16 bits")
        yield Example("few values", lambda: _build_narrowed_lookup(40_000, least=100),
                      reason="its values fit 16 bits")


_LARGEST_OF_16_BITS = {types.int16: 32_767, types.uint16: 65_535}


def _count_selected_rows(indices: Var) -> int:
    """Count the rows of the largest table that a gather selects from by these indices; 0 without any."""
    def carries(op: Operation) -> bool:
        return op.op_type in (*DATA_MOVEMENT_OPS, "select", "add") and is_integer_or_bool(op.outputs[0])

    found = 0
    for op in find_transitive_readers(indices, carries):
        if op.op_type in ("gather", "gather_along_axis") and is_const(op.axis):
            extent = op.x.shape[int(op.axis.val)]
            found = max(found, 0 if is_symbolic(extent) else int(extent))
    return found


def _build_narrowed_lookup(rows: int, dtype: str = "int16", least: int | None = None) -> Program:
    """Build what coremltools makes of `table(ids.squeeze(1))`, with at most `least` different ids."""
    def build_body(ids: Var) -> Var:
        ids = ids if least is None else Builder.mod(x=Builder.maximum(x=ids, y=np.int32(0)), y=np.int32(least))
        narrow = Builder.squeeze(x=Builder.cast(x=ids, dtype=dtype), axes=[1])
        wide = Builder.cast(x=narrow, dtype="int32")
        wrapped = Builder.add(x=wide, y=np.int32(rows))
        wide = Builder.select(cond=Builder.greater_equal(x=wide, y=np.int32(0)), a=wide, b=wrapped)
        table = Builder.const(val=np.zeros((rows, 1), np.float16))
        result: Var = Builder.gather(x=table, indices=wide, axis=0, name="y")
        return result

    return build_program(build_body, dtype=types.int32, ids=(1, 1, 4))


class TopkInTheMiddle(PlanRule):
    """A topk between two ANE partitions is more expensive than Core ML estimates.

    why     On an M4 a model with one topk took 8.00 ms with the ANE allowed and 6.23 ms on the CPU alone: the segmenter
            underestimates topk on the ANE about 200 times, and therefore keeps it there. An iPhone needed 1.75 ms for
            one, its GPU 0.05 ms. The estimate printed for such an op is that of Core ML, not its latency.
    when    A topk that is used inside the model, with ops predicted on the ANE before and after it. ANE320 is about its
            correctness.
    fix     Return the scores and rank them in the caller, or in a second package. If it has to stay, compare the
            latency with and without the ANE on the device.
    """

    code, slug = "ANE514", "topk-in-the-middle"
    advice = "Split the model at the topk and rank in the caller, or measure it with and without the ANE."
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
                        note=f"{format_op_name(row.op)} is predicted on the {row.backend.upper()}, between ANE "
                             f"partitions; measured 8.00 ms against 6.23 ms without the ANE (M4)",
                    )
                elif places:
                    yield Miss(row.op, "topk without ANE partitions on both sides", near=False)

    def examples(self) -> Iterable[Example]:
        yield Example("between", lambda: _build_topk_chain("ttttkttttttttt"))
        yield Example("at the end", lambda: _build_topk_chain("ttttk"), reason="topk without ANE partitions on both "
                                                                               "sides")
        yield Example("none", lambda: _build_topk_chain("tttt"), reason="")


def _build_topk_chain(spec: str) -> Program:
    def build_body(x: Var) -> Var:
        for number, kind in enumerate(spec):
            label = f"{kind}{number}"
            x = Builder.tanh(x=x, name=label) if kind == "t" else Builder.topk(x=x, k=500, axis=-1, name=label)[0]
        return x

    return build_program(build_body, x=(1, 64, 512, 512))
