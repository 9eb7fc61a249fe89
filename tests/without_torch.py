"""Processes in which torch is not installed, as far as they can tell: they start in a quarter of the time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ABSENT = Path(__file__).parent / "absent"
"A folder of modules that cannot be imported; it comes before those that are installed."


def hide_torch(**variables: str) -> dict[str, str]:
    """Return the environment of a process that finds this checkout and no torch, with `variables` besides."""
    path = [str(ABSENT), str(ABSENT.parent.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **variables}


def without_torch(code: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a process of its own, in which importing torch fails."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          cwd=ABSENT.parent.parent, env=hide_torch())
