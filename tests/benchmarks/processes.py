"""Whole processes, timed and weighed."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Cost:
    """What the runs of one command took: wall and processor seconds of each, and the peak resident memory in MB."""

    runs: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    memory: float = 0.0

    @property
    def seconds(self) -> float:
        """The median of the runs."""
        return statistics.median(self.runs)

    def add(self, command: Sequence[str], accepted: Sequence[int] = (0,)) -> None:
        """Run `command` once more; SystemExit when it ends with a code that is not `accepted`."""
        started = time.perf_counter()
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        self.runs.append(time.perf_counter() - started)
        self.busy.append(usage.ru_utime + usage.ru_stime)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode not in accepted:
            raise SystemExit(f"{' '.join(command)} failed with {child.returncode}")
        self.memory = max(self.memory, usage.ru_maxrss / (1024 if sys.platform == "linux" else 1024**2))
