"""Masks that a trace has as bools and the model as integers or floats."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
import torch

import mil_ane_passes as ane
from mil_ane_passes.torch_frontend import NotConverted

from ..checks import module_of

X = torch.tensor([[1.0, -2.0, 3.0], [-4.0, 5.0, -6.0]])
MASK = torch.tensor([[True, False, True], [True, True, False]])


def write(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    x = x * 2
    x[~mask & (x > 0)] = 9.0
    return x


def convert(model, dtype, tensors=(X, MASK)):
    inputs = [ct.TensorType("x", tensors[0].shape), *(
        ct.TensorType(f"mask{number}", each.shape, dtype=dtype) for number, each in enumerate(tensors[1:]))]
    return ane.convert(model, inputs=inputs, minimum_deployment_target=ct.target.iOS16,
                       compute_precision=ct.precision.FLOAT32)


def check_traced(function, dtype, *tensors):
    model = torch.jit.trace(module_of(function), tuple(each.clone() for each in tensors), check_trace=False)
    converted = convert(model, dtype, tensors)
    feeds = {"x": tensors[0].numpy(), **{f"mask{number}": each.numpy().astype(dtype)
                                         for number, each in enumerate(tensors[1:])}}
    found, = ane.run(converted, feeds).values()
    np.testing.assert_array_equal(found, function(*(each.clone() for each in tensors)).numpy())
    return converted._mil_program


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
@pytest.mark.parametrize("function", [
    lambda x, mask: torch.where(mask & (x > 0), x, x * 0), lambda x, mask: x.masked_fill(~mask, 0.0),
    lambda x, mask: x.masked_fill(mask | (x > 0), 0.0), lambda x, mask: x.masked_fill(mask ^ (x > 0), 0.0),
    lambda x, mask: x.masked_fill(~mask[:, None].transpose(0, 1)[0] & (x > 0), 0.0), lambda x, mask: x[mask] + 1, write,
    lambda x, mask: torch.bitwise_not(mask).float() + torch.bitwise_and(mask, x > 0).float(),
    lambda x, mask: x * (~mask).float() + mask.sum(),
], ids=["and", "not", "or", "xor", "not of a view", "index", "write", "functions", "sum"])
def test_values_are_those_of_pytorch(function, dtype) -> None:
    check_traced(function, dtype, X, MASK)


def test_of_two_masks() -> None:
    check_traced(lambda x, one, other: x.masked_fill(~(one & other), 0.0), np.int32, X, MASK, MASK.flip(0))


def test_where_zeros_and_ones_do_there_is_no_cast() -> None:
    program = check_traced(lambda x, mask: x * mask, np.float32, X, MASK)
    assert not program.functions["main"].find_ops(op_type="cast")


def test_integers_stay_integers() -> None:
    numbers = torch.tensor([[7, 2, 5], [1, 0, 3]], dtype=torch.int32)
    check_traced(lambda x, numbers: x + (numbers & 3) + (~numbers).float(), np.int32, X, numbers)


@pytest.mark.parametrize(("operator", "name"), [("&", "and"), ("|", "or"), ("^", "xor")])
def test_a_script_names_the_declared_type_and_what_to_write(tmp_path, monkeypatch, operator: str, name: str) -> None:
    (tmp_path / f"scripted_{name}.py").write_text(
        "import torch\n\n\nclass Scripted(torch.nn.Module):\n"
        "    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:\n"
        f"        return x.masked_fill(mask {operator} (x > 0), 0.0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__(f"scripted_{name}").Scripted().eval()
    with pytest.raises(NotConverted, match=rf"scripted_{name}.py:6\): '{name}' of int32 and bool; if the int32 operand "
                                           r"is a mask, write mask.bool\(\), else arithmetic"):
        convert(torch.jit.script(module), np.int32)
