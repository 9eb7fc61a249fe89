"""The README's five minutes, done as they stand there, and what they show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"```(python|sh)\n(.*?)\n```\n(?:<!-- shows (.*?) -->\n```\n(.*?)```\n)?", re.S)


@dataclass(frozen=True)
class Step:
    """One block to copy, and the excerpt of its output that stands below it."""

    language: str
    text: str
    wanted: str
    shown: str

    def run(self, folder: Path) -> str:
        """Run it in the folder as a reader would; gives what it prints. Raises AssertionError when it fails."""
        command = [sys.executable, "-c", self.text] if self.language == "python" else ["bash", "-c", SHELL + self.text]
        done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
        allowed = (0, 1) if " lint " in self.text else (0,)
        assert done.returncode in allowed, f"{self.text}\nexit code {done.returncode}\n{done.stderr[-2000:]}"
        return done.stdout

    def excerpt(self, output: str) -> str:
        """The lines that the README shows, in order; a time becomes dots."""
        lines = [line.rstrip() for line in output.splitlines() if re.search(self.wanted, line)]
        return "".join(re.sub(r"\d+(\.\d+)? s\b", "... s", f"{line}\n") for line in lines)


SHELL = f'set -eu -o pipefail; mil-ane-passes() {{ "{sys.executable}" -m mil_ane_passes "$@"; }}; '


def environment() -> dict[str, str]:
    """This checkout comes first, whatever is installed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def section(readme: str) -> str:
    return re.search(r"^## Five minutes\n(.*?)^## ", readme, re.S | re.M).group(1)


def steps(readme: str) -> Iterator[Step]:
    """The blocks of the section, in order."""
    for found in STEP.finditer(section(readme)):
        language, text, wanted, shown = found.groups()
        yield Step(language, text, wanted or "", shown or "")


def shown_anew(readme: str, folder: Path) -> str:
    """The README with every excerpt as the steps print it now."""
    for step in steps(readme):
        output = step.run(folder)
        if step.wanted:
            readme = readme.replace(f"<!-- shows {step.wanted} -->\n```\n{step.shown}```",
                                    f"<!-- shows {step.wanted} -->\n```\n{step.excerpt(output)}```")
    return readme
