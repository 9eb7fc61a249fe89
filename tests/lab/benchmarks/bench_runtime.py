"""The reference runtime beside PyTorch eager: time of a call, and memory during one.

    python -m tests.lab.benchmarks.bench_runtime [--rounds 9] [--models resnet50,vit-b] [--precision float32]
                                             [--record FILE.json] [--quick]

Models with random weights are converted to fp32 packages for iOS17, or for iOS18 where "@iOS18" follows the name: there
coremltools writes attention as one op. They are loaded with their weights mapped; eager runs the same model in the same
process with the same number of threads, call by call in turns. The bounds, at float32: the median call takes at most
1.3 times eager's (the aim is 1.1), and the work around an op (`op_overhead`) takes at most twice that of
`torch.fx.Interpreter` around an addition; a call holds at most the weights (counted in the computing dtype) and 1.5
times the largest live set. A live set is the bytes, at the dtypes they are kept in, of all values other than constants
that an op reads, gives, or leaves for later ones; it is computed from the program's shapes alone.

Two measures of memory, both in a process of its own. What torch's CPU allocator held at most during a call, above what
it held before (the profiler's record of every allocation; mapped weights are not among them) must be within the bound,
a page aside, for numbers that there is one of for each row.
The growth of the process's resident memory over its first two calls, after a small program has loaded the libraries
(Linux only; it counts the pages of mapped weights), may exceed it by 64 MB: it does so by tens of MB, as does eager's.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import torch
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.runtime import Runtime
from tests.lab.benchmarks.command import Benchmark
from tests.lab.benchmarks.make_models import MODELS, export_model, make_chain_program, make_small_program
from tests.lab.benchmarks.op_overhead import measure_op_overheads
from tests.lab.benchmarks.rounds import Comparison, run_rounds, show_progress, time_wall

MAX_SLOWDOWN, MAX_LIVE_SETS = 1.3, 1.5
#: MB of resident memory beyond the bound
HELD_BACK_MEGABYTES = 64
#: bytes of allocations that do not count: means, deviations and the like, of each row one number
UNCOUNTED_BYTES = 4096
#: by how much the outputs may differ, of the largest value: that both computed the same
MAX_DIFFERENCE = 1e-3


def make_model(name: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """The model of a name, with or without a target, and example inputs."""
    return MODELS[name.partition("@")[0]]()


def convert_and_save(name: str, folder: Path) -> Path:
    """The converted model, saved."""
    converted = ct.convert(export_model(*make_model(name)), compute_precision=ct.precision.FLOAT32,
                           skip_model_load=True, minimum_deployment_target=ct.target[name.partition("@")[2] or "iOS17"])
    path = folder / f"{name}.mlpackage"
    converted.save(str(path))
    return path


def compare_calls(name: str, path: Path, precision: str, rounds: int) -> Comparison:
    """Our call beside eager's."""
    model, example = make_model(name)
    program = ane.load(path).program
    runtime = Runtime(program, precision=precision)
    feeds = {key: value.numpy() for key, value in zip(program.functions["main"].inputs, example)}
    with torch.inference_mode():
        expected = model(*example).numpy()
        found = next(iter(runtime(feeds).values()))
        difference = np.abs(found - expected).max() / np.abs(expected).max()
        if not difference < MAX_DIFFERENCE:
            raise SystemExit(f"{name}: the outputs differ by {difference:.1e} of the largest value")
        for _ in range(2):
            model(*example)
            runtime(feeds)
        sides = {"eager": lambda: time_wall(lambda: model(*example)), "ours": lambda: time_wall(lambda: runtime(feeds))}
        times = run_rounds(sides, rounds)
    return Comparison(f"a call of {name} ({precision})", "PyTorch eager", times["ours"], times["eager"], MAX_SLOWDOWN)


def count_bytes(var: Any, precision: str) -> int:
    """What a variable takes as the runtime keeps it: all but int64 and uint32 integers in 32 bits."""
    size = math.prod(int(extent) for extent in var.shape)
    if types.is_bool(var.dtype):
        return size
    if types.is_float(var.dtype):
        half = precision == "float16" and var.dtype == types.fp16
        return size * (8 if precision == "float64" else 2 if half else 4)
    return size * (8 if types.builtin_to_string(var.dtype) in ("int64", "uint64", "uint32") else 4)


def find_largest_live_set(function: Any, precision: str) -> int:
    """Of a function without nested blocks."""
    ops = [op for op in function.operations if op.op_type != "const"]
    last = dict.fromkeys(function.inputs.values(), 0)
    for index, op in enumerate(ops):
        last |= dict.fromkeys(op.outputs, index)
        for given in op.inputs.values():
            last |= {var: index for var in (given if isinstance(given, (list, tuple)) else [given]) if var in last}
    last |= dict.fromkeys(function.outputs, len(ops))
    live, largest = list(function.inputs.values()), 0
    for index, op in enumerate(ops):
        live += op.outputs
        largest = max(largest, sum(count_bytes(var, precision) for var in live))
        live = [var for var in live if last[var] > index]
    return largest


def count_constant_bytes(function: Any, precision: str) -> int:
    """Bytes of all constants in the computing dtype."""
    constants = [op.outputs[0] for op in function.operations if op.op_type == "const"]
    wide = "float64" if precision == "float64" else "float32"
    return sum(count_bytes(var, wide) for var in constants if isinstance(var.val, np.ndarray))


def measure_allocated(call: Any) -> int:
    """The most that torch's CPU allocator held at once for `call`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()
    steps = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return int(np.cumsum([size for _, size in steps]).max())


def read_resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure_resident_growth(call: Any) -> int | None:
    """By how many bytes `call` raised the resident memory at most."""
    if not sys.platform.startswith("linux"):
        return None
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = read_resident_bytes("VmRSS")
    call()
    return read_resident_bytes("VmHWM") - before


def measure_in_process(source: str, name: str, precision: str) -> dict[str, Any]:
    """What a fresh process finds for one program, in bytes."""
    Runtime(make_small_program())({"x": np.ones((1, 8, 32, 32), np.float32)})
    program = make_chain_program() if source == "chain" else ane.load(source).program
    function = program.functions["main"]
    generator = np.random.default_rng(0)
    feeds = {name: generator.standard_normal(tuple(var.shape), np.float32) if types.is_float(var.dtype) else
             np.zeros(tuple(var.shape), np.int32) for name, var in function.inputs.items()}
    runtime = Runtime(program, precision=precision)
    found: dict[str, Any] = {"grown": measure_resident_growth(lambda: [runtime(feeds) for _ in range(2)])}
    found["allocated"] = max(0, measure_allocated(lambda: runtime(feeds)) - UNCOUNTED_BYTES)
    if source != "chain":
        model, example = make_model(name)
        with torch.inference_mode():
            found["eager"] = measure_allocated(lambda: model(*example))
    return found | {
        "live": find_largest_live_set(function, precision),
        "weights": count_constant_bytes(function, precision),
    }


def compare_memory(name: str, source: str, precision: str) -> Iterator[Comparison]:
    """What a process of its own finds."""
    show_progress(f"memory of {name}")
    command = [sys.executable, "-m", "tests.lab.benchmarks.bench_runtime", "--inside", source, name, precision]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = {key: value and value / 1e6 for key, value in json.loads(done.stdout.splitlines()[-1]).items()}
    held = f"memory of a call of {name}"
    if "eager" in found:
        yield Comparison(held, "PyTorch eager", [found["allocated"]], [found["eager"]], unit="MB")
    yield Comparison(held, "its largest live set", [found["allocated"]], [found["live"]], MAX_LIVE_SETS, "MB")
    if found["grown"] is not None:
        allowed = found["weights"] + MAX_LIVE_SETS * found["live"] + HELD_BACK_MEGABYTES
        yield Comparison(f"growth of the process for {name}", f"weights, 1.5 live sets, {HELD_BACK_MEGABYTES} MB",
                         [found["grown"]], [allowed], 1.0, "MB")


def measure_runtime(options: argparse.Namespace) -> Iterator[Comparison]:
    warnings.filterwarnings("ignore")
    yield from measure_op_overheads(options.rounds)
    if not options.quick:
        yield from compare_memory("1,000 elementwise ops", "chain", options.precision)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models.split(","):
            path = convert_and_save(name, Path(folder))
            yield compare_calls(name, path, options.precision, options.rounds)
            if not options.quick:
                yield from compare_memory(name, str(path), options.precision)


BENCHMARK = Benchmark("runtime", measure_runtime, {
    "rounds": (9, 3), "models": (
        "resnet50,resnet50-batch4,vit-b,bert-base,bert-base@iOS18,whisper-encoder,whisper-encoder@iOS18,llama-block,"
        "encoder", "encoder-small"),
    "precision": ("float32", "float32")})

if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        print(json.dumps(measure_in_process(*sys.argv[2:])))
    else:
        sys.exit(BENCHMARK.main())
