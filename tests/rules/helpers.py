"""Findings in programs as coremltools converts them."""

from __future__ import annotations

import coremltools as ct

from mil_ane_passes.equivalence.execution import Plan
from mil_ane_passes.equivalence.range_measurement import make_measurer
from mil_ane_passes.passes.engine import find_matches
from mil_ane_passes.passes.registry import get_all_rules
from tests.conversions import convert_model

WAYS = ["traced", "exported"]


def converted(module, *inputs, precision=ct.precision.FLOAT16, target=ct.target.iOS17, **settings):
    return convert_model(module, *inputs, convert_to="milinternal", compute_precision=precision,
                         minimum_deployment_target=target, **settings)


def fired(name, program, feeds=None, **options):
    """What rule `name` finds, with the ranges of a run on `feeds`, by input."""
    measure = None if feeds is None else make_measurer(lambda each: [Plan("main", "given", feeds, {})])
    return find_matches(get_all_rules()[name].configured(**options), program, measure=measure).fired


def notes(name, program, feeds=None, **options):
    return [finding.reason for finding in fired(name, program, feeds, **options)]
