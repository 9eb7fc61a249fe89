"""Samples of PyTorch's own operator tests: the converted op has torch's values, or is refused in words.

Arguments that are tensors are inputs, all others are constants. `convert(check=True)` compares further feeds, so that a
lowering that depends on the sample is found.
"""

from __future__ import annotations

import itertools
import sys
import unittest
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch

import mil_ane_passes as ane
from mil_ane_passes.torch_frontend import NotConverted
from mil_ane_passes.torch_frontend.errors import NotEqual

pytestmark = pytest.mark.slow

DTYPES = {torch.float32: np.float32, torch.int64: np.int32, torch.bool: np.float32}
PARTS = 16
"Tests into which the ops are divided: torch's module takes seconds to import, so the names are not known before."
SAMPLES = 1
"Samples of each variant of an op and dtype."
UNDEFINED = {
    "kthvalue", "nn.functional.rrelu", "new_empty", "new_empty_strided", "empty_like", "randn_like", "rand_like",
    "normal", "bernoulli", "multinomial", "nn.functional.rms_norm", "sort", "argsort", "msort", "topk",
}
"Ops whose result is random, not defined for ties, or has samples that nobody asks for, such as a negative epsilon."
FINITE = {"log", "log2", "log10", "rsqrt", "xlogy", "special.xlog1py", "logit", "special.entr", "pow", "float_power",
          "__rpow__"}
"Ops that Core ML computes with an epsilon or in fewer bits: infinity and numbers beyond float32 are finite there."
NARROW = {"byte", "char", "short", "half", "bfloat16", "to"}
"Casts to types that saturate in Core ML, see `evidence cast`, or that a program in fp32 does not round to."

ONE_FEED = {"remainder", "fmod", "floor_divide", "__rmod__", "div", "scatter", "scatter_reduce"}
"Ops that raise an error for a drawn 0, or whose sums of bools are bools, which no input of Core ML is."


def list_ops() -> dict[str, list[Any]]:
    """Return the ops by name; torch's module needs a package of test helpers, of which only a base class is used."""
    if "expecttest" not in sys.modules:
        stub = ModuleType("expecttest")
        vars(stub)["TestCase"] = unittest.TestCase
        sys.modules["expecttest"] = stub
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ImportError as error:
        pytest.skip(f"torch's operator tests cannot be imported: {error}")
    found: dict[str, list[Any]] = {}
    for op in op_db:
        found.setdefault(op.name, []).append(op)
    return found


class Call(torch.nn.Module):
    """A call of an op: `template` has the places of the tensors among the inputs."""

    def __init__(self, op: Any, template: Any) -> None:
        super().__init__()
        self.op, self.template = op, template

    def forward(self, *tensors: torch.Tensor) -> Any:
        arguments, keywords = fill(self.template, tensors)
        return self.op(*arguments, **keywords)


class Place(int):
    """The place of a tensor among the inputs."""


def take_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    if torch.is_tensor(value):
        tensors.append(value)
        return Place(len(tensors) - 1)
    if isinstance(value, dict):
        return {name: take_tensors(item, tensors) for name, item in value.items()}
    return type(value)(take_tensors(item, tensors) for item in value) if type(value) in (list, tuple) else value


def fill(template: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    if isinstance(template, Place):
        return tensors[template]
    if isinstance(template, dict):
        return {name: fill(item, tensors) for name, item in template.items()}
    return type(template)(fill(item, tensors) for item in template) if type(template) in (list, tuple) else template


def flatten(value: Any) -> list[torch.Tensor]:
    if torch.is_tensor(value):
        return [value]
    return [leaf for item in value for leaf in flatten(item)] if isinstance(value, (list, tuple)) else []


def draw_samples(op: Any, dtype: torch.dtype) -> Iterator[tuple[Call, list[torch.Tensor]]]:
    torch.manual_seed(0)
    samples = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=False), 40))
    for sample in samples[::max(1, len(samples) // SAMPLES)][:SAMPLES]:
        tensors: list[torch.Tensor] = []
        template = take_tensors(((sample.input, *sample.args), sample.kwargs), tensors)
        if tensors and all(each.dtype in DTYPES and each.dim() in range(1, 6) and each.numel() for each in tensors):
            yield Call(op.op, template).eval(), tensors


@pytest.mark.parametrize("frontend", ["trace", "export"])
@pytest.mark.parametrize("part", range(PARTS))
def test_values_are_those_of_torch(part, frontend):
    faults = []
    for name, ops in [*sorted(list_ops().items())][part::PARTS]:
        for op, dtype in itertools.product(ops, DTYPES):
            for call, tensors in draw_samples(op, dtype) if dtype in op.dtypes and name not in UNDEFINED else ():
                try:
                    check_sample(name, call, tensors, frontend)
                except Exception as error:
                    faults.append(f"{name} {op.variant_test_name} {dtype} {call.template}: {error!r:.300}")
    assert not faults, "\n".join(faults)


def check_sample(name: str, call: Call, tensors: list[torch.Tensor], frontend: str) -> None:
    given = tuple(each.clone() for each in tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wanted = flatten(call(*given))
            program = torch.jit.trace(call, given, check_trace=False, strict=False) if frontend == "trace" else (
                torch.export.export(call, given))
        except Exception:  # an error that the sample is to show, or a call that torch cannot capture
            return
        if not wanted or any(each.is_complex() or not each.numel() for each in wanted):
            return
        inputs = [ct.TensorType(f"x{place}", each.shape, dtype=DTYPES[each.dtype]) for place, each in enumerate(given)]
        try:
            mlmodel = ane.convert(program, inputs=inputs if frontend == "trace" else None, skip_model_load=True,
                                  compute_precision=ct.precision.FLOAT32, minimum_deployment_target=ct.target.iOS18,
                                  check=name not in FINITE | NARROW | ONE_FEED and not any(
                                      each.dtype == torch.bool for each in given))
        except NotEqual:
            raise
        except NotConverted as error:
            assert "Traceback" not in str(error) and str(error)
            return
    described = mlmodel.get_spec().description
    feeds = {each.name: value.numpy().astype(DTYPES[value.dtype]) for each, value in zip(described.input, given)}
    found = list(ane.run(mlmodel, feeds, precision="float32").values())
    for value, result in zip(wanted, found, strict=True):
        expected = value.detach().numpy().astype(np.float64)
        real = np.isfinite(expected) & (np.abs(expected) < 2**31) if name in FINITE | NARROW else np.isfinite(expected)
        result = np.asarray(result, np.float64).reshape(expected.shape)
        if value.dtype == torch.bool:  # an input of Core ML is a number, and so is what is computed of it
            result = result != 0
        np.testing.assert_allclose(result[real], expected[real], rtol=2e-3, atol=1e-4, err_msg=f"{call.template}")
