"""Find models that go back and forth between the ANE and the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from ..core.contract import Community, Example, Hit, Miss, PlanRule
from ..core.evidence import in_2020
from ..core.islands import Island, by_function, islands_of
from ..core.plan import CHANGE, ENTER, Plan, Row
from ..core.words import counted, duration_text
from ._plans import COST_MODEL, chain, kinds, listed, name

_SHOWN = 4
"CPU islands a note names."


class PingPong(PlanRule):
    """The model is predicted to change between the ANE and the CPU many times.

    why     Each change costs 0.125 ms and each ANE segment 0.125 ms to enter, by the constants of Core ML's segmenter
            on an M4, whatever is computed. A few refused ops in the middle of a model cost more that way than in
            themselves. The changes are predicted from those constants and from estimated costs; nobody ran it.
    when    A function with at least `changes` changes of backend. One finding for each, the CPU islands that cost most
            first, each with the ops that are refused there. An island costs its own time, two changes and an entry.
    cure    Mend the islands in the order given: the findings at the ops named say how. One mended island saves all it
            costs. Where none can be mended, moving refused ops next to one another joins their islands.
    """

    code, slug = "ANE509", "ping-pong"
    confidence = "high"
    advice = "Mend the refused ops of the CPU islands named, the costliest first."
    evidence = (
        COST_MODEL,
        in_2020("changes ANE, CPU, ANE, CPU do happen, and each involves overhead; replace the one or two layers that "
                "cause them"),
        Community("with more ops on the ANE a model became slower through partitioning: 24.6 to 31.8 ms (fp16, all "
                  "compute units)", source="https://github.com/kasper0406/stablehlo-coreml/issues/105", chip="M4"),
    )
    changes: int = 4
    "From how many changes of backend on it is reported; the number is ours."

    def match_plan(self, plan: Plan) -> Iterator[Hit | Miss]:
        for _, rows in by_function(plan):
            changes = sum(one.backend != other.backend for one, other in pairwise(rows))
            inner = [island for island in islands_of(rows) if island.inner]
            if changes < self.changes:
                if changes > 1:
                    yield Miss(inner[0].rows[0].op if inner else rows[0].op,
                               f"{changes} changes of backend, reported from {self.changes} on")
                continue
            inner.sort(key=_cost, reverse=True)
            causes = [row.op for island in inner for row in island.refused] or [row.op for row in inner[0].rows]
            yield Hit(causes[0], note=_note(rows, changes, inner), covers=causes)

    def examples(self) -> Iterable[Example]:
        yield Example("two islands", chain("ttttcttttctttt"))
        yield Example("one island", chain("ttttctttt"), reason="2 changes of backend, reported from 4 on")
        yield Example("nothing refused", chain("tttt"), reason="")


def _cost(island: Island) -> float:
    return island.milliseconds + 2 * CHANGE + ENTER


def _note(rows: list[Row], changes: int, inner: list[Island]) -> str:
    entries = sum(row.backend == "ane" and (not at or rows[at - 1].backend == "cpu") for at, row in enumerate(rows))
    spent = changes * CHANGE + entries * ENTER
    each = [f"{kinds(row.op for row in island.refused) or 'none refused'} at {name(island.rows[0].op)} "
            f"({_dragged(island)}{duration_text(_cost(island))})" for island in inner]
    return (f"{changes} changes of backend and {entries} entries into the ANE cost {duration_text(spent)}; "
            f"{counted(len(inner), 'CPU island')}: {listed(each, _SHOWN)}")


def _dragged(island: Island) -> str:
    return f"{counted(len(island.dragged), 'op')} dragged along, " if island.dragged else ""
