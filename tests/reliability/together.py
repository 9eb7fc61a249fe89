"""Several runs that write to one path at once, in processes and in threads."""

from __future__ import annotations

import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any

from mil_ane_passes.core.errors import InputError
from mil_ane_passes.package import load, save

from .job import DONE, REFUSED, Job, ended, hashed, start


def processes(job: Job, rounds: int, overwrite: bool, runs: int = 8) -> dict[str, Any]:
    """Rounds of `runs` processes that write different packages to one path; how many won, and what was wrong."""
    variants = set()
    for variant in range(runs):
        job.clear()
        assert ended(start(lambda variant=variant: job.run(variant=variant))) == DONE
        variants.add(hashed(job.target))
    counts = Counter[str]()
    for _ in range(rounds):
        job.clear()
        ready, go = os.pipe()
        started = [start(partial(_wait, ready, go, job, overwrite, variant)) for variant in range(runs)]
        os.close(go)  # the end of the pipe: all are off
        codes = [ended(process) for process in started]
        os.close(ready)
        _judge(job, codes, runs if overwrite else 1, variants, counts)
    return {"tries": rounds * runs, "rounds": rounds, **counts, "failures": counts["failures"]}


def _wait(ready: int, go: int, job: Job, overwrite: bool, variant: int) -> None:
    os.close(go)
    os.read(ready, 1)
    job.run(overwrite, variant)


def threads(job: Job, rounds: int, runs: int = 4) -> dict[str, Any]:
    """The same in threads of one process, without overwrite and without changes."""
    counts = Counter[str]()
    for _ in range(rounds):
        job.clear()
        packages, together = [load(job.source) for _ in range(runs)], Barrier(runs)

        def write(package: Any, together: Barrier = together) -> int:
            together.wait()
            try:
                save(package, job.target)
            except InputError:
                return REFUSED
            return DONE

        with ThreadPoolExecutor(runs) as pool:
            codes = list(pool.map(write, packages))
        _judge(job, codes, 1, {job.before}, counts)
    return {"tries": rounds * runs, "rounds": rounds, **counts, "failures": counts["failures"]}


def _judge(job: Job, codes: list[int], winners: int, variants: set[str], counts: Counter[str]) -> None:
    counts["written"] += codes.count(DONE)
    counts["refused"] += codes.count(REFUSED)
    found = hashed(job.target)
    if found not in variants or job.leftovers() or codes.count(DONE) != winners or set(codes) - {DONE, REFUSED}:
        counts["failures"] += 1
        print(f"together: ended {codes}, whole: {found in variants}, left {job.leftovers()}", file=sys.stderr)
