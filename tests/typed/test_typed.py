"""The types of the public functions as a user's checker sees them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="mypy is no part of what the tests need")

ROOT = Path(__file__).resolve().parent.parent.parent
SETTINGS = """
[mypy]
strict = True
cache_dir = {cache}
[mypy-mil_ane_passes.*]
follow_imports = silent
[mypy-coremltools.*,torch.*,distributed.*,google.protobuf.*,tomli.*]
ignore_missing_imports = True
follow_imports = skip
"""


def test_a_users_program_is_checked_against_the_public_types(tmp_path):
    """Right uses are taken and wrong ones refused, with the package read as an installed one is: silently."""
    settings = tmp_path / "mypy.ini"
    settings.write_text(SETTINGS.format(cache=tmp_path / "cache"))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(settings), "tests/typed/use.py"], cwd=ROOT,
        capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["Success: no issues found in 1 source file"]), (
        done.stdout + done.stderr)
