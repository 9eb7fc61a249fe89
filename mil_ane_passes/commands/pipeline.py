"""The pass pipeline for `ct.convert`, and the predictions and measurements that its passes use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import coremltools as ct
from coremltools.converters.mil.mil import Program

from ..ane import predict_plan
from ..ane.buffers import compute_peak_bytes, list_buffers
from ..ane.latency import estimate_latency
from ..equivalence.execution import build_plans
from ..equivalence.range_measurement import make_measurer
from ..equivalence.user_inputs import Feeds, Ranges, UserInputs
from ..ir.value_ranges import Measure
from ..package import Package
from ..passes import pipeline as passes_of
from ..passes.forecast import Forecast, Forecaster
from ..passes.guard import Guard
from ..passes.max_growth import DEFAULT_MAX_GROWTH, check_max_growth
from ..passes.rule_selection import configure_rules
from ..passes.targets import parse_target
from ..utils.garbage_collection import pause_garbage_collection
from ..utils.locking import synchronized
from .options import DEFAULT_SEEDS

__all__ = ["make_forecaster", "make_guard", "make_measures", "pipeline"]


@synchronized
def pipeline(
    base: ct.PassPipeline | None = None, *, preset: str = "safe", target: str = "all",
    passes: passes_of.Passes | None = None, options: passes_of.Options | None = None,
    feeds: Feeds | None = None, ranges: Ranges | None = None, max_growth: float | None = DEFAULT_MAX_GROWTH,
    strict: bool = False,
) -> ct.PassPipeline:
    """Build a new pipeline: coremltools' `base` (default: `ct.PassPipeline.DEFAULT`) followed by our passes.

    Ours come last, so that no pass of coremltools folds them back (`fuse_conv_bias` would). `base` is never changed.
    Our passes in `base` are replaced, not duplicated. Names, options, preset and target are checked here, and an
    invalid one raises an InputError that suggests the nearest valid one. Passes that need value ranges run the program
    on `feeds` (a mapping from input name to array, or several) and within `ranges` (input name to (low, high)); that
    needs torch.

    `max_growth`: rewrites that a preset includes for placement and speed are reverted if the predicted cost, or
    the estimated latency on a chip of the target, grows by more than this share, or if more ops than before are
    unsupported on the ANE (`explain guard`). Passes requested by name, and fixes of
    wrong numbers, are not reverted. None reverts nothing. A pass that fails leaves the program unchanged and logs a
    warning; with `strict` it stops the conversion.

    The names in the result's `passes` do the same without the object, in any process that has imported mil_ane_passes:
    `ct.PassPipeline(names)` after a JSON round trip, or ExecuTorch's `pass_names`. Settings and guard are in the name
    `ane::guard_begin{target=m4 ...}`; only feeds and ranges cannot be part of names. Written by hand, a preset is one
    name, `ane::full{target=m4 max_growth=0.01}`, and a pass is `ane::triangle_cumsum{target=m4}`. A list of names is an
    entire pipeline: `ct.PassPipeline(["ane::full"])` runs none of coremltools' own passes, while
    `append_pass("ane::full")` on a `ct.PassPipeline()` runs it after them.
    """
    measure, draw = make_measures(UserInputs.of(feeds, ranges), lambda function: None)
    parse_target(target)
    return passes_of.pipeline(base, preset=preset, target=target, passes=passes, options=options, measure=measure,
                              draw=draw, guard=make_guard(make_forecaster(target), max_growth), strict=strict)


def make_measures(
    inputs: UserInputs, describe: Any, seeds: int = DEFAULT_SEEDS, progress: Any = None
) -> tuple[Measure | None, Measure]:
    """Make the measures of a program: on the user's feeds and ranges (None without any), and on seeded random feeds."""
    report = progress or (lambda text: None)

    def plan_sampled(program: Program) -> Any:
        return build_plans(program, seeds, describe)

    def plan_user_inputs(program: Program) -> Any:
        return inputs.plans(program, describe)

    return (make_measurer(plan_user_inputs, report) if inputs else None), make_measurer(plan_sampled, report)


def make_forecaster(target: str, package: Package | None = None) -> Forecaster:
    """Make the function that predicts programs for `target`; `package` describes the shapes of its inputs."""
    rules = [rule for rule in configure_rules(None).values() if rule.refuses]

    @pause_garbage_collection()
    def forecast_program(program: Program) -> Forecast:
        plan = predict_plan(program, rules, target=target, package=package)[0]
        found = replace(Forecast.of(plan), padded=sum(each.padded for each in list_buffers(program)),
                        peak=compute_peak_bytes(program))
        spent = estimate_latency(program, plan, target)
        return replace(found, latency_us=round(spent.latency_us, 3), latency_low_us=round(spent.latency_low_us, 3),
                       latency_high_us=round(spent.latency_high_us, 3), latency_term=spent.term,
                       latency_extrapolated=spent.extrapolated, latencies=spent.by_chip)

    return forecast_program


def make_guard(forecast: Forecaster, share: float | None) -> Guard | None:
    """Make the guard that lets the predicted cost grow by `most`; None for no guard.

    Raises InputError for an invalid share.
    """
    share = check_max_growth(share)
    return None if share is None else Guard(forecast, share)
