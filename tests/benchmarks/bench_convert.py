"""What our passes and the patches of the torch frontend add to a conversion, beside coremltools' own `convert`.

    python -m tests.benchmarks.bench_convert [--models encoder,vocoder] [--rounds 3] [--record FILE.json] [--quick]

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
from tests.benchmarks.command import Benchmark
from tests.benchmarks.make_models import MODELS, exported
from tests.benchmarks.rounds import Comparison, busy, in_turn, told

SAFE, FULL = 1.3, 2.0
HOST, OURS, WHOLE = "ct.convert", "ane.convert", "full"


def sides(program: Any) -> dict[str, Callable[[], float]]:
    common: dict[str, Any] = {"skip_model_load": True, "minimum_deployment_target": ct.target.iOS17}
    return {
        HOST: lambda: busy(lambda: ct.convert(program, **common)),
        OURS: lambda: busy(lambda: ane.convert(program, **common)),
        WHOLE: lambda: busy(lambda: ane.convert(program, pass_pipeline=ane.pipeline(preset="full"), **common)),
    }


def measure(options: argparse.Namespace) -> Iterator[Comparison]:
    warnings.filterwarnings("ignore")
    for name, side in sides(exported(*MODELS["vocoder-small"]())).items():
        if name == OURS or not options.quick:  # that has the host's part, too
            side()  # what is imported and looked up once
    for name in options.models.split(","):
        told(f"exporting {name}")
        made = sides(exported(*MODELS[name]()))
        found = in_turn({side: made[side] for side in made if side != WHOLE or not options.quick}, options.rounds)
        yield Comparison(f"{OURS} of {name}", HOST, found[OURS], found[HOST], SAFE)
        if WHOLE in found:
            yield Comparison(f"{OURS} of {name}, preset full", HOST, found[WHOLE], found[HOST], FULL)


BENCHMARK = Benchmark("convert", measure, {"models": ("encoder,vocoder", "vocoder-small"), "rounds": (3, 1)})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
