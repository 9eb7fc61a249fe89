"""Runs coremltools' own op tests on the reference runtime and says what came of them.

    python -m tests.lab.upstream                 # all: mil/ops/tests, test_torch_ops.py and the stateful models
    python -m tests.lab.upstream --suite mil     # or torch, or stateful
    python -m tests.lab.upstream --one-in 20     # a sample of each test function's cases
    python -m tests.lab.upstream --suite torch --patched --results patched.jsonl     # with our torch frontend
    python -m tests.lab.upstream --compare host.jsonl patched.jsonl              # which cases pass in one of them only
    python -m tests.lab.upstream --record        # all, and keep the counts that the README states

Exit code 0 when every case that came to a prediction passed or is explained in `explained.py`, else 1; of --compare, 0
when nothing passes in the first that does not in the second.
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import coremltools

from tests.lab.records import write_record

from .compare import compare_results
from .explained import EXPLAINED, find_explanation

_MIL = Path(coremltools.__file__).parent / "converters" / "mil"
_TORCH = _MIL / "frontend" / "torch" / "test"
SUITES = {"mil": _MIL / "mil" / "ops" / "tests", "torch": _TORCH / "test_torch_ops.py",
          "stateful": _TORCH / "test_torch_stateful_model.py"}
ROOT = Path(__file__).parents[3]
_SHARDS_PER_JOB = 8
"How many processes a job takes for all cases: the host keeps what it converts, and each case costs more than the last."
COUNTS = Path(__file__).with_name("counts.json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.upstream", description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=("all", *SUITES), default="all")
    parser.add_argument("--one-in", type=int, default=1, help="a sample: one case in so many of each test function")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one for each core)")
    parser.add_argument("--limit", type=int, default=300, help="seconds after which one case has failed (default 300)")
    parser.add_argument("--record", action="store_true", help="write counts.json, from which the README is generated")
    parser.add_argument("--results", type=Path, help="where to keep the JSON lines, one for each case")
    parser.add_argument("--patched", action="store_true", help="install the patches of our torch frontend")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"), help="two files of --results, no run")
    arguments = parser.parse_args()
    if arguments.compare:
        return 1 if compare_results(*arguments.compare) else 0
    if arguments.record and (arguments.suite, arguments.one_in, arguments.patched) != ("all", 1, False):
        parser.error("--record keeps the counts of everything; leave out --suite, --one-in and --patched")
    good, counted = True, {}
    for suite in SUITES if arguments.suite == "all" else [arguments.suite]:
        started = time.perf_counter()
        results, broken = run_suite(suite, arguments)
        counts = count_cases(results, arguments.patched)
        counted[suite] = asdict(counts)
        report_suite(suite, results, counts, arguments.patched, time.perf_counter() - started)
        if arguments.one_in == 1:
            report_unused(suite, results)
        good = good and not broken and counts.reached > 0 and counts.unexplained == 0
    if arguments.record and good:
        write_record(COUNTS, {"versions": get_versions(), **counted}, indent=2)
    return 0 if good else 1


@dataclass(frozen=True)
class CaseCounts:
    """How many cases did what. All have an ML Program backend, or none at all."""

    cases: int
    reached: int
    "came to a prediction"
    passed: int
    failed: int
    unexplained: int
    "of those that failed"
    own: int
    "came to a prediction, and are expected to fail, or skipped, by the tests themselves"
    not_converted: int
    "failed before any prediction: the host's conversion on these versions"

    @property
    def share(self) -> float:
        """Per cent of the judged cases that passed."""
        return 100 * self.passed / (self.passed + self.failed)


def count_cases(results: list[dict[str, Any]], patched: bool = False) -> CaseCounts:
    reached = [each for each in results if each["reached"]]
    outcomes = Counter(each["outcome"] for each in reached)
    return CaseCounts(
        cases=len(results),
        reached=len(reached),
        passed=outcomes["passed"],
        failed=outcomes["failed"],
        unexplained=sum(
            find_explanation(each["case"], patched) is None for each in reached if each["outcome"] == "failed"
        ),
        own=outcomes["skipped"],
        not_converted=sum(each["outcome"] == "failed" for each in results if not each["reached"]),
    )


def get_versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("coremltools", "torch", "numpy")}


def run_suite(suite: str, arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """The results of all shards, `arguments.jobs` of them at a time, and whether one of them broke."""
    shards = arguments.jobs * (_SHARDS_PER_JOB if arguments.one_in == 1 and suite != "stateful" else 1)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        files = [Path(folder) / f"{index}.jsonl" for index in range(shards)]
        commands = [_build_command(suite, f"{index}/{shards}", file, arguments) for index, file in enumerate(files)]
        done = list(pool.map(lambda command, file: _run_shard(command, file, arguments.results), commands, files))
        lines = "".join(file.read_text() for file in files if file.exists())
    broken = [each for each in done if each.returncode not in (0, 1)]
    for each in broken:
        print(each.stdout[-3000:])
    return [json.loads(line) for line in lines.splitlines()], bool(broken)


def _run_shard(command: list[str], file: Path, results: Path | None) -> subprocess.CompletedProcess[str]:
    """Run one shard; its lines are kept as soon as it is done, since the whole takes long."""
    done = _run_command(command)
    if results is not None and file.exists():
        with open(results, "a", encoding="utf-8") as kept:
            kept.write(file.read_text())
    return done


def _run_command(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, check=False)


def _build_command(suite: str, shard: str, file: Path, arguments: argparse.Namespace) -> list[str]:
    return [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.lab.upstream.plugin",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir",
        str(_MIL),
        "-q",
        "--tb=no",
        "--disable-warnings",
        "--shard",
        shard,
        "--one-in",
        str(arguments.one_in),
        "--limit",
        str(arguments.limit),
        "--results",
        str(file),
        *(["--patched"] if arguments.patched else []),
        str(SUITES[suite]),
    ]


def report_suite(suite: str, results: list[dict[str, Any]], counts: CaseCounts, patched: bool, seconds: float) -> None:
    """Print the counts, what is unexplained, and the slowest."""
    print(f"{suite}: {counts.cases} cases in {seconds:.0f} s; {counts.reached} came to a prediction: {counts.passed} "
          f"passed, {counts.failed} failed ({counts.failed - counts.unexplained} of them explained), {counts.own} are "
          f"skipped or expected to fail by the tests themselves; {counts.not_converted} fail before, in the conversion")
    if counts.passed:
        print(f"{suite}: {counts.share:.2f} % of those judged pass")
    for each in results:
        if each["reached"] and each["outcome"] == "failed" and find_explanation(each["case"], patched) is None:
            print(f"  UNEXPLAINED {each['case']}: {each['message'][:200]!r}")
    slowest = sorted(results, key=lambda each: -each["seconds"])[:10]
    print(f"{suite}: slowest: " + "; ".join(f"{each['seconds']:.0f} s {each['case'][:90]}" for each in slowest))


def report_unused(suite: str, results: list[dict[str, Any]]) -> None:
    """Explanations that no failure needs any more."""
    failed = [each["case"] for each in results if each["outcome"] == "failed"]
    for entry in EXPLAINED:
        if entry.suite == suite and not any(entry.covers(case) for case in failed):
            print(f"  NEVER NEEDED {entry.pattern}: {entry.reason}")


if __name__ == "__main__":
    sys.exit(main())
