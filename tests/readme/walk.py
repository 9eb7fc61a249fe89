"""The examples of pages, done as they stand there, and what they show: the README's five minutes, for one."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from mil_ane_passes.commands.main import main

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

    def run_here(self, folder: Path) -> str:
        """Run it in this process, without a start of Python a command; gives what it prints, as `run` does."""
        printed, place = io.StringIO(), Path.cwd()
        os.chdir(folder)
        try:
            with redirect_stdout(printed):
                if self.language == "python":
                    exec(compile(self.text, "<page>", "exec"), {"__name__": "__main__"})
                else:
                    for line in self.text.splitlines():
                        self.run_command(line)
        finally:
            os.chdir(place)
        return printed.getvalue()

    def run_command(self, line: str) -> None:
        name, *arguments = shlex.split(line)
        assert name == "mil-ane-passes", f"{line}: only commands of the package run in this process"
        assert main(arguments) in ((0, 1) if arguments[0] == "lint" else (0,)), line

    def excerpt(self, output: str) -> str:
        """The lines that the README shows, in order; a time becomes dots."""
        lines = [line.rstrip() for line in output.splitlines() if re.search(self.wanted, line)]
        return "".join(re.sub(r"\d+(\.\d+)? s\b", "... s", f"{line}\n") for line in lines)


SHELL = f'set -eu -o pipefail; mil-ane-passes() {{ "{sys.executable}" -m mil_ane_passes "$@"; }}; '


def environment() -> dict[str, str]:
    """This checkout comes first, whatever is installed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


FIVE_MINUTES = "## Five minutes"


def section(page: str, title: str = FIVE_MINUTES) -> str:
    """The text under a title, up to the next of its level."""
    level = title.split(" ")[0]
    return re.search(rf"^{re.escape(title)}\n(.*?)^{level} ", page, re.S | re.M).group(1)


def steps(page: str, title: str = FIVE_MINUTES) -> Iterator[Step]:
    """The blocks of the section, in order."""
    for found in STEP.finditer(section(page, title)):
        language, text, wanted, shown = found.groups()
        yield Step(language, text, wanted or "", shown or "")


def shown_anew(page: str, folder: Path, title: str = FIVE_MINUTES, *, here: bool = False) -> str:
    """The page with every excerpt of the section as the steps print it now; `here`: in this process."""
    for step in steps(page, title):
        output = step.run_here(folder) if here else step.run(folder)
        if step.wanted:
            excerpt = step.excerpt(output)
            assert excerpt, f"nothing printed by {step.text} matches {step.wanted}"
            page = page.replace(f"<!-- shows {step.wanted} -->\n```\n{step.shown}```",
                                f"<!-- shows {step.wanted} -->\n```\n{excerpt}```")
    return page
