"""Torch models and programs as coremltools converts and saves them: the one place where tests make models of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Program

import mil_ane_passes as ane

WAYS = ("traced", "exported", "decomposed")
"How torch captures a model; it can be scripted, too."


def make_module(function: Any) -> Any:
    """Make a module that computes `function` of tensors; a module is returned as it is."""
    import torch

    if isinstance(function, torch.nn.Module):
        return function

    class FunctionModule(torch.nn.Module):
        def forward(self, *inputs):
            return function(*inputs)

    return FunctionModule().eval()


def capture_model(function: Any, inputs: Sequence[Any], way: str = "traced", check_trace: bool = True) -> Any:
    """Capture a module, or a function of tensors, in evaluation mode.

    "exported" goes through `run_decompositions({})`, which keeps torch's ops, "decomposed" through
    `run_decompositions()`, which takes them apart.
    """
    import torch

    module = make_module(function).eval()
    if way == "traced":
        return torch.jit.trace(module, tuple(inputs), check_trace=check_trace)
    if way == "scripted":
        return torch.jit.script(module)
    exported = torch.export.export(module, tuple(inputs), strict=False)
    return exported.run_decompositions({}) if way == "exported" else exported.run_decompositions()


def declare_inputs(inputs: Sequence[Any], names: Sequence[str] = (), shapes: Sequence[Any] = ()) -> list[ct.TensorType]:
    """Declare an input for each tensor, of its shape unless `shapes` has others; integers are int32."""
    return [ct.TensorType(name=name, shape=shape, dtype=np.float32 if each.is_floating_point() else np.int32)
            for each, name, shape in zip(inputs, names or [None] * len(inputs), shapes or [x.shape for x in inputs])]


def convert_model(
    function: Any, *inputs: Any, way: str = "traced", names: Sequence[str] = (), shapes: Sequence[Any] = (),
    passes: str | None = None, chip: str = "all", check_trace: bool = True, convert: Callable[..., Any] = ct.convert,
    **settings: Any,
) -> Any:
    """Convert a module, or a function of tensors, for iOS 17 unless `settings` (of `convert`) name another target.

    `passes` of ours run at their place in coremltools' pipeline, for the target `chip`.
    """
    if way in ("traced", "scripted"):
        settings = {"inputs": declare_inputs(inputs, names, shapes), **settings}
    if passes is not None:
        settings["pass_pipeline"] = ane.pipeline(passes=passes, target=chip)
    defaults = {"convert_to": "mlprogram", "skip_model_load": True, "minimum_deployment_target": ct.target.iOS17}
    return convert(capture_model(function, inputs, way, check_trace), **{**defaults, **settings})


def load_converted(function: Any, *inputs: Any, path: Path, **settings: Any) -> Program:
    """Return the program of the package that `convert_model` and `save` write to `path`."""
    convert_model(function, *inputs, **settings).save(str(path))
    return ane.load(path).program


def save_program(
    program: Program, path: Path | str, target: Any = ct.target.iOS17, passes: str | None = None, chip: str = "all",
    **settings: Any,
) -> str:
    """Save a program as it is, or by coremltools' pipeline with `passes` of ours, as a package at `path`."""
    pipeline = ct.PassPipeline.EMPTY if passes is None else ane.pipeline(passes=passes, target=chip)
    ct.convert(program, convert_to="mlprogram", minimum_deployment_target=target, pass_pipeline=pipeline,
               skip_model_load=True, **settings).save(str(path))
    return str(path)


def reload_program(program: Program, path: Path | str, target: Any = ct.target.iOS17, **settings: Any) -> Program:
    """Return the program of the package that `save_program` saves."""
    return ane.load(save_program(program, path, target, **settings)).program
