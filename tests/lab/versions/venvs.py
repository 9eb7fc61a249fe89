"""Virtual environments with the versions of a cell."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

from .cells import Cell

__all__ = ["ROOT", "Refused", "interpreter", "made", "versions", "why"]

ROOT = Path(__file__).resolve().parents[3]
_ASK = """
import json, platform
from importlib import metadata
found = {name: metadata.version(name) for name in ("coremltools", "numpy", "torch", "pytest", "hypothesis")}
try:
    origin = json.loads(metadata.distribution("mil_ane_passes").read_text("direct_url.json") or "{}").get("url", "")
except metadata.PackageNotFoundError:
    origin = ""
print(json.dumps({**found, "python": platform.python_version(), "origin": origin}))
"""


class Refused(Exception):
    """A cell that cannot be made, and why."""


def interpreter(version: str, given: list[Path]) -> Path:
    """The Python of this version: one of those given, else the one that is found by its name."""
    for path in given:
        asked = subprocess.run([path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
                               capture_output=True, text=True, check=False)
        if asked.stdout.strip() == version:
            return path
    found = shutil.which(f"python{version}")
    if found is None:
        raise Refused(f"no python{version} was found; give one with --python")
    return Path(found)


def made(cell: Cell, given: list[Path], folder: Path) -> Path:
    """The Python of the cell's virtual environment, which is made unless it is there."""
    python = folder / cell.name / "bin" / "python"
    if not python.exists():
        _call([interpreter(cell.python, given), "-m", "venv", folder / cell.name])
        _call([python, "-m", "pip", "install", "-q", "-e", f"{ROOT}[test]", *cell.pins])
    elif versions(python)["origin"] != ROOT.as_uri():
        _call([python, "-m", "pip", "install", "-q", "--no-deps", "-e", str(ROOT)])
    return python


def versions(python: Path) -> dict[str, str]:
    """What is installed there, and the folder that mil_ane_passes is taken from."""
    found: dict[str, str] = json.loads(_call([python, "-c", _ASK]))
    return found


def _call(command: list[str | Path]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Refused(why(done.stderr) or f"{Path(command[0]).name} ended with exit code {done.returncode}")
    return done.stdout


def why(text: str) -> str:
    """The line that says why a command failed: pip's last error, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    return re.sub(r"\s+", " ", errors[-1].removeprefix("ERROR:")).strip() if errors else ""
