"""The result of `lint`, as data and as JSON. Its partitions and times are predicted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from coremltools.converters.mil.mil import Operation, Var, types

from .._version import make_json_header
from ..ane.agreement import Agreement
from ..ane.buffers import Buffer, compute_peak_bytes, list_buffers
from ..ane.latency import LatencyReport, OpLatency, estimate_latency
from ..ane.prediction import RuleResult
from ..ane.weight_formats import SizeAdvice
from ..ir.printer import format_dimension, format_op
from ..ir.query import is_symbolic
from ..package.storage import Storage
from ..passes.contract import Hit, Miss
from ..passes.finding import Finding, build_finding
from ..passes.plan import Plan, Row
from ..passes.severity import DEFAULT_FAIL_ON, Severity
from ..utils.garbage_collection import pause_garbage_collection
from ..utils.locking import synchronized_property
from ..utils.text_format import format_short_repr
from ..utils.upgraded_source import UpgradedSource, upgrades_to_dict
from .agreement import agreement_to_dict
from .baseline import LINT_SCHEMA, BaselineComparison
from .document import Document, build_fragment
from .ignored import Ignored
from .lint_groups import group_findings
from .lint_text import format_headline, format_lint_text
from .network import LayerFinding, NetworkLint
from .next_step import NextStep, Outlook, find_next_step

__all__ = ["FOR_CPU", "LintReport"]

FOR_CPU = "for the CPU (manifest.json)"
"Why a lookup in a folder of `adapt` is not judged."


@dataclass
class LintReport(Document):
    """The ops that are predicted off the ANE of `target`, the reasons and the fixes; see `to_dict` for the parts.

    `findings` are the hits, worst first; `near_misses` the near misses. `plan` holds the program itself and is not part
    of the JSON. `after` is the report of the model it is compared with, `baseline` the new and gone findings since an
    earlier report, `measured` Core ML's measurement on a Mac; all are None, and not part of the JSON, if they were not
    requested. The rules that failed with an error are in `plan.failed`, and in the JSON if there are any. `left_out`
    are the parts of a pipeline that are not ML Programs, with their kinds. `latency` is the estimated run time, which
    is not Core ML's estimate in `plan`. `upgraded` describes the model where it is a NeuralNetwork,
    `network` has what is reported of its layers. `sizes` is advice on compressed weights, and `storage` the weights by
    format; both are None if they were not requested. `ignored` are findings that settings
    ignore at single ops; they are not among `findings`. `not_judged` is the reason why a package has no findings and
    does not count for gates: it is meant for the CPU; it is empty for all others. `outlook` is asked for the next step,
    and is not part of the JSON.
    """

    model: str
    target: str
    plan: Plan
    findings: list[Finding] = field(default_factory=list)
    near_misses: list[Finding] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    after: LintReport | None = None
    baseline: BaselineComparison | None = None
    measured: Agreement | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    latency: LatencyReport | None = None
    upgraded: tuple[UpgradedSource, ...] = ()
    network: NetworkLint | None = None
    sizes: SizeAdvice | None = None
    storage: Storage | None = None
    ignored: list[Ignored] = field(default_factory=list)
    not_judged: str = ""
    outlook: Outlook | None = field(default=None, compare=False)

    @classmethod
    def of(
        cls, model: str, target: str, plan: Plan, found: list[RuleResult], reported: Collection[str] | None = None,
    ) -> LintReport:
        """Build the report of what was found, of all rules or of those whose names are in `reported`."""
        places = {row.op: row.index for row in plan.rows}
        listed = [_place_finding(item, places) for item in found if (reported is None or item.rule.name in reported)
                  and not (isinstance(item.answer, Miss) and not item.answer.near)]
        hits = group_findings([item for item in listed if not item.near_miss], plan)
        return cls(model, target, plan, [item for group in hits for item in group.findings],
                   [item for item in listed if item.near_miss], list_buffers(plan.program),
                   latency=estimate_latency(plan.program, plan, target))

    @property
    def on_ane(self) -> int:
        return sum(row.backend == "ane" for row in self.plan.rows)

    @property
    def share(self) -> float:
        """Percentage of ops that are predicted to run on the ANE; 100 for a program without ops."""
        return 100.0 * self.on_ane / len(self.plan.rows) if self.plan.rows else 100.0

    @synchronized_property
    def functions_by_cut(self) -> dict[tuple[tuple[str, ...], ...], set[str]]:
        """The functions of each cut that findings suggest (`split_at`)."""
        found: dict[tuple[tuple[str, ...], ...], set[str]] = {}
        for item in self.findings:
            if item.split_at:
                found.setdefault(item.split_at, set()).add(item.function)
        return found

    @property
    def warnings(self) -> list[Finding | LayerFinding]:
        """The findings without suggestions: of ops, and of layers where the model is a NeuralNetwork."""
        layers = () if self.network is None else self.network.findings
        found: list[Finding | LayerFinding] = [*self.findings, *layers]
        return [item for item in found if item.severity.fails]

    def failing_findings(self, least: Severity | None = DEFAULT_FAIL_ON) -> list[Finding | LayerFinding]:
        """Return the findings that count and are at least as severe as `least`; None: none of them."""
        return [item for item in self.shown_findings if item.severity.reaches(least)]

    @property
    def shown_findings(self) -> list[Finding | LayerFinding]:
        """The findings that count: all, of ops and of layers, or with a baseline those that it does not have.

        A baseline is about findings of ops; those of layers are then left out.
        """
        if self.baseline is not None:
            return [*self.baseline.new]
        return [*self.findings, *(() if self.network is None else self.network.findings)]

    @synchronized_property
    def next_step(self) -> NextStep | None:
        """The step that helps most, of what is known; None if no finding fails.

        It is found on first use, as it takes about as long as the report: fixes are applied in memory and predicted.
        """
        with pause_garbage_collection():
            return find_next_step(self)

    @property
    def peak_bytes(self) -> int:
        """The most bytes of values that are live at once, as laid out on the ANE (`compute_peak_bytes`)."""
        return compute_peak_bytes(self.plan.program)

    def summary(self) -> dict[str, Any]:
        segments, support = self.plan.segments, self.plan.support
        return {
            "ops": len(self.plan.rows),
            "ane_supported": sum(row.ane == "yes" for row in self.plan.rows),
            "predicted_on_ane": self.on_ane,
            "transitions": sum(one.function == other.function for one, other in pairwise(segments)),
            "padded_bytes": sum(item.padded for item in self.buffers),
            "dense_bytes": sum(item.dense for item in self.buffers),
            "ane_unknown": support.unmeasured,
            "predicted_share": round(self.share, 2),
            "predicted_time_share": round(self.time_share, 2),
            "ane_unsupported": support.unsupported,
            "est_ms": self.plan.total,
            **_latency_to_dict(self.latency),
        }

    @property
    def time_share(self) -> float:
        """Percentage of the estimated time that is spent on the ANE."""
        return self.plan.time_share

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON that `lint --format json` prints."""
        with pause_garbage_collection():
            return self._build_dict()

    def _build_dict(self) -> dict[str, Any]:
        fixes: dict[tuple[str, int | None], dict[str, Any] | None] = {}
        ranked = sorted(self.findings, key=lambda item: (not item.refuses, item.severity.rank))
        for item in ranked[::-1]:  # the last one wins: unsupported ops over warnings, warnings over notes
            for index in item.covers:
                if item.refuses or (item.fix is not None and not item.rule.unmeasured):
                    fixes[item.function, index] = item.fix
        told = {id(row): each for row, each in self.measured.match.pairs} if self.measured is not None else {}
        latency = {(op.function, op.index): op for op in self.latency.ops} if self.latency is not None else {}
        return {
            **make_json_header("lint", LINT_SCHEMA),
            "model": self.model, "target": self.target,
            "ops": [{**_op_to_dict(row, fixes.get((row.function, row.index))),
                     **_latency_to_dict(latency.get((row.function, row.index))),
                     **({"measured": told[id(row)].to_dict()} if id(row) in told else {})} for row in self.plan.rows],
            "findings": [item.to_dict() for item in self.findings],
            "near_misses": [item.to_dict() for item in self.near_misses],
            "segments": [segment.to_dict() for segment in self.plan.segments],
            "buffers": [item.to_dict() for item in self.buffers],
            "summary": self.summary(),
            "next_step": None if self.next_step is None else self.next_step.to_dict(),
            **({"not_judged": self.not_judged} if self.not_judged else {}),
            **({"ignored": [each.to_dict() for each in self.ignored]} if self.ignored else {}),
            **({"after": self.after.to_dict()} if self.after is not None else {}),
            **({"baseline": self.baseline.to_dict()} if self.baseline is not None else {}),
            **({"left_out": dict(self.left_out)} if self.left_out else {}),
            **({"failed_rules": [each.to_dict() for each in self.plan.failed]} if self.plan.failed else {}),
            **({"measured": agreement_to_dict(self.measured)} if self.measured is not None else {}),
            **upgrades_to_dict(self.upgraded),
            **({"network": self.network.to_dict()} if self.network is not None else {}),
            **({"sizes": self.sizes.to_dict()} if self.sizes is not None else {}),
            **({"storage": {**self.storage.to_dict(), "peak_bytes": self.peak_bytes}} if self.storage is not None
               else {}),
        }

    def to_html(self) -> str:
        """Return the page that `lint --format html` prints; it loads nothing else."""
        from .formats import format_report

        return format_report(self, "html")

    def to_sarif(self) -> dict[str, Any]:
        """Return the SARIF 2.1.0 that `lint --format sarif` prints."""
        from .sarif import build_sarif

        return build_sarif(self)

    def get_forms(self) -> Mapping[str, Callable[[], str]]:
        from .formats import format_report

        return {**super().get_forms(), ".sarif": lambda: format_report(self, "sarif")}

    def _repr_html_(self) -> str:
        """Return what notebooks show: the predicted shares, the findings by rule, and the text, folded."""
        from .lint_statistics import count_rules

        rules = count_rules([self])
        return build_fragment(format_headline(self), ("count", "code", "rule", "severity", "fixed by"),
                              [(rule.count, rule.code, rule.slug, rule.severity.value, rule.describe_fixes())
                               for rule in rules], str(self))

    def __repr__(self) -> str:
        return format_short_repr(
            self,
            model=self.model,
            target=self.target,
            ops=len(self.plan.rows),
            on_ane=self.on_ane,
            findings=len(self.findings),
            near_misses=len(self.near_misses),
        )

    def __str__(self) -> str:
        return format_lint_text(self)

    def mil(self, row: Row) -> str:
        """Return the op as MIL text, with the program's own names."""
        return format_op(row.op)


def _latency_to_dict(found: LatencyReport | OpLatency | None) -> dict[str, Any]:
    """Return the estimate of a program or an op; of none where the op only unpacks a weight."""
    if found is None:
        return {"latency_us": None, "latency_low_us": None, "latency_high_us": None, "latency_term": None,
                "latency_extrapolated": None}
    return {"latency_us": round(found.latency_us, 3), "latency_low_us": round(found.latency_low_us, 3),
            "latency_high_us": round(found.latency_high_us, 3), "latency_term": found.term,
            "latency_extrapolated": found.extrapolated}


def _op_to_dict(row: Row, fix: dict[str, Any] | None) -> dict[str, Any]:
    first = row.op.outputs[0] if row.op.outputs else None
    shape, dtype = _get_shape_and_dtype(first)
    return {
        "function": row.function, "index": row.index, "name": row.op.name, "op": row.op.op_type,
        "output": first.name if first is not None else None, "shape": shape, "dtype": dtype,
        "ane": row.ane, "predicted_backend": row.backend, "est_ane_ms": row.cost.ane, "est_cpu_ms": row.cost.cpu,
        "est_is_guess": row.cost.guess, "codes": list(row.codes), "reason": row.reason, "fix": fix,
    }


def _place_finding(item: RuleResult, places: Mapping[Operation, int]) -> Finding:
    """Convert `item` to a finding; `places` has the index of each counted op."""
    answer = item.answer
    covered = answer.covers if isinstance(answer, Hit) else (answer.op,)
    return replace(
        build_finding(item.rule, answer, item.function), index=places.get(answer.op),
        covers=tuple(places[one] for one in covered if one in places), fixed_by=item.fixed_by,
        not_fixed_because=item.not_fixed_because)


def _get_shape_and_dtype(var: Var | None) -> tuple[list[int | str] | None, str | None]:
    """Return shape ("?" for dynamic extents) and dtype of a value.

    Both are None where it has neither (a list, for instance).
    """
    shape, dtype = (None, None) if var is None else _get_type_shape_and_dtype(var.sym_type)
    return None if shape is None else list(shape), dtype


@functools.lru_cache(maxsize=1 << 16)
def _get_type_shape_and_dtype(sym_type: Any) -> tuple[tuple[int | str, ...] | None, str | None]:
    inner = sym_type.wrapped_type() if types.is_state(sym_type) else sym_type
    if types.is_list(inner) or types.is_tuple(inner) or inner is types.unknown:
        return None, None
    if not types.is_tensor(inner):
        return (), str(types.builtin_to_string(inner))
    shape = tuple(format_dimension(extent) if is_symbolic(extent) else int(extent) for extent in inner.get_shape())
    return shape, str(types.builtin_to_string(inner.get_primitive()))
