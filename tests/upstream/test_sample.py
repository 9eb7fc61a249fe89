"""A sample of coremltools' own op tests, at least one case of each test function."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .__main__ import ROOT
from .explained import EXPLAINED

for module in ("PIL", "scipy"):
    pytest.importorskip(module, reason="coremltools' own tests need it")


@pytest.mark.parametrize("suite, one_in, least", [("mil", 20, 500), ("torch", 20, 400)])
def test_a_sample_of_each_suite(suite: str, one_in: int, least: int) -> None:
    command = [sys.executable, "-m", "tests.upstream", "--suite", suite, "--one-in", str(one_in)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = int(done.stdout.split(" came to a prediction: ")[1].split(" passed")[0])
    assert passed >= least, done.stdout


def test_every_explanation_gives_a_reason() -> None:
    for entry in EXPLAINED:
        assert entry.suite in ("mil", "torch") and len(entry.reason) > 40, entry
