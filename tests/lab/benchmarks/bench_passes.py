"""What our passes cost beside coremltools' default pipeline, and that their cost grows with the program, not faster.

    python -m tests.lab.benchmarks.bench_passes [--ops 2000] [--rounds 3] [--record FILE.json] [--quick]

One program with a quarter of its ops to rewrite. `rewrite` runs our passes by themselves; in `ct.convert` coremltools
validates the whole program after each pass, ours as well as its own, which is the row with the validation. Seconds of
the processor, in one thread. The bounds: the preset `safe` takes at most 4 % of coremltools' default pipeline, `full`
at most 15 %, and an op of a program four times as large at most 1.6 times as long.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import coremltools as ct
from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager

import mil_ane_passes as ane
from mil_ane_passes.passes.pipeline import apply_rewrites, select_rewrites
from tests.lab.benchmarks.command import Benchmark
from tests.lab.benchmarks.make_program import make_program
from tests.lab.benchmarks.rounds import Comparison, run_rounds, time_processor

MAX_SAFE_RATIO, MAX_FULL_RATIO, MAX_GROWTH_RATIO = 0.04, 0.15, 1.6
DEFAULT_PIPELINE = "coremltools' default pipeline"


def time_on_fresh_program(ops: int, job: Callable[[Any], object]) -> Callable[[], float]:
    """Times `job` on a fresh program of that many ops, since passes change what they run on."""
    def once() -> float:
        fresh = make_program(ops, ops // 4)
        return time_processor(lambda: job(fresh))
    return once


def make_pipeline_job(pipeline: Any) -> Callable[[Any], object]:
    return lambda fresh: PassPipelineManager.apply_pipeline(fresh, pipeline)


def make_preset_job(preset: str) -> Callable[[Any], object]:
    return lambda fresh: apply_rewrites(select_rewrites(preset), fresh)


def measure_passes(options: argparse.Namespace) -> Iterator[Comparison]:
    ops, small = options.ops, options.ops // 4
    apply_rewrites(select_rewrites("full"), make_program(20, 5))  # what is looked up once
    sides: dict[str, Callable[[], float]] = {
        DEFAULT_PIPELINE: time_on_fresh_program(ops, make_pipeline_job(ct.PassPipeline.DEFAULT))
    }
    for preset in ("safe", "full"):
        sides[preset] = time_on_fresh_program(ops, make_preset_job(preset))
        sides[f"{preset} in ct.convert"] = time_on_fresh_program(
            ops, make_pipeline_job(ane.pipeline(ct.PassPipeline.EMPTY, preset=preset))
        )
        sides[f"{preset}, small"] = time_on_fresh_program(small, make_preset_job(preset))
    found = run_rounds(sides, options.rounds)
    for preset, allowed in (("safe", MAX_SAFE_RATIO), ("full", MAX_FULL_RATIO)):
        what = f"preset {preset} on {ops:,} ops"
        yield Comparison(what, DEFAULT_PIPELINE, found[preset], found[DEFAULT_PIPELINE], allowed)
        yield Comparison(
            f"{what}, with coremltools' validation",
            DEFAULT_PIPELINE,
            found[f"{preset} in ct.convert"],
            found[DEFAULT_PIPELINE],
        )
        yield Comparison(
            f"preset {preset}, 1,000 of {ops:,} ops", f"1,000 of {small:,} ops",
            [each * 1000 / ops for each in found[preset]], [each * 1000 / small for each in found[f"{preset}, small"]],
            MAX_GROWTH_RATIO)


BENCHMARK = Benchmark("passes", measure_passes, {"ops": (2000, 200), "rounds": (3, 1)})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
