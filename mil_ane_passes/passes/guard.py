"""The guard: reverts rewrites that increase the predicted cost of a program, or move work off the ANE.

A rewrite is reverted, and reported as such (`reverted`, which names the reason), if it

- increases the cost that Core ML's segmenter is predicted to estimate for the entire model by more than 1 %
  (`--max-growth`),
- increases the estimated latency by more than that on a chip of the target (any measured chip for the target `all`),
- makes more ops unsupported, or adds a transition without moving an op off the CPU,
- increases the size of padded buffers by more than a quarter without removing an unsupported op or a transition, or
- adds more than 16 ops to a model that has no op on the ANE before or after.

The limit is 20 % if the latency increase is due only to ops that no measurement of the chip covers, unless the
segmenter's cost, an independent estimate, increases as well. If ops move off the CPU, whose time is a guess, the limit
is also 20 %, or 2 % if the segmenter's cost increases as well. If ops move to the CPU, which is never the aim of a
rewrite, the limit is 2 %.

In addition to these shares, each rewrite may add 0.5 us to the latency and to the segmenter's cost: less than half a
percent of the fixed cost of a call on the ANE. The allowances of several rewrites add up (two rewrites may add
2.9 % to a model of 35 us), and so do the ops that they may add. The sum is not limited, because a second run, which
starts from the result of the first one, would then apply rewrites that the first one reverted.

A firm latency gain outweighs an increase of the segmenter's cost, which is not a latency: it does not count weights
that are streamed twice. A gain is firm if it is more than 5 % on every chip of the target, counting only ops that
measurements of that chip cover, minus three times the increase due to other ops; and if no more ops than before are
unsupported or on the CPU, and no transition is added. It also outweighs memory, up to three times the padded bytes that
are live at the same time, because the parts of a sum are read once and freed. A rewrite that only adds cost or memory
next to a gaining rewrite is reverted separately.

The guard covers rewrites that a preset includes for placement and speed. It never reverts fixes of wrong numbers (the
preset `safe`, and rewrites with `fixes_nonfinite`), whatever they cost, nor rewrites requested by name, such as
`--passes full,unroll_lstm`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coremltools.converters.mil.mil import Program

from ..ir.clone import clone_program
from .contract import Rewrite
from .engine import PassTrace, RunSettings, run_rewrites
from .forecast import ChipLatency, Forecast, Forecaster
from .layout import format_bytes
from .max_growth import DEFAULT_MAX_GROWTH

__all__ = ["Fault", "Guard", "is_guarded", "run_guarded", "undo_costly_rewrites"]

_NEGLIGIBLE_COST_MS = 0.0005
"Milliseconds, less than half a percent of one transition: a cost increase of one rewrite that is too small to matter."
_MAX_PADDED_RATIO, _NEGLIGIBLE_BYTES = 1.25, 1 << 20
"""Allowed ratio of the padded bytes of all values, and allowed increase in bytes.

Decompositions in steps add up to a quarter, where a last axis of one adds 31 times. The prediction has no price for
memory.
"""
_MAX_ADDED_OPS = 16
"""How many ops a rewrite may add where nothing runs on the ANE before or after: the number that a decomposition of one
op adds. Unrolled layers add tens (two lstm steps 27, a short rnn 96) for a gain that only a guessed CPU cost
predicts."""
_MAX_EXTRAPOLATED_GROWTH = 0.2
"Allowed growth of the run time if ops that no measurement covers account for it: movement, reductions and norms."
_MAX_MOVED_GROWTH = 0.02
"""Allowed growth of the run time where ops go to the CPU, or leave it at a higher cost for the segmenter, too: what
the tables of real architectures count as slower. One of both times rests on a guess of the CPU, so that a smaller
difference says nothing."""
_NEGLIGIBLE_LATENCY_US = 0.5
"Microseconds, less than half a percent of the fixed cost of a call on the ANE, that one rewrite may add."
_MIN_FIRM_GAIN, _EXTRAPOLATED_GROWTH_WEIGHT = 0.05, 3.0
"""The share of the run time that has to be gained to pay for cost and memory, and how often growth of ops without
measurement is taken off it: the largest factor by which ops that rewrites for speed add are said to be off."""
_MAX_PEAK_RATIO = 3.0
"""Allowed ratio of the padded bytes that are live at the same time, where a firm gain pays for memory.

A sum of parts holds the sum so far, one more part and the new sum in place of one result, however many parts it has."""


class Fault(NamedTuple):
    """The reason for which a rewrite is reverted: support, memory, ops, cost, transitions or latency, and in words."""

    kind: str
    words: str


@dataclass(frozen=True)
class Guard:
    """Settings of the guard: `forecast` predicts a program, `most` is the share by which the cost may grow."""

    forecast: Forecaster
    most: float = DEFAULT_MAX_GROWTH

    def allows(self, before: Forecast, after: Forecast, steps: int = 1) -> bool:
        """Return whether `steps` rewrites may turn a program with forecast `before` into one with forecast `after`."""
        return self.find_fault(before, after, steps) is None

    def find_fault(
        self, before: Forecast, after: Forecast, steps: int = 1, most_added: float = _MAX_ADDED_OPS
    ) -> Fault | None:
        """Find the reason why `after` is not allowed; None if it is.

        `most_added` is the number of ops that may be added where nothing runs on the ANE.
        """
        paid = _gains_firmly(before, after)
        if after.unsupported > before.unsupported:
            return Fault("support", f"{after.unsupported} unsupported ops instead of {before.unsupported} (predicted)")
        if _needs_more_memory(before, after):
            if not paid:
                return Fault("memory", f"padded buffers of {format_bytes(after.padded)} instead of "
                             f"{format_bytes(before.padded)} (computed), without removing an unsupported op or a "
                             f"transition"
                             + _explain_unpaid(before, after))
            if after.peak > before.peak * _MAX_PEAK_RATIO + _NEGLIGIBLE_BYTES:
                return Fault("memory", f"padded buffers of {format_bytes(after.peak)} live at the same time instead of "
                             f"{format_bytes(before.peak)} (computed)")
        if _is_pointless(before, after, most_added):
            return Fault("ops", f"{after.ops} ops instead of {before.ops}, although no op is predicted to run on the "
                                f"ANE before or after")
        if self._costs_more(before, after, steps) and not paid:
            return Fault("cost", f"{after.cost:.3f} ms instead of {before.cost:.3f} (predicted), "
                         f"{after.cost / before.cost - 1:+.1%}" + _explain_unpaid(before, after))
        if after.transitions > before.transitions and not _is_better_placed(before, after):
            return Fault("transitions", f"{after.transitions} transitions instead of {before.transitions} "
                                        f"(predicted), without moving an op off the CPU")
        slower = _find_slower_chips(before, after, self.most, steps)
        if not slower:
            return None
        first, last = max(slower, key=lambda pair: pair[1].latency_us / pair[0].latency_us)
        return Fault("latency", f"latency on {last.chip} of {last.latency_us / 1e3:.3f} ms instead of "
                     f"{first.latency_us / 1e3:.3f} (estimated), {last.latency_us / first.latency_us - 1:+.1%}")

    def is_paid(self, before: Forecast, after: Forecast, steps: int = 1) -> bool:
        """Return whether `after` is allowed only because a firm gain of run time pays for its cost or memory."""
        grows = _needs_more_memory(before, after) or self._costs_more(before, after, steps)
        return grows and _gains_firmly(before, after)

    def _costs_more(self, before: Forecast, after: Forecast, steps: int) -> bool:
        return after.cost > before.cost * (1 + self.most) + _NEGLIGIBLE_COST_MS * steps


def _needs_more_memory(before: Forecast, after: Forecast) -> bool:
    """Return whether `after` needs more memory without removing an unsupported op or a transition."""
    better = after.unsupported < before.unsupported or after.off < before.off or after.transitions < before.transitions
    return not better and after.padded > before.padded * _MAX_PADDED_RATIO + _NEGLIGIBLE_BYTES


def _is_better_placed(before: Forecast, after: Forecast) -> bool:
    """Return whether `after` removes an unsupported op, an op on the CPU, or a transition with no op more on the CPU.

    A graph that leaves the ANE entirely also has fewer transitions, which is not a better placement.
    """
    added = _count_ops_added_to_cpu(before, after)
    return (after.unsupported < before.unsupported or after.off < before.off or (added is not None and added < 0)
            or (after.transitions < before.transitions and (added is None or added <= 0)))


def _count_ops_added_to_cpu(before: Forecast, after: Forecast) -> int | None:
    """Count the ops that `after` runs on the CPU beyond those of `before`; None where a placement is not predicted."""
    if before.on_ane is None or after.on_ane is None:
        return None
    return (after.ops - after.on_ane) - (before.ops - before.on_ane)


def _is_placed_no_worse(before: Forecast, after: Forecast) -> bool:
    """Return whether no more ops are unsupported or on the CPU, and no transition is added."""
    added = _count_ops_added_to_cpu(before, after)
    return (added is not None and added <= 0 and after.unsupported <= before.unsupported and after.off <= before.off
            and after.transitions <= before.transitions)


def _pair_chips(before: Forecast, after: Forecast) -> list[tuple[ChipLatency, ChipLatency]]:
    """Pair the estimates of each chip of the target."""
    earlier = {each.chip: each for each in before.latencies}
    return [(earlier[each.chip], each) for each in after.latencies if each.chip in earlier]


def _measure_firm_gain(before: ChipLatency, after: ChipLatency) -> float:
    """Measure what of the run time is gained on a chip by ops that measurements of it cover, as a share."""
    firm = [each.latency_us - each.call_us - each.extrapolated_us for each in (before, after)]
    growth = max(0.0, after.extrapolated_us - before.extrapolated_us)
    return (firm[0] - firm[1] - _EXTRAPOLATED_GROWTH_WEIGHT * growth) / before.latency_us if before.latency_us else 0.0


def _gains_firmly(before: Forecast, after: Forecast) -> bool:
    """Return whether the run time falls enough on every chip of the target to pay for cost and memory."""
    pairs = _pair_chips(before, after)
    return (bool(pairs) and _is_placed_no_worse(before, after)
            and all(_measure_firm_gain(*pair) > _MIN_FIRM_GAIN for pair in pairs))


def _explain_unpaid(before: Forecast, after: Forecast) -> str:
    """Explain why an estimated gain of run time does not pay for cost and memory; "" if there is none."""
    pairs = _pair_chips(before, after)
    if not any(last.latency_us < first.latency_us * (1 - _MIN_FIRM_GAIN) for first, last in pairs):
        return ""
    if not _is_placed_no_worse(before, after):
        return "; a lower latency does not outweigh it, because fewer ops run on the ANE or transitions are added"
    first, last = min(pairs, key=lambda pair: _measure_firm_gain(*pair))
    return (f"; a lower latency does not outweigh it: on {last.chip} measurements account for "
            f"{max(0.0, _measure_firm_gain(first, last)):.1%}, less than {_MIN_FIRM_GAIN:.0%}")


def _is_slower(
    before: ChipLatency, after: ChipLatency, most: float, steps: int, *, moves: bool, costs_more: bool,
) -> bool:
    """Return whether the run time on a chip grows by more than `most`, as far as the estimate can tell.

    Growth that the fixed cost of a call hides or causes alone does not count: it differs between the ANE and the CPU,
    and no rewrite is for or against it. Growth by ops without measurement counts in full where the segmenter's
    estimate, which is independent of ours, grows, too (`costs_more`). With `moves` ops change the processor, so that
    measurements cover different ops before and after, and the total counts.
    """
    slack = _NEGLIGIBLE_LATENCY_US * steps
    spent = [each.latency_us - each.call_us for each in (before, after)]
    if after.latency_us <= before.latency_us * (1 + most) + slack or spent[1] <= spent[0] * (1 + most) + slack:
        return False
    if moves:
        return True
    firm = [total - each.extrapolated_us for total, each in zip(spent, (before, after), strict=True)]
    if costs_more or firm[1] - firm[0] > most * before.latency_us + slack:
        return True
    return after.latency_us > before.latency_us * (1 + max(most, _MAX_EXTRAPOLATED_GROWTH)) + slack


def _find_slower_chips(
    before: Forecast, after: Forecast, most: float, steps: int,
) -> list[tuple[ChipLatency, ChipLatency]]:
    """Find the chips of the target that lose, with the estimates before and after."""
    costs_more, added = after.cost > before.cost, _count_ops_added_to_cpu(before, after) or 0
    if added:
        most = max(most, _MAX_EXTRAPOLATED_GROWTH if added < 0 and not costs_more else _MAX_MOVED_GROWTH)
    return [pair for pair in _pair_chips(before, after)
            if _is_slower(*pair, most, steps, moves=added != 0, costs_more=costs_more)]


def _measure_slowdown(before: Forecast, after: Forecast) -> float:
    """Return the growth of the run time on the chip that loses most, as a share."""
    earlier = {each.chip: each.latency_us for each in before.latencies}
    return max((each.latency_us / earlier[each.chip] - 1 for each in after.latencies if earlier.get(each.chip)),
               default=0.0)


def _is_pointless(before: Forecast, after: Forecast, most_added: float) -> bool:
    """Return whether `after` only adds ops to a model that runs on the CPU alone."""
    return before.on_ane == 0 and after.on_ane == 0 and after.ops > before.ops + most_added


def is_guarded(rule: Rewrite) -> bool:
    """Return whether the guard may revert `rule`."""
    return rule.preset == "full" and not rule.fixes_nonfinite and not rule.asked


def run_guarded(
    rules: Sequence[Rewrite], program: Program, settings: RunSettings, guard: Guard | None
) -> list[PassTrace]:
    """Run `rules` over `program` and revert those that `guard` does not allow; `program` is changed in place.

    This costs a second copy of the program's structure (no weights) and a prediction before and after. If a rule is to
    be reverted, it costs one more run and prediction for each rule that fires, and for each that is reverted.
    """
    if guard is None or not any(map(is_guarded, rules)):
        return run_rewrites(rules, program, settings)
    original = clone_program(program)
    traces = run_rewrites(rules, program, settings)
    names = {rule.name for rule in rules if is_guarded(rule)}
    if not any(trace.fired and trace.rule in names for trace in traces):
        return traces
    undone, again = undo_costly_rewrites(rules, original, program, settings, guard)
    return [*(traces if again is None else again), *undone]


def undo_costly_rewrites(
    rules: Sequence[Rewrite], original: Program, program: Program, settings: RunSettings, guard: Guard,
) -> tuple[list[PassTrace], list[PassTrace] | None]:
    """Remove from `program`, the result of `rules` on `original`, the rewrites that `guard` does not allow.

    Returns a trace of each reverted rule, and the traces of the others from their last run; None if nothing is
    reverted.
    """
    bar, after = guard.forecast(original), guard.forecast(program)
    undone: list[PassTrace] = []
    traces: list[PassTrace] | None = None
    if not guard.allows(bar, after):
        undone, traces = _undo_faults(bar, after, rules, original, program, settings, guard)
    current = after if traces is None else guard.forecast(program)
    if guard.is_paid(bar, current):
        names = {trace.rule for trace in undone}
        rest = [rule for rule in rules if rule.name not in names]
        more, again = _undo_free_riders(current, rest, original, program, settings, guard)
        undone, traces = [*undone, *more], traces if again is None else again
    return undone, traces


def _undo_free_riders(
    current: Forecast, rules: Sequence[Rewrite], original: Program, program: Program, settings: RunSettings,
    guard: Guard,
) -> tuple[list[PassTrace], list[PassTrace] | None]:
    """Remove from `program` the rewrites without which it is as good, and whose cost or memory the gain of others pays.

    Returns the same as `undo_costly_rewrites`.
    """
    undone: list[PassTrace] = []
    last: list[PassTrace] | None = None
    for suspect in _rank_by_cost_increase(rules, original, settings, guard):
        rest = [rule for rule in rules if rule.name != suspect.rule]
        trial = clone_program(original)
        traces = run_rewrites(rest, trial, settings)
        without = guard.forecast(trial)
        fault = guard.find_fault(without, current)
        if fault is None or not guard.allows(current, without):
            continue
        suspect.reverted = fault.words
        undone.append(suspect)
        rules, last, current, program.functions = rest, traces, without, trial.functions
    return undone, last


def _undo_faults(
    bar: Forecast, after: Forecast, rules: Sequence[Rewrite], original: Program, program: Program,
    settings: RunSettings, guard: Guard,
) -> tuple[list[PassTrace], list[PassTrace] | None]:
    """Remove from `program` rewrites until the forecast of the rest is allowed; see `undo_costly_rewrites`."""
    undone: list[PassTrace] = []
    bar = _compute_baseline(bar, rules, original, settings, guard)
    traces, suspects, rest, steps = (
        None,
        deque[PassTrace](),
        list(rules),
        _count_fired_guarded_rules(rules, run_rewrites(rules, clone_program(original), settings)),
    )
    most_added: float = _MAX_ADDED_OPS
    while (fault := guard.find_fault(bar, after, steps, most_added)) is not None:
        if not suspects:  # rank again: without some rules, others fire in their place
            suspects = deque(_rank_by_cost_increase(rest, original, settings, guard, fault.kind))
        if not suspects and fault.kind == "ops":  # none adds too many: a second run would apply what is reverted here
            most_added = math.inf
            continue
        if not suspects:
            break
        left_out = suspects.popleft()
        left_out.reverted = fault.words
        undone.append(left_out)
        rest = [rule for rule in rest if rule.name != left_out.rule]
        trial = clone_program(original)
        traces = run_rewrites(rest, trial, settings)
        program.functions, after, steps = (
            trial.functions,
            guard.forecast(trial),
            _count_fired_guarded_rules(rest, traces),
        )
    for left_out in undone[:-1]:  # the rules that made it too expensive may have been reverted since
        more = [rule for rule in rules if rule in rest or rule.name == left_out.rule]
        trial = clone_program(original)
        built = run_rewrites(more, trial, settings)
        fires = any(trace.rule == left_out.rule and trace.fired for trace in built)
        if fires and guard.allows(bar, guard.forecast(trial), _count_fired_guarded_rules(more, built)):
            rest, traces, program.functions = more, built, trial.functions
    names = {rule.name for rule in rest}
    return [left_out for left_out in undone if left_out.rule not in names], traces


def _count_fired_guarded_rules(rules: Sequence[Rewrite], traces: Sequence[PassTrace]) -> int:
    """Count the guarded `rules` that fired."""
    names = {rule.name for rule in rules if is_guarded(rule)}
    return sum(trace.rule in names and bool(trace.fired) for trace in traces)


def _compute_baseline(
    bar: Forecast, rules: Sequence[Rewrite], original: Program, settings: RunSettings, guard: Guard
) -> Forecast:
    """Compute the baseline: the original program, or the result of the unguarded rules where that costs more."""
    alone = clone_program(original)
    unguarded = [rule for rule in rules if not is_guarded(rule)]
    if not any(trace.fired for trace in run_rewrites(unguarded, alone, settings)):
        return bar
    cured = guard.forecast(alone)
    return Forecast(
        cured.ops,
        max(bar.unsupported, cured.unsupported),
        max(bar.off, cured.off),
        max(bar.cost, cured.cost),
        cured.transitions,
        max(bar.padded, cured.padded),
        cured.on_ane or bar.on_ane,
        latencies=_select_slower_chips(bar, cured),
        peak=max(bar.peak, cured.peak),
    )


def _select_slower_chips(one: Forecast, other: Forecast) -> tuple[ChipLatency, ...]:
    """Return for each chip the estimate of the program that is slower there."""
    known = {each.chip: each for each in other.latencies}
    return tuple(max((each, known.get(each.chip, each)), key=lambda spent: spent.latency_us)
                 for each in one.latencies)


def _rank_by_cost_increase(
    rules: Sequence[Rewrite], original: Program, settings: RunSettings, guard: Guard, kind: str = "cost",
) -> list[PassTrace]:
    """Rank the guarded rules that add unsupported ops or cost, largest increase first.

    If none does, all that fire are ranked.

    For a fault of `kind` ops the rank has the rules that add too many, by their number, and for latency it is by the
    added run time on the chip that loses most.
    """
    program = clone_program(original)
    last = guard.forecast(program)
    added: list[tuple[tuple[float, float, float], PassTrace]] = []
    for rule in rules:
        (trace,) = run_rewrites([rule], program, settings)
        if not trace.fired:
            continue
        now = guard.forecast(program)
        if is_guarded(rule):
            growth = (now.unsupported - last.unsupported, now.cost - last.cost, now.padded - last.padded)
            by_kind = {"ops": (now.ops - last.ops, 0, 0), "latency": (_measure_slowdown(last, now), *growth[:2]),
                       "transitions": (now.transitions - last.transitions, *growth[:2])}
            added.append((by_kind.get(kind, growth),
                          PassTrace(rule.name, places=len(trace.fired))))
        last = now
    if kind == "ops":
        added = [each for each in added if each[0][0] > _MAX_ADDED_OPS]
    added = [each for each in added if each[0] > (0, 0, 0)] or added
    return [trace for _, trace in sorted(added, key=lambda each: each[0], reverse=True)]
