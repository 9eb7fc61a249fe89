"""Find rankings between parts of the model that run on the ANE."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from coremltools.converters.mil.mil import Builder, Program, Var

from ..ane.partitions import iterate_rows_by_function
from ..passes.contract import Community, Example, Hit, Miss, PlanRule
from ..passes.evidence import cite_m4_study
from ..passes.examples import build_program
from ..passes.plan import Plan
from ._plan_rules import format_op_name


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
