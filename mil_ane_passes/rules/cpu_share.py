"""Find models that are predicted on the CPU altogether, although most of their ops are supported on the ANE."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..ane.partitions import find_stranded_ops, iterate_rows_by_function
from ..passes.contract import Community, Example, Hit, Miss, PlanRule
from ..passes.plan import Plan, Row
from ..utils.text_format import format_count, format_duration
from ._plan_rules import COST_MODEL, format_op_range, format_op_types, make_chain_builder


class CpuShare(PlanRule):
    """The whole function is predicted on the CPU, although most of its ops are supported on the ANE.

    why     Taking an op and being given it are two things. Core ML's segmenter gives the ANE a stretch only where that
            saves more than the way there and back, and refused ops cut stretches short. What it decides here is
            predicted from its published constants and estimated costs on an M4; nobody ran it.
    when    A function none of whose ops is predicted on the ANE, although it takes at least `share` of them. The note
            names the stretch that comes closest, what it would save and what it would have to.
    fix     If nothing is unsupported, the model is too small to pay: that is no fault, and the CPU is the faster
            place. A larger batch changes it. Otherwise fix the refused ops that cut off the stretch named.
    """

    code, slug = "ANE516", "all-on-the-cpu"
    level, confidence = "note", "high"
    advice = "Fix the refused ops that cut off the stretch named; if there are none, the model is too small to pay."
    evidence = (
        COST_MODEL,
        Community("every op is reported as supported by the ANE, and the CPU is preferred all the same",
                  source="https://developer.apple.com/forums/thread/740317"),
        Community("625 of 625 ops eligible and on the ANE at 10M parameters; 217 of 217 eligible at 50K, and none of "
                  "them on it", source="https://ask-meridian.uk/blog/apple-neural-engine-eligibility-vs-placement/"),
    )
    share: float = 0.5
    "Smallest share of ops supported on the ANE; the number is ours."

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
                note=f"{len(taken)} of {len(rows)} ops are supported on the ANE, and all are predicted on the CPU: "
                     f"the best "
                f"stretch, {format_op_range(best.rows)}, would save {format_duration(best.saved_ms)} and cost "
                f"{format_duration(best.needs)} to get there and back{_describe_unsupported_ops(rows)}",
            )

    def examples(self) -> Iterable[Example]:
        yield Example("small", make_chain_builder("ttt", 1, 8))
        yield Example("cut apart", make_chain_builder("ttctt", 8, 64))
        yield Example("large", make_chain_builder("tttt"), reason="")
        yield Example("mostly refused", make_chain_builder("ctcc", 1, 8), reason="")


def _describe_unsupported_ops(rows: list[Row]) -> str:
    refused = [row for row in rows if not row.takes and not row.depth]
    if not refused:
        return "; nothing is unsupported, the model is too small to pay"
    kinds = format_op_types(row.op for row in refused)
    return f"; {format_count(len(refused), 'op')} unsupported on the ANE cut it off ({kinds})"
