"""What linting, rewriting and editing a large package costs, beside `cp -r`, a bare `import coremltools` and the host.

    python -m tests.benchmarks.bench_package [--gigabytes 1] [--rounds 3] [--shape llm|tower] [--folder DIR]
                                             [--record FILE.json] [--quick]

Each command starts after the disk has come to rest and with the package in the page cache (as far as it fits). What a
command takes beyond its start-up is the wall time of its second run in one process, the first being on a package of a
few kilobytes; `cp -r` leaves the bytes to the kernel to write later, rewrite and edit wait until they are on disk, as
`cp -r; sync` does. The host's round trip is its own edit of an existing package, `change_input_output_tensor_type`,
then `save`, beside `edit --io fp32`, the same edit; whole processes both. It is left out where memory is less than four
times the package. The bounds, of which a quick run holds the last alone, its package being too small:

- `rewrite --no-verify` at most 1.2 times `cp -r`, `edit --rename` 1.5 times;
- `edit --rename --link` at most half of `cp -r`, and without `--link` too on a file system whose files can share blocks
  (name a folder on one with --folder);
- `lint` at most the time of `cp -r` for a gigabyte (it does not grow with the weights);
- `edit --io` at most half of the host's round trip, and its memory at most half;
- none of ours more than 1.4 times the memory of `import coremltools`.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.benchmarks.bench_start import HOST, TINY
from tests.benchmarks.command import Benchmark
from tests.benchmarks.processes import spend
from tests.benchmarks.rounds import Comparison, in_turn, told

COPY, EDIT, AT_ONCE, LINT, EDIT_BY_HOST, MEMORY = 1.2, 1.5, 0.5, 1.0, 0.5, 1.4
HOST_MEMORY = 4
FICLONE = 0x40049409
ROUND_TRIP = """
import sys
import coremltools as ct
from coremltools.proto.FeatureTypes_pb2 import ArrayFeatureType as A
model = ct.models.MLModel(sys.argv[1], skip_model_load=True)
ct.utils.change_input_output_tensor_type(model, A.FLOAT16, A.FLOAT32).save(sys.argv[2])
"""
BEYOND = ("rewrite --no-verify", "lint", "edit --rename", "edit --rename --link")


class Machine:
    """Runs the commands on one package and keeps what each took of memory."""

    def __init__(self, folder: Path, gigabytes: float, shape: str) -> None:
        self.source, self.target = folder / "in.mlpackage", folder / "out.mlpackage"
        spend([sys.executable, "-m", "tests.benchmarks.make_package", str(self.source), "--gigabytes", str(gigabytes),
               "--shape", shape])
        self.bytes = sum(file.stat().st_size for file in self.source.rglob("*") if file.is_file())
        self.shares_blocks = shares_blocks(folder)
        self.memory: dict[str, list[float]] = {}

    @property
    def fits_the_host(self) -> bool:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >= HOST_MEMORY * self.bytes

    def sides(self) -> dict[str, Callable[[], float]]:
        source, target, python = str(self.source), str(self.target), sys.executable
        made = {
            HOST: [python, "-c", HOST],
            "cp -r": ["cp", "-r", source, target],
            "cp -r; sync": ["sh", "-c", f"cp -r '{source}' '{target}' && sync -f '{target}'"],
            **{name: self.warm(name) for name in BEYOND},
        }
        if self.fits_the_host:
            made["edit --io fp32"] = [python, "-m", "mil_ane_passes", "edit", source, "-o", target, "--io", "fp32"]
            made["the host's round trip"] = [python, "-c", ROUND_TRIP, source, target]
        return {name: lambda name=name, command=command: self.once(name, command) for name, command in made.items()}

    def once(self, name: str, command: list[str]) -> float:
        """Seconds: what is printed by a command that times itself, else the wall time of the process."""
        self._rest()
        spent = spend(command)
        self.memory.setdefault(name, []).append(spent.memory)
        shutil.rmtree(self.target, ignore_errors=True)
        return float(spent.output) if name in BEYOND else spent.seconds

    def warm(self, name: str) -> list[str]:
        def arguments(source: Path, value: str, target: str) -> list[str]:
            command, *more = name.split(" ")
            if command == "lint":
                return [command, str(source)]
            at = [command, str(source), "-o", target, *more]
            if "--rename" in more:
                at.insert(at.index("--rename") + 1, f"{value}=renamed")
            return at

        first = arguments(TINY, "waveform", str(self.target.with_name("tiny.mlpackage")))
        return [sys.executable, "-m", "tests.benchmarks.warm", *first, *(["--overwrite"] if "-o" in first else []),
                "--", *arguments(self.source, "output", str(self.target))]

    def _rest(self) -> None:
        """What an earlier command left to write, and what it took out of the page cache, must not slow the next one."""
        os.sync()
        buffer = bytearray(16 << 20)
        for file in self.source.rglob("*"):
            if file.is_file():
                with open(file, "rb", buffering=0) as opened:
                    while opened.readinto(buffer):
                        pass


def shares_blocks(folder: Path) -> bool:
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


def measure(options: argparse.Namespace) -> Iterator[Comparison]:
    """All commands on one package, which is made in a folder of its own and removed again."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        told(f"making a package of {options.gigabytes:g} GB")
        machine = Machine(Path(folder), options.gigabytes, options.shape)
        if not options.quick:
            machine.once("lint", machine.warm("lint"))  # the tool comes into the page cache
            machine.memory.clear()
        found = in_turn(machine.sides(), options.rounds)
    size = f"{machine.bytes / 1e9:.1f} GB"
    bounds = (COPY, LINT, AT_ONCE if machine.shares_blocks else EDIT, AT_ONCE)
    for name, allowed in zip(BEYOND, bounds):
        yield Comparison(f"{name} of {size}, beyond start-up", "cp -r", found[name], found["cp -r"],
                         None if options.quick else allowed)
    for name in (BEYOND[0], BEYOND[2]):
        yield Comparison(f"{name} of {size}, beyond start-up", "cp -r; sync", found[name], found["cp -r; sync"])
    ours, host = "edit --io fp32", "the host's round trip"
    what, theirs = f"{ours} of {size}, whole process", "coremltools: load, change_input_output_tensor_type, save"
    if host in found:
        yield Comparison(what, theirs, found[ours], found[host],
                         None if options.quick else EDIT_BY_HOST)
        yield Comparison(f"memory of {ours} of {size}", "coremltools: the same", machine.memory[ours],
                         machine.memory[host], None if options.quick else EDIT_BY_HOST, "MB")
    most = [max(each) for each in zip(*(machine.memory[name] for name in BEYOND))]
    yield Comparison(f"most memory of rewrite, lint, edit of {size}", HOST, most, machine.memory[HOST], MEMORY, "MB")


def named(options: argparse.Namespace) -> str:
    """Other sizes have places of their own in the record."""
    return "package" if options.quick or options.gigabytes == 1 else f"package, {options.gigabytes:g} GB"


BENCHMARK = Benchmark(
    "package", measure, {"gigabytes": (1.0, 0.1), "rounds": (3, 1), "shape": ("llm", "tower"), "folder": (None, None)},
    named)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
