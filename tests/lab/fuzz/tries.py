"""One try: a package is damaged, loaded, and what loads is saved, linted and rewritten."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import mil_ane_passes as ane
from mil_ane_passes.utils.errors import InputError, NotSupported

from . import files
from .fixtures import Files
from .protos import ProtoMutator

MAX_PROCESSOR_SECONDS, MAX_MEGABYTES = 4.0, 300
"What a try may take of the processor's time and of memory above what stood before it."
_MAX_WALL_SECONDS = 60.0
"What it may take in all, on a machine that does other things too."
_TRIES_PER_FULL_RUN = 8
"One try in so many goes on to lint and rewrite."


class TryTimeout(BaseException):
    """The time of a try is over."""


@dataclass(frozen=True)
class Outcome:
    """What became of a try: "loaded" or "refused", else a failure, with the words that belong to it."""

    number: int
    kind: str
    words: str
    seconds: float
    megabytes: float


class Tries:
    """Makes tries in `folder`; try `number` of `seed` is the same each time."""

    model = files.MODEL
    max_seconds: float | None = None

    def __init__(self, fixtures: Mapping[str, Files], seed: int, folder: Path) -> None:
        self._fixtures = [fixtures[name] for name in sorted(fixtures)]
        self._protos = ProtoMutator([each[self.model] for each in self._fixtures])
        self._seed, self._folder = seed, folder
        self._source, self._saved = folder / "source.mlpackage", folder / "saved.mlpackage"
        self._outside = folder / "outside"
        folder.mkdir(parents=True, exist_ok=True)
        self._outside.write_bytes(b"outside")

    def make(self, number: int) -> Path:
        """The damaged package of try `number`."""
        rng = random.Random(f"{self._seed}:{number}")
        which = rng.randrange(len(self._fixtures))
        made = dict(self._fixtures[which])
        blobs = [path for path in made if path.endswith(".bin")]
        draw = rng.random()
        if draw < 0.60:
            made[files.MODEL] = self._protos.mutate(which, rng)
        elif draw < 0.75:
            made[files.MODEL] = files.mutate_fields(made[files.MODEL], rng)
        elif draw < 0.82:
            made[files.MODEL] = files.mutate_bytes(made[files.MODEL], rng)
        elif draw < 0.93 and blobs:
            path = rng.choice(blobs)
            made[path] = files.mutate_weights(made[path], rng)
        elif draw < 0.98:
            made[files.MANIFEST] = files.mutate_manifest(made[files.MANIFEST], rng)
        self.remove()
        for path, data in made.items():
            (self._source / path).parent.mkdir(parents=True, exist_ok=True)
            (self._source / path).write_bytes(data)
        if draw >= 0.98:
            files.replace_by_special_file(self._source / rng.choice(sorted(made)), self._outside, rng)
        return self._source

    def run(self, number: int) -> Outcome:
        """Make try `number` and see what becomes of it."""
        self.make(number)
        before = reset_peak_memory()
        started = time.process_time()
        kind, words = "loaded", ""
        try:
            with _limit_time(self.max_seconds or MAX_PROCESSOR_SECONDS):
                self._use(further=number % _TRIES_PER_FULL_RUN == 0)
        except InputError as error:
            kind, words = ("refused", str(error)) if "\n" not in str(error) else ("unclear", repr(str(error)))
        except TryTimeout:
            kind, words = "hang", traceback.format_exc(limit=-12)
        except MemoryError:
            kind, words = "memory", traceback.format_exc(limit=-12)
        except BaseException:
            kind, words = "exception", traceback.format_exc(limit=-12)
        seconds, megabytes = time.process_time() - started, read_peak_memory() - before
        if megabytes > MAX_MEGABYTES and kind in ("loaded", "refused"):
            kind, words = "memory", f"{megabytes:.0f} MB: {words}"
        return Outcome(number, kind, words, seconds, megabytes)

    def _use(self, further: bool) -> None:
        package = ane.load(self._source)
        ane.save(package, self._saved)
        assert _read_tree(self._saved) == _read_tree(self._source), (
            "a package that nobody touched was not saved byte for byte"
        )
        if further:
            ane.lint(package).to_dict()
            shutil.rmtree(self._saved)
            try:
                ane.rewrite(self._source, self._saved, preset="full", verify=False)
            except NotSupported:
                return
            ane.load(self._saved)

    def remove(self) -> None:
        """Nothing is left of the last try."""
        for path in self._folder.iterdir():
            if path.name == self._outside.name:
                continue
            if path.is_symlink() or not path.is_dir():
                path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)


def _read_tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def _limit_time(seconds: float) -> Iterator[None]:
    """Ends what takes more of the processor's time, where Python can end it."""

    def over(number: int, frame: FrameType | None) -> None:
        raise TryTimeout

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, seconds), (signal.SIGALRM, signal.ITIMER_REAL, _MAX_WALL_SECONDS))
    for number, timer, after in timers:
        signal.signal(number, over)
        signal.setitimer(timer, after, 1.0)
    try:
        yield
    finally:
        for _, timer, _ in timers:
            signal.setitimer(timer, 0)


def reset_peak_memory() -> float:
    """Forget the highest memory so far; returns what is held now, in megabytes."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return read_peak_memory()


def read_peak_memory() -> float:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def limit_memory(more: int) -> None:
    """Lets this process take `addend` bytes of addresses than it has now."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))
