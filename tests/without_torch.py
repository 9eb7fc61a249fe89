"""Code run where torch is not installed, as far as it can tell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mil_ane_passes

_NO_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("no torch here", name="torch")

sys.meta_path.insert(0, NoTorch())
"""


def without_torch(code: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a process of its own, in which importing torch fails."""
    return subprocess.run([sys.executable, "-c", f"{_NO_TORCH}{code}"], capture_output=True, text=True, check=False,
                          cwd=Path(mil_ane_passes.__file__).parent.parent)
