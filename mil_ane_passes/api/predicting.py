"""The prediction that a rewrite is measured by: before, after, and for the guard."""

from __future__ import annotations

from dataclasses import replace

from coremltools.converters.mil.mil import Program

from ..core.forecast import Forecast, Foresee
from ..core.growth import growth
from ..core.guard import Guard
from ..core.selecting import configured
from ..package import Package
from ..residency import predict
from ..residency.buffers import buffers

__all__ = ["foreseeing", "guard_of"]


def foreseeing(target: str, package: Package | None = None) -> Foresee:
    """What predicts programs for `target`; `package` says what the shapes of its inputs may be."""
    rules = [rule for rule in configured(None).values() if rule.refuses]

    def foresee(program: Program) -> Forecast:
        found = Forecast.of(predict(program, rules, target=target, package=package)[0])
        return replace(found, padded=sum(each.padded for each in buffers(program)))

    return foresee


def guard_of(foresee: Foresee, most: float | None) -> Guard | None:
    """The guard that lets the predicted cost grow by `most`, None for none. Raises InputError for what is no share."""
    share = growth(most)
    return None if share is None else Guard(foresee, share)
