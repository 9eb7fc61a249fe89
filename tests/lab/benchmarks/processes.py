"""Whole processes, timed and weighed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessCost:
    """What one run of a command took: seconds that passed, its peak resident memory in MB, and what it printed."""

    seconds: float
    memory: float
    output: str


def run_and_measure(command: Sequence[str], accepted: Sequence[int] = (0,)) -> ProcessCost:
    """Run `command`; SystemExit with what it said when it ends with a code that is not `accepted`.

    Linux counts what the process held that started it: the caller has to be a small one. Compiled modules are kept, as
    those of an installed package are.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as said:
        started = time.perf_counter()
        child = subprocess.Popen(command, stdout=printed, stderr=said, env=environment)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - started
        child.returncode = os.waitstatus_to_exitcode(status)
        printed.seek(0)
        said.seek(0)
        if child.returncode not in accepted:
            raise SystemExit(f"{' '.join(command)} failed with {child.returncode}: {said.read()[-2000:].decode()}")
        memory = usage.ru_maxrss / (1024 if sys.platform == "linux" else 1024**2)
        return ProcessCost(seconds, memory, printed.read().decode())
