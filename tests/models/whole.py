"""How much of real architectures runs on the ANE before and after, as predicted, and at what cost?

    python -m tests.models.whole [NAME ...] [--target m4 --target m1] [--record]

Each of tests.models.more is converted by coremltools at float16 and rewritten as a user's package would be, with the
preset full, the proof and the guard; before and after it runs in half precision and is held against PyTorch in double
precision. `cures` is the predicted cost after the preset safe: what right numbers cost, which a guard does not undo.
REAL_PACKAGES names a folder with packages made by tests.package.real, which are taken from there. `--record` writes the
rows to whole.json, which tests.models.test_whole looks at.

This file imports torch at its top: import it inside functions.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mil_ane_passes as ane
from tests.models import fired
from tests.models.more import EVERY
from tests.models.zoo import Architecture
from tests.package.real import VARIABLE, path_of

RECORD = Path(__file__).with_name("whole.json")
TARGETS = ("m4", "m1")
GROWTH = 0.01


@dataclass
class Whole:
    """One architecture for one target; pairs are before and after, costs predicted and in ms."""

    architecture: str
    target: str
    ops: tuple[int, int]
    weight_bytes: tuple[int, int]
    refused: tuple[int, int]
    off: tuple[int, int]
    cost: tuple[float, float]
    cures: float
    switches: tuple[int, int]
    proved: str
    error: tuple[float, float]  # against PyTorch, a share of the output's largest value
    fired: dict[str, int] = field(default_factory=dict)
    undone: dict[str, str] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)  # refused ops that are left, by kind

    @property
    def faults(self) -> list[str]:
        """What is not as it should be."""
        allowed = max(self.cost[0], self.cures) * (1 + GROWTH) + 1e-9
        found = {
            f"{self.refused[0]} -> {self.refused[1]} refused": self.refused[1] >= max(self.refused[0], 1),
            f"cost {self.cost[0]:.3f} -> {self.cost[1]:.3f} ms, cures {self.cures:.3f}": self.cost[1] > allowed,
            self.proved: self.proved not in ("nothing fired", "bitwise", "rounding"),
            f"error {self.error[0]:.1e} -> {self.error[1]:.1e}": self.error[1] > max(4 * self.error[0], 1e-2),
        }
        return [words for words, wrong in found.items() if wrong]


def measure(architecture: Architecture, folder: Path, targets: Sequence[str] = TARGETS) -> Iterator[Whole]:
    """Convert (or take from REAL_PACKAGES), rewrite for each target, and compare with PyTorch."""
    with fired.quiet():
        model, inputs, path = architecture.model(), architecture.draw(0), folder / "before.mlpackage"
        made = path_of(Path(os.environ[VARIABLE]), architecture.name) if VARIABLE in os.environ else None
        if made is not None and made.exists():
            path = made
        else:
            fired.converted(architecture, model, inputs, path)
        expected = fired.torch_outputs(model, inputs)
        error = fired.error_of(path, inputs, expected)
        for target in targets:
            yield _rewritten(architecture.name, target, path, folder / f"{target}.mlpackage",
                             lambda after: (error, fired.error_of(after, inputs, expected)))
    gc.collect()


def _rewritten(name: str, target: str, before: Path, after: Path, errors: Any) -> Whole:
    cures = ane.rewrite(before, preset="safe", target=target, verify=False)
    report = ane.rewrite(before, after, preset="full", target=target)
    old, new = ane.lint(before, target=target), ane.lint(after if after.exists() else before, target=target)
    cost = [sum(segment.milliseconds for segment in each.plan.segments) for each in (old, new)]
    left: dict[str, int] = {}
    for row in new.plan.rows:
        if row.ane == "no":
            left[row.op.op_type] = left.get(row.op.op_type, 0) + 1
    proved = "nothing fired"
    if report.changed:
        assert report.verify is not None
        proved = report.verify.exactness.value if report.proved else str(report.verify)
    return Whole(
        name, target, (report.ops_before, report.ops_after),
        (_weights(before), _weights(after if after.exists() else before)),
        *((counted(old), counted(new)) for counted in (
            lambda each: sum(row.ane == "no" for row in each.plan.rows),
            lambda each: sum(not row.takes for row in each.plan.rows))),
        (round(cost[0], 6), round(cost[1], 6)),
        round(cures.predicted[1].cost if cures.predicted else cost[0], 6),
        (old.summary()["switches"], new.summary()["switches"]), proved,
        errors(after) if report.changed and after.exists() else (errors(before)[0],) * 2,
        {each.rule: len(each.fired) for each in report.traces if each.fired},
        {each.rule: each.undone for each in report.undone}, left)


def _weights(package: Path) -> int:
    return sum(file.stat().st_size for file in package.rglob("*.bin"))


HEAD = ("| architecture | target | ops | weight bytes | refused ops | off the ANE | predicted ms | with cures alone "
        "| changes of place | proved | error against PyTorch |\n|---|---|---|---|---|---|---|---|---|---|---|")


def row(found: Whole) -> str:
    pairs = (found.ops, found.weight_bytes, found.refused, found.off)
    return (f"| {found.architecture} | {found.target} | {' | '.join(f'{a} -> {b}' for a, b in pairs)} "
            f"| {found.cost[0]:.3f} -> {found.cost[1]:.3f} | {found.cures:.3f} "
            f"| {found.switches[0]} -> {found.switches[1]} | {found.proved.splitlines()[0]} "
            f"| {found.error[0]:.1e} -> {found.error[1]:.1e} |")


def recorded() -> list[Whole]:
    """The rows of the last `--record`."""
    return [Whole(**{name: tuple(value) if isinstance(value, list) else value for name, value in each.items()})
            for each in json.loads(RECORD.read_text())] if RECORD.exists() else []


def record(found: Sequence[Whole]) -> None:
    """Put these rows in the place of earlier ones of the same architecture and target."""
    table = {(each.architecture, each.target): each for each in [*recorded(), *found]}
    order = [each.name for each in EVERY]
    rows = sorted(table.values(), key=lambda each: (order.index(each.architecture), TARGETS.index(each.target)))
    RECORD.write_text("[\n" + ",\n".join(json.dumps(asdict(each)) for each in rows) + "\n]\n")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.models.whole", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args(arguments)
    failed = [f"{name}: unknown" for name in given.names if name not in {each.name for each in EVERY}]
    print(HEAD)
    for each in EVERY:
        if (given.names and each.name not in given.names) or each.missing():
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                found = []
                for one in measure(each, Path(folder), given.target or TARGETS):
                    print(row(one), flush=True)
                    found.append(one)
        except Exception as error:  # one that fails does not keep the others from being run
            failed.append(f"{each.name}: {type(error).__name__}: {error}")
            continue
        failed += [f"{one.architecture}, {one.target}: {fault}" for one in found for fault in one.faults]
        if given.record:
            record(found)
    print(*failed, sep="\n", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
