"""What `calibrate-plan` found, as data, as JSON and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .._version import __version__
from ..core.words import counted, lines_text, short_repr
from ..residency.agreement import Agreement, Differs, factors
from .measured import agreement_dict, contradicted, differs_dict, lines
from .table import aligned

__all__ = ["CalibratePlanReport", "Compared"]

_SHOWN = 20
"Disagreements of one sort that the text lists."


@dataclass(frozen=True)
class Compared:
    """One model, the target it was predicted for, and how that stands to the measurement."""

    model: str
    target: str
    found: Agreement


@dataclass
class CalibratePlanReport:
    """One entry for each package that was measured and could be read."""

    compared: list[Compared] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return all(each.found.agrees for each in self.compared)

    def to_dict(self) -> dict[str, Any]:
        """Exactly what `calibrate-plan --format json` prints."""
        return {
            "schema": 1, "tool": "mil-ane-passes", "version": __version__, "command": "calibrate-plan",
            "agrees": self.agrees, "notes": self.notes,
            "packages": [{"model": each.model, "target": each.target, **agreement_dict(each.found),
                          "factors": factors(each.found.shares), "disagreements": [
                              differs_dict(one) for one in [*each.found.support, *each.found.backend]]}
                         for each in self.compared],
        }

    def __repr__(self) -> str:
        return short_repr(self, packages=[each.model for each in self.compared], agrees=self.agrees,
                          notes=len(self.notes))

    def __str__(self) -> str:
        made = [line for each in self.compared for line in _text(each)]
        return lines_text([*made, *[f"note: {note}" for note in self.notes]])


def _text(each: Compared) -> Iterator[str]:
    found = each.found
    yield f"{each.model}, predicted for {each.target}"
    yield from lines(found)
    kinds = [(f"  {kind}", *(str(count) for count in counts.values())) for kind, counts in found.kinds().items()]
    if kinds:
        yield from aligned(("  kind", "ops", "agree", "differ", "unknown"), (str.ljust, *(str.rjust,) * 4), kinds)
    scaled = [(f"  {one['op']}", one["backend"], str(one["ops"]),
               *(f"{one[name]:.3g}" for name in ("factor", "lowest", "highest"))) for one in factors(found.shares)]
    if scaled:
        yield "our share of the cost, times what is the share that was measured:"
        yield from aligned(("  kind", "on", "ops", "median", "lowest", "highest"),
                           (str.ljust, str.ljust, *(str.rjust,) * 4), scaled)
    if found.support:
        yield "the ANE takes them, or not, against our prediction:"
        yield from _listed(found.support)
    if found.backend and not found.tie:
        yield "they run elsewhere than predicted:"
        yield from _listed(found.backend)
    wrong = contradicted(found)
    if wrong:
        yield "contradicted there: " + ", ".join(
            f"{one['code'] or 'that ' + one['op'] + ' was seen'} ({counted(one['ops'], 'op')}, measured "
            f"{one['measured']})" for one in wrong)
    for name, missing in (("only here", [f"%{row.op.outputs[0].name if row.op.outputs else row.op.name} "
                                         f"({row.op.op_type})" for row in found.match.ours]),
                          ("only measured", [f"%{op.outputs[0] if op.outputs else '?'} ({op.kind})"
                                             for op in found.match.theirs])):
        if missing:
            yield f"{name}, so not compared: {', '.join(missing[:_SHOWN])}{_more(len(missing))}"


def _listed(listed: list[Differs]) -> Iterator[str]:
    for each in listed[:_SHOWN]:
        told = differs_dict(each)
        codes = f" {', '.join(told['codes'])}:" if told["codes"] else ""
        why = f";{codes} {told['reason']}" if told["reason"] and each.what == "support" else ""
        yield (f"  {told['function']} {told['index']} %{told['output']} ({told['op']}): predicted {told['predicted']}, "
               f"measured {told['measured']}{why}")
    if len(listed) > _SHOWN:
        yield f"  {_more(len(listed)).strip()}"


def _more(count: int) -> str:
    return f" and {count - _SHOWN} more" if count > _SHOWN else ""
