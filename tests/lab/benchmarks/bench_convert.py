"""What our passes and the patches of the torch frontend add to a conversion, beside coremltools' own `convert`.

    python -m tests.lab.benchmarks.bench_convert [--models encoder,vocoder] [--rounds 3] [--record FILE.json] [--quick]

Exported torch models with random weights become fp16 ML Programs: with `ct.convert` alone, and with `ane.convert`,
whose pipeline and patches are ours. Nothing is saved. Seconds of the processor. The bounds: `ane.convert` takes at most
1.3 times `ct.convert`, with the preset `full` at most twice as long.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import coremltools as ct

import mil_ane_passes as ane
from tests.lab.benchmarks.command import Benchmark
from tests.lab.benchmarks.make_models import MODELS, export_model
from tests.lab.benchmarks.rounds import Comparison, run_rounds, show_progress, time_processor

MAX_SAFE_RATIO, MAX_FULL_RATIO = 1.3, 2.0
HOST, OURS, FULL_PRESET = "ct.convert", "ane.convert", "full"


def make_sides(program: Any) -> dict[str, Callable[[], float]]:
    common: dict[str, Any] = {"skip_model_load": True, "minimum_deployment_target": ct.target.iOS17}
    return {
        HOST: lambda: time_processor(lambda: ct.convert(program, **common)),
        OURS: lambda: time_processor(lambda: ane.convert(program, **common)),
        FULL_PRESET: lambda: time_processor(
            lambda: ane.convert(program, pass_pipeline=ane.pipeline(preset="full"), **common)
        ),
    }


def measure_conversion(options: argparse.Namespace) -> Iterator[Comparison]:
    warnings.filterwarnings("ignore")
    for name, side in make_sides(export_model(*MODELS["vocoder-small"]())).items():
        if name == OURS or not options.quick:  # that has coremltools' part, too
            side()  # what is imported and looked up once
    for name in options.models.split(","):
        show_progress(f"exporting {name}")
        made = make_sides(export_model(*MODELS[name]()))
        found = run_rounds(
            {side: made[side] for side in made if side != FULL_PRESET or not options.quick}, options.rounds
        )
        yield Comparison(f"{OURS} of {name}", HOST, found[OURS], found[HOST], MAX_SAFE_RATIO)
        if FULL_PRESET in found:
            yield Comparison(f"{OURS} of {name}, preset full", HOST, found[FULL_PRESET], found[HOST], MAX_FULL_RATIO)


BENCHMARK = Benchmark("convert", measure_conversion, {"models": ("encoder,vocoder", "vocoder-small"), "rounds": (3, 1)})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
