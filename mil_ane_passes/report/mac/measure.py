"""Measure the packages next to this file with Core ML, on a Mac.

    pip install coremltools==9.0        (it brings numpy; models with images also need: pip install pillow)
    python measure.py                   (Python 3.9 or later; writes result.json beside this file)

For each package and function it loads the model with CPU_ONLY, CPU_AND_NE and ALL, predicts on each feed, compares with
CPU_ONLY and with the expected outputs, times predictions, and reads the compute plan. Send result.json back.

The authors of this script had no Mac and never ran it on one; it was tested against stubs of the classes that exist on
a Mac only. So each step is independent: a step that fails is written to result.json as text, and the others still run.
If Core ML crashes or hangs, "doing" in result.json names the step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

UNITS = ("CPU_ONLY", "CPU_AND_NE", "ALL")
DEVICES = {"MLCPUComputeDevice": "cpu", "MLGPUComputeDevice": "gpu", "MLNeuralEngineComputeDevice": "ane",
           "NoneType": None}
MACHINE_QUERIES = {
    "model": "sysctl -n hw.model",
    "chip": "sysctl -n machdep.cpu.brand_string",
    "memory_bytes": "sysctl -n hw.memsize",
    "macos": "sw_vers -productVersion",
    "build": "sw_vers -buildVersion",
}
Json = dict[str, Any]


def escape_unprintable(text: str) -> str:
    """Return `text` on one line, without control characters for the terminal: names come from the model."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class Recorder:
    """The result as it is built: every step is guarded, named before it starts, and saved when it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "result.json"
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.result: Json = {"schema": 1, "made_by": None, "created": now, "complete": False, "doing": "",
                             "machine": {}, "problems": [], "packages": {}, "verdict": []}

    def step(self, name: str, action: Callable[..., Any], *given: Any) -> Any:
        """Run `action` and return its result; None when it failed, with the error added to the problems."""
        print(escape_unprintable(f"... {name}"), flush=True)
        self.result["doing"] = name
        self.save()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", RuntimeWarning)
            try:
                found = action(*given)
            except Exception as error:
                self.problem(name, f"{type(error).__name__}: {error}")
                found = None
        for each in told:
            if issubclass(each.category, RuntimeWarning):
                self.problem(name, f"warning: {each.message}")
        self.result["doing"] = ""
        self.save()
        return found

    def problem(self, where: str, text: str) -> None:
        print(escape_unprintable(f"    problem: {text}"), flush=True)
        self.result["problems"].append({"where": where, "problem": text})

    def save(self) -> None:
        """Write the file completely or not at all."""
        temporary = self.out.with_suffix(".tmp")
        temporary.write_text(json.dumps(to_json_value(self.result), indent=1, allow_nan=False), encoding="utf-8")
        os.replace(temporary, self.out)

    def arrays(self, name: str | None) -> Json:
        if name is None:
            return {}
        with np.load(self.folder / name, allow_pickle=False) as archive:
            return {each: archive[each] for each in archive.files}

    def given(self, feed: Json, images: list[str]) -> tuple[Json, Json]:
        """Read the inputs in the form that `predict` accepts (pixels become images), and the initial states."""
        inputs = self.arrays(feed["inputs"])
        if images:
            from PIL import Image
            inputs.update({name: Image.fromarray(inputs[name]) for name in images})
        return inputs, self.arrays(feed["states"])

    def judge(self, feed: Json, found: Json, cpu: Json | None, share: float) -> list[Json]:
        rows = [row for each in feed["references"]
                for row in compare_outputs(each["name"], self.arrays(each["file"]), found, share)]
        return rows + ([] if cpu is None else compare_outputs("CPU_ONLY", cpu, found, share))

    def package(self, ct: Any, package: Json, runs: int) -> None:
        report: Json = {"path": package["path"], "tolerance": package["tolerance"], "functions": {}, "plans": {}}
        self.result["packages"][package["name"]] = report
        for function in package["functions"]:
            if function["skipped"]:
                self.problem(f"{package['name']}, {function['name']}", f"not predicted: {function['skipped']}")
                continue
            by_cpu: dict[str, Json] = {}
            units_of: Json = {}
            report["functions"][function["name"]] = {"units": units_of}
            for units in UNITS:
                where = f"{package['name']}, {function['name']}, {units}"
                begun = time.perf_counter()
                model = self.step(
                    f"load {where}", load_model, ct, self.folder / package["path"], units, function["load_as"]
                )
                if model is not None:
                    mine: Json = {"load_seconds": time.perf_counter() - begun, "feeds": {}, "timing": None}
                    units_of[units] = mine
                    for feed in function["feeds"]:
                        self.feed(model, feed, where, mine, by_cpu, function["images"], package["tolerance"], runs)
        for units in UNITS[1:]:
            found = self.step(
                f"compute plan of {package['name']}, {units}",
                read_compute_plan,
                ct,
                self.folder / package["path"],
                units,
                package["functions"][0]["load_as"],
            )
            if found is not None:
                report["plans"][units] = found

    def feed(self, model: Any, feed: Json, where: str, mine: Json, by_cpu: Json, images: list[str], share: float,
             runs: int) -> None:
        """Predict on one feed, compare, and time the first one; outputs of CPU_ONLY are kept in `by_cpu`."""
        label = feed["label"]
        given = self.step(f"read the feed {label}", self.given, feed, images)
        found = given and self.step(f"predict {where}, {label}", run_prediction, model, *given)
        if not found:
            return
        if where.endswith("CPU_ONLY"):
            by_cpu[label] = found
        cpu = None if by_cpu.get(label) is found else by_cpu.get(label)
        mine["feeds"][label] = self.step(f"compare {where}, {label}", self.judge, feed, found, cpu, share) or []
        if mine["timing"] is None:
            mine["timing"] = self.step(f"time {where}", time_predictions, model, *given, runs)


def to_json_value(value: Any) -> Any:
    """Convert a value to JSON: numbers that JSON cannot represent become "nan", "inf" and "-inf"."""
    if isinstance(value, dict):
        return {str(key): to_json_value(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(each) for each in value]
    if isinstance(value, (bool, str, int)) or value is None:
        return value
    return float(value) if np.isfinite(value) else str(float(value))


def run_command(command: str) -> str:
    return subprocess.run(command.split(), capture_output=True, text=True, check=True, timeout=20).stdout.strip()


def get_device_name(device: Any) -> str | None:
    return DEVICES.get(type(device).__name__, type(device).__name__)


def load_model(ct: Any, path: Path, units: str, function: str | None) -> Any:
    """Load the model; `function` is None if the package has only one function."""
    named = {} if function is None else {"function_name": function}
    return ct.models.MLModel(str(path), compute_units=getattr(ct.ComputeUnit, units), **named)


def run_prediction(model: Any, inputs: Json, start: Json) -> Json:
    """Return outputs by name, and final states as `state NAME`; coremltools passes no fp16 array to Core ML."""
    if not start:
        return flatten_outputs(model.predict(dict(inputs)))
    state = model.make_state()
    for name, value in start.items():
        state.write_state(name, value.astype(np.float32) if value.dtype == np.float16 else value)
    found = flatten_outputs(model.predict(dict(inputs), state))
    return {**found, **{f"state {name}": np.asarray(state.read_state(name)) for name in start}}


def flatten_outputs(outputs: Json) -> Json:
    """Convert outputs to arrays; a classifier's probabilities become numbers and labels, in the order of the labels."""
    found: Json = {}
    for name, value in outputs.items():
        if isinstance(value, dict):
            labels = sorted(value, key=str)
            found[name] = np.asarray([value[label] for label in labels])
            found[f"{name} labels"] = np.asarray([str(label) for label in labels])
        else:
            image = value.convert("RGB") if getattr(value, "mode", None) == "RGBA" else value  # colour images are RGBA
            found[name] = np.asarray(image).astype(np.float32) if hasattr(value, "getbands") else np.asarray(value)
    return found


def compare_arrays(reference: Any, found: Any, share: float) -> Json:
    """Compare `found` with `reference`; a number passes within `share` of the largest finite value of `reference`."""
    one, two = np.atleast_1d(np.asarray(reference)), np.atleast_1d(np.asarray(found))
    if one.shape != two.shape:
        return {"passed": False, "problem": f"shape {list(two.shape)}, expected {list(one.shape)}"}
    if {one.dtype.kind, two.dtype.kind} & set("USO"):
        texts = [[str(each) for each in side.ravel()] for side in (one, two)]
        return {"passed": texts[0] == texts[1], "problem": f"found {texts[1][:8]}, expected {texts[0][:8]}"}
    a, b = one.astype(np.float64), two.astype(np.float64)
    largest = float(np.max(np.abs(a[np.isfinite(a)]), initial=0.0))
    allowed = share * largest if "f" in (one.dtype.kind, two.dtype.kind) else 0.0
    with np.errstate(all="ignore"):
        gap = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(b - a))
        gap = np.where(np.isnan(gap), np.inf, gap)
        relative = np.where(a != 0, gap / np.abs(a), 0.0)
    beyond = gap > allowed
    at = np.unravel_index(int(np.argmax(gap)), gap.shape) if gap.size else ()
    first = np.unravel_index(int(np.argmax(beyond)), gap.shape) if beyond.any() else None
    return {
        "passed": first is None, "allowed": allowed, "max_abs": float(np.max(gap, initial=0.0)),
        "max_rel": float(np.nanmax(relative, initial=0.0)), "largest": largest, "elements": int(gap.size),
        "beyond": int(np.count_nonzero(beyond)), "worst_at": [int(each) for each in at],
        "first_beyond_at": None if first is None else [int(each) for each in first],
        "reference": float(a[at]) if gap.size else None, "found": float(b[at]) if gap.size else None,
        "nan": int(np.isnan(b).sum()), "inf": int(np.isinf(b).sum()),
        "reference_nan": int(np.isnan(a).sum()), "reference_inf": int(np.isinf(a).sum())}


def compare_outputs(against: str, reference: Json, found: Json, share: float) -> list[Json]:
    lacking = {"passed": False, "problem": "no such output"}
    return [
        {
            "output": name,
            "against": against,
            **(compare_arrays(value, found[name], share) if name in found else lacking),
        }
        for name, value in reference.items()
    ]


def time_predictions(model: Any, inputs: Json, start: Json, runs: int, warm_up: int = 3) -> Json:
    ticks = [time.perf_counter()]
    for _ in range(warm_up + runs):
        run_prediction(model, inputs, start)
        ticks.append(time.perf_counter())
    spent = [(after - before) * 1e3 for before, after in zip(ticks[warm_up:], ticks[warm_up + 1:])]
    return {"median_ms": statistics.median(spent), "min_ms": min(spent), "runs": runs, "warm_up": warm_up}


def read_compute_plan(ct: Any, path: Path, units: str, function: str | None) -> Json:
    """Return the compute plan of all functions: for each op but constants, supported and preferred devices, and
    cost."""
    from coremltools.models.compute_plan import MLComputePlan

    model = load_model(ct, path, units, function)  # keep a reference: the compiled model is deleted with it
    try:
        compiled = model.get_compiled_model_path()
    except Exception:
        compiled = ct.models.utils.compile_model(str(path))
    plan = MLComputePlan.load_from_path(path=str(compiled), compute_units=getattr(ct.ComputeUnit, units))
    program = plan.model_structure.program
    if program is None:
        raise ValueError("the model is not an ML Program")
    return {"program": {"functions": {name: list(iterate_plan_ops(plan, each.block, 0))
                                      for name, each in program.functions.items()}}}


def iterate_plan_ops(plan: Any, block: Any, depth: int) -> Iterator[Json]:
    for op in block.operations:
        if op.operator_name.rpartition(".")[2] == "const":
            continue
        usage = plan.get_compute_device_usage_for_mlprogram_operation(op)
        cost = plan.get_estimated_cost_for_mlprogram_operation(op)
        yield {
            "operator": op.operator_name,
            "outputs": [each.name for each in op.outputs],
            "depth": depth,
            "preferred": None if usage is None else get_device_name(usage.preferred_compute_device),
            "supported": None if usage is None else [get_device_name(each) for each in usage.supported_compute_devices],
            "cost": None if cost is None or not np.isfinite(cost.weight) else float(cost.weight),
        }
        for inner in op.blocks:
            yield from iterate_plan_ops(plan, inner, depth + 1)


def build_verdict(packages: Json) -> list[Json]:
    """Return one entry for each package, function and choice of units."""
    return [{"package": package, "function": function, "units": units, **judge_feeds(mine["feeds"])}
            for package, report in packages.items() for function, measured in report["functions"].items()
            for units, mine in measured["units"].items()]


def judge_feeds(feeds: Json) -> Json:
    rows = [(feed, row) for feed, found in feeds.items() for row in found]
    bad = [f"{row['output']} on {feed} against {row['against']}: " + (row.get("problem") or (
        f"off by {row['max_abs']:.4g} at {row['worst_at']}, {row['beyond']} of {row['elements']} elements beyond "
        f"{row['allowed']:.4g}")) for feed, row in rows if not row["passed"]]
    return {"passed": not bad if rows else None, "says": "; ".join(bad) or ("agrees" if rows else "nothing compared")}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure what Core ML does with the packages beside this file.")
    parser.add_argument("--runs", type=int, default=20, help="timed predictions for each compute unit setting "
                                                             "(default: 20)")
    given = parser.parse_args(arguments)
    import coremltools as ct

    recorder = Recorder(Path(__file__).resolve().parent)
    manifest = json.loads((recorder.folder / "manifest.json").read_text(encoding="utf-8"))
    recorder.result["made_by"] = manifest["made_by"]
    recorder.result["machine"] = {
        "python": platform.python_version(),
        "coremltools": str(ct.__version__),
        "numpy": np.__version__,
        "system": platform.system(),
        **{name: recorder.step(asked, run_command, asked) for name, asked in MACHINE_QUERIES.items()},
    }
    for package in manifest["packages"]:
        recorder.package(ct, package, max(1, given.runs))
        recorder.result["verdict"] = build_verdict(recorder.result["packages"])
    recorder.result["complete"] = True
    recorder.save()
    for line in recorder.result["verdict"]:
        print(escape_unprintable(f"{line['package']}, {line['function']}, {line['units']}: {line['says']}"))
    print(f"{len(recorder.result['problems'])} problems; send back {recorder.out}")
    return 0


if __name__ == "__main__":
    if sys.platform != "darwin":
        sys.exit(f"measure.py: found {platform.system()}; expected macOS: Core ML predicts there only. Copy this "
                 "folder to a Mac and run it there")
    sys.exit(main())
