"""What rewriting a large package costs, side by side with `cp -r` and a bare `import coremltools`.

    python -m tests.benchmarks.bench_package [--gigabytes 1.0] [--runs 3]

Prints wall times and peak memory of whole processes (the median of the runs), and the two bounds the project holds
itself to: wall time without proof at most twice the bare import plus 1.5 times the copy, and at most 500 MB of memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def measured(command: list[str]) -> tuple[float, float]:
    """Wall seconds and peak resident MB of one child process."""
    started = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {child.returncode}")
    return seconds, usage.ru_maxrss / (1024 if sys.platform == "linux" else 1024**2)


def median(command: list[str], runs: int, clean: Path | None = None) -> tuple[float, float]:
    results = []
    for _ in range(runs):
        if clean is not None:
            shutil.rmtree(clean, ignore_errors=True)
        os.sync()  # what an earlier run left to write must not slow this one
        results.append(measured(command))
    return statistics.median(each[0] for each in results), max(each[1] for each in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in.mlpackage"), Path(folder, "out.mlpackage")
        subprocess.run([sys.executable, "-m", "tests.benchmarks.make_package", str(source), "--gigabytes",
                        str(arguments.gigabytes)], check=True)
        bare, _ = median([sys.executable, "-c", "import coremltools"], arguments.runs)
        copy, _ = median(["cp", "-r", str(source), str(target)], arguments.runs, target)
        command = [sys.executable, "-m", "mil_ane_passes", "rewrite", str(source), "-o", str(target), "--no-verify"]
        ours, memory = median(command, arguments.runs, target)
    bound = 2 * bare + 1.5 * copy
    print(f"import coremltools  {bare:6.2f} s\ncp -r               {copy:6.2f} s")
    print(f"rewrite             {ours:6.2f} s  of {bound:.2f} s allowed ({ours / bound:.0%})")
    print(f"peak memory         {memory:6.0f} MB of 500 MB allowed")
    sys.exit(ours > bound or memory > 500)


if __name__ == "__main__":
    main()
