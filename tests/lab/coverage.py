"""How much of the package the fast tests run, subprocesses included, held to a bar:

    python -m tests.lab.coverage                    the fast tests, about twice as long as they take by themselves
    python -m tests.lab.coverage tests/commands -n0 part of them, to see what they miss; no bar

Says of each file what is missed, lines by their number and branches as FROM->TO. Exit codes: 0, 1 under the bar or a
test failed, 2 it could not run. What is left out of the count is in setup.cfg (coverage:report), with its reasons.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BAR = {"lines": 95.0, "branches": 90.0}
"Percent of the package's lines, and of its branches, each by itself: coverage's own bar takes them together."
OLDEST = (7, 10)
"The coverage that measures subprocesses by its settings alone."


def main(arguments: list[str]) -> int:
    problem = unfit()
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "COVERAGE_FILE": os.path.join(folder, "data")}
        failed = called(["run", "-m", "pytest", *arguments], env)
        if failed > 1:  # interrupted, wrong options, nothing collected
            return 2
        result = Path(folder, "result.json")
        if called(["combine", "--quiet"], env) or called(["json", "--quiet", "-o", str(result)], env):
            return 2
        found = json.loads(result.read_text(encoding="utf-8"))
    print("\n".join([*missed(found["files"]), summary(found["totals"])]))
    low = [] if arguments else under(found["totals"])
    print("\n".join(f"error: {each}" for each in low), end="\n" if low else "", file=sys.stderr)
    return 1 if failed or low else 0


def unfit() -> str:
    """Why nothing can be measured here, or nothing."""
    try:
        import coverage
    except ImportError:
        return "coverage is not installed; expected what the tests need: pip install 'mil-ane-passes[test]'"
    if coverage.version_info[:2] < OLDEST:
        return f"found coverage {coverage.__version__}; expected {'.'.join(map(str, OLDEST))} or newer"
    return ""


def called(arguments: list[str], env: dict[str, str]) -> int:
    return subprocess.run([sys.executable, "-m", "coverage", *arguments], cwd=ROOT, env=env, check=False).returncode


def percents(totals: dict) -> dict[str, float]:
    """Of lines and of branches; all of none is all."""
    return {
        "lines": 100 * totals["covered_lines"] / (totals["num_statements"] or 1),
        "branches": 100 * totals["covered_branches"] / totals["num_branches"] if totals["num_branches"] else 100.0,
    }


def summary(totals: dict) -> str:
    share = percents(totals)
    return (f"{share['lines']:.2f} % of {totals['num_statements']} lines, "
            f"{share['branches']:.2f} % of {totals['num_branches']} branches")


def under(totals: dict) -> list[str]:
    """What does not reach the bar."""
    return [f"{share:.2f} % of {kind}; expected {BAR[kind]:g} % or more"
            for kind, share in percents(totals).items() if share < BAR[kind]]


def missed(files: dict) -> list[str]:
    """One line for each file of which something is missed, most of it last; arrows to 0 or below leave the function."""
    rows = []
    for name, found in sorted(files.items(), key=lambda item: (len(item[1]["missing_lines"]), item[0])):
        lines = runs(found["missing_lines"])
        gone = set(found["missing_lines"])
        branches = [f"{start}->{end if end > 0 else 'exit'}"
                    for start, end in found["missing_branches"] if start not in gone and end not in gone]
        if lines or branches:
            rows.append(f"{name}: {', '.join([*lines, *branches])}")
    return rows


def runs(numbers: list[int]) -> list[str]:
    """[3, 4, 5, 9] as ["3-5", "9"]."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return [str(first) if first == last else f"{first}-{last}" for first, last in found]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
