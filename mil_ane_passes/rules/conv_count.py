"""Find models with more convs than the ANE's compiler supports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from coremltools.converters.mil.mil import Builder, Program, Var

from ..ane.partitions import iterate_rows_by_function
from ..passes.contract import Community, Example, Hit, Miss, PlanRule
from ..passes.examples import build_program, make_weight
from ..passes.plan import Plan

_CONV_OPS = ("conv", "conv_transpose")


class ConvCount(PlanRule):
    """More convs in one function than one ANE compiler was seen to bear.

    why     On an M6 a chain of 387 convs overflows the compiler's stack: the model goes to the CPU without a word, or
            loading hangs. 386 compile. No other chip was tried; that others share the limit is not known.
    when    A function with more than `most` convs and transposed convs on the longest path on the ANE. Whether they
            form one chain is not asked.
    fix     Split the model.
    """

    code, slug = "ANE511", "conv-count"
    confidence = "low"
    advice = "Split the model, so that no part has so many convs."
    evidence = (
        Community("387 conv layers in a chain: the compiler's stack overflows, and the model runs on the CPU silently "
                  "or hangs; 386 compile", chip="M6",
                  source="751K/Apple-Neural-Engine-Microarchitecture-Study-M6 notes/defects.md"),
    )
    most: int = 386
    "The largest number that was observed to compile."

    def match_plan(self, plan: Plan) -> Iterator[Hit | Miss]:
        for name, rows in iterate_rows_by_function(plan):
            convs = [row.op for row in rows if row.op.op_type in _CONV_OPS and row.takes]
            said = f"{len(convs)} convs in function '{name}'"
            if len(convs) > self.most:
                yield Hit(convs[0], covers=convs, note=f"{said}, {self.most} is the most that was seen to compile (M6; "
                                                       "other chips were not tried)")
            elif len(convs) > 0.9 * self.most:
                yield Miss(convs[0], f"{said}, the most that was seen to compile is {self.most}")

    def examples(self) -> Iterable[Example]:
        yield Example("above", lambda: _build_convs(4), options={"most": 3})
        yield Example("at the limit", lambda: _build_convs(3), options={"most": 3},
                      reason="3 convs in function 'main', the most that was seen to compile is 3")
        yield Example("few", lambda: _build_convs(2), reason="")


def _build_convs(count: int) -> Program:
    def body(x: Var) -> Var:
        for number in range(count):
            x = Builder.conv(x=x, weight=make_weight(4, 4, 1, 1), name=f"conv{number}")
        return x

    return build_program(body, x=(1, 4, 8, 8))
