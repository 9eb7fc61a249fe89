"""Models of what users complained of: converted, rewritten, held against PyTorch."""

from __future__ import annotations

import copy

import coremltools as ct
import numpy as np
import torch

import mil_ane_passes as ane
from mil_ane_passes.ane.prediction import predict_plan
from mil_ane_passes.passes.registry import get_all_rules
from mil_ane_passes.runtime import Runtime
from tests.conversions import convert_model, make_module
from tests.rewrites.helpers import torch_outputs

X = (2, 3, 8)
FLEXIBLE = ct.RangeDim(1, 64, 8)


def converted(function, *inputs, **settings):
    """A model, as torch and coremltools make it, not yet rewritten."""
    return convert_model(function, *inputs, names="abc", **settings)


def refused(built, target):
    """The types of the ops that the ANE is predicted not to take."""
    return {row.op.op_type for row in rows(built, target) if not row.takes}


def rows(built, target):
    plan, _ = predict_plan(built, [rule.configured() for rule in get_all_rules().values()], target=target)
    return plan.rows


def held(built, function, *inputs, tolerance=1e-12):
    """The program's output against PyTorch's, both in double precision."""
    feeds = dict(zip(built.functions["main"].inputs, (each.numpy() for each in inputs)))
    (found,) = Runtime(built, precision="float64")(feeds).values()
    module = copy.deepcopy(make_module(function))  # it is doubled in place
    np.testing.assert_allclose(found, torch_outputs(module, *(each.clone() for each in inputs)), rtol=0, atol=tolerance)


def rewritten(model, target, **asked):
    """The program that the preset leaves, verified; single ops are no reason to enter the ANE, so cost is no bar
    here."""
    report = ane.rewrite(model, target=target, **{"preset": "full", "max_growth": None, **asked})
    assert report.status != "not verified"
    return report.package.program


def numbers(*shape):
    return torch.from_numpy(np.random.default_rng(0).standard_normal(shape).astype(np.float16)).float()


def found(model, name, target="all"):
    return [item for item in ane.lint(model, target=target).findings if item.rule.name == name]
