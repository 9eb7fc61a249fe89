"""Undoes rewrites that leave a program predicted dearer, or further off the ANE, than it was.

Guarded is what a preset brings for the sake of place and speed. Never undone are the cures of wrong numbers (the preset
`safe`, and what `mends`), which may cost what they cost, and what the user asked for by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from coremltools.converters.mil.mil import Program

from .clone import clone
from .contract import Rewrite
from .engine import PassTrace
from .forecast import Forecast, Foresee
from .growth import MOST_GROWTH

__all__ = ["Guard", "guarded", "settled", "watched"]

Run = Callable[[Sequence[Rewrite], Program], list[PassTrace]]


@dataclass(frozen=True)
class Guard:
    """`foresee` predicts; `most` is the share by which the cost may grow."""

    foresee: Foresee
    most: float = MOST_GROWTH

    def allows(self, before: Forecast, after: Forecast) -> bool:
        return after.refused <= before.refused and after.cost <= before.cost * (1 + self.most)

    def words(self, before: Forecast, after: Forecast) -> str:
        """Why `after` is not allowed."""
        if after.refused > before.refused:
            return f"{after.refused} ops that the ANE does not take instead of {before.refused} (predicted)"
        return f"{after.cost:.3f} ms instead of {before.cost:.3f} (predicted), {after.cost / before.cost - 1:+.1%}"


def watched(rule: Rewrite) -> bool:
    """Whether a guard may undo `rule`."""
    return rule.preset == "full" and not rule.mends and not rule.asked


def guarded(rules: Sequence[Rewrite], program: Program, run: Run, guard: Guard | None) -> list[PassTrace]:
    """`run(rules, program)`, without those rules that `guard` does not let stand; `program` is changed in place.

    It costs a second structure of the program (no weights) and a prediction before and after; where something is to be
    undone, one more run and prediction for each rule that fired, at most twice.
    """
    if guard is None or not any(map(watched, rules)):
        return run(rules, program)
    original = clone(program)
    traces = run(rules, program)
    names = {rule.name for rule in rules if watched(rule)}
    if not any(trace.fired and trace.rule in names for trace in traces):
        return traces
    why, again = settled(rules, original, program, run, guard)
    places = {trace.rule: len(trace.fired) for trace in traces}
    return [*(again or traces), *(PassTrace(name, undone=reason, places=places[name]) for name, reason in why.items())]


def settled(
    rules: Sequence[Rewrite], original: Program, program: Program, run: Run, guard: Guard,
) -> tuple[dict[str, str], list[PassTrace] | None]:
    """Leave out of `program`, which `rules` made of `original`, what `guard` does not let stand.

    Returns the names of the rules that are left out with the reasons, and the traces of the others, run once more; None
    where nothing is left out.
    """
    bar, after = guard.foresee(original), guard.foresee(program)
    why: dict[str, str] = {}
    if guard.allows(bar, after):
        return why, None
    bar = _with_cures(bar, rules, original, run, guard)
    suspects = () if guard.allows(bar, after) else _by_growth(rules, original, run, guard)
    traces = None
    for name in suspects:
        why[name] = guard.words(bar, after)
        trial = clone(original)
        traces = run([rule for rule in rules if rule.name not in why], trial)
        program.functions = trial.functions
        after = guard.foresee(trial)
        if guard.allows(bar, after):
            break
    return why, traces


def _with_cures(bar: Forecast, rules: Sequence[Rewrite], original: Program, run: Run, guard: Guard) -> Forecast:
    """What the rest is measured by: the program as it was, or with what is never undone, where that costs more."""
    alone = clone(original)
    if not any(trace.fired for trace in run([rule for rule in rules if not watched(rule)], alone)):
        return bar
    cured = guard.foresee(alone)
    return Forecast(cured.ops, max(bar.refused, cured.refused), max(bar.off, cured.off), max(bar.cost, cured.cost),
                    cured.switches)


def _by_growth(rules: Sequence[Rewrite], original: Program, run: Run, guard: Guard) -> Iterable[str]:
    """The names of the watched rules that fire, from the one that adds most refused ops and cost to the one that
    saves most."""
    program = clone(original)
    last = guard.foresee(program)
    added: dict[str, tuple[int, float]] = {}
    for rule in rules:
        (trace,) = run([rule], program)
        if not trace.fired:
            continue
        now = guard.foresee(program)
        if watched(rule):
            added[rule.name] = (now.refused - last.refused, now.cost - last.cost)
        last = now
    return sorted(added, key=lambda name: added[name], reverse=True)
