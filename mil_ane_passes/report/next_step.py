"""The recommended next step of a lint report: the command with the best forecast, or the reason why no known fix
helps."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import coremltools as ct

from ..ir.query import get_function, lacks_fp16
from ..passes.finding import Finding, collect_fixes
from ..passes.forecast import Forecast
from ..passes.severity import Severity
from ..utils.text_format import format_duration, join_names
from .fix_commands import (
    format_adapt_command,
    format_preset_command,
    format_rewrite_command,
    format_split_command,
    format_upgrade_command,
)

if TYPE_CHECKING:
    from .lint import LintReport

__all__ = ["FixForecast", "NextStep", "Outlook", "find_next_step", "iterate_step_lines"]

_WITHOUT_GAIN = "Fixes of wrong numbers are recommended even if they are not predicted to be faster."
_MIN_GAIN = 0.01
"The share of the estimated run time that counts as a gain: the guard lets it grow by as much."
_MAX_TRIED_OPS = 3000
"""Ops of all forecasts together: a forecast rewrites the program in memory and predicts the result, which takes about
as long as the report itself."""
_PRESET_RUNS = 8
"Forecasts that a preset counts for: the guard predicts again for each pass that it reverts (500 ops: 8 times as long)."
_MAX_TRIED_PASSES = 4
"Passes that are tried one by one, where all together are not predicted to help."
_TARGET_WITH_FP16 = "iOS17"
"The first deployment target that has fp16 for recurrent layers."


@dataclass(frozen=True)
class FixForecast:
    """Forecasts before and after some passes; `fault` is the guard's reason against them, empty without one."""

    before: Forecast
    after: Forecast
    fault: str = ""

    @property
    def is_gain(self) -> bool:
        """True if fewer ops are off the ANE, more run on it, or the estimated time shrinks, and it does not grow."""
        one, other = self.before, self.after
        ratio = other.latency_us / one.latency_us if one.latency_us and other.latency_us else 1.0
        gains = ratio < 1 - _MIN_GAIN or (ratio <= 1 + _MIN_GAIN and _is_placed_better(self))
        return not self.fault and gains


def _is_placed_better(found: FixForecast) -> bool:
    one, other = found.before, found.after
    return other.share > one.share or other.unsupported < one.unsupported or other.off < one.off


class Outlook(Protocol):
    """Forecasts and recognition of the linted model, which a report needs in addition to its findings."""

    def forecast(self, passes: Sequence[str]) -> FixForecast | str:
        """Forecast the model rewritten by `passes`; return the reason if that costs more than a report may."""

    def forecast_preset(self, preset: str) -> FixForecast | str:
        """Forecast the model rewritten by a preset, as `forecast` does."""

    def recognize(self) -> str:
        """Return the kind of language model as which `adapt` recognizes the model; "" if it does not."""


@dataclass(frozen=True)
class NextStep:
    """The suggested next step: a command ("" if none is predicted to help), and the reason in words.

    `found` has the forecasts before and after the command, or after the tried rewrites. `note` states why there is no
    command, or a disadvantage of it.
    """

    command: str
    words: str
    found: FixForecast | None = None
    note: str = ""

    @property
    def outcome(self) -> str:
        """The predicted effect of the command in one line; "" without a forecast."""
        return "" if self.found is None else _describe_outcome(self.found)

    def to_dict(self) -> dict[str, Any]:
        return {"command": self.command or None, "reason": self.words, "note": self.note or None,
                "predicted": None if self.found is None else {
                    "before": self.found.before.to_dict(), "after": self.found.after.to_dict()}}


def iterate_step_lines(step: NextStep | None) -> Iterator[str]:
    """Yield the lines of the text: the command or that there is none, the reason, and the forecast."""
    if step is None:
        return
    yield f"next: {step.command}" if step.command else f"next: {step.words}"
    yield from [f"  {step.words}"] if step.command else []
    yield from (f"  {text}" for text in (step.outcome and f"predicted: {step.outcome}", step.note) if text)


def _describe_outcome(found: FixForecast) -> str:
    one, other = found.before, found.after
    parts = [f"{one.on_ane or 0} of {one.ops} -> {other.on_ane or 0} of {other.ops} ops on the ANE",
             f"{one.unsupported} -> {other.unsupported} unsupported"]
    if one.possibly_unsupported != other.possibly_unsupported:
        parts.append(f"{one.possibly_unsupported} -> {other.possibly_unsupported} possibly unsupported")
    if one.latency_us is not None and other.latency_us is not None:
        parts.append(f"latency {format_duration(one.latency_us / 1e3)} -> {format_duration(other.latency_us / 1e3)}")
    return ", ".join(parts)


def find_next_step(report: LintReport) -> NextStep | None:
    """Find the step that helps most; None if no finding fails, or with a baseline none that is new.

    A language model with unsupported ops is adapted. Else the passes that fix findings are forecast: all, those of them
    that gain alone, or those that fix wrong numbers, whatever their cost. If none gains, a package is cut where
    a finding says so, or the advice of the worst finding is repeated.
    """
    listed = report.findings if report.baseline is None else report.baseline.new
    failing = [item for item in listed if item.severity.fails]
    if not failing:
        return None
    kinds = _find_kinds_without_fp16(report, failing)
    if kinds and report.upgraded:
        return NextStep(format_upgrade_command(report, _TARGET_WITH_FP16), f"{_describe_missing_fp16(report, kinds)}, "
                        f"so no pass can move {'it' if len(kinds) == 1 else 'them'} to the ANE; "
                        f"{_TARGET_WITH_FP16} has fp16.",
                        note="no prediction: lint the result for its fixes")
    if report.network is not None:
        return _suggest_preset(report, failing)
    if report.outlook is not None and os.path.exists(report.model) and (kind := report.outlook.recognize()):
        return NextStep(format_adapt_command(report), f"adapt rewrites this {kind} for the ANE; passes alone cannot "
                        "fix its lookups and lengths.",
                        note="adapt prints the ops before and after, and verifies the results")
    passes = [fix["pass"] for fix in collect_fixes(failing)]
    made = _suggest_rewrite(report, passes, failing) if passes else NextStep("", "No pass fixes these findings.")
    if kinds and not made.command:
        return replace(made, words=f"{made.words} {_describe_missing_fp16(report, kinds)}: convert the model with "
                       f"minimum_deployment_target {_TARGET_WITH_FP16}, or upgrade its NeuralNetwork with "
                       f"--deployment-target {_TARGET_WITH_FP16}.")
    return made if made.command else _suggest_otherwise(report, failing, made)


def _find_kinds_without_fp16(report: LintReport, failing: Iterable[Finding]) -> list[str]:
    """Find the types of reported ops for which the model's deployment target has no fp16, and a newer one has."""
    ops = {(row.function, row.index): row.op for row in report.plan.rows}
    found = [op for item in failing for index in item.covers if (op := ops.get((item.function, index))) is not None]
    newer = ct.target[_TARGET_WITH_FP16]
    return sorted({op.op_type for op in found if lacks_fp16(op) and get_function(op).opset_version < newer})


def _describe_missing_fp16(report: LintReport, kinds: Sequence[str]) -> str:
    opset = min(function.opset_version for function in report.plan.program.functions.values())
    return f"{opset.name} has no fp16 for {join_names(kinds)}"


def _suggest_preset(report: LintReport, failing: Sequence[Finding]) -> NextStep | None:
    """Suggest to upgrade a NeuralNetwork and rewrite it, where its report forecasts a gain."""
    network = report.network
    assert network is not None
    found = FixForecast(network.before, network.after)
    if found.is_gain:
        return NextStep(format_preset_command(report, "full"), "Upgrade the NeuralNetwork and rewrite it with the "
                        "preset full.", found)
    words = "No known fix is predicted to gain. Tried: the preset full."
    return _suggest_otherwise(report, failing, NextStep("", words, found))


def _suggest_rewrite(
    report: LintReport, passes: Sequence[str], failing: Sequence[Finding],
) -> NextStep:
    """Suggest the passes that gain by forecast, else the preset if it gains, else fixes of wrong numbers; without a
    command, say what speaks against them all."""
    tried = _Forecasts(report)
    found = tried.forecast(passes)
    if isinstance(found, str):
        return NextStep(format_rewrite_command(report, passes, dry_run=True), "This shows the changes of the passes "
                        f"that fix findings, without writing: {_list_passes(passes)}.",
                        note=f"no prediction: {found}")
    needed = [fix["pass"] for fix in collect_fixes(item for item in failing if item.severity is Severity.WRONG)]
    if found.is_gain or set(passes) == set(needed):
        words = "" if found.is_gain else _WITHOUT_GAIN
        return NextStep(format_rewrite_command(report, passes), _describe_passes(passes, words), found)
    chosen = _choose_gaining(tried, passes, needed)
    if chosen and tried.gains(chosen):
        return NextStep(format_rewrite_command(report, chosen), _describe_passes(
            chosen, "The other fixes are not predicted to gain."), tried.known[tuple(chosen)])
    has_all = all(fix["preset"] != "named" for fix in collect_fixes(failing) if fix["pass"] in needed)
    if has_all and isinstance(whole := tried.forecast_preset("full"), FixForecast) and whole.is_gain:
        return NextStep(format_preset_command(report, "full"), "Rewrite the model with the preset full; the passes "
                        f"that fix findings are not predicted to gain alone: {_list_passes(passes)}.", whole)
    if chosen:
        return NextStep(format_rewrite_command(report, chosen), _describe_passes(
            chosen, f"{_WITHOUT_GAIN} The other fixes are not predicted to gain."), tried.known.get(tuple(chosen)))
    why = found.fault or ("the estimated latency grows" if _is_placed_better(found) else "no op moves to the ANE")
    return NextStep("", f"No known fix is predicted to gain. Tried: {_list_passes(passes)}.", found, why)


def _choose_gaining(tried: _Forecasts, passes: Sequence[str], needed: Sequence[str]) -> list[str]:
    """Choose the passes that gain alone, and together; and those in `needed`. Empty if there are none."""
    alone = [name for name in passes if 1 < len(passes) <= _MAX_TRIED_PASSES and tried.gains([name])]
    together = [name for name in passes if name in alone or name in needed]
    if together and tried.gains(together):
        return together
    return [*needed] or alone[:1]


class _Forecasts:
    """The forecasts of one report, each made once, within the limit of work. The first one is always made."""

    def __init__(self, report: LintReport) -> None:
        self.known: dict[tuple[str, ...], FixForecast] = {}
        self._outlook, self._size, self._left = report.outlook, len(report.plan.rows), _MAX_TRIED_OPS

    def forecast(self, passes: Sequence[str]) -> FixForecast | str:
        """Forecast `passes`; or return the reason why not."""
        key = tuple(passes)
        if key in self.known:
            return self.known[key]
        if self._outlook is None:
            return "the report has no model to rewrite"
        if self._size > self._left:
            return f"forecasts are limited to models of {_MAX_TRIED_OPS:,} ops"
        self._left -= self._size
        found = self._outlook.forecast(passes)
        if isinstance(found, FixForecast):
            self.known[key] = found
        return found

    def forecast_preset(self, preset: str) -> FixForecast | str:
        """Forecast a preset, which is tried with and without the passes that the guard reverts."""
        if self._outlook is None or self._size * _PRESET_RUNS > self._left:
            return "it would take longer than the report"
        return self._outlook.forecast_preset(preset)

    def gains(self, passes: Sequence[str]) -> bool:
        found = self.forecast(passes)
        return isinstance(found, FixForecast) and found.is_gain


def _describe_passes(passes: Sequence[str], more: str) -> str:
    words = f"Rewrite the model with {_list_passes(passes)}, which fix{'es' * (len(passes) == 1)} findings."
    return f"{words} {more}".strip()


def _list_passes(passes: Sequence[str]) -> str:
    return join_names(name.removeprefix("ane::") for name in passes)


def _suggest_otherwise(report: LintReport, failing: Sequence[Finding], tried: NextStep) -> NextStep:
    """Suggest a cut; or add the advice of the worst finding without a pass to what was `tried`."""
    cut = next((item for item in failing if item.split_at), None)
    command = None if cut is None else format_split_command(report, cut)
    if cut is not None and command is not None:
        return NextStep(command, f"{tried.words} This cuts the model at %{cut.value} "
                        f"({cut.code} {cut.slug}), so that the rest can run on the ANE.",
                        note="no prediction: lint the parts to see where they run")
    for item in failing:
        fix = item.fix
        if fix is not None and fix["advice"] and not fix["pass"]:
            return replace(tried, words=f"{tried.words} {item.code} {item.slug}: {fix['advice']}")
    return tried
