"""Runs coremltools' own numeric tests of NeuralNetworks through `upgrade` and the reference runtime, unmodified.

    python -m tests.lab.neuralnetwork [--results FILE.jsonl] [--limit 1800] [--only EXPRESSION] [--record]

The four files of the installed wheel that build a network and compare `predict` with numpy run under `plugin.py`. A
run that is stopped goes on where it was when it is started again with the same --results: each case is one line of
that file. Exit code 0 when every case that came to a prediction passed or is explained in `explained.py`, else 1.

`MLModel.predict` upgrades at fp32, whatever the compute unit: variants for GPUs run as those for CPUs do, and variants
in half precision have weights of fp16, which upgrade keeps. In fp16 arithmetic is what `architectures.py` compares.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import coremltools

from tests.lab.records import format_table, read_record, write_record

from .explained import find_explanation

FOLDER = Path(coremltools.__file__).parent / "test" / "neural_network"
FILES = ("test_numpy_nn_layers.py", "test_nn_builder.py", "test_quantization.py", "test_simple_nn_inference.py")
ROOT = Path(__file__).parents[3]
RECORD = Path(__file__).with_name("counts.json")


def run_tests(results: Path, limit: int, only: str = "") -> int:
    """Run what has no line in `results` yet; returns pytest's exit code."""
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(FOLDER), "-p", "no:cacheprovider",
               "-p", "tests.lab.neuralnetwork.plugin", "--results", str(results), "--limit", str(limit), "-q",
               "--tb=no", "--disable-warnings", *(["-k", only] if only else []),
               *(str(FOLDER / each) for each in FILES)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=False).returncode


def read_results(results: Path) -> list[dict[str, Any]]:
    """Return the last line of each case."""
    lines = map(json.loads, results.read_text(encoding="utf-8").splitlines())
    return list({line["case"]: line for line in lines}.values())


def count_cases(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Count by file: cases, those that came to a prediction, their predictions, and what became of them."""
    counts = {}
    for name in FILES:
        own = [each for each in results if f"/{name}::" in each["case"]]
        reached = [each for each in own if each["reached"]]
        outcomes = Counter(each["outcome"] for each in reached)
        counts[name] = {
            "cases": len(own), "reached": len(reached), "predictions": sum(each["reached"] for each in own),
            "passed": outcomes["passed"], "failed": outcomes["failed"],
            "not_reached": dict(Counter(_describe(each) for each in own if not each["reached"])),
        }
    return counts


def _describe(line: dict[str, Any]) -> str:
    """Say why a case came to no prediction."""
    if line["outcome"] == "passed":
        return "they predict nothing"
    if "TensorFlow" in line["message"]:
        return "they need TensorFlow, which is not installed"
    if line["message"].startswith("XFailed") or line["outcome"] == "skipped":
        return "the tests themselves expect them to fail"
    return "they need scikit-learn, which is not installed" if "scikit-learn" in line["message"] else line["message"]


def list_failures(results: list[dict[str, Any]]) -> list[list[str]]:
    """List the cases that came to a prediction and failed, each with its reason or its message."""
    failed = [each for each in results if each["reached"] and each["outcome"] == "failed"]
    return sorted([each["case"].split("/", 1)[-1], find_explanation(each["case"]) or f"UNEXPLAINED: {each['message']}"]
                  for each in failed)


def compute_share(counts: dict[str, dict[str, Any]]) -> float:
    """Return the per cent of the cases that came to a prediction which passed."""
    reached = sum(each["passed"] + each["failed"] for each in counts.values())
    return 100 * sum(each["passed"] for each in counts.values()) / reached


def format_counts() -> str:
    """Return the table of the record, for the page."""
    record = read_record(RECORD)
    rows = []
    for name, each in record["files"].items():
        others = "; ".join(f"{count}: {why}" for why, count in each["not_reached"].items())
        rows.append([f"`{name}`", each["cases"], each["reached"], f"{each['predictions']:,}", each["passed"],
                     each["failed"], others or "-"])
    total = [sum(each[key] for each in record["files"].values()) for key in ("cases", "reached", "predictions",
                                                                             "passed", "failed")]
    rows.append(["all", total[0], total[1], f"{total[2]:,}", f"{total[3]} ({record['share']:.1f} %)", total[4], "-"])
    return format_table(["file", "test functions", "come to a prediction", "predictions", "pass", "fail",
                         "no prediction"], rows)


def format_failures() -> str:
    """Return the table of what fails, with reasons."""
    return format_table(["case", "reason"], [[f"`{case}`", why] for case, why in read_record(RECORD)["failures"]])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.neuralnetwork", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="JSON lines, one for each case; a later run goes on from there")
    parser.add_argument("--limit", type=int, default=1800, help="seconds after which a case has failed (default 1800)")
    parser.add_argument("--only", default="", help="an expression as pytest's -k takes it")
    parser.add_argument("--record", action="store_true", help="keep the counts, from which the page is generated")
    asked = parser.parse_args()
    if asked.record and asked.only:
        parser.error("--record keeps the counts of everything; leave out --only")
    with tempfile.TemporaryDirectory() as folder:
        results = asked.results or Path(folder) / "results.jsonl"
        run_tests(results.absolute(), asked.limit, asked.only)
        found = read_results(results)
    counts, failures = count_cases(found), list_failures(found)
    print(json.dumps(counts, indent=1))
    print(*(f"{case}: {why}" for case, why in failures), sep="\n")
    print(f"{compute_share(counts):.2f} % of the cases that come to a prediction pass")
    if asked.record:
        versions = {"coremltools": coremltools.__version__, "date": datetime.now(timezone.utc).date().isoformat()}
        write_record(RECORD, {**versions, "share": compute_share(counts), "files": counts, "failures": failures})
    return int(any(why.startswith("UNEXPLAINED") for _, why in failures))


if __name__ == "__main__":
    sys.exit(main())
