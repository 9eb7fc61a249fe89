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


def sides(program: Any) -> dict[str, Callable[[], float]]:
    common: dict[str, Any] = {"skip_model_load": True, "minimum_deployment_target": ct.target.iOS17}
    return {
        "ct.convert": lambda: busy(lambda: ct.convert(program, **common)),
        "ane.convert": lambda: busy(lambda: ane.convert(program, **common)),
        "full": lambda: busy(lambda: ane.convert(program, pass_pipeline=ane.pipeline(preset="full"), **common)),
    }


def measure(options: argparse.Namespace) -> Iterator[Comparison]:
    warnings.filterwarnings("ignore")
    for name, side in sides(exported(*MODELS["vocoder-small"]())).items():
        if name == "ane.convert" or not options.quick:  # that has the host's part, too
            side()  # what is imported and looked up once
    for name in options.models.split(","):
        told(f"exporting {name}")
        found = in_turn(sides(exported(*MODELS[name]())), options.rounds)
        yield Comparison(f"ane.convert of {name}", "ct.convert", found["ane.convert"], found["ct.convert"], SAFE)
        yield Comparison(f"ane.convert of {name}, preset full", "ct.convert", found["full"], found["ct.convert"],
                         FULL)


BENCHMARK = Benchmark("convert", measure, {"models": ("encoder,vocoder", "vocoder-small"), "rounds": (3, 1)})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
