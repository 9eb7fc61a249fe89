"""How the small models of the M4 measurements are built: one op alone, or the op inside a small network.

The rules are those of the measurements' source (fixtures/m4/README.md). Weights' values do not matter to any answer.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any
from unittest.mock import patch

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Program, Var, types

__all__ = ["DTYPES", "Case", "W", "convert", "fp16", "table"]

DTYPES = {"fp16": types.fp16, "fp32": types.fp32, "int32": types.int32}
_POOL = np.random.default_rng(0).normal(0, 0.05, 1 << 16).astype(np.float16)
_turn = count()


@dataclass(frozen=True)
class Case:
    """One model: `inputs` as "1x64x32x32 8x2:int32"; `body` makes the output of them."""

    name: str
    inputs: str
    body: Callable[..., Var]


def table(rows: dict[str, tuple[str, Callable[..., Var]]]) -> dict[str, Case]:
    return {name: Case(name, inputs, body) for name, (inputs, body) in rows.items()}


def W(*shape: int) -> Any:
    """A weight, another one at each call."""
    return np.resize(np.roll(_POOL, next(_turn) * 7), shape)


def fp16(value: Any) -> Any:
    """An fp16 constant."""
    return np.asarray(value, np.float16)[()]


def convert(case: Case, *, context: bool) -> Any:
    """The converted MLModel, never loaded."""
    specs = {}
    for place, text in enumerate(case.inputs.split()):
        shape, _, dtype = text.partition(":")
        specs[f"x{place}"] = mb.placeholder([int(d) for d in shape.split("x")], dtype=DTYPES[dtype or "fp16"])
    with Function(specs, opset_version=ct.target.iOS18) as function:
        values = [_layers(var, context) for var in function.inputs.values()]
        function.set_outputs([_layers(case.body(*values), context)])
    program = Program()
    program.add_function("main", function)
    with _in_a_hurry():
        return ct.convert(program, convert_to="mlprogram", minimum_deployment_target=ct.target.macOS15,
                          compute_precision=ct.precision.FLOAT16, skip_model_load=True)


@contextmanager
def _in_a_hurry() -> Iterator[None]:
    """coremltools checks the program after each of its passes, and collects garbage in between: half of the time."""
    gc.freeze()
    try:
        with patch.object(Program, "validate"):
            yield
    finally:
        gc.unfreeze()


def _layers(var: Var, context: bool) -> Var:
    """Two layers behind `var`, where the measurements put them."""
    known = context and var.dtype == types.fp16 and var.rank in (3, 4) \
        and all(isinstance(d, (int, np.integer)) for d in var.shape)
    if not known or (var.rank == 3 and var.shape[2] > 2048):
        return var
    for _ in range(2):
        var = mb.relu(x=_main(var))
    return var


def _main(var: Var) -> Var:
    if var.rank == 3:
        return mb.linear(x=var, weight=W(var.shape[2], var.shape[2]))
    channels = var.shape[1]
    if channels <= 512:
        return mb.conv(x=var, weight=W(channels, channels, 3, 3), pad_type="same")
    return mb.conv(x=var, weight=W(channels, 1, 3, 3), pad_type="same", groups=channels)
