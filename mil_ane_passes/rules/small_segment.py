"""Find ops that the ANE takes and that are not worth the way there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..core.contract import Community, Example, Hit, Miss, PlanRule
from ..core.islands import Stretch, by_function, stretches_of
from ..core.plan import Plan
from ..core.words import duration_text
from ._plans import COST_MODEL, chain, listed, rows_text

_SHOWN = 3
"Stretches a note names."


class SmallSegment(PlanRule):
    """A stretch of ops that the ANE takes is predicted on the CPU, since it saves less than the way there and back.

    why     Entering an ANE segment costs 0.125 ms, and each change of backend as much again. A stretch between two ops
            that the ANE refuses has to save 0.375 ms to be worth it, one at the model's start 0.25 ms; an output on
            the ANE costs 0.125 ms more. These are constants of Core ML's own segmenter, published for an M4; that it is
            so in the model at hand is predicted from them and from estimated costs, nobody ran it.
    when    Neighbours that the ANE takes, in a function part of which is predicted on the ANE. One finding for each
            function, the stretch that would save most first. A function all on the CPU is ANE516's.
    cure    What cuts the stretch off is the ops that the ANE refuses on either side: replace those, or move them to the
            model's start or end. A larger batch makes a stretch save more. A single op at the end is nothing to mend.
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
    "Shorter stretches, in ops, are not mentioned; the number is ours."

    def match_plan(self, plan: Plan) -> Iterator[Hit | Miss]:
        for function, rows in by_function(plan):
            if all(row.backend == "cpu" for row in rows):
                continue
            ends = frozenset(plan.program.functions[function].outputs)
            found = [stretch for stretch in stretches_of(rows, ends)
                     if len(stretch.rows) >= self.least and stretch.saves > 0]
            if found:
                found.sort(key=lambda stretch: stretch.saves, reverse=True)
                yield Hit(found[0].rows[0].op, note=_note(found),
                          covers=[row.op for stretch in found for row in stretch.rows])

    def examples(self) -> Iterable[Example]:
        yield Example("between two refused ops", chain("ttctcttt"))
        yield Example("behind the last refused op", chain("tttct"))
        yield Example("worth the way", chain("ttctttcttt"), reason="")
        yield Example("all on the CPU", chain("tct", 1, 8), reason="")
        yield Example("none so short", chain("ttctcttt"), reason="", options={"least": 2})


def _note(stretches: list[Stretch]) -> str:
    each = [f"{rows_text(one.rows)}, which would save {duration_text(one.saves)} there and cost "
            f"{duration_text(one.needs)} for the way"
            for one in stretches]
    return f"predicted on the CPU although the ANE takes it: {listed(each, _SHOWN, 'stretch')}"
