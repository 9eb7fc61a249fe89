"""A sample of coremltools' own op tests, at least one case of each test function."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .__main__ import ROOT, SUITES
from .compare import compare
from .explained import EXPLAINED

for module in ("PIL", "scipy"):
    pytest.importorskip(module, reason="coremltools' own tests need it")


@pytest.mark.parametrize("suite, one_in, least, options", [
    ("mil", 20, 500, []), ("torch", 20, 400, []), ("torch", 20, 400, ["--patched"]),
    ("stateful", 10, 8, []), ("stateful", 10, 8, ["--patched"]),
])
def test_a_sample_of_each_suite(suite: str, one_in: int, least: int, options: list[str]) -> None:
    command = [sys.executable, "-m", "tests.upstream", "--suite", suite, "--one-in", str(one_in), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = int(done.stdout.split(" came to a prediction: ")[1].split(" passed")[0])
    assert passed >= least, done.stdout


def test_every_explanation_gives_a_reason() -> None:
    for entry in EXPLAINED:
        assert entry.suite in SUITES and len(entry.reason) > 40, entry


def _results(path: Path, **outcomes: str) -> Path:
    lines = [{"case": case, "outcome": outcome, "reached": 1, "seconds": 0.1, "message": "why"}
             for case, outcome in outcomes.items()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_two_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = _results(tmp_path / "one", both="passed", lost="passed", gone="passed", won="failed", neither="skipped")
    other = _results(tmp_path / "other", both="passed", lost="failed", won="passed", neither="failed")
    assert compare(one, other) == 2
    printed = capsys.readouterr().out
    assert f"passed in {one} only: 2\n  gone: did not run in the other\n  lost: failed: 'why' in the other" in printed
    assert f"passed in {other} only: 1\n  won: failed: 'why' in the other" in printed
    assert compare(one, one) == 0
