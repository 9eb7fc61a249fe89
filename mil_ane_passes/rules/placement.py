"""Placement of ops in a plan: work on the CPU, and transitions between ANE and CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from coremltools.converters.mil.mil import Block, Builder, Function, Var

from ..ane.partitions import (
    TOO_SMALL,
    CpuPartition,
    StrandedOps,
    find_cpu_partitions,
    find_stranded_ops,
    iterate_rows_by_function,
)
from ..ane.segments import find_cheapest_partition
from ..ir.query import get_flat_inputs
from ..passes.contract import BlockRule, Community, Example, Hit, Miss, PlanRule, Severity
from ..passes.evidence import cite_2020_layer_list, cite_ane_compiler_quirk
from ..passes.examples import make_example
from ..passes.plan import ENTER_ANE_MS, TRANSITION_MS, Plan, Row
from ..utils.text_format import format_count, format_duration
from ._plan_rules import COST_MODEL, format_list, format_op_name, format_op_range, format_op_types, make_chain_builder

_MAX_PARTITIONS_NAMED = 4
"Maximum number of CPU partitions that a finding names."
_MAX_LISTED = 3
"Maximum number of partitions that a finding names."


class CpuShare(PlanRule):
    """The entire function is predicted on the CPU, although most of its ops are supported on the ANE.

    why     Supported ops are not always placed on the ANE. Core ML's segmenter uses the ANE for a partition only if
            this saves more than the transfer overhead, and unsupported ops make partitions short. Its decision is
            predicted from its published constants and estimated costs on an M4; nothing was run.
    when    A function without an op predicted on the ANE, although at least `share` of its ops are supported. The
            finding names the best candidate partition, its gain and its cost.
    fix     If all ops are supported, the model is too small for the ANE: this is not a fault, the CPU is faster. A
            larger batch changes it. Otherwise fix the unsupported ops next to the partition.
    """

    code, slug = "ANE516", "all-on-the-cpu"
    severity, confidence = Severity.SUGGESTION, "high"
    advice = ("Fix the unsupported ops next to the named partition; if there are none, the model is too small for the"
              " ANE.")
    evidence = (
        COST_MODEL,
        Community("every op is reported as supported by the ANE, but the CPU is preferred",
                  source="https://developer.apple.com/forums/thread/740317"),
        Community("625 of 625 ops eligible and on the ANE at 10M parameters; 217 of 217 eligible at 50K, and none of "
                  "them on it", source="https://ask-meridian.uk/blog/apple-neural-engine-eligibility-vs-placement/"),
    )
    share: float = 0.5
    "Minimum share of ops supported on the ANE; our choice, no source states one."

    def match_plan(self, plan: Plan) -> Iterator[Hit | Miss]:
        for function, rows in iterate_rows_by_function(plan):
            taken = [row for row in rows if row.takes]
            if len(taken) < max(1, self.share * len(rows)) or any(row.backend == "ane" for row in rows):
                continue
            ends = frozenset(plan.program.functions[function].outputs)
            best = max(find_stranded_ops(rows, ends), key=lambda stretch: stretch.saved_ms - stretch.needs)
            yield Hit(
                best.rows[0].op,
                covers=[row.op for row in rows],
                note=f"{len(taken)} of {len(rows)} ops are supported on the ANE, but all are predicted on the CPU: "
                     f"the best partition, {format_op_range(best.rows)}, would save {format_duration(best.saved_ms)}, "
                     f"with a transfer overhead of {format_duration(best.needs)}{_describe_unsupported_ops(rows)}",
            )

    def examples(self) -> Iterable[Example]:
        yield Example("small", make_chain_builder("ttt", 1, 8))
        yield Example("cut apart", make_chain_builder("ttctt", 8, 64))
        yield Example("large", make_chain_builder("tttt"), reason="")
        yield Example("mostly refused", make_chain_builder("ctcc", 1, 8), reason="")


def _describe_unsupported_ops(rows: list[Row]) -> str:
    refused = [row for row in rows if not row.takes and not row.depth]
    if not refused:
        return f"; {TOO_SMALL}"
    kinds = format_op_types(row.op for row in refused)
    limit = "limits" if len(refused) == 1 else "limit"
    return f"; {format_count(len(refused), 'op')} unsupported on the ANE {limit} it ({kinds})"


class LateDeparture(PlanRule):
    """Unsupported ops near the end: all ops after them are predicted on the CPU.

    why     Core ML runs the first part of such a model on the ANE and the rest on the CPU. If the model is split, the
            first part stays on the ANE, and the second one can be a separate model or code of the app. The transition
            is predicted by a published cost model; nothing was run.
    when    The last ops of a function are predicted on the CPU, some of them because they are unsupported on the ANE,
            and at least `share` of its ops come before them. The first part is also predicted as a separate model,
            whose additional outputs cost time on the ANE; if fewer of its ops would run there than now, the split is
            not advised.
    fix     Split the model at the named values (edit --split-at). A single unsupported op at the very end costs little;
            splitting pays off for several, or if supported ops fall back to the CPU with them.
    """

    code, slug = "ANE508", "late-departure"
    severity, confidence = Severity.SUGGESTION, "medium"
    advice = "Split the model at the named values and run the second part separately."
    evidence = (
        cite_2020_layer_list(
            "if the unsupported ops are near the end, split the model and run the parts in sequence: the first one "
            "can use the ANE; may be faster than running all on CPU or GPU"
        ),
        cite_2020_layer_list("Core ML may run the first part on the ANE and then switch for the rest"),
        COST_MODEL,
    )
    share: float = 0.5
    "Minimum share of a function's ops before the last transition to the CPU; our choice, no source states one."

    def match_plan(self, plan: Plan) -> Iterator[Hit | Miss]:
        for _, rows in iterate_rows_by_function(plan):
            last = next(iter(find_cpu_partitions(rows)[-1:]), None)
            if last is None or not last.last or not last.refused or last.first:
                continue
            before = len(rows) - len(last.rows)
            if before < self.share * len(rows):
                yield Miss(last.rows[0].op, f"{before} of {len(rows)} ops are before the last transition to the CPU, "
                                            f"less than "
                                            f"{self.share:.0%}")
                continue
            crossing = _find_crossing_values(rows, last)
            now = sum(row.backend == "ane" for row in rows[:before])
            then = _count_on_ane(rows[:before], {*crossing, *plan.program.functions[rows[0].function].outputs})
            if then < now:
                yield Miss(last.rows[0].op, f"of the {before} ops before the last transition to the CPU {now} are "
                                            f"predicted on the ANE, and {then} in a separate model")
                continue
            where = f"{before} ops before, {then} of them predicted on the ANE, {len(last.rows)} after"
            note = f"{_format_departure_note(rows, last, crossing)}: {where}"
            yield Hit(last.refused[0].op, note=note, covers=[row.op for row in last.rows],
                      split_at=[[var.name for var in crossing]] if crossing else ())

    def examples(self) -> Iterable[Example]:
        yield Example("one unsupported op, and a supported one after it", make_chain_builder("ttttct"))
        yield Example("at the very end", make_chain_builder("ttttc"))
        yield Example(
            "early",
            make_chain_builder("ttctctctct"),
            reason="2 of 10 ops are before the last transition to the CPU, less than 50%",
        )
        yield Example("it returns to the ANE", make_chain_builder("ttcttt"), reason="")
        yield Example("no op on the ANE", make_chain_builder("tct", 1, 8), reason="")


def _count_on_ane(rows: list[Row], outputs: set[Var]) -> int:
    """Count the `rows` that are predicted on the ANE in a model of their own that returns `outputs`."""
    made = [sum(var in outputs for var in row.op.outputs) for row in rows]
    engines, _ = find_cheapest_partition([row.cost for row in rows], made)
    return sum(engine == "ane" for engine in engines)


def _format_departure_note(rows: list[Row], tail: CpuPartition, crossing: list[Var]) -> str:
    after = len(tail.rows)
    dragged = f", {format_count(len(tail.stranded), 'supported op')} among them" if tail.stranded else ""
    cut = [f"%{var.name}" for var in crossing]
    last = f"the last {after} of {len(rows)} ops are" if after > 1 else f"the last of {len(rows)} ops is"
    return (f"{last} predicted on the CPU ({format_duration(tail.milliseconds)}), because of "
            f"{format_op_types(row.op for row in tail.refused)}{dragged}; "
            + (f"split at {format_list(cut, 3, 'value')}" if cut else "no value crosses"))


def _find_crossing_values(rows: list[Row], tail: CpuPartition) -> list[Var]:
    """Return the values that are computed before the tail and read by it, in the order of the reads."""
    behind = {row.op for row in tail.rows}
    made = {var for row in rows if row.op not in behind for var in row.op.outputs}
    return list(dict.fromkeys(var for row in tail.rows for var in get_flat_inputs(row.op) if var in made))


class PingPong(PlanRule):
    """The model is predicted to switch between the ANE and the CPU many times.

    why     Each transition costs 0.125 ms and each entry to an ANE segment 0.125 ms, by the constants of Core ML's
            segmenter on an M4. For a few unsupported ops in the middle of a model this overhead exceeds their own cost.
            Transitions are predicted from these constants and from estimated costs; nothing was run.
    when    A function with at least `changes` transitions. One finding per function; it lists CPU partitions with their
            unsupported ops, the most expensive one first. A partition costs its own time, two transitions and an entry.
    fix     Fix the partitions in this order; the findings of the named ops have the fixes. A fixed partition saves its
            entire cost. If none can be fixed, move unsupported ops next to one another, which joins their partitions.
    """

    code, slug = "ANE509", "ping-pong"
    confidence = "high"
    advice = "Fix the unsupported ops of the named CPU partitions, the most expensive first."
    evidence = (
        COST_MODEL,
        cite_2020_layer_list(
            "transitions ANE, CPU, ANE, CPU do happen, and each has an overhead; replace the one or two layers that "
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
    "Minimum number of transitions to report; our choice, no source states one."

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
            yield Hit(causes[0], note=_format_partitions_note(rows, changes, inner), covers=causes)

    def examples(self) -> Iterable[Example]:
        yield Example("two partitions", make_chain_builder("ttttcttttctttt"))
        yield Example("one partition", make_chain_builder("ttttctttt"), reason="2 transitions, reported from 4 on")
        yield Example("nothing refused", make_chain_builder("tttt"), reason="")


def _estimate_cost(island: CpuPartition) -> float:
    return island.milliseconds + 2 * TRANSITION_MS + ENTER_ANE_MS


def _format_partitions_note(rows: list[Row], changes: int, inner: list[CpuPartition]) -> str:
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


class SmallSegment(PlanRule):
    """Ops that are supported on the ANE are predicted on the CPU, because they save less than the transfer overhead.

    why     Entering an ANE segment costs 0.125 ms, and each transition another 0.125 ms. A partition between two
            unsupported ops has to save 0.375 ms, one at the start of the model 0.25 ms; an output on the ANE costs
            0.125 ms more. These are constants of Core ML's segmenter, published for an M4. The placement is predicted
            from them and from estimated costs; nothing was run.
    when    Neighbouring ops that are supported on the ANE, in a function that is partly predicted on the ANE. One
            finding per function, the partition with the largest gain first. Functions entirely on the CPU are reported
            by ANE516.
    fix     Replace the unsupported ops on either side, or move them to the start or end of the model. A larger batch
            increases the gain. A single op at the end needs no fix.
    """

    code, slug = "ANE507", "small-segment"
    severity, confidence = Severity.SUGGESTION, "high"
    advice = "Replace or move the unsupported ops on either side, or use a larger batch."
    evidence = (
        COST_MODEL,
        Community("the same architecture runs entirely on the ANE with 10M parameters and not at all with 50K, "
                  "although every op is eligible in both",
                  source="https://ask-meridian.uk/blog/apple-neural-engine-eligibility-vs-placement/"),
    )
    least: int = 1
    "Minimum number of ops of a reported partition; our choice, no source states one."

    def match_plan(self, plan: Plan) -> Iterator[Hit | Miss]:
        for function, rows in iterate_rows_by_function(plan):
            if all(row.backend == "cpu" for row in rows):
                continue
            ends = frozenset(plan.program.functions[function].outputs)
            found = [stretch for stretch in find_stranded_ops(rows, ends)
                     if len(stretch.rows) >= self.least and stretch.saved_ms > 0]
            if found:
                found.sort(key=lambda stretch: stretch.saved_ms, reverse=True)
                yield Hit(found[0].rows[0].op, note=_format_stretches_note(found),
                          covers=[row.op for stretch in found for row in stretch.rows])

    def examples(self) -> Iterable[Example]:
        yield Example("between two unsupported ops", make_chain_builder("ttctcttt"))
        yield Example("after the last unsupported op", make_chain_builder("tttct"))
        yield Example("worth the way", make_chain_builder("ttctttcttt"), reason="")
        yield Example("all on the CPU", make_chain_builder("tct", 1, 8), reason="")
        yield Example("none so short", make_chain_builder("ttctcttt"), reason="", options={"least": 2})


def _format_stretches_note(stretches: list[StrandedOps]) -> str:
    each = [f"{format_op_range(one.rows)}, which would save {format_duration(one.saved_ms)}, with a transfer overhead "
            f"of {format_duration(one.needs)}"
            for one in stretches]
    return f"predicted on the CPU although it is supported on the ANE: {format_list(each, _MAX_LISTED, 'partition')}"


class PassthroughOutput(BlockRule):
    """An output is returned directly from an input, without an op.

    why     Such a program crashed when it was run on the ANE without Core ML. Whether Core ML is affected is unknown:
            coremltools inserts an `identity` when it converts, other tools may not.
    when    A function that returns one of its inputs.
    fix     Remove the output, because the caller has the value; or multiply by one, as the source did. An `identity` is
            equivalent, but was not tried there.
    """

    code, slug = "ANE515", "passthrough-output"
    severity, confidence = Severity.SUGGESTION, "low"
    advice = "Remove the output, because the caller has the value, or multiply it by one."
    evidence = (
        cite_ane_compiler_quirk("an output that is an input crashes in Espresso; a multiplication by one fixes it"),
    )

    def match_block(self, block: Block) -> Iterator[Hit | Miss]:
        if not isinstance(block, Function):
            return
        inputs = {var: name for name, var in block.inputs.items()}
        first = next((op for op in block.operations if op.op_type != "const"), None)
        for var in block.outputs:
            if var in inputs and first is not None:
                yield Hit(first, note=f"output '{var.name}' is the input '{inputs[var]}'")

    def examples(self) -> Iterable[Example]:
        yield make_example("beside another", lambda x: (Builder.relu(x=x, name="y"), x), x=(2, 3))
        yield make_example("an identity", lambda x: Builder.identity(x=x, name="y"), reason="", x=(2, 3))
