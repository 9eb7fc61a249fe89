"""What our passes cost beside coremltools' default pipeline, and that their cost grows with the program, not faster.

    python -m tests.benchmarks.bench_passes [--ops 2000] [--rounds 3] [--record FILE.json] [--quick]

One program with a quarter of its ops to rewrite. `rewrite` runs our passes by themselves; in `ct.convert` coremltools
validates the whole program after each pass, ours as well as its own, which is the row with the validation. Seconds of
the processor, in one thread. The bounds: the preset `safe` takes at most 4 % of the host's default pipeline, `full` at
most 15 %, and an op of a program four times as large at most 1.6 times as long.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import coremltools as ct
from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager

import mil_ane_passes as ane
from mil_ane_passes.core.pipeline import run_all, selected
from tests.benchmarks.command import Benchmark
from tests.benchmarks.make_program import program
from tests.benchmarks.rounds import Comparison, busy, in_turn

SAFE, FULL, GROWTH = 0.04, 0.15, 1.6
HOST = "coremltools' default pipeline"


def on_fresh(ops: int, job: Callable[[Any], object]) -> Callable[[], float]:
    """Times `job` on a fresh program of that many ops, since passes change what they run on."""
    def once() -> float:
        fresh = program(ops, ops // 4)
        return busy(lambda: job(fresh))
    return once


def apply(pipeline: Any) -> Callable[[Any], object]:
    return lambda fresh: PassPipelineManager.apply_pipeline(fresh, pipeline)


def ours(preset: str) -> Callable[[Any], object]:
    return lambda fresh: run_all(selected(preset), fresh)


def measure(options: argparse.Namespace) -> Iterator[Comparison]:
    ops, small = options.ops, options.ops // 4
    run_all(selected("full"), program(20, 5))  # what is looked up once
    sides: dict[str, Callable[[], float]] = {HOST: on_fresh(ops, apply(ct.PassPipeline.DEFAULT))}
    for preset in ("safe", "full"):
        sides[preset] = on_fresh(ops, ours(preset))
        sides[f"{preset} in ct.convert"] = on_fresh(ops, apply(ane.pipeline(ct.PassPipeline.EMPTY, preset=preset)))
        sides[f"{preset}, small"] = on_fresh(small, ours(preset))
    found = in_turn(sides, options.rounds)
    for preset, allowed in (("safe", SAFE), ("full", FULL)):
        what = f"preset {preset} on {ops:,} ops"
        yield Comparison(what, HOST, found[preset], found[HOST], allowed)
        yield Comparison(f"{what}, with coremltools' validation", HOST, found[f"{preset} in ct.convert"], found[HOST])
        yield Comparison(
            f"preset {preset}, 1,000 of {ops:,} ops", f"1,000 of {small:,} ops",
            [each * 1000 / ops for each in found[preset]], [each * 1000 / small for each in found[f"{preset}, small"]],
            GROWTH)


BENCHMARK = Benchmark("passes", measure, {"ops": (2000, 200), "rounds": (3, 1)})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
