"""Packages for a batch, and executors that are not what they should be."""

from __future__ import annotations

import os
import pickle
import shutil
import time
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

REWRITTEN, IDLE = "conv_transpose_1d", "nothing_to_do"


def packages(fixtures: Path, folder: Path, **kinds: str) -> list[str]:
    """A copy of a fixture for each name, at folder/NAME.mlpackage."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, kind in kinds.items():
        shutil.copytree(fixtures / f"{kind}.mlpackage", folder / f"{name}.mlpackage")
    return [str(folder / f"{name}.mlpackage") for name in kinds]


def files(path: str | Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(Path(path).rglob("*")) if file.is_file()}


def shown(folder: Path) -> list[str]:
    """What is in a folder of results, without the records."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".mil-ane-passes")


def statuses(report: Any) -> dict[str, str]:
    return {item.name: item.status for item in report.items}


def die() -> None:
    """As a process does that the system kills. A name of ours: what measures coverage takes the place of the other."""
    os._exit(9)


class Deadly(Executor):
    """An executor on which the process that is to do the jobs called `names` dies of them; `others` does the rest."""

    def __init__(self, dying: Executor, others: Executor, *names: str) -> None:
        self._dying, self._others, self._names = dying, others, names

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        if args[0].name in self._names:
            return self._dying.submit(die)
        return self._others.submit(fn, *args, **kwargs)


class ByPost:
    """No subclass of anything; like MPI executors it pickles what goes out and what comes back."""

    def __init__(self) -> None:
        self.posted: list[int] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Answer:
        letter = pickle.dumps((fn, args, kwargs))
        self.posted.append(len(letter))
        opened, values, named = pickle.loads(letter)
        try:
            return Answer(pickle.dumps(opened(*values, **named)), None)
        except Exception as error:
            return Answer(b"", error)


class Answer:
    def __init__(self, letter: bytes, error: Exception | None) -> None:
        self._letter, self._error = letter, error

    def add_done_callback(self, fn: Any) -> None:
        fn(self)

    def cancel(self) -> bool:
        return False

    def cancelled(self) -> bool:
        return False

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return pickle.loads(self._letter)


def write_late(path: str) -> None:
    """A job of three seconds, whose end leaves a file."""
    time.sleep(3)
    Path(path).touch()
