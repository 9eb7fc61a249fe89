"""A sample of coremltools' own op tests, at least one case of each test function."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.lab.versions.needs import coremltools_from

from . import explained
from .__main__ import ROOT, SUITES
from .compare import compare_results
from .explained import EXPLAINED

for module in ("PIL", "scipy"):
    pytest.importorskip(module, reason="coremltools' own tests need it")


class SampleRun(NamedTuple):
    """A run of `python -m tests.lab.upstream`, and the file of its results."""

    done: subprocess.CompletedProcess[str]
    results: Path


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SampleRun]:
    """Runs one case in so many of a suite, once for all tests."""
    @functools.cache
    def sample(suite: str, one_in: int, *options: str) -> SampleRun:
        results = tmp_path_factory.mktemp(suite) / "results.jsonl"
        jobs = [] if suite != "stateful" else ["--jobs", "1"]  # it takes less time than a process to start
        command = [sys.executable, "-m", "tests.lab.upstream", "--suite", suite, "--one-in", str(one_in), "--results",
                   str(results), *jobs, *options]
        return SampleRun(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False), results)
    return sample


@pytest.mark.slow
@pytest.mark.parametrize("suite, one_in, least", [
    ("mil", 20, 500), ("torch", 20, 400), ("stateful", 10, 8)])
def test_a_sample_of_each_suite(sampled: Callable[..., SampleRun], suite: str, one_in: int, least: int) -> None:
    done, _ = sampled(suite, one_in)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = int(done.stdout.split(" came to a prediction: ")[1].split(" passed")[0])
    assert passed >= least, done.stdout


@coremltools_from("9.0", "has other tests of its own; which of them look at the host's ops is said of 9.0's")
@pytest.mark.slow
@pytest.mark.parametrize("suite, one_in", [("torch", 20), ("stateful", 10)])
def test_with_the_patches_no_less_passes(
    sampled: Callable[..., SampleRun], suite: str, one_in: int, capsys: pytest.CaptureFixture[str]
) -> None:
    done, patched = sampled(suite, one_in, "--patched")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert compare_results(sampled(suite, one_in).results, patched) == 0, capsys.readouterr().out


def test_every_explanation_gives_a_reason() -> None:
    for entry in EXPLAINED:
        assert entry.suite in (*SUITES, "patched") and len(entry.reason) > 40, entry


def _write_results(path: Path, **outcomes: str) -> Path:
    lines = [{"case": case, "outcome": outcome, "reached": 1, "seconds": 0.1, "message": "why"}
             for case, outcome in outcomes.items()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_two_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = _write_results(tmp_path / "one", both="passed", lost="passed", gone="passed", won="failed", neither="skipped")
    other = _write_results(tmp_path / "other", both="passed", lost="failed", won="passed", neither="failed")
    assert compare_results(one, other) == 2
    printed = capsys.readouterr().out
    assert f"passed in {one} only: 2\n  gone: did not run in the other\n  lost: failed: 'why' in the other" in printed
    assert f"passed in {other} only: 1\n  won: failed: 'why' in the other" in printed
    assert compare_results(one, one) == 0


def test_what_is_explained_of_the_patches_counts_with_them_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = explained.ExplainedFailure("patched", "lost", "another op, the same values")
    monkeypatch.setattr(explained, "EXPLAINED", (entry,))
    one, other = _write_results(tmp_path / "one", lost="passed"), _write_results(tmp_path / "other", lost="failed")
    assert compare_results(one, other) == 0
    assert "lost: failed: 'why' in the other (explained: another op, the same values)" in capsys.readouterr().out
    assert explained.find_explanation("lost") is None and explained.find_explanation("lost", patched=True)
