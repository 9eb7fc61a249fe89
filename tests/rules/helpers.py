"""Findings in programs as coremltools converts them."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import torch

from mil_ane_passes.equivalence.execution import Plan
from mil_ane_passes.equivalence.range_measurement import make_measurer
from mil_ane_passes.passes.engine import find_matches
from mil_ane_passes.passes.registry import get_all_rules

WAYS = ["traced", "exported"]


class Spelt(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def converted(module, *inputs, way="traced", precision=ct.precision.FLOAT16, target=ct.target.iOS17):
    module = (module if isinstance(module, torch.nn.Module) else Spelt(module)).eval()
    types = [ct.TensorType(shape=each.shape, dtype=np.int32 if not each.is_floating_point() else np.float32)
             for each in inputs]
    if way == "exported":
        source, types = torch.export.export(module, inputs).run_decompositions({}), None
    else:
        source = torch.jit.trace(module, inputs)
    return ct.convert(source, inputs=types, minimum_deployment_target=target, convert_to="milinternal",
                      compute_precision=precision)


def fired(name, program, feeds=None, **options):
    """What rule `name` finds, with the ranges of a run on `feeds`, by input."""
    measure = None if feeds is None else make_measurer(lambda each: [Plan("main", "given", feeds, {})])
    return find_matches(get_all_rules()[name].configured(**options), program, measure=measure).fired


def notes(name, program, feeds=None, **options):
    return [finding.reason for finding in fired(name, program, feeds, **options)]
