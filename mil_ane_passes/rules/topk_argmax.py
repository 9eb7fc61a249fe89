"""Find rankings: topk, argmax and argmin."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from coremltools.converters.mil.mil import Builder, Operation, Program, Var, types

from ..ir.query import get_consumers, is_used
from ..passes.contract import Community, Example, Hit, Miss, Rule
from ..passes.evidence import cite_m4_study, cite_private_route
from ..passes.examples import build_program, make_example
from ._transitive_readers import find_transitive_readers

_GATHER_OPS = ("gather", "gather_along_axis", "gather_nd")


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
