"""Are networks of real architectures upgraded to what PyTorch computes, and do they run on the ANE as ML Programs do?

    python -m tests.lab.neuralnetwork.architectures [NAME ...] [--record] [--missing]

Each of tests.lab.models.more and of `small_models.py` is converted by coremltools twice: to a NeuralNetwork, which is
upgraded, and to an ML Program. Both are run and held against PyTorch, at the bounds of tests.lab.models.architectures:
at float32 no output is off by more than 1e-4 of its largest value; at float16 by at most 4 times the error of the same
module in PyTorch's own half precision, plus one unit in the last place. Then both are rewritten with the preset full
for M4, and what is predicted of their placement is compared: of no type of op may more stay off the ANE than in the
direct conversion. `--record` keeps the rows in architectures.json; `--missing` measures what has no row there yet.

This file imports torch at its top: import it inside functions.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import torch
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.neuralnetwork.upgrade import upgrade_model
from tests.lab.cases import limit_time
from tests.lab.models.architectures import (
    FLOAT32_BOUND,
    MAX_HALF_PRECISION_FACTOR,
    _run_torch,
    capture_model,
    compute_relative_error,
)
from tests.lab.models.fired import silence_warnings
from tests.lab.models.more import ALL_ARCHITECTURES
from tests.lab.models.zoo import Architecture, Tensors
from tests.lab.neuralnetwork.small_models import SMALL_MODELS
from tests.lab.neuralnetwork.tables import is_placed_as_well
from tests.lab.records import read_record, write_record

RECORD = Path(__file__).with_name("architectures.json")
TARGET = "m4"
MAX_SECONDS = 600
ALL = (*SMALL_MODELS, *ALL_ARCHITECTURES)

Array = np.ndarray[Any, Any]


@dataclass
class Placement:
    """Where the ops of a package run, as predicted, after the rewrite: how many on the ANE and not, and what stays."""

    ops: int
    off_ane: int
    cost: float
    left: dict[str, int]


@dataclass
class Row:
    """What became of one architecture.

    `refused` says why coremltools makes no NeuralNetwork of it, or upgrade no ML Program, and `by` which of them; else
    `by` says how coremltools got the module: traced or, where that fails, exported.
    """

    name: str
    refused: str = ""
    by: str = ""
    layers: int = 0
    float32: float = 0.0
    float32_direct: float = 0.0
    "Of the direct conversion at fp32; only where `float32` is above the bound."
    float16: float = 0.0
    float16_direct: float = 0.0
    bound: float = 0.0
    upgraded: dict[str, Any] = field(default_factory=dict)
    direct: dict[str, Any] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Whether it was upgraded, within the bounds; what the direct conversion gives is enough."""
        return not self.refused and self.float32 <= max(FLOAT32_BOUND, 1.5 * self.float32_direct) and (
            self.float16 <= max(self.bound, 1.5 * self.float16_direct))

    @property
    def is_placed_as_well(self) -> bool:
        return bool(self.upgraded) and is_placed_as_well(asdict(self))


def _convert(architecture: Architecture, captured: Any, inputs: Tensors, **options: Any) -> Any:
    kinds = [np.int32 if each.dtype == torch.int32 else np.float32 for each in inputs]
    declared = [ct.TensorType(f"input_{at}", shape=each.shape, dtype=kind)
                for at, (each, kind) in enumerate(zip(inputs, kinds))]
    return ct.convert(captured, inputs=None if architecture.export else declared, skip_model_load=True, **options)


def _run(path: Path, inputs: Tensors, precision: str, expected: Sequence[Array]) -> float:
    declared = ane.load(path).program.functions["main"].inputs
    feeds = {name: each.numpy().astype(types.nptype_from_builtin(var.dtype))
             for (name, var), each in zip(declared.items(), inputs, strict=True)}
    found = ane.run(path, feeds, precision=precision)
    arrays = [each.reshape(two.shape) for each, two in zip(found.values(), expected, strict=True)]
    return compute_relative_error(arrays, expected)


def _place(path: Path) -> Placement:
    """Rewrite the package, and count where its ops run."""
    after = path.with_name(f"after_{path.name}")
    ane.rewrite(path, after, preset="full", target=TARGET, verify=False)
    found = ane.lint(after if after.exists() else path, target=TARGET)
    left: dict[str, int] = {}
    for each in found.plan.rows:
        if not each.takes:
            left[each.op.op_type] = left.get(each.op.op_type, 0) + 1
    return Placement(len(found.plan.rows), sum(left.values()), round(found.plan.total, 6), dict(sorted(left.items())))


def measure_architecture(architecture: Architecture, folder: Path) -> Row:
    """Convert both ways, upgrade, compare with PyTorch, and place."""
    row = Row(architecture.name)
    model, inputs = architecture.model(), architecture.draw(0)
    captured, network = None, None
    for each in (architecture, replace(architecture, export=True)):
        try:
            captured = capture_model(each, model, inputs)
            network = _convert(each, captured, inputs, convert_to="neuralnetwork").get_spec()
            architecture = each
            break
        except Exception as error:  # whatever a conversion of coremltools may raise
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            row.refused, row.by = row.refused or reason, "coremltools"
    if network is None:
        return row
    row.refused, row.by = "", "export" if architecture.export else "trace"
    row.layers = len(network.neuralNetwork.layers)
    try:
        single = upgrade_model(network, "iOS18", "fp32")
    except ane.InputError as error:
        row.refused, row.by = str(error)[:300], "upgrade"
        return row
    ane.save(single.package, folder / "single.mlpackage")
    if architecture.match_coremltools is not None:
        architecture.match_coremltools(model)
    expected = _run_torch(model, inputs)
    row.float32 = _run(folder / "single.mlpackage", inputs, "float32", expected)
    if row.float32 > FLOAT32_BOUND:
        _convert(architecture, captured, inputs, convert_to="mlprogram", compute_precision=ct.precision.FLOAT32,
                 minimum_deployment_target=ct.target.iOS18).save(str(folder / "direct_single.mlpackage"))
        row.float32_direct = _run(folder / "direct_single.mlpackage", inputs, "float32", expected)
    upgraded, direct = folder / "upgraded.mlpackage", folder / "direct.mlpackage"
    ane.save(upgrade_model(network, "iOS18", "fp16").package, upgraded)
    _convert(architecture, captured, inputs, convert_to="mlprogram", compute_precision=ct.precision.FLOAT16,
             minimum_deployment_target=ct.target.iOS18).save(str(direct))
    row.float16, row.float16_direct = (_run(path, inputs, "float16", expected) for path in (upgraded, direct))
    row.bound = _compute_half_bound(model, inputs, expected)
    row.upgraded, row.direct = asdict(_place(upgraded)), asdict(_place(direct))
    return row


def _compute_half_bound(model: torch.nn.Module, inputs: Tensors, expected: Sequence[Array]) -> float:
    """Return the bound at float16; 0 where PyTorch lacks an op in half precision."""
    halves = tuple(each.half() if each.is_floating_point() else each for each in inputs)
    unit = max(float(np.spacing(np.float16(np.abs(each).max()))) / float(np.abs(each).max()) for each in expected)
    try:
        return MAX_HALF_PRECISION_FACTOR * compute_relative_error(_run_torch(model.half(), halves), expected) + unit
    except (NotImplementedError, RuntimeError):
        return 0.0


def read_rows() -> list[Row]:
    return [Row(**each) for each in read_record(RECORD, [])]


def format_row(row: Row, seconds: float) -> str:
    if row.refused:
        return f"{row.name}: {row.by} refuses: {row.refused} ({seconds:.0f} s)"
    placed = "placed as well" if row.is_placed_as_well else "PLACED WORSE"
    return (f"{row.name}: {'right' if row.is_right else 'WRONG'} {row.float32:.1e} {row.float16:.1e} "
            f"{row.float16_direct:.1e} {row.bound:.1e}; {placed} {row.upgraded} {row.direct} ({seconds:.0f} s)")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.neuralnetwork.architectures", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--record", action="store_true", help="keep the rows in architectures.json")
    parser.add_argument("--missing", action="store_true", help="leave out what has a row already")
    asked = parser.parse_args(arguments)
    known = {each.name for each in read_rows()} if asked.missing else set()
    wrong = False
    for each in ALL:
        if (asked.names and each.name not in asked.names) or each.name in known or each.missing():
            continue
        started = time.perf_counter()
        try:
            with tempfile.TemporaryDirectory() as folder, silence_warnings(), limit_time(MAX_SECONDS):
                row = measure_architecture(each, Path(folder))
        except Exception as error:  # one that fails does not keep the others from being run
            print(f"{each.name}: {type(error).__name__}: {' '.join(str(error).split())[:500]}", flush=True)
            wrong = True
            continue
        print(format_row(row, time.perf_counter() - started), flush=True)
        wrong = wrong or not ((row.is_right and row.is_placed_as_well) or row.by == "coremltools")
        if asked.record:
            rows = {one.name: one for one in [*read_rows(), row]}
            order = [one.name for one in ALL]
            write_record(RECORD, [asdict(one) for one in sorted(rows.values(), key=lambda one: order.index(one.name))])
        gc.collect()
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
