"""Rounds: each side runs once in each, in turn, so that what the machine does besides hits all alike."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

BUSY_LOAD_PER_CORE = 0.5
"""From which load for each core on a machine is said to be busy: what is measured on it then is of less worth."""
_VERSIONS = ("coremltools", "torch")


@dataclass
class Comparison:
    """One thing of ours beside another's: a figure of each for each round, and what the median ratio may be at most."""

    what: str
    beside: str
    ours: list[float]
    theirs: list[float]
    allowed: float | None = None
    unit: str = "s"

    def __post_init__(self) -> None:
        if not self.ours or len(self.ours) != len(self.theirs):
            raise ValueError(f"'{self.what}' was measured {len(self.ours)} times and '{self.beside}' "
                             f"{len(self.theirs)} times; expected both in each round, and one round at least")

    @property
    def ratios(self) -> list[float]:
        """Ours by theirs, round by round."""
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs)]

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(self.ratios)

    @property
    def holds(self) -> bool:
        return self.allowed is None or self.ratio <= self.allowed

    def to_dict(self) -> dict[str, Any]:
        """As it is recorded."""
        return {name: [float(f"{each:.5g}") for each in value] if isinstance(value, list) else value
                for name, value in asdict(self).items()}

    def cells(self) -> list[str]:
        """A row of a table: `COLUMNS`."""
        spread = (
            f"{_format_figure(min(self.ratios))} to {_format_figure(max(self.ratios))}"
            if len(self.ratios) > 1
            else "one round"
        )
        allowed = "" if self.allowed is None else f"{self.allowed:g}" + ("" if self.holds else ", MISSED")
        return [
            self.what,
            self.beside,
            self._figure(self.ours),
            self._figure(self.theirs),
            f"{_format_figure(self.ratio)} x",
            spread,
            allowed,
        ]

    def _figure(self, values: Sequence[float]) -> str:
        value = statistics.median(values)
        if self.unit == "s" and value < 1:
            return f"{_format_figure(value * 1e3)} ms"
        return f"{_format_figure(value)} {self.unit}"


COLUMNS = ("ours", "beside", "ours takes", "the other", "ratio", "spread", "allowed")


def run_rounds(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """The figures of all sides, by name; every other round goes backwards, so that none always follows the same one."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            show_progress(f"round {number + 1} of {rounds}: {name}")
            found[name].append(sides[name]())
    return found


def time_wall(job: Callable[[], object]) -> float:
    """Seconds that pass while `job` runs: for what waits for disks, or works in several threads."""
    return _time_job(job, time.perf_counter)


def time_processor(job: Callable[[], object]) -> float:
    """Seconds of processors that `job` takes: for work in one thread, whatever else the machine does."""
    return _time_job(job, time.process_time)


def _time_job(job: Callable[[], object], clock: Callable[[], float]) -> float:
    gc.collect()  # the garbage of the other side
    started = clock()
    job()
    return clock() - started


def show_progress(text: str) -> None:
    """Progress: one line that the next one replaces, on a terminal alone."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:100]}", end="", file=sys.stderr, flush=True)


def describe_machine() -> dict[str, Any]:
    """Where and when something is measured, and what the machine does besides as it begins."""
    return {
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "load": round(os.getloadavg()[0], 2),
        "busy": os.getloadavg()[0] > BUSY_LOAD_PER_CORE * (os.cpu_count() or 1),
        "versions": {"python": platform.python_version(), **{name: _get_version(name) for name in _VERSIONS}},
    }


def _get_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _format_figure(value: float) -> str:
    """Two digits, or all before the point; nothing finer than a hundredth."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 2 else f"{value:.2f}"
