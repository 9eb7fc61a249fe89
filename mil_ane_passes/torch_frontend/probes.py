"""Probes: convert a tiny model with the installed coremltools and run it, to find out whether a patch is needed."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from types import SimpleNamespace
from typing import Any

import numpy as np

from .contract import describe_fault
from .patching import suspend_patches

__all__ = [
    "convert_to_mil",
    "export_function",
    "find_fault",
    "find_refused_input",
    "is_lowered_by_coremltools",
    "isolate_coremltools",
    "trace_function",
]

_DIALECT_PASSES = ("torch::torch_upsample_to_core_upsample", "torch::torch_tensor_assign_to_core")


@contextmanager
def isolate_coremltools() -> Iterator[None]:
    """Use coremltools' own functions inside the `with`, and suppress its logs and warnings."""
    logger = logging.getLogger("coremltools")
    with suspend_patches(), warnings.catch_warnings(), open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        warnings.simplefilter("ignore")
        logger.addFilter(_reject_record)
        try:
            yield
        finally:
            logger.removeFilter(_reject_record)


def _reject_record(record: logging.LogRecord) -> bool:
    return False


def is_lowered_by_coremltools(kind: str) -> bool:
    """Return whether coremltools has a lowering for this op kind."""
    from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

    return kind in _TORCH_OPS_REGISTRY.name_to_func_mapping


def trace_function(function: Callable[..., Any], *example: Any) -> Any:
    """Trace `function` of tensors as a module."""
    return _import_torch().jit.trace(_make_module(function), example, check_trace=False)


def export_function(function: Callable[..., Any], *example: Any) -> Any:
    """Export `function` of tensors as a program in the ATen dialect."""
    return _import_torch().export.export(_make_module(function), example).run_decompositions({})


def convert_to_mil(model: Any, *example: Any, flexible: Sequence[int] = (), target: Any = None) -> Any:
    """Convert a traced or exported model to the frontend's mil.Program, with only the passes that lower its dialect.

    `flexible` are the axes of the first input that get a range of 1 to 64.
    """
    import coremltools as ct
    from coremltools.converters.mil.frontend.torch.load import load
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

    inputs = None
    if not isinstance(model, _import_torch().export.ExportedProgram):
        inputs = [ct.TensorType(name=f"x{index}", shape=_make_input_shape(tensor, flexible if index == 0 else ()),
                                dtype=_to_numpy_dtype(tensor)) for index, tensor in enumerate(example)]
    target = ct.target.iOS16 if target is None else target
    program = load(model, inputs=inputs, specification_version=target.value)
    for name in _DIALECT_PASSES:
        PASS_REGISTRY[name](program)
    return program


def find_fault(function: Callable[..., Any], *example: Any, flexible: Sequence[int] = (), target: Any = None,
               exporting: bool = False, captured: Any = None) -> str | None:
    """Return what coremltools does wrong with `function` of `example`, or None when it is correct.

    The fault is "fails: ..." or "silently miscompiled". The program runs on the reference runtime in
    float64 and is compared with torch. `captured` is the model to convert in place of the traced function.
    """
    from ..runtime import Runtime

    torch = _import_torch()
    expected = function(*(tensor.clone() for tensor in example))
    try:
        model = captured or (export_function if exporting else trace_function)(
            function, *(tensor.clone() for tensor in example))
        program = convert_to_mil(model, *example, flexible=flexible, target=target)
        feeds = {name: tensor.numpy() for name, tensor in zip(program.functions["main"].inputs, example, strict=True)}
        found = list(Runtime(program, precision="float64")(feeds).values())
    except Exception as error:
        return f"fails: {describe_fault(error)}"
    expected = expected if isinstance(expected, tuple) else (expected,)
    same = len(found) == len(expected) and all(
        np.shape(one) == tuple(other.shape)
        and np.allclose(one, torch.as_tensor(other).numpy(), rtol=1e-4, atol=1e-5, equal_nan=True)
        for one, other in zip(found, expected, strict=True))
    return None if same else "silently miscompiled"


def find_refused_input(argument: Any, value: Any) -> str | None:
    """Return why coremltools refuses the input `argument` of an exported program, or None when it accepts it.

    `value` is its example. Exporting a program would take ten times as long as reading a signature.
    """
    from coremltools.converters.mil.frontend.torch import exir_utils
    from torch import fx
    from torch.export.graph_signature import InputKind, InputSpec

    graph = fx.Graph()
    graph.placeholder(argument.name).meta["val"] = value
    signature = SimpleNamespace(input_specs=[InputSpec(InputKind.USER_INPUT, argument, None)], buffers_to_mutate={},
                                parameters=(), buffers=())
    try:
        exir_utils._extract_inputs_from_exir_program(SimpleNamespace(
            graph_signature=signature, graph_module=SimpleNamespace(graph=graph), parameters=tuple, buffers=tuple,
            range_constraints={}))
    except NotImplementedError as error:
        return f"refused: {str(error).splitlines()[0]}"
    return None


def _make_module(function: Callable[..., Any]) -> Any:
    def forward(self: Any, *tensors: Any) -> Any:
        return function(*tensors)

    return type("Probe", (_import_torch().nn.Module,), {"forward": forward})().eval()


def _make_input_shape(tensor: Any, flexible: Sequence[int]) -> Any:
    import coremltools as ct

    return tuple(ct.RangeDim(1, 64, default=size) if axis in flexible else size
                 for axis, size in enumerate(tensor.shape))


def _to_numpy_dtype(tensor: Any) -> Any:
    return {"int64": np.int32, "int32": np.int32, "bool": bool}.get(str(tensor.dtype).removeprefix("torch."),
                                                                    np.float32)


def _import_torch() -> Any:
    import torch

    return torch
