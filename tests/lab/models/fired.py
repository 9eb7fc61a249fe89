"""Which rewrites fire where in real architectures, and is what they leave behind verified equivalent?

    python -m tests.lab.models.fired [NAME ...] [--preset safe|full] [--record]

Each of tests.lab.models.more is converted by coremltools at float16 (what it cannot convert, with the patched torch
frontend), saved, and rewritten as a user's package would be, with proof. Besides, the package before and after runs in
half precision on several draws of inputs, and is held against PyTorch in double precision. `--record` writes the
presets' tables to fired.json, which tests.lab.models.test_fired compares with.

This file imports torch at its top: import it inside functions.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import torch

import mil_ane_passes as ane
from tests.lab import records
from tests.lab.models.architectures import capture_model
from tests.lab.models.more import ALL_ARCHITECTURES
from tests.lab.models.tools import summarize_equivalence
from tests.lab.models.whole_latency import compute_geometric_mean
from tests.lab.models.zoo import Architecture, Tensors
from tests.lab.records import format_head, format_row

RECORD = Path(__file__).with_name("fired.json")
PRESETS = ("safe", "full")
DRAWS = 6
"Inputs on which errors are measured; one of them says little about a model that amplifies the rounding of some inputs."

Array = np.ndarray[Any, Any]


@dataclass
class RewriteResult:
    """What one preset did to one architecture."""

    architecture: str
    preset: str
    frontend: str  # host, or patched where coremltools' does not convert it
    ops: int
    ops_after: int
    proved: str  # nothing fired; bitwise or rounding: verified equivalent as that; or why not
    fired: dict[str, int] = field(default_factory=dict)  # places by pass
    near: dict[str, dict[str, int]] = field(default_factory=dict)  # reasons by pass
    before: float = 0.0  # error against PyTorch, a share of the output's largest value
    after: float = 0.0
    seconds: float = 0.0

    @property
    def settled(self) -> dict[str, Any]:
        """What is the same in every run."""
        return {"frontend": self.frontend, "ops": [self.ops, self.ops_after], "proved": self.proved,
                "fired": self.fired, "near": self.near}


@contextmanager
def silence_warnings() -> Iterator[None]:
    """Without the warnings of tracing and converting; in one thread, as several wait for each other on busy cores."""
    before, threads = logging.root.manager.disable, torch.get_num_threads()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        torch.set_num_threads(threads)


def convert_architecture(architecture: Architecture, model: torch.nn.Module, inputs: Tensors, path: Path) -> str:
    """Save the package at `path`; returns which frontend converted it."""
    declared = [ct.TensorType(f"input_{i}", shape=each.shape,
                              dtype=np.int32 if each.dtype == torch.int32 else np.float32)
                for i, each in enumerate(inputs)]
    ends = {"inputs": None if architecture.export else declared}
    target = {"minimum_deployment_target": ct.target.iOS18}
    package = {"convert_to": "mlprogram", "compute_precision": ct.precision.FLOAT16, "skip_model_load": True, **target}
    captured, frontend = capture_model(architecture, model, inputs), "host"
    try:
        made = ct.convert(captured, **ends, **package)
    except Exception:
        frontend = "patched"
        with ane.torch_frontend.patched():  # not around the passes: it would fix the masks that are to be fixed here
            program = ct.convert(captured, convert_to="milinternal", compute_precision=ct.precision.FLOAT32, **ends,
                                 **target)
        made = ct.convert(program, **package)
    made.save(str(path))
    return frontend


def run_torch(model: torch.nn.Module, inputs: Tensors) -> list[Array]:
    """PyTorch's results; in double precision, unless the model insists on single."""
    doubled = tuple(each.double() if each.is_floating_point() else each for each in inputs)
    with torch.no_grad():
        try:
            made = model.double()(*doubled)
        except RuntimeError:
            made = model.float()(*inputs)
    return [each.double().numpy() for each in (made if isinstance(made, tuple) else (made,))]


def measure_error(path: Path, inputs: Tensors, expected: Sequence[Array]) -> float:
    names = ane.load(path).program.functions["main"].inputs
    found = ane.run(path, dict(zip(names, (each.numpy() for each in inputs))), precision="float16")
    errors = [np.abs(one.astype(np.float64).reshape(two.shape) - two).max() / np.abs(two).max()
              for one, two in zip(found.values(), expected)]
    return max(float(np.nan_to_num(error, nan=np.inf)) for error in errors)


def make_error_measure(architecture: Architecture, model: torch.nn.Module) -> Callable[[Path], float]:
    """Make the function that measures a package's error against `model`: the geometric mean over `DRAWS` inputs."""
    draws = [architecture.draw(seed) for seed in range(DRAWS)]
    expected = [run_torch(model, each) for each in draws]
    return lambda package: compute_geometric_mean(
        max(measure_error(package, each, true), 1e-9) for each, true in zip(draws, expected, strict=True))


def _count_near_miss_reasons(traces: Sequence[Any]) -> dict[str, dict[str, int]]:
    counted = {each.rule: dict(sorted(Counter(miss.reason for miss in each.near_misses).items())) for each in traces}
    return {name: reasons for name, reasons in counted.items() if reasons}


def _rewrite_package(name: str, preset: str, frontend: str, before: Path, after: Path) -> RewriteResult:
    report = ane.rewrite(before, after, preset=preset, max_growth=None)  # where passes fire, not what they cost
    fired = {each.rule: len(each.fired) for each in report.traces if each.fired}
    proved = summarize_equivalence(report)
    return RewriteResult(
        name,
        preset,
        frontend,
        report.ops_before,
        report.ops_after,
        proved,
        fired,
        _count_near_miss_reasons(report.traces),
    )


def measure_presets(architecture: Architecture, folder: Path, presets: Sequence[str] = PRESETS) -> list[RewriteResult]:
    """Convert, save into `folder`, rewrite with each preset, and compare with PyTorch."""
    results = []
    with silence_warnings():
        started = time.perf_counter()
        model, inputs, path = architecture.model(), architecture.draw(0), folder / "before.mlpackage"
        frontend = convert_architecture(architecture, model, inputs, path)
        measure = make_error_measure(architecture, model)
        before = measure(path)
        for preset in presets:
            after = folder / f"{preset}.mlpackage"
            found = _rewrite_package(architecture.name, preset, frontend, path, after)
            found.before = found.after = before
            if after.exists() and found.fired:
                found.after = measure(after)
            found.seconds, started = time.perf_counter() - started, time.perf_counter()
            results.append(found)
    gc.collect()
    return results


def is_correct(found: RewriteResult) -> bool:
    """Proved, and no further from PyTorch than it was, but for rounding."""
    return found.proved in ("nothing fired", "bitwise", "rounding") and (
        found.after <= max(4 * found.before, 1e-2) or found.after == found.before)


def _format_row(found: RewriteResult) -> str:
    fired = ", ".join(f"{name} × {places}" for name, places in found.fired.items()) or "-"
    near = ", ".join(f"{name} × {sum(reasons.values())}" for name, reasons in found.near.items()) or "-"
    proved = found.proved.splitlines()[0]
    return format_row((found.architecture, found.frontend, f"{found.ops} -> {found.ops_after}", fired, near, proved,
                       f"{found.before:.1e} -> {found.after:.1e}", f"{found.seconds:.1f}"))


def _format_near_misses(found: Sequence[RewriteResult]) -> Iterator[str]:
    """Every reason once, with where it was given."""
    places: dict[tuple[str, str], Counter[str]] = {}
    for each in found:
        for name, reasons in each.near.items():
            for reason, count in reasons.items():
                places.setdefault((name, reason), Counter())[each.architecture] += count
    yield format_head(("pass", "left alone because", "places", "architectures"))
    for (name, reason), where in sorted(places.items()):
        yield format_row((name, reason, where.total(), ", ".join(where)))


def read_record() -> dict[str, dict[str, Any]]:
    """The table of each preset, by architecture."""
    return dict(records.read_record(RECORD, {}))


def _write_record(found: Sequence[RewriteResult]) -> None:
    """Put these into the record, which has a line for each architecture."""
    tables = read_record()
    for each in found:
        tables.setdefault(each.preset, {})[each.architecture] = each.settled
    parts = []
    for preset, table in tables.items():
        rows = [
            f"  {json.dumps(one.name)}: {json.dumps(table[one.name])}" for one in ALL_ARCHITECTURES if one.name in table
        ]
        parts.append(f"{json.dumps(preset)}: {{\n" + ",\n".join(rows) + "\n}")
    RECORD.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.models.fired", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--preset", choices=[*PRESETS, "both"], default="safe")
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args(arguments)
    presets = PRESETS if given.preset == "both" else (given.preset,)
    failed = [f"{name}: unknown" for name in given.names if name not in {each.name for each in ALL_ARCHITECTURES}]
    found: list[RewriteResult] = []
    print(format_head(("architecture", "frontend", "ops", "fired", "almost", "verified", "error against PyTorch",
                       "seconds")))
    for each in ALL_ARCHITECTURES:
        if given.names and each.name not in given.names:
            continue
        if each.missing():
            print(format_row((each.name, each.missing())))
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                made = measure_presets(each, Path(folder), presets)
        except Exception as error:  # one that fails does not keep the others from being run
            failed.append(f"{each.name}: {type(error).__name__}: {error}")
            continue
        print(*map(_format_row, made), sep="\n", flush=True)
        failed += [f"{one.architecture}, {one.preset}: {one.proved}, {one.before:.1e} -> {one.after:.1e}"
                   for one in made if not is_correct(one)]
        found += made
        if given.record:
            _write_record([one for one in made if is_correct(one)])
    print("", *_format_near_misses(found), sep="\n")
    for fault in failed:
        print(fault, file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
