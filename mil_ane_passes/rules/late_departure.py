"""Find models that leave the ANE near their end for good."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from coremltools.converters.mil.mil import Var

from ..ane.partitions import CpuPartition, find_cpu_partitions, iterate_rows_by_function
from ..ane.segments import find_cheapest_partition
from ..ir.query import get_flat_inputs
from ..passes.contract import Example, Hit, Miss, PlanRule
from ..passes.evidence import cite_2020_layer_list
from ..passes.plan import Plan, Row
from ..utils.text_format import format_count, format_duration
from ._plan_rules import COST_MODEL, format_list, format_op_types, make_chain_builder


class LateDeparture(PlanRule):
    """An op that the ANE rejects stands near the end, and all that follows is predicted on the CPU.

    why     Core ML runs the first part of such a model on the ANE and leaves it for the rest. Split in two, the first
            part stays on the ANE, and you choose how the second is run: by a model of its own, or by code that
            Core ML need not plan for. Where the ANE is left is predicted by a published cost model; nobody ran it.
    when    The last ops of a function are predicted on the CPU, some of them since they are unsupported on the ANE, and
            at least `share` of its ops come before them. The first part is predicted on its own, each value that it
            passes on being an output that costs time on the ANE; where fewer of its ops would stay there than now, the
            cut is not advised.
    fix     Cut the model at the values named (edit --split-at). A single unsupported op at the very end costs little;
            several, or one that takes supported ops to the CPU with it, are worth it.
    """

    code, slug = "ANE508", "late-departure"
    level, confidence = "note", "medium"
    advice = "Split the model at the values named and run the second part on its own."
    evidence = (
        cite_2020_layer_list(
            "where what is unsupported on the ANE stands near the end, split the model and run one part after the "
            "other: the first can use the ANE; may be faster than running all on CPU or GPU"
        ),
        cite_2020_layer_list("Core ML may run the first part on the ANE and then switch for the rest"),
        COST_MODEL,
    )
    share: float = 0.5
    "Smallest share of a function's ops before the departure; the number is ours."

    def match_plan(self, plan: Plan) -> Iterator[Hit | Miss]:
        for _, rows in iterate_rows_by_function(plan):
            last = next(iter(find_cpu_partitions(rows)[-1:]), None)
            if last is None or not last.last or not last.refused or last.first:
                continue
            before = len(rows) - len(last.rows)
            if before < self.share * len(rows):
                yield Miss(last.rows[0].op, f"{before} of {len(rows)} ops stand before the last departure, less than "
                                            f"{self.share:.0%}")
                continue
            crossing = _find_crossing_values(rows, last)
            now = sum(row.backend == "ane" for row in rows[:before])
            then = _count_on_ane(rows[:before], {*crossing, *plan.program.functions[rows[0].function].outputs})
            if then < now:
                yield Miss(last.rows[0].op, f"of the {before} ops before the last departure {now} are predicted on the "
                                            f"ANE, and {then} in a model of their own")
                continue
            note = f"{_format_note(rows, last, crossing)}: {before} ops before, {then} of them predicted on the ANE, " \
                   f"{len(last.rows)} after"
            yield Hit(last.refused[0].op, note=note, covers=[row.op for row in last.rows],
                      split_at=[[var.name for var in crossing]])

    def examples(self) -> Iterable[Example]:
        yield Example("one refused op, another behind it", make_chain_builder("ttttct"))
        yield Example("at the very end", make_chain_builder("ttttc"))
        yield Example(
            "early",
            make_chain_builder("ttctctctct"),
            reason="2 of 10 ops stand before the last departure, less than 50%",
        )
        yield Example("it comes back", make_chain_builder("ttcttt"), reason="")
        yield Example("nowhere on the ANE", make_chain_builder("tct", 1, 8), reason="")


def _count_on_ane(rows: list[Row], outputs: set[Var]) -> int:
    """Count the `rows` that are predicted on the ANE in a model of their own that returns `outputs`."""
    made = [sum(var in outputs for var in row.op.outputs) for row in rows]
    engines, _ = find_cheapest_partition([row.cost for row in rows], made)
    return sum(engine == "ane" for engine in engines)


def _format_note(rows: list[Row], tail: CpuPartition, crossing: list[Var]) -> str:
    after = len(tail.rows)
    dragged = f", {format_count(len(tail.stranded), 'supported op')} among them" if tail.stranded else ""
    cut = [f"%{var.name}" for var in crossing]
    last = f"the last {after} of {len(rows)} ops are" if after > 1 else f"the last of {len(rows)} ops is"
    return (f"{last} predicted on the CPU ({format_duration(tail.milliseconds)}), because of "
            f"{format_op_types(row.op for row in tail.refused)}{dragged}; cut at {format_list(cut, 3, 'value')}")


def _find_crossing_values(rows: list[Row], tail: CpuPartition) -> list[Var]:
    """Return the values that are computed before the tail and read by it, in the order of the reads."""
    behind = {row.op for row in tail.rows}
    made = {var for row in rows if row.op not in behind for var in row.op.outputs}
    return list(dict.fromkeys(var for row in tail.rows for var in get_flat_inputs(row.op) if var in made))
