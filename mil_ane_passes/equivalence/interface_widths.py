"""Rounding of feeds and results for two programs whose inputs and outputs have different float widths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Program, Var, types

from .execution import Execution, Plan

__all__ = ["InterfaceWidths", "find_interface_widths", "holds_floats", "round_feeds", "round_results"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class InterfaceWidths:
    """The inputs and outputs of one function whose float width differs in the second program, with its dtypes."""

    inputs: Mapping[str, np.dtype[Any]] = field(default_factory=dict)
    outputs: Mapping[str, np.dtype[Any]] = field(default_factory=dict)

    def round_to_narrower(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Round `feeds` to the narrower type of each input, so that both programs get equal values."""
        return {name: _round_to_dtype(np.asarray(value), self.inputs[name]) if name in self.inputs else value
                for name, value in feeds.items()}

    def describe_overflow(self, outputs: Mapping[str, Array]) -> str:
        """Describe the first of `outputs` that exceeds its dtype in the second program; "" if none does."""
        for name, dtype in self.outputs.items():
            sizes = np.abs(outputs[name][np.isfinite(outputs[name])]) if name in outputs else np.zeros(0)
            if sizes.size and float(sizes.max()) > float(np.finfo(dtype).max):
                return f"output '{name}' reaches {float(sizes.max()):.4g}, which {dtype} cannot represent"
        return ""

    def convert_outputs(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """Convert the first program's `outputs` to the second's dtypes; results at full precision are not changed."""
        return {name: value.astype(self.outputs[name]) if name in self.outputs and value.dtype.itemsize < 8 else value
                for name, value in outputs.items()}


def find_interface_widths(before: Program, after: Program) -> dict[str, InterfaceWidths]:
    """Find the differing widths by function; functions without differences are left out."""
    found = {}
    for name, old in before.functions.items():
        new = after.functions[name]
        interface = InterfaceWidths(
            _find_changed_widths(old.inputs.values(), new.inputs.values()),
            _find_changed_widths(old.outputs, new.outputs),
        )
        if interface.inputs or interface.outputs:
            found[name] = interface
    return found


def round_feeds(plan: Plan, across: Mapping[str, InterfaceWidths]) -> Plan:
    """Return `plan` with feeds that both programs can represent."""
    interface = across.get(plan.function)
    return plan if interface is None else replace(plan, feeds=interface.round_to_narrower(plan.feeds))


def round_results(found: Execution, across: Mapping[str, InterfaceWidths]) -> str:
    """Round the results of the first program to the dtypes of the second.

    Returns a description of a finite number that the narrower type cannot hold, or an empty string.
    """
    lost = ""
    for run in found.runs:
        interface = across.get(run.plan.function)
        if interface is not None:
            beyond = interface.describe_overflow(run.results.get("float64", {}))
            if beyond and run.plan.adversarial:  # the narrower program need not support adversarial feeds
                run.error, run.results = beyond, {}
                continue
            lost = lost or beyond
            run.results = {precision: interface.convert_outputs(results) if precision == "float16" else results
                           for precision, results in run.results.items()}
    return lost


def _find_changed_widths(old: Iterable[Var], new: Iterable[Var]) -> dict[str, np.dtype[Any]]:
    return {other.name: np.dtype(types.nptype_from_builtin(other.dtype)) for one, other in zip(old, new)
            if one.dtype != other.dtype and holds_floats(one) and holds_floats(other)}


def holds_floats(var: Var) -> bool:
    """Return whether `var` is a tensor or a scalar of floats: in MIL, a value of rank 0 is a scalar, not a tensor."""
    return (types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type)) and bool(types.is_float(var.dtype))


def _round_to_dtype(value: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore"):
        return value.astype(dtype).astype(value.dtype) if value.dtype.itemsize > dtype.itemsize else value
