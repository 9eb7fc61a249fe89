"""What linting, rewriting and editing a large package costs, beside `cp -r`, a bare `import coremltools` and
coremltools.

    python -m tests.lab.benchmarks.bench_package [--gigabytes 1] [--rounds 3] [--shape llm|tower] [--folder DIR]
                                             [--record FILE.json] [--quick]

Each command starts after the disk has come to rest and with the package in the page cache (as far as it fits). Times
are wall times of whole processes. Rewrite and edit copy the weights while they import coremltools, so they stand beside
`import coremltools` and `cp -r` one after the other; what `rewrite` takes beyond its start-up is what it takes longer
than on a package of a few kilobytes. A difference of seconds magnifies what a machine does besides: what
enters it runs twice in each round, and the faster one counts, ours and the other's alike. `cp -r` leaves the bytes to
the kernel to write later; rewrite and edit wait until they are on disk, as `cp -r; sync` does. coremltools' round trip
is its own edit of an existing package, `change_input_output_tensor_type`, then `save`, beside `edit --io fp32`, the
same edit; it is left out where memory is less than four times the package. The bounds:

- `rewrite --no-verify` and `edit --rename` at most 1.2 times `import coremltools` and `cp -r` after it;
- `rewrite --no-verify` beyond start-up at most 1.2 times `cp -r`;
- `lint` and `edit --rename --link` at most 1.2 times `import coremltools`; `edit --rename` as well on a file system
  whose files can share blocks (name a folder on one with --folder);
- `edit --io` at most half of coremltools' round trip, and its memory at most half;
- none of ours more than 1.4 times the memory of `import coremltools`.

A quick run has `rewrite --no-verify` alone, once, on a small package.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.lab.benchmarks.bench_start import HOST, TINY
from tests.lab.benchmarks.command import Benchmark
from tests.lab.benchmarks.processes import ProcessCost, run_and_measure
from tests.lab.benchmarks.rounds import Comparison, run_rounds, show_progress

MAX_COPY_RATIO, MAX_START_RATIO, MAX_COREMLTOOLS_RATIO, MAX_MEMORY_RATIO = 1.2, 1.2, 0.5, 1.4
COREMLTOOLS_MEMORY_FACTOR = 4
FICLONE = 0x40049409
ROUND_TRIP = """
import sys
import coremltools as ct
from coremltools.proto.FeatureTypes_pb2 import ArrayFeatureType as A
model = ct.models.MLModel(sys.argv[1], skip_model_load=True)
ct.utils.change_input_output_tensor_type(model, A.FLOAT16, A.FLOAT32).save(sys.argv[2])
"""
REWRITE, LINT, EDIT, LINK = "rewrite --no-verify", "lint", "edit --rename", "edit --rename --link"
START, COPIED, SYNCED = "rewrite, tiny", "cp -r", "cp -r; sync"
RUN_TWICE = {HOST, COPIED, START, REWRITE}
QUICK = (HOST, COPIED, REWRITE)
IO, HOSTS_IO = "edit --io fp32", "coremltools: load, change_input_output_tensor_type, save"


class PackageCommands:
    """Runs the commands on one package and keeps what each took of memory."""

    def __init__(self, folder: Path, gigabytes: float, shape: str) -> None:
        self.source, self.target = folder / "in.mlpackage", folder / "out.mlpackage"
        run_and_measure(
            [
                sys.executable,
                "-m",
                "tests.lab.benchmarks.make_package",
                str(self.source),
                "--gigabytes",
                str(gigabytes),
                "--shape",
                shape,
            ]
        )
        self.bytes = sum(file.stat().st_size for file in self.source.rglob("*") if file.is_file())
        self.shares_blocks = has_shared_blocks(folder)
        self.memory: dict[str, list[float]] = {}

    @property
    def fits_the_host(self) -> bool:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >= COREMLTOOLS_MEMORY_FACTOR * self.bytes

    def sides(self, quick: bool) -> dict[str, Callable[[], float]]:
        source, target, python = str(self.source), str(self.target), sys.executable
        tool = [python, "-m", "mil_ane_passes"]
        renamed = [*tool, "edit", source, "-o", target, "--rename", "output=renamed"]
        made = {
            HOST: [python, "-c", HOST],
            COPIED: ["cp", "-r", source, target],
            SYNCED: ["sh", "-c", f"cp -r '{source}' '{target}' && sync -f '{target}'"],
            START: [*tool, "rewrite", str(TINY), "-o", target, "--no-verify"],
            REWRITE: [*tool, "rewrite", source, "-o", target, "--no-verify"],
            LINT: [*tool, "lint", source],
            EDIT: renamed,
            LINK: [*renamed, "--link"],
            IO: [*tool, "edit", source, "-o", target, "--io", "fp32"],
            HOSTS_IO: [python, "-c", ROUND_TRIP, source, target],
        }
        left_out = set() if self.fits_the_host else {IO, HOSTS_IO}
        names = QUICK if quick else [name for name in made if name not in left_out]
        return {name: lambda name=name: self.once(name, made[name], name in RUN_TWICE and not quick) for name in names}

    def once(self, name: str, command: list[str], twice: bool) -> float:
        """Seconds of the process, the faster of two where differences of it are shown."""
        tries = [self._try(command, (0, 1) if name == LINT else (0,)) for _ in range(1 + twice)]
        self.memory.setdefault(name, []).append(max(each.memory for each in tries))
        return min(each.seconds for each in tries)

    def _try(self, command: list[str], accepted: tuple[int, ...]) -> ProcessCost:
        self._rest()
        spent = run_and_measure(command, accepted)
        shutil.rmtree(self.target, ignore_errors=True)
        return spent

    def _rest(self) -> None:
        """What an earlier command left to write, and what it took out of the page cache, must not slow the next one."""
        os.sync()
        buffer = bytearray(16 << 20)
        for file in self.source.rglob("*"):
            if file.is_file():
                with open(file, "rb", buffering=0) as opened:
                    while opened.readinto(buffer):
                        pass


def has_shared_blocks(folder: Path) -> bool:
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


def measure_package(options: argparse.Namespace) -> Iterator[Comparison]:
    """All commands on one package, which is made in a folder of its own and removed again."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        show_progress(f"making a package of {options.gigabytes:g} GB")
        machine = PackageCommands(Path(folder), options.gigabytes, options.shape)
        found = run_rounds(machine.sides(options.quick), options.rounds)
    yield from compare_findings(found, machine.memory, f"of {machine.bytes / 1e9:.1f} GB", machine.shares_blocks)


def compare_findings(
    found: Mapping[str, list[float]], memory: Mapping[str, list[float]], size: str, shares: bool
) -> Iterator[Comparison]:
    """What was found, side by side."""
    bare, copied = found[HOST], found[COPIED]
    both = [sum(each) for each in zip(bare, copied)]
    for name in (name for name in (REWRITE, EDIT) if name in found):
        yield Comparison(f"{name} {size}", f"{HOST}, then {COPIED}", found[name], both, MAX_COPY_RATIO)
    for name in (name for name in (LINT, LINK, *([EDIT] if shares else [])) if name in found):
        yield Comparison(f"{name} {size}", HOST, found[name], bare, MAX_START_RATIO)
    if START in found:
        beyond = [max(0.0, whole - start) for whole, start in zip(found[REWRITE], found[START])]
        yield Comparison(f"{REWRITE} {size}, beyond start-up", COPIED, beyond, copied, MAX_COPY_RATIO)
        yield Comparison(f"{REWRITE} {size}, beyond start-up", SYNCED, beyond, found[SYNCED])
    if HOSTS_IO in found:
        yield Comparison(f"{IO} {size}", HOSTS_IO, found[IO], found[HOSTS_IO], MAX_COREMLTOOLS_RATIO)
        yield Comparison(
            f"memory of {IO} {size}", "coremltools: the same", memory[IO], memory[HOSTS_IO], MAX_COREMLTOOLS_RATIO, "MB"
        )
    ours = "rewrite, lint, edit" if LINT in found else REWRITE
    most = [max(each) for each in zip(*(memory[name] for name in (REWRITE, LINT, EDIT, LINK) if name in memory))]
    yield Comparison(f"most memory of {ours} {size}", HOST, most, memory[HOST], MAX_MEMORY_RATIO, "MB")


def get_record_name(options: argparse.Namespace) -> str:
    """Other sizes have places of their own in the record."""
    return "package" if options.quick or options.gigabytes == 1 else f"package, {options.gigabytes:g} GB"


BENCHMARK = Benchmark(
    "package",
    measure_package,
    {"gigabytes": (1.0, 0.1), "rounds": (3, 1), "shape": ("llm", "tower"), "folder": (None, None)},
    get_record_name,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
