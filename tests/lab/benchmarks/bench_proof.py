"""What the equivalence check adds to `rewrite_and_check`, counted in calls of the model with PyTorch eager.

    python -m tests.lab.benchmarks.bench_proof [--model vocoder] [--rounds 3] [--record FILE.json] [--quick]

A model with random weights, converted to fp16, is rewritten with the preset `safe` and written, with the equivalence
check and without. The equivalence check runs both programs on several draws at float64 and at float16, so it costs as
many calls of the model, and wider ones. With the check, the written package is also read again before it appears, which
takes one call of this model. Wall times, start-up left out. The bounds: what the equivalence check adds takes at most
15 calls of eager (ten are the model before, at float64 and float16 on five feeds, and one is the reading; on a machine
where a call takes 34 ms in place of 65, what is not computed in the ops weighs more, and it took 17 to 18); and where
one op in the middle of a model was changed, the check of both programs at both precisions takes at most 1.3 times as
long as the original alone at these.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import coremltools as ct
import torch
from coremltools.converters.mil.mil import Builder, Program

import mil_ane_passes as ane
from mil_ane_passes.equivalence.equivalence import compare_programs
from mil_ane_passes.equivalence.execution import build_plans, execute_plans
from mil_ane_passes.ir.query import is_const
from mil_ane_passes.passes.contract import Exactness
from tests.lab.benchmarks.command import Benchmark
from tests.lab.benchmarks.make_models import MODELS, export_model
from tests.lab.benchmarks.rounds import Comparison, run_rounds, show_progress, time_wall

MAX_MODEL_CALLS = 15.0
MAX_ORIGINAL_RUNS = 1.3
_PRECISIONS = ("float64", "float16")


def convert_and_save(name: str, folder: Path) -> Path:
    path = folder / f"{name}.mlpackage"
    made = ct.convert(export_model(*MODELS[name]()), skip_model_load=True, minimum_deployment_target=ct.target.iOS17)
    made.save(str(path))
    return path


def rewrite_and_check(source: Path, verify: bool) -> None:
    report = ane.rewrite(source, source.with_name("out.mlpackage"), verify=verify, overwrite=True)
    if report.status != "written" or not report.changed or verify != (report.verify is not None):
        raise SystemExit(f"the rewrite did not go as it should: {report}")


def measure_equivalence_check(options: argparse.Namespace) -> Iterator[Comparison]:
    warnings.filterwarnings("ignore")
    model, example = MODELS[options.model]()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        show_progress("converting")
        if not options.quick:
            rewrite_and_check(
                convert_and_save("vocoder-small", Path(folder)), verify=True
            )  # what is imported and looked up once
        source = convert_and_save(options.model, Path(folder))
        size = sum(file.stat().st_size for file in source.rglob("*") if file.is_file()) / 1e6
        model(*example)
        found = run_rounds({
            "eager": lambda: time_wall(lambda: model(*example)),
            "without": lambda: time_wall(lambda: rewrite_and_check(source, verify=False)),
            "with": lambda: time_wall(lambda: rewrite_and_check(source, verify=True)),
        }, options.rounds)
    what = f"of {options.model}, {size:.0f} MB"
    yield Comparison(f"rewrite with proof {what}", "without equivalence check", found["with"], found["without"])
    added = [max(0.0, proved - plain) for proved, plain in zip(found["with"], found["without"])]
    yield Comparison(
        f"what the equivalence check {what} adds", "one call of PyTorch eager", added, found["eager"], MAX_MODEL_CALLS
    )


def change_one_op(program: Program) -> None:
    """Exchange the operands of a sum in the middle of the default function: the same numbers by another op."""
    function = program.functions[program.default_function_name]
    sums = [op for op in function.operations if op.op_type == "add" and not is_const(op.x) and not is_const(op.y)]
    op = sums[len(sums) // 2]
    with function:
        changed = Builder.add(x=op.y, y=op.x, before_op=op, name=f"{op.outputs[0].name}_exchanged")
        function.replace_uses_of_var_after_op(anchor_op=changed.op, old_var=op.outputs[0], new_var=changed)
        function.remove_ops([op])


def measure_one_changed_op(options: argparse.Namespace) -> Iterator[Comparison]:
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        source = convert_and_save(options.touched, Path(folder))
        before, after = (ane.load(source).program for _ in range(2))
        change_one_op(after)
        (plan,) = build_plans(before, 1, lambda name: None)

        def check() -> None:
            report = compare_programs(before, after, precisions=_PRECISIONS, feeds=plan.feeds,
                                      exactness=Exactness.BITWISE)
            if not report.equal_bits:
                raise SystemExit(f"the check did not go as it should: {report}")

        found = run_rounds({
            "original": lambda: time_wall(lambda: execute_plans(before, [plan], _PRECISIONS, lambda text: None)),
            "check": lambda: time_wall(check)}, options.rounds)
    yield Comparison(f"check of {options.touched} with one op changed", "the original alone at the same precisions",
                     found["check"], found["original"], MAX_ORIGINAL_RUNS)


def measure(options: argparse.Namespace) -> Iterator[Comparison]:
    yield from measure_equivalence_check(options)
    yield from measure_one_changed_op(options)


BENCHMARK = Benchmark("proof", measure, {
    "model": ("vocoder", "vocoder-small"), "touched": ("resnet50", "resnet50"), "rounds": (3, 1)})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
