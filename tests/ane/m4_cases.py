"""All models of the M4 measurements, by name, and what was published of them."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

from coremltools.converters.mil.mil import Operation, Program, types

from mil_ane_passes.commands.sources import open_source
from mil_ane_passes.ir.query import is_symbolic

from . import m4_elementwise, m4_layers, m4_shapes
from .m4_build import Case, convert

__all__ = ["CASES", "alone", "context", "estimates", "in_order", "networks", "signature"]

CASES: dict[str, Case] = m4_elementwise.CASES | m4_layers.CASES | m4_shapes.CASES
_FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "m4"


def _rows(name: str) -> list[dict[str, str]]:
    with (_FIXTURES / name).open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


@cache
def estimates() -> dict[str, list[dict[str, str]]]:
    """The published rows of each model of one op alone, by op index."""
    found: dict[str, list[dict[str, str]]] = {}
    for row in _rows("estimates.tsv"):
        found.setdefault(row["model"], []).append(row)
    return found


@cache
def networks() -> dict[str, dict[str, str]]:
    """The published row of each model with an op inside a network."""
    return {row["model"]: row for row in _rows("context.tsv")}


@cache
def alone(name: str) -> Program:
    return open_source(convert(CASES[name], context=False)).program


@cache
def context(name: str) -> Program:
    return open_source(convert(CASES[name], context=True)).program


def in_order(program: Program) -> list[Operation]:
    return [op for op in program.functions["main"].operations if op.op_type != "const"]


def signature(op: Operation) -> tuple[str, str, str]:
    """Type, dtype and shape of the first output, spelled as the published rows spell them."""
    var = op.outputs[0]
    shape = "x".join("?" if is_symbolic(d) else str(d) for d in var.shape) or "scalar"
    return op.op_type, types.builtin_to_string(var.dtype), shape
