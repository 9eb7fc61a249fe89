"""The reference runtime beside PyTorch eager: time of a call, and memory during one.

    python -m tests.benchmarks.bench_runtime [--runs 9] [--models resnet50,encoder] [--precision float32]

Models with random weights are converted to fp32 packages and loaded with their weights mapped; eager runs the same
model in the same process with the same number of threads, call by call in turns. The bounds, at float32: the median
call takes at most 1.3 times eager's, and holds at most the weights (counted in the computing dtype) and 1.5 times the
largest live set. A live set is the bytes, at the dtypes they are kept in, of all values other than constants that an op
reads, gives, or leaves for later ones; it is computed from the program's shapes alone.

Two measures of memory, both in a process of its own. What torch's CPU allocator held at most during a call, above what
it held before (the profiler's record of every allocation; mapped weights are not among them) must be within the bound.
The growth of the process's resident memory over its first two calls, after a small program has loaded the libraries
(Linux only; it counts the pages of mapped weights), may exceed it by 64 MB: it does so by tens of MB, as does eager's.

`--half` times an fp16 package at float16 too, for which nothing is promised.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import torch
from coremltools.converters.mil.mil import types

import mil_ane_passes as ane
from mil_ane_passes.runtime import Runtime
from tests.benchmarks.make_models import MODELS, chain, small

SLOWER, LARGER = 1.3, 1.5
#: MB of resident memory beyond the bound
HELD_BACK = 64


def package(name: str, precision: Any, folder: Path) -> Path:
    """The converted model, saved."""
    model, example = MODELS[name]()
    # The fused kernels of torch's own layers cannot be converted; eager uses them all the same.
    torch.backends.mha.set_fastpath_enabled(False)
    exported = torch.export.export(model, example).run_decompositions({})
    torch.backends.mha.set_fastpath_enabled(True)
    converted = ct.convert(exported, compute_precision=precision, minimum_deployment_target=ct.target.iOS17,
                           skip_model_load=True)
    path = folder / f"{name}.mlpackage"
    converted.save(str(path))
    return path


def timed(call: Any) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def compare(name: str, path: Path, precision: str, runs: int) -> float:
    """The median of our times by the median of eager's."""
    model, example = MODELS[name]()
    program = ane.load(path).program
    runtime = Runtime(program, precision=precision)
    feeds = {key: value.numpy() for key, value in zip(program.functions["main"].inputs, example)}
    with torch.inference_mode():
        expected = model(*example).numpy()
        found = next(iter(runtime(feeds).values()))
        for _ in range(2):
            model(*example)
            runtime(feeds)
        pairs = [(timed(lambda: model(*example)), timed(lambda: runtime(feeds))) for _ in range(runs)]
    eager, ours = (statistics.median(each) for each in zip(*pairs))
    difference = np.abs(found - expected).max() / np.abs(expected).max()
    print(f"{name}, {precision}, {torch.get_num_threads()} threads: eager {eager * 1e3:.1f} ms, "
          f"ours {ours * 1e3:.1f} ms, {ours / eager:.2f} times; "
          f"largest difference {difference:.1e} of the largest value")
    return ours / eager


def nbytes(var: Any, precision: str) -> int:
    """What a variable takes as the runtime keeps it: all but int64 and uint32 integers in 32 bits."""
    size = math.prod(int(extent) for extent in var.shape)
    if types.is_bool(var.dtype):
        return size
    if types.is_float(var.dtype):
        half = precision == "float16" and var.dtype == types.fp16
        return size * (8 if precision == "float64" else 2 if half else 4)
    return size * (8 if types.builtin_to_string(var.dtype) in ("int64", "uint64", "uint32") else 4)


def largest_live_set(function: Any, precision: str) -> int:
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
        largest = max(largest, sum(nbytes(var, precision) for var in live))
        live = [var for var in live if last[var] > index]
    return largest


def weights(function: Any, precision: str) -> int:
    """Bytes of all constants in the computing dtype."""
    constants = [op.outputs[0] for op in function.operations if op.op_type == "const"]
    wide = "float64" if precision == "float64" else "float32"
    return sum(nbytes(var, wide) for var in constants if isinstance(var.val, np.ndarray))


def allocated(call: Any) -> int:
    """The most that torch's CPU allocator held at once for `call`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()
    steps = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return int(np.cumsum([size for _, size in steps]).max())


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def grown(call: Any) -> int | None:
    """By how many bytes `call` raised the resident memory at most."""
    if not sys.platform.startswith("linux"):
        return None
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def measure(source: str, precision: str) -> dict[str, Any]:
    """What a fresh process finds for one program."""
    Runtime(small())({"x": np.ones((1, 8, 32, 32), np.float32)})
    program = chain() if source == "chain" else ane.load(source).program
    function = program.functions["main"]
    generator = np.random.default_rng(0)
    feeds = {name: generator.standard_normal(tuple(var.shape), np.float32) for name, var in function.inputs.items()}
    runtime = Runtime(program, precision=precision)
    found: dict[str, Any] = {"grown": grown(lambda: [runtime(feeds) for _ in range(2)])}
    found["allocated"] = allocated(lambda: runtime(feeds))
    return found | {"live": largest_live_set(function, precision), "weights": weights(function, precision)}


def memory(name: str, source: str, precision: str) -> bool:
    """Prints what a process of its own finds; True when it is more than allowed."""
    command = [sys.executable, "-m", "tests.benchmarks.bench_runtime", "--measure", source, "--precision", precision]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = {key: value and value / 1e6 for key, value in json.loads(done.stdout.splitlines()[-1]).items()}
    allowed = found["weights"] + LARGER * found["live"]
    text = "not measured" if found["grown"] is None else f"{found['grown']:.1f} MB"
    print(f"{name}, {precision}: weights {found['weights']:.1f} MB, largest live set {found['live']:.2f} MB, allowed "
          f"{allowed:.1f} MB; allocator at most {found['allocated']:.2f} MB "
          f"({found['allocated'] / found['live']:.2f} live sets), resident memory grew by {text}")
    return bool(found["allocated"] > LARGER * found["live"] or (found["grown"] or 0) > allowed + HELD_BACK)


def main() -> None:
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--half", action="store_true", help="time fp16 packages at float16 too")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.precision)))
        return
    failed = memory("1,000 elementwise ops", "chain", arguments.precision)
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models.split(","):
            path = package(name, ct.precision.FLOAT32, Path(folder))
            failed |= memory(name, str(path), arguments.precision)
            failed |= compare(name, path, arguments.precision, arguments.runs) > SLOWER
            if arguments.half:
                path = package(name, ct.precision.FLOAT16, Path(folder))
                memory(name, str(path), "float16")
                compare(name, path, "float16", arguments.runs)
    sys.exit(failed)


if __name__ == "__main__":
    main()
