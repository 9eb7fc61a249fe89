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
from tests.rewrites.helpers import torch_outputs
from tests.rules.helpers import Spelt

X = (2, 3, 8)
FLEXIBLE = ct.RangeDim(1, 64, 8)


def converted(function, *inputs, way="traced", shapes=None, convert=ct.convert):
    """A model, as torch and coremltools make it, not yet rewritten."""
    module = (function if isinstance(function, torch.nn.Module) else Spelt(function)).eval()
    declared = [ct.TensorType(name=name, shape=shape, dtype=np.float32 if each.is_floating_point() else np.int32)
                for name, each, shape in zip("abc", inputs, shapes or [each.shape for each in inputs])]
    if way == "exported":
        source, declared = torch.export.export(module, inputs).run_decompositions({}), None
    else:
        source = torch.jit.script(module) if way == "scripted" else torch.jit.trace(module, inputs)
    return convert(source, inputs=declared, convert_to="mlprogram", skip_model_load=True,
                   minimum_deployment_target=ct.target.iOS17)


def refused(built, target):
    """The types of the ops that the ANE is predicted not to take."""
    return {row.op.op_type for row in rows(built, target) if not row.takes}


def rows(built, target):
    plan, _ = predict_plan(built, [rule.configured() for rule in get_all_rules().values()], target=target)
    return plan.rows


def held(built, function, *inputs, tolerance=1e-12):
    """The program's output against PyTorch's, both in double precision."""
    module = function if isinstance(function, torch.nn.Module) else Spelt(function)
    feeds = dict(zip(built.functions["main"].inputs, (each.numpy() for each in inputs)))
    (found,) = Runtime(built, precision="float64")(feeds).values()
    module = copy.deepcopy(module)  # it is doubled in place
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
