"""The folder for measurements on a Mac, as data and as text, and its README."""

from __future__ import annotations

from dataclasses import dataclass, field
from shlex import quote
from typing import Any

from .._version import __version__
from ..utils.text_format import escape_text, format_lines, format_short_repr

__all__ = ["MacFolder", "format_readme"]

_COREMLTOOLS_VERSION = "9.0"
"The version of coremltools that the script was written against."


@dataclass
class MacFolder:
    """A folder to be run by somebody with a Mac; `notes` list what is left out of it and why."""

    source: str
    folder: str
    packages: list[str] = field(default_factory=list)
    feeds: int = 0
    expected: int = 0
    images: bool = False
    notes: list[str] = field(default_factory=list)

    def build_provenance(self) -> dict[str, str]:
        """Return the origin recorded in manifest.json and then in result.json."""
        return {"tool": "mil-ane-passes", "version": __version__, "source": self.source, "expected": "float32"}

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON that `mac-script --format json` prints."""
        return {"schema": 1, "tool": "mil-ane-passes", "version": __version__, "command": "mac-script",
                "source": self.source, "folder": self.folder, "packages": self.packages, "feeds": self.feeds,
                "expected": self.expected, "run": _format_command(self.images), "notes": self.notes}

    def __repr__(self) -> str:
        return format_short_repr(self, source=self.source, folder=self.folder, packages=self.packages, feeds=self.feeds)

    def __str__(self) -> str:
        return format_lines([
            f"wrote {self.folder}: {' and '.join(self.packages)}, {self.feeds} feeds, expected outputs for "
            f"{self.expected} of them, measure.py, README.txt",
            *[f"note: {note}" for note in self.notes],
            f"on a Mac, in that folder: {_format_command(self.images)}",
            f"then here: mil-ane-passes calibrate-plan {quote(f'{self.folder}/result.json')}"])


def _format_command(images: bool) -> str:
    return f"pip install coremltools=={_COREMLTOOLS_VERSION}{' pillow' * images}; python measure.py"


def format_readme(folder: MacFolder, tolerances: dict[str, float]) -> str:
    """Format README.txt: instructions, contents, and what was never tested."""
    shares = "\n".join(f"  {name}: {share:g} of an output's largest value" for name, share in tolerances.items())
    notes = "".join(f"\n- {note}" for note in folder.notes)
    return f"""Made by mil-ane-passes {__version__} from {escape_text(folder.source)}.

On a Mac (macOS 13 or later, Python 3.9 or later), in this folder:

    {_format_command(folder.images)}

Core ML's compute plan needs macOS 14.4, a model with states macOS 15. It takes minutes, as Core ML compiles the model
for each choice of units; what is done is kept. It writes result.json: send that file back. It holds the Mac's model and
chip, the versions of macOS and libraries, differences of outputs with the worst element of each, times and compute
plans; no weights, no whole outputs.

What is here
- {', '.join(folder.packages)}: the packages to measure.
- feeds/: the inputs, one .npz for each run; states/ what states hold at the start.
- expected/: outputs of the same package by the reference runtime of mil-ane-passes, computed at float32 from the
  package's stored weights. They are no Core ML outputs. A difference is told where it is more than the tolerance that
  `mil-ane-passes verify` uses between a model and something that computes it elsewhere:
{shares}
  Integers and texts have to be equal. CPU_AND_NE and ALL are held against CPU_ONLY with the same tolerance.
- manifest.json: what belongs to what. measure.py: the script; plain coremltools and numpy, nothing else.

The authors of measure.py had no Mac and never ran it on one. A step that fails is written to result.json as text, and
the rest goes on.
{f'{chr(10)}Notes{notes}{chr(10)}' if notes else ''}"""
