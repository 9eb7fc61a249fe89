"""Does the runtime compute what PyTorch computes, for real architectures?

    python -m tests.lab.models.architectures [NAME ...]

Each of tests.lab.models.zoo is converted by coremltools at float32 and at float16, saved, and run. The bounds, fixed
beforehand:

- float32: no output value is off by more than 1e-4 of the output's largest value;
- float16: the largest error is at most 4 times that of the same module in PyTorch's own half precision, plus one unit
  in the last place of the output's largest value.

This file imports torch at its top: import it inside functions.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import torch
from torch import nn

import mil_ane_passes as ane
from tests.lab.models.zoo import ARCHITECTURES, Architecture, Tensors
from tests.lab.records import format_head, format_row

FLOAT32_BOUND = 1e-4
MAX_HALF_PRECISION_FACTOR = 4

Array = np.ndarray[Any, Any]


@dataclass
class Measurement:
    """What one architecture gave. Errors are the largest of any output, relative to that output's largest value."""

    architecture: Architecture
    parameters: int
    scale: float  # the smallest of the outputs' largest values
    spread: float  # the smallest of the outputs' deviations, relative to scale
    input_response: float  # the smallest relative change of an output when the inputs are drawn again
    ops: int = 0
    float32: float = 0.0
    float16: float = 0.0
    half: float = 0.0  # PyTorch's own half precision
    unit: float = 0.0  # one unit in the last place of half precision at the outputs' scale, relative to it
    host: float = 0.0  # the float32 error against the module as it was given to coremltools
    seconds: float = 0.0

    @property
    def float16_bound(self) -> float:
        return MAX_HALF_PRECISION_FACTOR * self.half + self.unit

    def faults(self) -> list[str]:
        """What is wrong: a bound that is broken, or a measurement that would verify nothing."""
        known = bool(self.architecture.coremltools_fault)
        checks = (
            (1e-2 < self.scale < 1e4, f"outputs of size {self.scale:.3g} are no fair test"),
            (self.spread > 0.03, f"outputs hardly vary ({self.spread:.3g} of their size)"),
            (self.input_response > 0.1, f"outputs hardly depend on the inputs ({self.input_response:.3g})"),
            (self.float32 <= FLOAT32_BOUND, f"float32 error {self.float32:.3g}, {FLOAT32_BOUND:.3g} allowed"),
            (self.half <= 0.05, f"PyTorch's half precision is off by {self.half:.3g}: no yardstick"),
            (self.float16 <= self.float16_bound, f"float16 error {self.float16:.3g}, {self.float16_bound:.3g} allowed"),
            (not known or self.host > FLOAT32_BOUND, "the fault of coremltools that is named here is not there"),
        )
        return [text for fine, text in checks if not fine]


def _run_torch(model: nn.Module, inputs: Tensors) -> list[Array]:
    with torch.no_grad():
        made = model(*inputs)
    return [each.double().numpy() for each in (made if isinstance(made, tuple) else (made,))]


def compute_relative_error(found: Sequence[Array], expected: Sequence[Array]) -> float:
    """NaN counts as infinitely wrong."""
    assert [each.shape for each in found] == [each.shape for each in expected]
    errors = [np.abs(one.astype(np.float64) - two).max() / np.abs(two).max() for one, two in zip(found, expected)]
    return max(float(np.nan_to_num(error, nan=np.inf)) for error in errors)


def capture_model(architecture: Architecture, model: nn.Module, inputs: Tensors) -> Any:
    """The model as coremltools is given it."""
    if not architecture.export:
        with torch.no_grad():
            return torch.jit.trace(model, inputs, check_trace=False)
    exported = torch.export.export(model, inputs).run_decompositions({})
    for node in list(exported.graph.nodes):  # coremltools 9.0 does not know this op, which does nothing
        if node.target is torch.ops.aten.alias.default:
            node.replace_all_uses_with(node.args[0])
            exported.graph.erase_node(node)
    return exported


def _convert_and_run(architecture: Architecture, captured: Any, inputs: Tensors, precision: str, folder: Path) -> Any:
    """(number of ops, outputs) of the package that coremltools makes at this precision."""
    kinds = [np.int32 if each.dtype == torch.int32 else np.float32 for each in inputs]
    declared = [ct.TensorType(f"input_{i}", shape=each.shape, dtype=kind)
                for i, (each, kind) in enumerate(zip(inputs, kinds))]
    path = folder / f"{precision}.mlpackage"
    ct.convert(
        captured, inputs=None if architecture.export else declared, convert_to="mlprogram", skip_model_load=True,
        compute_precision=ct.precision(precision), minimum_deployment_target=ct.target.iOS18,
    ).save(str(path))
    function = ane.load(path).program.functions["main"]
    feeds = dict(zip(function.inputs, (each.numpy() for each in inputs)))
    ops = sum(op.op_type != "const" for op in function.operations)
    return ops, list(ane.run(path, feeds, precision=precision).values())


def measure_architecture(architecture: Architecture, folder: Path) -> Measurement:
    """Convert at both precisions, save into `folder`, run, and compare with PyTorch."""
    started = time.perf_counter()
    model, inputs = architecture.model(), architecture.draw(0)
    captured, given = capture_model(architecture, model, inputs), _run_torch(model, inputs)
    ops, single = _convert_and_run(architecture, captured, inputs, "float32", folder)
    _, typed = _convert_and_run(architecture, captured, inputs, "float16", folder)
    expected = given
    if architecture.match_coremltools is not None:
        architecture.match_coremltools(model)
        expected = _run_torch(model, inputs)
    other = _run_torch(model, architecture.draw(9))
    scales = [float(np.abs(each).max()) for each in expected]
    measured = Measurement(
        architecture, sum(each.numel() for each in model.parameters()), min(scales),
        min(float(each.std()) / scale for each, scale in zip(expected, scales)),
        min(float(np.abs(one - two).max()) / scale for one, two, scale in zip(expected, other, scales)),
        ops, compute_relative_error(single, expected), compute_relative_error(typed, expected))
    halves = tuple(each.half() if each.is_floating_point() else each for each in inputs)
    measured.half = compute_relative_error(_run_torch(model.half(), halves), expected)
    measured.unit = max(float(np.spacing(np.float16(scale))) / scale for scale in scales)
    measured.host = compute_relative_error(single, given)
    measured.seconds = time.perf_counter() - started
    return measured


def main(names: Sequence[str]) -> int:
    print(format_head(("architecture", "kind", "source", "ops", "parameters", "float32 error", "float16 error",
                       "torch half", "seconds")))
    failed = [f"{name}: unknown" for name in names if name not in {each.name for each in ARCHITECTURES}]
    for each in ARCHITECTURES:
        if names and each.name not in names:
            continue
        if each.missing():
            print(format_row((each.name, each.missing())))
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = measure_architecture(each, Path(folder))
        errors = (f"{error:.1e}" for error in (found.float32, found.float16, found.half))
        print(format_row((each.name, each.kind, f"{each.package} {version(each.package)}", found.ops,
                          f"{found.parameters / 1e6:.2f} M", *errors, f"{found.seconds:.1f}")), flush=True)
        failed += [f"{each.name}: {fault}" for fault in found.faults()]
        if each.coremltools_fault:
            print(f"{each.name}: compared with what coremltools converted, not with the module ({found.host:.1e} off): "
                  f"{each.coremltools_fault}", file=sys.stderr)
    for fault in failed:
        print(fault, file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
