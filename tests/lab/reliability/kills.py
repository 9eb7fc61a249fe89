"""SIGKILL: at moments drawn at random over the time a run takes, and before each thing it does to files."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from statistics import median
from typing import Any

from .job import DONE, SaveJob, hash_folder, start_child, wait_for_child

FILE_EVENTS = ("open", "os.", "fcntl.", "shutil.", "tempfile.", "ctypes.dlsym")


def kill_at_moments(job: SaveJob, tries: int, overwrite: bool, seed: int) -> dict[str, Any]:
    """Kill `tries` runs at random moments; how many left what, and what was wrong."""
    draw, counts = Random(seed), Counter[str]()
    longest = 1.05 * median(_time_job(job, overwrite) for _ in range(3))
    for _ in range(tries):
        _prepare_job(job, overwrite)
        process = start_child(lambda: job.run(overwrite))
        time.sleep(draw.uniform(0, longest))
        os.kill(process, signal.SIGKILL)
        _judge_kill(job, overwrite, wait_for_child(process), counts)
    return {"tries": tries, **counts, "failures": counts["failures"]}


def kill_at_steps(job: SaveJob, overwrite: bool, every: int = 1) -> dict[str, Any]:
    """Kill one run before each step, as Python's audit events tell them; with `every`, before each so-manieth."""
    _prepare_job(job, overwrite)
    counts, step = Counter[str](), 0
    while not counts["to the end"]:
        step += every
        _prepare_job(job, overwrite)
        process = start_child(lambda step=step: _stop_at_step(step, _kill_self, lambda: job.run(overwrite)))
        _judge_kill(job, overwrite, wait_for_child(process), counts)
    return {"tries": sum(counts[kind] for kind in ("absent", "old", "whole", "broken")), **counts,
            "failures": counts["failures"]}


def _stop_at_step(step: int, stop: Callable[[], None], work: Callable[[], None]) -> None:
    seen = 0

    def hook(event: str, _: object) -> None:
        nonlocal seen
        if event.startswith(FILE_EVENTS):
            seen += 1
            if seen == step:
                stop()

    sys.addaudithook(hook)
    work()


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _prepare_job(job: SaveJob, overwrite: bool) -> None:
    job.clear()
    if overwrite:
        job.put_old()


def _time_job(job: SaveJob, overwrite: bool) -> float:
    _prepare_job(job, overwrite)
    begun = time.perf_counter()
    assert wait_for_child(start_child(lambda: job.run(overwrite))) == DONE
    return time.perf_counter() - begun


def _judge_kill(job: SaveJob, overwrite: bool, code: int, counts: Counter[str]) -> None:
    """Counts what one killed run left; then the next run has to succeed and leave nothing else."""
    found = job.found()
    counts[found] += 1
    counts["to the end"] += code == DONE
    counts["left over"] += bool(job.leftovers())
    wrong = found not in (("old", "whole") if overwrite else ("absent", "whole")) or code not in (DONE, -signal.SIGKILL)
    if code == DONE:
        wrong |= found != "whole" or bool(job.leftovers())
    again = wait_for_child(start_child(lambda: job.run(overwrite=True)))
    wrong |= hash_folder(job.source) != job.before or again != DONE or job.found() != "whole" or bool(job.leftovers())
    if wrong:
        counts["failures"] += 1
        print(f"killed ({overwrite=}): ended {code}, left {found}, the next run {again}, {job.found()}, "
              f"{job.leftovers()}", file=sys.stderr)
