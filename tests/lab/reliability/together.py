"""Several runs that write to one path at once, in processes and in threads."""

from __future__ import annotations

import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any

from mil_ane_passes.package import load, save
from mil_ane_passes.utils.errors import InputError

from .job import DONE, REFUSED, SaveJob, hash_folder, start_child, wait_for_child


def run_processes(job: SaveJob, rounds: int, overwrite: bool, runs: int = 8) -> dict[str, Any]:
    """Rounds of `runs` processes that write different packages to one path; how many won, and what was wrong."""
    variants = set()
    for variant in range(runs):
        job.clear()
        assert wait_for_child(start_child(lambda variant=variant: job.run(variant=variant))) == DONE
        variants.add(hash_folder(job.target))
    counts = Counter[str]()
    for _ in range(rounds):
        job.clear()
        ready, go = os.pipe()
        started = [start_child(partial(_wait_and_run, ready, go, job, overwrite, variant)) for variant in range(runs)]
        os.close(go)  # the end of the pipe: all are off
        codes = [wait_for_child(process) for process in started]
        os.close(ready)
        _judge_round(job, codes, runs if overwrite else 1, variants, counts)
    return {"tries": rounds * runs, "rounds": rounds, **counts, "failures": counts["failures"]}


def _wait_and_run(ready: int, go: int, job: SaveJob, overwrite: bool, variant: int) -> None:
    os.close(go)
    os.read(ready, 1)
    job.run(overwrite, variant)


def run_threads(job: SaveJob, rounds: int, runs: int = 4) -> dict[str, Any]:
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
        _judge_round(job, codes, 1, {job.before}, counts)
    return {"tries": rounds * runs, "rounds": rounds, **counts, "failures": counts["failures"]}


def _judge_round(job: SaveJob, codes: list[int], winners: int, variants: set[str], counts: Counter[str]) -> None:
    counts["written"] += codes.count(DONE)
    counts["refused"] += codes.count(REFUSED)
    found = hash_folder(job.target)
    if found not in variants or job.leftovers() or codes.count(DONE) != winners or set(codes) - {DONE, REFUSED}:
        counts["failures"] += 1
        print(f"together: ended {codes}, whole: {found in variants}, left {job.leftovers()}", file=sys.stderr)
