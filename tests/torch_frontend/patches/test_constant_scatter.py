"""Scatters of constants keep what is there, as their mode says."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.torch_frontend import patched

from ..checks import check

DATA, INDICES = torch.arange(12.).reshape(3, 4) + 4, torch.tensor([[0, 0, 2, 1], [2, 0, 2, 1]])
UPDATES = torch.full((2, 4), 10.)


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("axis", [0, -1])
def test_added_constants_are_added(frontend: str, axis: int) -> None:
    check(lambda x: x + DATA.scatter_add(axis, INDICES if axis == 0 else INDICES[:, :3], UPDATES), torch.randn(3, 4),
          frontend=frontend)


@pytest.mark.parametrize("reduce", ["sum", "prod", "amax", "amin"])
def test_reduced_constants(reduce: str) -> None:
    check(lambda x: x + DATA.scatter_reduce(0, INDICES, UPDATES, reduce), torch.randn(3, 4))


@pytest.mark.parametrize("mode", ["add", "sub", "mul", "div", "max", "min", "update"])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_a_fold_gives_what_the_op_gives(mode: str, dtype: type) -> None:
    """As the runtime computes the op on values that it is fed."""
    def build(data: object, indices: object, updates: object) -> object:
        return mb.scatter_along_axis(data=data, indices=indices, updates=updates, axis=0, mode=mode, name="y")

    data, indices = np.array([4, 5, 6], dtype), np.array([2, 0, 2] if mode != "update" else [2, 0, 1], np.int32)
    updates = np.array([10, 3, 2], dtype)
    types = ct.converters.mil.mil.types
    fed = mb.program(input_specs=[mb.TensorSpec((3,), dtype=types.numpy_type_to_builtin_type(each))
                                  for each in (dtype, np.int32, dtype)])(
        lambda data, indices, updates: build(data, indices, updates))
    wanted = ane.run(fed, {"data": data, "indices": indices, "updates": updates})["y"]
    with patched():
        folded = mb.program(input_specs=[mb.TensorSpec((1,))])(
            lambda x: mb.cast(x=build(data, indices, updates), dtype="fp32"))
    (value,) = [op.outputs[0].val for op in folded.functions["main"].operations if op.op_type == "scatter_along_axis"]
    if value is None:
        assert mode == "div" and dtype == np.int32, "left to the runtime"
    else:
        np.testing.assert_array_equal(value, wanted)
