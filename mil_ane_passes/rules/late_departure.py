"""Find models that leave the ANE near their end for good."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from coremltools.converters.mil.mil import Var

from ..core.contract import Example, Hit, Miss, PlanRule
from ..core.evidence import in_2020
from ..core.islands import Island, by_function, islands_of
from ..core.plan import Plan, Row
from ..core.query import flat_inputs
from ..core.words import counted
from ._plans import COST_MODEL, chain, kinds, listed, ms


class LateDeparture(PlanRule):
    """An op that the ANE refuses stands near the end, and all that follows is predicted on the CPU.

    why     Core ML runs the first part of such a model on the ANE and leaves it for the rest. Split in two, the first
            part is wholly on the ANE, and you choose how the second is run: by a model of its own, or by code that
            Core ML need not plan for. Where the ANE is left is predicted by a published cost model; nobody ran it.
    when    The last ops of a function are predicted on the CPU, some of them since the ANE refuses them, and at least
            `share` of its ops stand before them. The note names the values to cut at.
    cure    Cut the model at the values named: convert the part before and the part after each on its own. A single
            refused op at the very end costs little; several, or one that drags others along, are worth it.
    """

    code, slug = "ANE508", "late-departure"
    level, confidence = "note", "medium"
    advice = "Split the model at the values named and run the second part on its own."
    evidence = (
        in_2020("where what the ANE does not take stands near the end, split the model and run one part after the "
                "other: the first can use the ANE; may be faster than running all on CPU or GPU"),
        in_2020("Core ML may run the first part on the ANE and then switch for the rest"),
        COST_MODEL,
    )
    share: float = 0.5
    "Least share of a function's ops before the departure; the number is ours."

    def match_plan(self, plan: Plan) -> Iterator[Hit | Miss]:
        for _, rows in by_function(plan):
            last = next(iter(islands_of(rows)[-1:]), None)
            if last is None or not last.last or not last.refused or last.first:
                continue
            before = len(rows) - len(last.rows)
            if before < self.share * len(rows):
                yield Miss(last.rows[0].op, f"{before} of {len(rows)} ops stand before the last departure, less than "
                                            f"{self.share:.0%}")
                continue
            yield Hit(last.refused[0].op, note=_note(rows, last), covers=[row.op for row in last.rows])

    def examples(self) -> Iterable[Example]:
        yield Example("one refused op, another behind it", chain("ttttct"))
        yield Example("at the very end", chain("ttttc"))
        yield Example("early", chain("ttctctctct"), reason="2 of 10 ops stand before the last departure, less than 50%")
        yield Example("it comes back", chain("ttcttt"), reason="")
        yield Example("nowhere on the ANE", chain("tct", 1, 8), reason="")


def _note(rows: list[Row], tail: Island) -> str:
    before, after = len(rows) - len(tail.rows), len(tail.rows)
    dragged = f", {counted(len(tail.dragged), 'op')} that the ANE takes among them" if tail.dragged else ""
    cut = [f"%{var.name}" for var in _crossing(rows, tail)]
    last = f"the last {after} of {len(rows)} ops are" if after > 1 else f"the last of {len(rows)} ops is"
    return (f"{last} predicted on the CPU ({ms(tail.milliseconds)}), because of "
            f"{kinds(row.op for row in tail.refused)}{dragged}; cut at {listed(cut, 3, 'value')}: {before} ops before "
            f"({before / len(rows):.0%}), {after} after")


def _crossing(rows: list[Row], tail: Island) -> list[Var]:
    """Values made before the tail that the tail reads, in the order in which it does."""
    behind = {row.op for row in tail.rows}
    made = {var for row in rows if row.op not in behind for var in row.op.outputs}
    return list(dict.fromkeys(var for row in tail.rows for var in flat_inputs(row.op) if var in made))
