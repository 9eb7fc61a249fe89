"""Predictions for a rewrite: before, after, and for the guard."""

from __future__ import annotations

from dataclasses import replace

from coremltools.converters.mil.mil import Program

from ..ane import predict_plan
from ..ane.buffers import list_buffers
from ..package import Package
from ..passes.forecast import Forecast, Forecaster
from ..passes.guard import Guard
from ..passes.max_growth import check_max_growth
from ..passes.rule_selection import configure_rules

__all__ = ["make_forecaster", "make_guard"]


def make_forecaster(target: str, package: Package | None = None) -> Forecaster:
    """Make the function that predicts programs for `target`; `package` describes the shapes of its inputs."""
    rules = [rule for rule in configure_rules(None).values() if rule.refuses]

    def foresee(program: Program) -> Forecast:
        found = Forecast.of(predict_plan(program, rules, target=target, package=package)[0])
        return replace(found, padded=sum(each.padded for each in list_buffers(program)))

    return foresee


def make_guard(foresee: Forecaster, most: float | None) -> Guard | None:
    """Make the guard that lets the predicted cost grow by `most`; None for no guard.

    Raises InputError for an invalid share.
    """
    share = check_max_growth(most)
    return None if share is None else Guard(foresee, share)
