"""Integers that are computed from integers through floats, in fp16 models."""

from __future__ import annotations

import math
from collections.abc import Callable

import coremltools as ct
import numpy as np
import pytest
import torch

import mil_ane_passes as ane

from ..checks import captured, convert, input_types, module_of, outputs

BOTH = pytest.mark.parametrize("frontend", ["trace", "export"])


def measure_distances(x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[1])
    return places[None] - places[:, None]


def count_t5_buckets(x: torch.Tensor) -> torch.Tensor:
    """The buckets of T5, bidirectional: 32 buckets, of which 8 are of one distance each."""
    distances = measure_distances(x)
    sizes = distances.abs()
    large = 8 + (torch.log(sizes.float() / 8) / math.log(128 / 8) * 8).long()
    large = torch.min(large, torch.full_like(large, 15))
    return (distances > 0).long() * 16 + torch.where(sizes < 8, sizes, large)


def count_deberta_buckets(x: torch.Tensor) -> torch.Tensor:
    """The buckets of DeBERTa: a bucket of 32, whose half is of one distance each."""
    distances = measure_distances(x)
    middle = 16
    sizes = torch.where((distances < middle) & (distances > -middle), torch.tensor(middle - 1).type_as(distances),
                        distances.abs())
    logs = torch.ceil(torch.log(sizes / middle) / torch.log(torch.tensor((64 - 1) / middle)) * (middle - 1)) + middle
    return torch.where(sizes <= middle, distances.type_as(logs), logs * torch.sign(distances)).long()


def scale_places(x: torch.Tensor) -> torch.Tensor:
    """Places above 2048, of which fp16 holds the even ones."""
    return (torch.arange(x.shape[1]).float() * 1.0 + 2048).long()


def measure_from_the_middle(x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[1]).float() + 3000
    return (places - places.mean()).abs().long()


@BOTH
@pytest.mark.parametrize("count", [count_t5_buckets, count_deberta_buckets, scale_places, measure_from_the_middle])
def test_integers_are_those_of_torch(count: Callable[[torch.Tensor], torch.Tensor], frontend: str) -> None:
    example = torch.zeros(1, 40)
    mlmodel = convert(count, (example,), frontend, flexible=(1,), precision=ct.precision.FLOAT16)
    for length in (2, 40, 64):
        feeds = torch.zeros(1, length)
        for precision in ("float64", "float32", "float16"):
            np.testing.assert_array_equal(outputs(mlmodel, (feeds,), precision)[0], count(feeds).numpy())


@BOTH
def test_a_bias_by_buckets_is_compared_with_torch(frontend: str) -> None:
    table = torch.nn.Embedding(32, 4).requires_grad_(False)

    def add_bias(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x[:, None] + table(count_t5_buckets(x)).permute(2, 0, 1), -1)

    example = torch.rand(1, 40)
    program = captured(add_bias, (example,), frontend, flexible=(1,))
    inputs = None if frontend == "export" else input_types((example,), (1,))
    mlmodel = ane.convert(program, inputs=inputs, minimum_deployment_target=ct.target.iOS17, skip_model_load=True,
                          check=True)
    kinds = {op.op_type: op.outputs[0].dtype for op in mlmodel._mil_program.functions["main"].operations}
    assert kinds["log"] is ct.converters.mil.mil.types.fp32
    assert kinds["softmax"] is ct.converters.mil.mil.types.fp16
    assert ane.verify(module_of(add_bias), mlmodel).status == "equal"


def test_features_that_become_integers_are_fp16() -> None:
    example = torch.rand(1, 8)
    mlmodel = convert(lambda x: (x * 255).int(), (example,), precision=ct.precision.FLOAT16)
    product, = mlmodel._mil_program.find_ops(op_type="mul")
    assert product.outputs[0].dtype is ct.converters.mil.mil.types.fp16


def test_a_mask_of_integers_that_becomes_scores_is_fp16() -> None:
    mask = torch.tensor([[1, 1, 0, 0]], dtype=torch.int32)
    mlmodel = convert(lambda mask: (1.0 - mask.float()) * -1e4, (mask,), precision=ct.precision.FLOAT16)
    product, = mlmodel._mil_program.find_ops(op_type="mul")
    assert product.outputs[0].dtype is ct.converters.mil.mil.types.fp16
