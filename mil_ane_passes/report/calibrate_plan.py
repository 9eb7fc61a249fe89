"""The result of `calibrate-plan`, as data, as JSON and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .._version import __version__
from ..ane.agreement import Agreement, Disagreement, compute_cost_factors
from ..utils.text_format import format_count, format_lines, format_short_repr
from .agreement import agreement_to_dict, disagreement_to_dict, find_contradictions, iterate_agreement_lines
from .table import format_table

__all__ = ["CalibratePlanReport", "PlanComparison"]

_MAX_DISAGREEMENTS_LISTED = 20
"The most disagreements of one kind that the text lists."


@dataclass(frozen=True)
class PlanComparison:
    """One model, the target it was predicted for, and the agreement of the prediction with the measurement."""

    model: str
    target: str
    found: Agreement


@dataclass
class CalibratePlanReport:
    """The comparisons of all packages that were measured and could be read."""

    compared: list[PlanComparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return all(each.found.agrees for each in self.compared)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON that `calibrate-plan --format json` prints."""
        return {
            "schema": 1, "tool": "mil-ane-passes", "version": __version__, "command": "calibrate-plan",
            "agrees": self.agrees, "notes": self.notes,
            "packages": [{"model": each.model, "target": each.target, **agreement_to_dict(each.found),
                          "factors": compute_cost_factors(each.found.shares), "disagreements": [
                              disagreement_to_dict(one) for one in [*each.found.support, *each.found.backend]]}
                         for each in self.compared],
        }

    def __repr__(self) -> str:
        return format_short_repr(self, packages=[each.model for each in self.compared], agrees=self.agrees,
                                 notes=len(self.notes))

    def __str__(self) -> str:
        made = [line for each in self.compared for line in _iterate_lines(each)]
        return format_lines([*made, *[f"note: {note}" for note in self.notes]])


def _iterate_lines(each: PlanComparison) -> Iterator[str]:
    found = each.found
    yield f"{each.model}, predicted for {each.target}"
    yield from iterate_agreement_lines(found)
    kinds = [(f"  {kind}", *(str(count) for count in counts.values())) for kind, counts in found.kinds().items()]
    if kinds:
        yield from format_table(("  kind", "ops", "agree", "differ", "unknown"), (str.ljust, *(str.rjust,) * 4), kinds)
    scaled = [
        (
            f"  {one['op']}",
            one["backend"],
            str(one["ops"]),
            *(f"{one[name]:.3g}" for name in ("factor", "lowest", "highest")),
        )
        for one in compute_cost_factors(found.shares)
    ]
    if scaled:
        yield "our share of the cost, times what is the share that was measured:"
        yield from format_table(("  kind", "on", "ops", "median", "lowest", "highest"),
                                (str.ljust, str.ljust, *(str.rjust,) * 4), scaled)
    if found.support:
        yield "they are supported on the ANE, or not, against our prediction:"
        yield from _iterate_disagreement_lines(found.support)
    if found.backend and not found.is_tie:
        yield "they run elsewhere than predicted:"
        yield from _iterate_disagreement_lines(found.backend)
    wrong = find_contradictions(found)
    if wrong:
        yield "contradicted there: " + ", ".join(
            f"{one['code'] or 'that ' + one['op'] + ' was seen'} ({format_count(one['ops'], 'op')}, measured "
            f"{one['measured']})" for one in wrong)
    for name, missing in (("only here", [f"%{row.op.outputs[0].name if row.op.outputs else row.op.name} "
                                         f"({row.op.op_type})" for row in found.match.ours]),
                          ("only measured", [f"%{op.outputs[0] if op.outputs else '?'} ({op.kind})"
                                             for op in found.match.theirs])):
        if missing:
            listed = ", ".join(missing[:_MAX_DISAGREEMENTS_LISTED])
            yield f"{name}, so not compared: {listed}{_format_remainder(len(missing))}"


def _iterate_disagreement_lines(listed: list[Disagreement]) -> Iterator[str]:
    for each in listed[:_MAX_DISAGREEMENTS_LISTED]:
        told = disagreement_to_dict(each)
        codes = f" {', '.join(told['codes'])}:" if told["codes"] else ""
        why = f";{codes} {told['reason']}" if told["reason"] and each.what == "support" else ""
        yield (f"  {told['function']} {told['index']} %{told['output']} ({told['op']}): predicted {told['predicted']}, "
               f"measured {told['measured']}{why}")
    if len(listed) > _MAX_DISAGREEMENTS_LISTED:
        yield f"  {_format_remainder(len(listed)).strip()}"


def _format_remainder(count: int) -> str:
    return f" and {count - _MAX_DISAGREEMENTS_LISTED} more" if count > _MAX_DISAGREEMENTS_LISTED else ""
