"""Distributions that several tests look at, built once, in a copy: building leaves folders behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
collect_ignore = ["example_plugin"]  # its tests are run where it is installed

BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2]))
"""
COMMANDS = """
import contextlib, io, json, sys
from mil_ane_passes.commands.main import main
done = []
for line in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(line)
        except SystemExit as stopped:
            code = stopped.code
    done.append([code, out.getvalue(), err.getvalue()])
json.dump(done, open(sys.argv[2], "w"))
"""


@dataclass(frozen=True)
class Done:
    """What a command said."""

    code: int
    out: str
    err: str


def need_setuptools() -> None:
    pytest.importorskip("setuptools", minversion="77.0.3", reason="the first that writes the licence as we state it")


def run(*words: object, cwd: Path, path: Path | None = None) -> str:
    """What a process prints; `path` is where it finds modules before all others, and nothing of the repository is."""
    done = subprocess.run([*map(str, words)], cwd=cwd, env=environment(path), capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, (done.stdout[-1500:], done.stderr[-1500:])
    return done.stdout


def environment(path: Path | None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "COV_CORE_SOURCE")}
    return {**kept, "PYTHONPATH": str(path)} if path else kept


def built(kind: str, source: Path, target: Path) -> Path:
    """The `wheel` or the `sdist` of `source`, in `target`; no network is asked."""
    return target / run(sys.executable, "-c", BUILD, kind, target, cwd=source).splitlines()[-1]


def installed(wheel: Path, target: Path) -> Path:
    """A folder that holds what is in `wheel`, and its commands."""
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--disable-pip-version-check",
        "--target", target, wheel, cwd=target.parent)
    return target


def commands(lines: list[list[str]], cwd: Path, path: Path) -> list[Done]:
    """What `mil-ane-passes` says to each of `lines`, one process for all."""
    run(sys.executable, "-c", COMMANDS, json.dumps(lines), cwd / "done.json", cwd=cwd, path=path)
    return [Done(*each) for each in json.loads((cwd / "done.json").read_text())]


def copied(target: Path) -> Path:
    """The repository without what tools left in it."""
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", ".?*_cache", ".hypothesis")
    for name in ("mil_ane_passes", "tests", "fixtures", ".ci", ".github"):
        shutil.copytree(ROOT / name, target / name, ignore=ignore)
    for name in ("CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "setup.cfg"):
        shutil.copy(ROOT / name, target / name)
    return target
