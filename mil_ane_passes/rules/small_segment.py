"""Find ops supported on the ANE that are not worth the transition."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..ane.partitions import StrandedOps, find_stranded_ops, iterate_rows_by_function
from ..passes.contract import Community, Example, Hit, Miss, PlanRule
from ..passes.plan import Plan
from ..utils.text_format import format_duration
from ._plan_rules import COST_MODEL, format_list, format_op_range, make_chain_builder

_MAX_LISTED = 3
"Most partitions that a note names."


class SmallSegment(PlanRule):
    """A stretch of ops supported on the ANE is predicted on the CPU, since it saves less than the way there and back.

    why     Entering an ANE segment costs 0.125 ms, and each transition as much again. A stretch between two ops
            that the ANE rejects has to save 0.375 ms to be worth it, one at the model's start 0.25 ms; an output on
            the ANE costs 0.125 ms more. These are constants of Core ML's own segmenter, published for an M4; that it is
            so in the model at hand is predicted from them and from estimated costs, nobody ran it.
    when    Neighbours supported on the ANE, in a function part of which is predicted on the ANE. One finding for each
            function, the stretch that would save most first. A function all on the CPU is ANE516's.
    fix     What cuts the stretch off is the ops that the ANE rejects on either side: replace those, or move them to the
            model's start or end. A larger batch makes a stretch save more. A single op at the end is nothing to fix.
    """

    code, slug = "ANE507", "small-segment"
    level, confidence = "note", "high"
    advice = "Replace or move away the refused ops that cut the stretch off, or give the model a larger batch."
    evidence = (
        COST_MODEL,
        Community("the same architecture is placed on the ANE in full at 10M parameters and not at all at 50K, "
                  "although every op is eligible in both",
                  source="https://ask-meridian.uk/blog/apple-neural-engine-eligibility-vs-placement/"),
    )
    least: int = 1
    "Fewest ops of a reported partition; the number is ours."

    def match_plan(self, plan: Plan) -> Iterator[Hit | Miss]:
        for function, rows in iterate_rows_by_function(plan):
            if all(row.backend == "cpu" for row in rows):
                continue
            ends = frozenset(plan.program.functions[function].outputs)
            found = [stretch for stretch in find_stranded_ops(rows, ends)
                     if len(stretch.rows) >= self.least and stretch.saved_ms > 0]
            if found:
                found.sort(key=lambda stretch: stretch.saved_ms, reverse=True)
                yield Hit(found[0].rows[0].op, note=_format_note(found),
                          covers=[row.op for stretch in found for row in stretch.rows])

    def examples(self) -> Iterable[Example]:
        yield Example("between two refused ops", make_chain_builder("ttctcttt"))
        yield Example("behind the last refused op", make_chain_builder("tttct"))
        yield Example("worth the way", make_chain_builder("ttctttcttt"), reason="")
        yield Example("all on the CPU", make_chain_builder("tct", 1, 8), reason="")
        yield Example("none so short", make_chain_builder("ttctcttt"), reason="", options={"least": 2})


def _format_note(stretches: list[StrandedOps]) -> str:
    each = [f"{format_op_range(one.rows)}, which would save {format_duration(one.saved_ms)} there and cost "
            f"{format_duration(one.needs)} for the way"
            for one in stretches]
    return f"predicted on the CPU although it is supported on the ANE: {format_list(each, _MAX_LISTED, 'stretch')}"
