"""Find models with many transitions between the ANE and the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from ..ane.partitions import CpuPartition, find_cpu_partitions, iterate_rows_by_function
from ..passes.contract import Community, Example, Hit, Miss, PlanRule
from ..passes.evidence import cite_2020_layer_list
from ..passes.plan import ENTER_ANE_MS, TRANSITION_MS, Plan, Row
from ..utils.text_format import format_count, format_duration
from ._plan_rules import COST_MODEL, format_list, format_op_name, format_op_types, make_chain_builder

_MAX_PARTITIONS_NAMED = 4
"Most CPU partitions that a note names."


class PingPong(PlanRule):
    """The model is predicted to change between the ANE and the CPU many times.

    why     Each change costs 0.125 ms and each ANE segment 0.125 ms to enter, by the constants of Core ML's segmenter
            on an M4, whatever is computed. A few refused ops in the middle of a model cost more that way than in
            themselves. The changes are predicted from those constants and from estimated costs; nobody ran it.
    when    A function with at least `changes` transitions. One finding for each, the CPU partitions that cost most
            first, each with the ops that are unsupported there. A partition costs its own time, two changes and an
            entry.
    fix     Fix the partitions in the order given: the findings at the ops named say how. One fixed partition saves
            all it costs. Where none can be fixed, moving refused ops next to one another joins their partitions.
    """

    code, slug = "ANE509", "ping-pong"
    confidence = "high"
    advice = "Fix the refused ops of the CPU partitions named, the costliest first."
    evidence = (
        COST_MODEL,
        cite_2020_layer_list(
            "changes ANE, CPU, ANE, CPU do happen, and each involves overhead; replace the one or two layers that "
            "cause them"
        ),
        Community(
            "with more ops on the ANE a model became slower through partitioning: 24.6 to 31.8 ms (fp16, all "
            "compute units)",
            source="https://github.com/kasper0406/stablehlo-coreml/issues/105",
            chip="M4",
        ),
    )
    changes: int = 4
    "Fewest transitions that are reported; the number is ours."

    def match_plan(self, plan: Plan) -> Iterator[Hit | Miss]:
        for _, rows in iterate_rows_by_function(plan):
            changes = sum(one.backend != other.backend for one, other in pairwise(rows))
            inner = [island for island in find_cpu_partitions(rows) if island.inner]
            if changes < self.changes:
                if changes > 1:
                    yield Miss(inner[0].rows[0].op if inner else rows[0].op,
                               f"{changes} transitions, reported from {self.changes} on")
                continue
            inner.sort(key=_estimate_cost, reverse=True)
            causes = [row.op for island in inner for row in island.refused] or [row.op for row in inner[0].rows]
            yield Hit(causes[0], note=_format_note(rows, changes, inner), covers=causes)

    def examples(self) -> Iterable[Example]:
        yield Example("two partitions", make_chain_builder("ttttcttttctttt"))
        yield Example("one partition", make_chain_builder("ttttctttt"), reason="2 transitions, reported from 4 on")
        yield Example("nothing refused", make_chain_builder("tttt"), reason="")


def _estimate_cost(island: CpuPartition) -> float:
    return island.milliseconds + 2 * TRANSITION_MS + ENTER_ANE_MS


def _format_note(rows: list[Row], changes: int, inner: list[CpuPartition]) -> str:
    entries = sum(row.backend == "ane" and (not at or rows[at - 1].backend == "cpu") for at, row in enumerate(rows))
    spent = changes * TRANSITION_MS + entries * ENTER_ANE_MS
    each = [
        f"{format_op_types(row.op for row in island.refused) or 'none unsupported'} at "
        f"{format_op_name(island.rows[0].op)} "
        f"({_describe_stranded_ops(island)}{format_duration(_estimate_cost(island))})"
        for island in inner
    ]
    return (f"{changes} transitions and {entries} entries into the ANE cost {format_duration(spent)}; "
            f"{format_count(len(inner), 'CPU partition')}: {format_list(each, _MAX_PARTITIONS_NAMED)}")


def _describe_stranded_ops(island: CpuPartition) -> str:
    return f"{format_count(len(island.stranded), 'stranded op')}, " if island.stranded else ""
