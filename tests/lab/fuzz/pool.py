"""Tries in child processes: one that dies or stands still is a failure of its try, and another goes on."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .fixtures import Files
from .networks import FILE, NetworkTries
from .tries import Outcome, Tries, limit_memory

_TRIES_PER_CHILD = 400
"Tries of one child: what coremltools keeps in memory for good must not be counted against a try."
_MAX_SILENT_SECONDS = 120.0
"Seconds without a word after which a child is ended: nothing Python could stop."
_MAX_ADDRESS_BYTES = 2 << 30


@dataclass
class TryProcess:
    """A child process, what it is to do yet, and when it was last heard of."""

    process: Any
    connection: Connection
    numbers: list[int]
    last_heard: float


def iterate_outcomes(fixtures: Mapping[str, Files], seed: int, numbers: list[int], jobs: int) -> Iterator[Outcome]:
    """What becomes of the tries `numbers`, as they end; `jobs` children at a time."""
    waiting = [numbers[at : at + _TRIES_PER_CHILD] for at in range(0, len(numbers), _TRIES_PER_CHILD)][::-1]
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as folder:
        children: list[TryProcess] = []
        try:
            while waiting or children:
                while waiting and len(children) < jobs:
                    children.append(_start_child(fixtures, seed, waiting.pop(), Path(folder) / str(len(waiting))))
                for child in list(children):
                    yield from _receive_outcomes(child)
                    if child.numbers and not _is_lost(child):
                        continue
                    children.remove(child)
                    if child.numbers:
                        yield _make_lost_outcome(child)
                        waiting.append(child.numbers[1:])
                    child.process.join()
                wait([child.connection for child in children], timeout=1.0)
        finally:
            for child in children:
                child.process.kill()


def make_tries(fixtures: Mapping[str, Files], seed: int, folder: Path) -> Tries:
    """Return the tries of packages or, where the fixtures are files of networks, of those."""
    networks = all(FILE in each for each in fixtures.values())
    return (NetworkTries if networks else Tries)(fixtures, seed, folder)


def _start_child(fixtures: Mapping[str, Files], seed: int, numbers: list[int], folder: Path) -> TryProcess:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run_tries, args=(fixtures, seed, numbers, folder, theirs), daemon=True)
    process.start()
    theirs.close()
    return TryProcess(process, ours, list(numbers), time.monotonic())


def _run_tries(
    fixtures: Mapping[str, Files], seed: int, numbers: list[int], folder: Path, connection: Connection
) -> None:
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        limit_memory(_MAX_ADDRESS_BYTES)
        tries = make_tries(fixtures, seed, folder)
        for number in numbers:
            connection.send(tries.run(number))
        tries.remove()


def _receive_outcomes(child: TryProcess) -> Iterator[Outcome]:
    try:
        while child.connection.poll():
            outcome = child.connection.recv()
            child.last_heard = time.monotonic()
            child.numbers.remove(outcome.number)
            yield outcome
    except EOFError:
        child.process.join()


def _is_lost(child: TryProcess) -> bool:
    return not child.process.is_alive() or time.monotonic() - child.last_heard > _MAX_SILENT_SECONDS


def _make_lost_outcome(child: TryProcess) -> Outcome:
    """The outcome of the try at which a child was lost."""
    silent = child.process.is_alive()
    if silent:
        child.process.kill()
    child.process.join()
    kind, words = ("hang", "stopped from outside") if silent else ("crash", f"ended with {child.process.exitcode}")
    return Outcome(child.numbers[0], kind, words, time.monotonic() - child.last_heard, 0.0)
