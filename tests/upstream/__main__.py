"""Runs coremltools' own op tests on the reference runtime and says what came of them.

    python -m tests.upstream                 # all: mil/ops/tests and test_torch_ops.py, on every core
    python -m tests.upstream --suite mil     # or torch
    python -m tests.upstream --one-in 20     # a sample of each test function's cases

Exit code 0 when every case that came to a prediction passed or is explained in `explained.py`, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import coremltools

from .explained import EXPLAINED, explanation

_MIL = Path(coremltools.__file__).parent / "converters" / "mil"
SUITES = {"mil": _MIL / "mil" / "ops" / "tests", "torch": _MIL / "frontend" / "torch" / "test" / "test_torch_ops.py"}
ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=("all", *SUITES), default="all")
    parser.add_argument("--one-in", type=int, default=1, help="a sample: one case in so many of each test function")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one for each core)")
    parser.add_argument("--limit", type=int, default=300, help="seconds after which one case has failed (default 300)")
    parser.add_argument("--results", type=Path, help="where to keep the JSON lines, one for each case")
    arguments = parser.parse_args()
    good = True
    for suite in SUITES if arguments.suite == "all" else [arguments.suite]:
        started = time.perf_counter()
        results, broken = run(suite, arguments)
        good = summarise(suite, results, time.perf_counter() - started, arguments.one_in == 1) and good and not broken
    return 0 if good else 1


def run(suite: str, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """One pytest process for each job; their results, and whether one of them broke."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{index}.jsonl" for index in range(arguments.jobs)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(_command(suite, index, file, arguments), cwd=ROOT, env=environment,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for index, file in enumerate(files)]
        outputs = [process.communicate()[0] for process in processes]
        broken = [text for process, text in zip(processes, outputs) if process.returncode not in (0, 1)]
        for text in broken:
            print(text[-3000:])
        lines = "".join(file.read_text() for file in files if file.exists())
    if arguments.results is not None:
        with open(arguments.results, "a", encoding="utf-8") as file:
            file.write(lines)
    return [json.loads(line) for line in lines.splitlines()], bool(broken)


def _command(suite: str, index: int, file: Path, arguments: argparse.Namespace) -> list[str]:
    return [sys.executable, "-m", "pytest", "-p", "tests.upstream.plugin", "-p", "no:cacheprovider", "-c", os.devnull,
            "--rootdir", str(_MIL), "-q", "--tb=no", "--disable-warnings", "--shard", f"{index}/{arguments.jobs}",
            "--one-in", str(arguments.one_in), "--limit", str(arguments.limit), "--results", str(file),
            str(SUITES[suite])]


def summarise(suite: str, results: list[dict[str, Any]], seconds: float, whole: bool) -> bool:
    """Print the counts; True when nothing is unexplained."""
    reached = [each for each in results if each["reached"]]
    failed = [each for each in reached if each["outcome"] == "failed"]
    strange = [each for each in failed if explanation(each["case"]) is None]
    passed = [each for each in reached if each["outcome"] == "passed"]
    own = len(reached) - len(failed) - len(passed)
    before = Counter(each["outcome"] for each in results if not each["reached"])
    judged = len(passed) + len(failed)
    share = 100 * len(passed) / judged if judged else 0.0
    print(f"{suite}: {len(results)} cases with an ML Program backend in {seconds:.0f} s; {len(reached)} came to a "
          f"prediction: {len(passed)} passed, {len(failed)} failed ({len(failed) - len(strange)} of them explained), "
          f"{own} are expected by the tests themselves to fail on a Mac = {share:.2f} % passed")
    print(f"{suite}: before any prediction: {before['passed']} passed, {before['skipped']} skipped, "
          f"{before['failed']} failed (the host's conversion on these versions)")
    for each in strange:
        print(f"  UNEXPLAINED {each['case']}: {each['message'][:200]!r}")
    if whole:
        unused = [entry for entry in EXPLAINED if entry.suite == suite and not any(
            entry.covers(each["case"]) for each in failed)]
        for entry in unused:
            print(f"  NEVER NEEDED {entry.pattern}: {entry.reason}")
    slowest = sorted(results, key=lambda each: -each["seconds"])[:10]
    print(f"{suite}: slowest: " + "; ".join(f"{each['seconds']:.0f} s {each['case'][:90]}" for each in slowest))
    return bool(judged) and not strange


if __name__ == "__main__":
    sys.exit(main())
