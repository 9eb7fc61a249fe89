"""A cast to an integer between a float and a bool drops the fraction."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch

import mil_ane_passes as ane

from ..checks import FRONTENDS, captured, check, input_types

X = torch.tensor([[0.4, -0.9, 1.5, 0.0, -2.0]])


def cast_twice(x: torch.Tensor):
    return x.int().to(torch.bool).float() * 2


def conjoin(x: torch.Tensor):
    return torch.logical_and(x.long(), x < 9).float()


def negate(x: torch.Tensor):
    return torch.where(torch.logical_not(x.int()), 1.0, 2.0)


def cast_once(x: torch.Tensor):
    return x.to(torch.bool).float() * 2



@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("form", [cast_twice, conjoin, negate, cast_once])
def test_values_are_those_of_torch(form, frontend):
    check(form, X, frontend=frontend)


@pytest.mark.parametrize("preset", ["safe", "full"])
def test_our_passes_keep_the_cast(preset):
    mlmodel = ane.convert(captured(cast_twice, (X,), "trace"), inputs=input_types((X,)), skip_model_load=True,
                          pass_pipeline=ane.pipeline(preset=preset), minimum_deployment_target=ct.target.iOS17)
    (found,) = ane.run(mlmodel, {"x0": X.numpy()}).values()
    np.testing.assert_array_equal(found, [[0, 0, 2, 0, 2]])
