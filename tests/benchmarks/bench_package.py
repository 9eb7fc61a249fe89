"""What linting, rewriting and editing a large package costs, beside `cp -r`, a bare `import coremltools` and the host.

    python -m tests.benchmarks.bench_package [--gigabytes 1 4 8] [--runs 3] [--shape llm|tower] [--folder DIR]
                                             [--record FILE.json] [--quick]

All commands take turns, each after the disk has come to rest and with package and tool in the page cache (as far
as they fit), so that what the machine does besides hits all of them.
Times are wall times of whole processes, medians of the runs; what a command takes on a package of a few kilobytes is
its start-up, and the rest is beyond it. The bounds:

- start-up at most 1.2 times a bare `import coremltools`;
- `rewrite --no-verify` beyond start-up at most 1.2 times `cp -r`;
- `lint` beyond start-up at most 1 s;
- `edit --rename` beyond start-up at most 1 s where files need no copy: with `--link`, and on a file system that shares
  blocks (name a folder on one with --folder) without it;
- at most 450 MB of memory.

`cp -r` leaves the bytes to the kernel to write later; rewrite and edit wait until they are on disk, as `cp -r; sync`
does, which is printed beside. The host's round trip is its own edit of an existing package,
`coremltools.utils.change_input_output_tensor_type`, then `save`; it runs once, where memory is four times the package.
Exit code 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.processes import Cost
from tests.benchmarks.shapes import SHAPES

TINY = Path(__file__).parents[2] / "fixtures" / "conv_transpose_1d.mlpackage"
STARTUP, COPY, AT_ONCE, MEMORY = 1.2, 1.2, 1.0, 450.0
HOST_MEMORY = 4
FICLONE = 0x40049409
HOST = """
import sys
import coremltools as ct
from coremltools.proto.FeatureTypes_pb2 import ArrayFeatureType as A
model = ct.models.MLModel(sys.argv[1], skip_model_load=True)
ct.utils.change_input_output_tensor_type(model, A.FLOAT16, A.FLOAT32).save(sys.argv[2])
"""


@dataclass
class Row:
    """One bound: what was found, and how much is allowed."""

    what: str
    found: float
    allowed: float
    unit: str

    @property
    def holds(self) -> bool:
        return self.found <= self.allowed

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "MISSED"
        return f"  {self.what:<46} {self.found:8.2f} {self.unit:<2} of {self.allowed:g} allowed: {verdict}"


@dataclass
class Size:
    """All that was measured with one package."""

    gigabytes: float
    bytes: int
    shares_blocks: bool
    costs: dict[str, Cost] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def beyond(self, name: str) -> float:
        """Seconds that a command takes beyond its start-up; noise may take it below nothing."""
        return max(0.0, self.costs[name].seconds - self.costs[f"{name.split(' --')[0]}, tiny"].seconds)

    def bounds(self) -> list[Row]:
        bare, copy = self.costs["import coremltools"].seconds, self.costs["cp -r"].seconds
        rows = [
            Row("start-up / import coremltools", self.costs["rewrite, tiny"].seconds / bare, STARTUP, "x"),
            Row("rewrite beyond start-up / cp -r", self.beyond("rewrite") / copy, COPY, "x"),
            Row("lint beyond start-up", self.beyond("lint"), AT_ONCE, "s"),
        ]
        for name in ("edit --link", *(["edit"] if self.shares_blocks else [])):
            rows.append(Row(f"{name} beyond start-up", self.beyond(name), AT_ONCE, "s"))
        ours = ("rewrite", "lint", "edit", "edit --link")
        return [*rows, *(Row(f"memory of {name}", self.costs[name].memory, MEMORY, "MB") for name in ours)]

    def beside(self) -> list[str]:
        """Ratios that nothing is promised about."""
        copy, synced = self.costs["cp -r"].seconds, self.costs["cp -r; sync"].seconds
        lines = [f"  edit beyond start-up / cp -r                   {self.beyond('edit') / copy:8.2f} x"]
        lines += [f"  {name + ' beyond start-up / cp -r; sync':<46} {self.beyond(name) / synced:8.2f} x"
                  for name in ("rewrite", "edit")]
        host = self.costs.get("host's round trip")
        if host is not None:
            for name in ("rewrite", "edit"):
                lines.append(f"  {'host / ' + name + ': time':<46} {host.seconds / self.costs[name].seconds:8.2f} x")
            lines.append(f"  {'host / rewrite: memory':<46} {host.memory / self.costs['rewrite'].memory:8.2f} x")
        return lines

    def to_dict(self) -> dict[str, Any]:
        return {
            "gigabytes": self.gigabytes, "bytes": self.bytes, "shares_blocks": self.shares_blocks,
            "costs": {name: {"seconds": [round(each, 3) for each in cost.runs],
                             "processor_seconds": [round(each, 3) for each in cost.busy],
                             "memory_mb": round(cost.memory)}
                      for name, cost in self.costs.items()},
            "bounds": [{"what": row.what, "found": round(row.found, 3), "allowed": row.allowed, "unit": row.unit}
                       for row in self.bounds()],
            "skipped": self.skipped,
        }


def _shares_blocks(folder: Path) -> bool:
    """Whether files in `folder` can be clones of others."""
    with tempfile.TemporaryDirectory(dir=folder) as inner:
        source = Path(inner, "a")
        source.write_bytes(bytes(1 << 16))
        try:
            with open(source, "rb") as one, open(Path(inner, "b"), "wb") as other:
                fcntl.ioctl(other.fileno(), FICLONE, one.fileno())
        except OSError:
            return False
    return True


def _commands(source: Path, target: Path) -> dict[str, list[str]]:
    python = sys.executable
    tool = [python, "-m", "mil_ane_passes"]

    def edit(of: Path, value: str, *more: str) -> list[str]:
        return [*tool, "edit", str(of), "-o", str(target), "--rename", f"{value}=renamed", *more]

    def rewrite(of: Path) -> list[str]:
        return [*tool, "rewrite", str(of), "-o", str(target), "--no-verify"]

    return {
        "import coremltools": [python, "-c", "import coremltools"],
        "rewrite, tiny": rewrite(TINY),
        "lint, tiny": [*tool, "lint", str(TINY)],
        "edit, tiny": edit(TINY, "waveform"),
        "cp -r": ["cp", "-r", str(source), str(target)],
        "cp -r; sync": ["sh", "-c", f"cp -r '{source}' '{target}' && sync -f '{target}'"],
        "rewrite": rewrite(source),
        "lint": [*tool, "lint", str(source)],
        "edit": edit(source, "output"),
        "edit --link": edit(source, "output", "--link"),
        "host's round trip": [python, "-c", HOST, str(source), str(target)],
    }


def measure(gigabytes: float, runs: int, shape: str, folder: Path) -> Size:
    """All commands on one package of `gigabytes`, which is made in `folder` and removed again."""
    source, target = folder / "in.mlpackage", folder / "out.mlpackage"
    subprocess.run([sys.executable, "-m", "tests.benchmarks.make_package", str(source), "--gigabytes", str(gigabytes),
                    "--shape", shape], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    total = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    size = Size(gigabytes, total, _shares_blocks(folder))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    commands = _commands(source, target)
    if memory < HOST_MEMORY * total:
        size.skipped["host's round trip"] = f"{memory / 1e9:.0f} GB of memory are less than {HOST_MEMORY} x the package"
        del commands["host's round trip"]
    for run in range(runs):
        for name, command in commands.items():
            if run and name.startswith("host"):
                continue
            _rest(source)
            cost = size.costs.setdefault(name, Cost())
            cost.add(command, (0, 1) if name.startswith("lint") else (0,))
            print(f"{name}: {cost.runs[-1]:.2f} s, {cost.memory:.0f} MB", file=sys.stderr, flush=True)
            shutil.rmtree(target, ignore_errors=True)
    shutil.rmtree(source)
    return size


def _rest(package: Path) -> None:
    """What an earlier command left to write, and what it took out of the page cache, must not slow the next one.

    The package is read first, then what the commands are made of: a package that fills the memory pushes it out.
    """
    os.sync()
    buffer = bytearray(16 << 20)
    for file in package.rglob("*"):
        if file.is_file():
            with open(file, "rb", buffering=0) as opened:
                while opened.readinto(buffer):
                    pass
    subprocess.run([sys.executable, "-m", "mil_ane_passes", "lint", str(TINY)], stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL, check=False)


def _show(size: Size, shape: str) -> None:
    print(f"{size.bytes / 1e9:.2f} GB, {shape}, on a file system that "
          f"{'shares' if size.shares_blocks else 'does not share'} blocks")
    for name, cost in size.costs.items():
        spread = f"({min(cost.runs):.2f} to {max(cost.runs):.2f})" if len(cost.runs) > 1 else ""
        busy = statistics.median(cost.busy)
        print(f"  {name:<20} {cost.seconds:8.2f} s  {spread:<18} {busy:6.2f} s of processors {cost.memory:6.0f} MB")
    for name, reason in size.skipped.items():
        print(f"  {name}: not run, {reason}")
    print(*size.bounds(), *size.beside(), sep="\n", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1.0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="llm")
    parser.add_argument("--folder", type=Path, help="where the packages are written (default: the temporary folder)")
    parser.add_argument("--record", type=Path, metavar="FILE.json")
    parser.add_argument("--quick", action="store_true", help="half a gigabyte, once")
    options = parser.parse_args(arguments)
    sizes, runs = ([0.5], 1) if options.quick else (options.gigabytes, options.runs)
    found = []
    for gigabytes in sizes:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            found.append(measure(gigabytes, runs, options.shape, Path(folder)))
        _show(found[-1], options.shape)
    if options.record:
        machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
        record = {"machine": machine, "shape": options.shape, "runs": runs,
                  "sizes": [size.to_dict() for size in found]}
        options.record.write_text(json.dumps(record, indent=1) + "\n")
    return int(not all(row.holds for size in found for row in size.bounds()))


if __name__ == "__main__":
    sys.exit(main())
