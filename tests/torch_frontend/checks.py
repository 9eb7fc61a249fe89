"""Convert with the patched frontend, run on the reference runtime, compare with PyTorch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import coremltools as ct
import numpy as np
import torch
from coremltools.converters.mil.frontend.milproto.load import load as host_load

import mil_ane_passes as ane
from mil_ane_passes.runtime import Runtime

FRONTENDS = ("trace", "script", "export")
_INPUT_DTYPES = {torch.int64: np.int32, torch.int32: np.int32, torch.float16: np.float16}


@contextmanager
def silence() -> Iterator[None]:
    """Nothing of what coremltools logs."""
    logger = logging.getLogger("coremltools")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def module_of(function: Callable[..., Any]) -> torch.nn.Module:
    """A module that does what `function` of tensors does."""
    class Module(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> Any:
            return function(*tensors)

    return Module().eval()


class _One(torch.nn.Module):
    """A scripted module takes no `*tensors`: one class an arity."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = torch.jit.script(function)
        self.eval()

    def forward(self, x):
        return self.function(x)


class _Two(_One):
    def forward(self, x, y):
        return self.function(x, y)


class _Three(_One):
    def forward(self, x, y, z):
        return self.function(x, y, z)


_SCRIPTED = {1: _One, 2: _Two, 3: _Three}


def captured(model: Any, example: Sequence[torch.Tensor], frontend: str, flexible: Sequence[int] = (),
             lowest: int = 2) -> Any:
    """`model` (a module or a function of tensors) as TorchScript or exported program."""
    example = tuple(tensor.clone() for tensor in example)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if frontend == "script":
            return torch.jit.script(model if isinstance(model, torch.nn.Module) else _SCRIPTED[len(example)](model))
        module = model if isinstance(model, torch.nn.Module) else module_of(model)
        if frontend == "trace":
            return torch.jit.trace(module, example, check_trace=False)
        dynamic = None
        if flexible:
            sizes = {axis: torch.export.Dim(f"d{axis}", min=lowest, max=64) for axis in flexible}
            dynamic = {"tensors": (sizes, *[None] * (len(example) - 1))} if not isinstance(model, torch.nn.Module) \
                else (sizes, *[None] * (len(example) - 1))
        return torch.export.export(module, example, dynamic_shapes=dynamic).run_decompositions({})


def input_types(example: Sequence[torch.Tensor], flexible: Sequence[int] = (), lowest: int = 2) -> list[ct.TensorType]:
    """One TensorType an input; the `flexible` axes of the first range from `lowest` to 64."""
    return [
        ct.TensorType(
            name=f"x{index}", dtype=_INPUT_DTYPES.get(tensor.dtype, np.float32),
            shape=tuple(ct.RangeDim(lowest, 64, default=size) if index == 0 and axis in flexible else size
                        for axis, size in enumerate(tensor.shape)))
        for index, tensor in enumerate(example)
    ]


def convert(model: Any, example: Sequence[torch.Tensor], frontend: str = "trace", *, flexible: Sequence[int] = (),
            target: Any = ct.target.iOS16, patched: bool = True, precision: Any = ct.precision.FLOAT32,
            lowest: int = 2, **options: Any) -> Any:
    """The MLModel of `ct.convert` with (or without) the patches; `model` is a module or a function of tensors."""
    program = captured(model, example, frontend, flexible, lowest)
    return convert_captured(program, example, frontend, flexible=flexible, target=target, patched=patched,
                            precision=precision, lowest=lowest, **options)


def convert_captured(program: Any, example: Sequence[torch.Tensor], frontend: str, *, flexible: Sequence[int] = (),
                     target: Any = ct.target.iOS16, patched: bool = True, precision: Any = ct.precision.FLOAT32,
                     lowest: int = 2, readable: bool = True, **options: Any) -> Any:
    """The MLModel of what `captured` gave, which coremltools can read if `readable`."""
    options.setdefault("inputs", None if frontend == "export" and not options.get("named") else
                       input_types(example, flexible, lowest))
    options.pop("named", None)
    arguments = dict(minimum_deployment_target=target, compute_precision=precision, convert_to="mlprogram",
                     skip_model_load=True, **options)
    if not patched:
        return ct.convert(program, **arguments)
    state = program.state_dict() if isinstance(program, torch.nn.Module) else program.state_dict
    before = {name: value.clone() for name, value in state.items()}
    with ane.torch_frontend.patched():
        mlmodel = ct.convert(program, **arguments)
    assert all(torch.equal(value.nan_to_num(), before[name].nan_to_num()) for name, value in state.items())
    if readable:
        check_read_by_coremltools(mlmodel)
    return mlmodel


def check_read_by_coremltools(mlmodel: Any) -> None:
    """Assert that coremltools reads an MLModel that was not saved, as its compression of weights does."""
    spec = mlmodel.get_spec()
    host_load(spec, spec.specificationVersion, mlmodel.weights_dir)


def outputs(mlmodel: Any, feeds: Sequence[torch.Tensor], precision: str = "float32") -> list[np.ndarray[Any, Any]]:
    """The outputs of a converted model on the reference runtime, in order."""
    runtime = Runtime(mlmodel._mil_program, precision=precision)
    names = list(mlmodel._mil_program.functions["main"].inputs)
    return list(runtime({name: tensor.numpy() for name, tensor in zip(names, feeds, strict=True)}).values())


def check(model: Any, *example: torch.Tensor, frontend: str = "trace", flexible: Sequence[int] = (),
          at: Sequence[Sequence[torch.Tensor]] = (), rtol: float = 1e-4, atol: float = 1e-5, **options: Any) -> Any:
    """Assert that the converted model equals PyTorch on `example` and on each of `at`; returns the MLModel.

    `model` is a module or a function of tensors; int64 outputs are compared as numbers.
    """
    mlmodel = convert(model, example, frontend, flexible=flexible, **options)
    for feeds in [example, *at]:
        expected = model(*(tensor.clone() for tensor in feeds))
        expected = list(expected) if isinstance(expected, tuple | list) else [expected]
        found = outputs(mlmodel, feeds)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            wanted = torch.as_tensor(other).detach().numpy()
            assert np.shape(one) in (wanted.shape, wanted.shape or (1,)), (np.shape(one), wanted.shape)
            np.testing.assert_allclose(np.asarray(one).reshape(wanted.shape), wanted, rtol=rtol, atol=atol)
    return mlmodel
