"""How much of real architectures runs on the ANE before and after, as predicted, and at what cost?

    python -m tests.lab.models.whole [NAME ...] [--target m4 --target m1] [--latency] [--record]

Each of tests.lab.models.more is converted by coremltools at float16 and rewritten as a user's package would be, with
the preset full, the equivalence check and the guard; before and after it runs in half precision and is held against
PyTorch in double precision, on several draws of its inputs (their errors differ by a factor of ten in some models).
`fixes` is the predicted cost after the preset safe: what right numbers cost, which a guard does not undo. REAL_PACKAGES
names a folder with packages made by tests.package.real, which are taken from there. `--record` writes the rows to
whole.json, which tests.lab.models.test_whole looks at. With `--latency`, latencies before and after are estimated
instead, for more chips and without an equivalence check, and recorded in whole_latency.json.

This file imports torch at its top: import it inside functions.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mil_ane_passes as ane
from tests.lab.models import fired
from tests.lab.models.more import ALL_ARCHITECTURES
from tests.lab.models.tools import summarize_equivalence
from tests.lab.models.whole_latency import (
    LATENCY_HEAD,
    LatencyResult,
    format_latency,
    measure_latency,
    write_latencies,
)
from tests.lab.models.whole_latency import TARGETS as LATENCY_TARGETS
from tests.lab.models.whole_table import RECORD, TABLE_HEAD, TARGETS, ArchitectureResult, format_row, read_record
from tests.lab.models.zoo import Architecture
from tests.package.real import VARIABLE, path_of


def measure_targets(
    architecture: Architecture, folder: Path, targets: Sequence[str] = TARGETS
) -> Iterator[ArchitectureResult]:
    """Convert (or take from REAL_PACKAGES), rewrite for each target, and compare with PyTorch."""
    with fired.silence_warnings():
        model, inputs = architecture.model(), architecture.draw(0)
        path = _find_package(architecture) or folder / "before.mlpackage"
        if not path.exists():
            fired.convert_architecture(architecture, model, inputs, path)
        measure = fired.make_error_measure(architecture, model)
        error = measure(path)
        for target in targets:
            yield _rewrite_and_measure(architecture.name, target, path, folder / f"{target}.mlpackage",
                                       lambda after: (error, measure(after)))
    gc.collect()


def _find_package(architecture: Architecture) -> Path | None:
    """Find the package that was made earlier, in the folder that REAL_PACKAGES names."""
    made = path_of(Path(os.environ[VARIABLE]), architecture.name) if VARIABLE in os.environ else None
    return made if made is not None and made.exists() else None


def measure_latencies(
    architecture: Architecture, folder: Path, targets: Sequence[str] = LATENCY_TARGETS
) -> Iterator[LatencyResult]:
    """Convert (or take from REAL_PACKAGES), and estimate latencies before and after for each target."""
    with fired.silence_warnings():
        path = _find_package(architecture) or folder / "before.mlpackage"
        if not path.exists():
            fired.convert_architecture(architecture, architecture.model(), architecture.draw(0), path)
        for target in targets:
            yield measure_latency(architecture.name, path, target)
    gc.collect()


def _rewrite_and_measure(name: str, target: str, before: Path, after: Path, errors: Any) -> ArchitectureResult:
    cures = ane.rewrite(before, preset="safe", target=target, verify=False)
    report = ane.rewrite(before, after, preset="full", target=target)
    old, new = ane.lint(before, target=target), ane.lint(after if after.exists() else before, target=target)
    cost = [each.plan.total for each in (old, new)]
    left = Counter(each.op.op_type for each in new.plan.rows if each.ane == "no")
    proved = summarize_equivalence(report)
    return ArchitectureResult(
        name, target, (report.ops_before, report.ops_after),
        (_count_weight_bytes(before), _count_weight_bytes(after if after.exists() else before)),
        *((counted(old), counted(new)) for counted in (
            lambda each: sum(row.ane == "no" for row in each.plan.rows),
            lambda each: sum(not row.takes for row in each.plan.rows))),
        (round(cost[0], 6), round(cost[1], 6)),
        round(cures.predicted[1].cost if cures.predicted else cost[0], 6),
        (old.summary()["transitions"], new.summary()["transitions"]), proved,
        errors(after) if report.changed and after.exists() else (errors(before)[0],) * 2,
        {each.rule: len(each.fired) for each in report.traces if each.fired},
        {each.rule: each.reverted for each in report.reverted}, dict(left), fired.DRAWS)


def _count_weight_bytes(package: Path) -> int:
    return sum(file.stat().st_size for file in package.rglob("*.bin"))


def write_record(found: Sequence[ArchitectureResult]) -> None:
    """Put these rows in the place of earlier ones of the same architecture and target."""
    table = {(each.architecture, each.target): each for each in [*read_record(), *found]}
    order = [each.name for each in ALL_ARCHITECTURES]
    rows = sorted(table.values(), key=lambda each: (order.index(each.architecture), TARGETS.index(each.target)))
    RECORD.write_text("[\n" + ",\n".join(json.dumps(asdict(each)) for each in rows) + "\n]\n")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.models.whole", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--target", action="append", choices=sorted({*TARGETS, *LATENCY_TARGETS}))
    parser.add_argument("--latency", action="store_true")
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args(arguments)
    failed = [f"{name}: unknown" for name in given.names if name not in {each.name for each in ALL_ARCHITECTURES}]
    print(LATENCY_HEAD if given.latency else TABLE_HEAD)
    for each in ALL_ARCHITECTURES:
        if (given.names and each.name not in given.names) or each.missing():
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                if given.latency:
                    _measure_and_record_latencies(each, Path(folder), given)
                    continue
                found = []
                for one in measure_targets(each, Path(folder), given.target or TARGETS):
                    print(format_row(one), flush=True)
                    found.append(one)
        except Exception as error:  # one that fails does not keep the others from being run
            failed.append(f"{each.name}: {type(error).__name__}: {error}")
            continue
        failed += [f"{one.architecture}, {one.target}: {fault}" for one in found for fault in one.faults]
        if given.record:
            write_record(found)
    print(*failed, sep="\n", file=sys.stderr)
    return bool(failed)


def _measure_and_record_latencies(architecture: Architecture, folder: Path, given: argparse.Namespace) -> None:
    found = []
    for one in measure_latencies(architecture, folder, given.target or LATENCY_TARGETS):
        print(format_latency(one), flush=True)
        found.append(one)
    if given.record:
        write_latencies(found, [each.name for each in ALL_ARCHITECTURES])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
