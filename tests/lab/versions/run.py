"""Runs the fast tests of one cell and counts what came of them."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field, replace
from pathlib import Path

from .cells import Cell, Result
from .venvs import ROOT, versions

__all__ = ["Counted", "commit", "counted", "rerun", "run"]

_OF_THE_RECORD = "tests/test_readme.py::test_the_tables_are_generated[tests/README.md-versions]"
"That the README has what is recorded, which is not so while it is being recorded."


@dataclass
class Counted:
    """What a JUnit file says: how many tests did what, and which of them failed."""

    passed: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)


def run(cell: Cell, python: Path, jobs: str, one_in: int) -> Result:
    """All fast tests, or one in so many."""
    found, started = versions(python), time.monotonic()
    seen = _pytest(python, ["-p", "tests.lab.versions.sample", "--one-in", str(one_in), "-n", jobs])
    return Result(cell.name, found["python"], found["numpy"], found["coremltools"], found["torch"], seen.passed,
                  len(seen.failures), seen.skipped, round((time.monotonic() - started) / 60, 1), one_in, commit(),
                  failures=seen.failures)


def rerun(before: Result, python: Path) -> Result:
    """What failed, once more: those that pass now count as passed. Tests that are no longer there are left out."""
    failures = [name for name in before.failures if name != _OF_THE_RECORD]
    known = _collected(python, failures) if failures else set()
    failures = [name for name in failures if name in known]
    if not failures:
        return replace(before, failed=0, failures=[], again=commit() if before.failures else before.again)
    seen = _pytest(python, ["-n", "0", *failures])
    return replace(before, passed=before.passed + seen.passed, skipped=before.skipped + seen.skipped,
                   failed=len(seen.failures), failures=seen.failures, again=commit())


def _collected(python: Path, names: list[str]) -> set[str]:
    """The names of all tests in the files of `names`."""
    files = {name.partition("::")[0] for name in names}
    command = [python, "-m", "pytest", "-o", "addopts=", "-q", "--collect-only", "-p", "no:cacheprovider", "-p",
               "no:anyio", *sorted(name for name in files if (ROOT / name).exists())]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
                          text=True, check=False)
    return {line.strip() for line in done.stdout.splitlines()}


def _pytest(python: Path, arguments: list[str]) -> Counted:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "junit.xml"
        command = [python, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={file}", "--deselect", _OF_THE_RECORD,
                   *arguments]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
        if done.returncode not in (0, 1) or not file.exists():
            raise RuntimeError(f"pytest ended with exit code {done.returncode}; expected 0 or 1")
        return counted(file)


def counted(file: Path) -> Counted:
    """The counts of a JUnit file as pytest writes it; a test whose clean-up fails, too, has failed once."""
    seen, passed, skipped = set(), 0, 0
    failures = {}
    for case in ET.parse(file).iter("testcase"):
        name = _node(case.get("classname", ""), case.get("name", ""))
        if case.find("failure") is not None or case.find("error") is not None:
            failures[name] = True
        elif case.find("skipped") is not None:
            skipped += 1
        elif name not in seen:
            passed += 1
        seen.add(name)
    return Counted(passed, skipped, list(failures))


def _node(classname: str, name: str) -> str:
    """`tests.passes.test_a.TestB`, `test_c[d]` as pytest takes it on its command line."""
    module, within = classname, []
    while module and not (ROOT / f"{module.replace('.', '/')}.py").exists():
        module, _, last = module.rpartition(".")
        within.insert(0, last)
    if not module:  # a file that cannot be imported has its path in dots as its name
        return f"{name.replace('.', '/')}.py"
    return "::".join([f"{module.replace('.', '/')}.py", *within, name])


def commit() -> str:
    """The commit that is checked out, with a `+` when files differ from it; empty outside of git."""
    told = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty=+", "--exclude=*"], capture_output=True,
                          text=True, check=False)
    return told.stdout.strip()
