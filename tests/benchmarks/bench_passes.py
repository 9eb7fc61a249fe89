"""What our passes cost beside coremltools' default pipeline, and that their cost grows with the program, not faster.

    python -m tests.benchmarks.bench_passes [--ops 8000] [--skip-host]

One program with a quarter of its ops to rewrite. The bounds: our preset `safe` takes at most 3 % of the host's default
pipeline, and 8,000 ops at most ten times as long as 1,000.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import coremltools as ct
from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager

import mil_ane_passes as ane
from tests.benchmarks.make_program import program


def seconds(ops: int, job: Callable[[Any], object], runs: int) -> float:
    """Median time of `job` on fresh programs of that many ops."""
    times = []
    for _ in range(runs):
        fresh = program(ops, ops // 4)
        started = time.perf_counter()
        job(fresh)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def apply(pipeline: Any) -> Callable[[Any], object]:
    return lambda fresh: PassPipelineManager.apply_pipeline(fresh, pipeline)


def ours(preset: str) -> Callable[[Any], object]:
    from mil_ane_passes.core.pipeline import run_all, selected

    return lambda fresh: run_all(selected(preset), fresh)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", type=int, default=8000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--skip-host", action="store_true", help="leave out the host's pipeline, which takes minutes")
    arguments = parser.parse_args()
    failed = False
    for preset in ("safe", "full"):
        small = seconds(arguments.ops // 8, ours(preset), arguments.runs)
        large = seconds(arguments.ops, ours(preset), arguments.runs)
        within = seconds(arguments.ops, apply(ane.pipeline(ct.PassPipeline.EMPTY, preset=preset)), 1)
        print(f"{preset}: {arguments.ops // 8} ops {small:.3f} s, {arguments.ops} ops {large:.3f} s "
              f"({large / small:.1f} times, 10 allowed); with the host's validation after each pass {within:.3f} s")
        failed |= large > 10 * small
        if preset == "safe":
            safe = large
    if not arguments.skip_host:
        host = seconds(arguments.ops, apply(ct.PassPipeline.DEFAULT), 1)
        print(f"coremltools' default pipeline {host:.1f} s; safe takes {safe / host:.2%} of it (3 % allowed)")
        failed |= safe > 0.03 * host
    sys.exit(failed)


if __name__ == "__main__":
    main()
