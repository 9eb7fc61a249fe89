"""Write a folder to be run on a Mac: packages, feeds, expected outputs and a script, which writes one result file.

The script compares CPU_ONLY with ALL and CPU_AND_NE, times predictions and reads Core ML's compute plan. Its authors
have never run it on a Mac.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import KW_ONLY, dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

from .._version import __version__, make_json_header
from ..package.manifest import check_model_path
from ..utils.errors import InputError
from ..utils.option_spelling import choose_spelling, format_option
from ..utils.text_format import escape_text, format_command_path, format_lines, format_short_repr, quote_word
from .options import (
    DEFAULT_SEEDS,
    FEEDS,
    SEEDS,
    Progress,
    add_format_option,
    add_options,
    argument,
    command,
    flag,
    ignore_progress,
    positive_int,
    read_options,
)
from .output import print_report, show_progress
from .rewrite import rewrite

if TYPE_CHECKING:
    from ..equivalence.user_inputs import Feeds
    from ..passes.pipeline import Passes

__all__ = ["MacFolder", "MacScriptOptions", "format_readme", "write_mac_script"]

HELP = "write a folder with which a package is measured on a Mac"
EXAMPLE = "mac-script folder in.mlpackage --preset safe"
_COREMLTOOLS_VERSION = "9.0"
"The version of coremltools that the script was written against."


@dataclass(frozen=True)
class MacScriptOptions:
    """The options of `write_mac_script`."""

    src: Any = field(metadata=argument("IN", check=check_model_path))
    "the .mlpackage or .mlmodel to measure"
    folder: str | PathLike[str]
    _: KW_ONLY
    after: Any = field(default=None, metadata=argument("AFTER", check=check_model_path, nargs="?"))
    "a second package to measure"
    preset: str | None = field(default=None, metadata=flag())
    "also measure IN rewritten with this preset: safe or full"
    passes: Passes | None = field(default=None, metadata=flag(metavar="LIST"))
    "also measure IN rewritten by exactly these passes"
    target: str = field(default="all", metadata=flag())
    "chip to rewrite for (default: all)"
    feeds: Feeds | None = field(default=None, metadata=FEEDS)
    "inputs by name; repeatable; default: seeded random feeds"
    seeds: int = field(default=DEFAULT_SEEDS, metadata={**flag(type=positive_int, metavar="N"), **SEEDS})
    "number of random feeds (default: 3)"
    progress: Progress = ignore_progress


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="the folder to write; must be missing or empty")
    add_options(parser, MacScriptOptions)
    add_format_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    keywords = read_options(arguments, MacScriptOptions)
    with show_progress() as progress:
        report = write_mac_script(folder=arguments.folder, **keywords, progress=progress)
    print_report(report, arguments.format)
    return 0


@command(MacScriptOptions)
def write_mac_script(options: MacScriptOptions) -> MacFolder:
    """Write a folder with which a user with a Mac measures `src`, and `after` or its rewrite beside it.

    The folder is written entirely or not at all.

    The default function gets `feeds` (a mapping from input name to array, or several). Every other function, and all
    without `feeds`, get `seeds` seeded random feeds. Expected outputs are the reference runtime's at float32.

    Raises InputError for a source that is not a package, a folder that is not empty, feeds that do not fit, and a
    rewrite that is not verified.
    """
    from ..equivalence.user_inputs import UserInputs
    from .mac_folder import FolderWriter, require_package, stage_folder
    from .sources import open_source

    rewritten = options.preset is not None or options.passes is not None
    if options.after is not None and rewritten:
        raise InputError("both a second package and a rewrite are given; expected one of "
                         f"{choose_spelling('AFTER.mlpackage, or --preset or --passes', 'after, or preset or passes')}")
    inputs = UserInputs.of(options.feeds, None)
    before = require_package(open_source(options.src))
    made = MacFolder(before.name, os.fspath(options.folder))
    with stage_folder(options.folder) as staged:
        sides = {"before": before}
        if options.after is not None:
            sides["after"] = require_package(open_source(options.after))
        elif rewritten:
            report = rewrite(before.package, preset=options.preset or "safe", passes=options.passes,
                             target=options.target, feeds=options.feeds, progress=options.progress)
            if report.status == "not verified":
                raise InputError(
                    "the rewrite is not verified equivalent, so nothing was written; `mil-ane-passes rewrite` reports "
                    f"the reason; try fewer {format_option('passes')}"
                )
            made.notes += report.explain_replaced_preset()
            if report.changed:
                sides["after"] = open_source(report.package)
            else:
                made.notes.append("the rewrite changes nothing, so there is no package 'after'")
        made.notes += [str(each) for side in sides.values() for each in side.upgraded]
        FolderWriter(staged, made, sides, options.progress).write(inputs, options.seeds)
    return made


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
        return {**make_json_header("mac-script"),
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
            "then here: mil-ane-passes calibrate-plan "
            f"{quote_word(format_command_path(f'{self.folder}/result.json'))}"])


def _format_command(images: bool) -> str:
    return f"pip install coremltools=={_COREMLTOOLS_VERSION}{' pillow' * images}; python measure.py"


def format_readme(folder: MacFolder, tolerances: dict[str, float]) -> str:
    """Format README.txt: instructions, contents, and what was never tested."""
    shares = "\n".join(f"  {name}: {share:g} of an output's largest value" for name, share in tolerances.items())
    notes = "".join(f"\n- {note}" for note in folder.notes)
    return f"""Made by mil-ane-passes {__version__} from {escape_text(folder.source)}.

On a Mac (macOS 13 or later, Python 3.9 or later), in this folder:

    {_format_command(folder.images)}

Core ML's compute plan needs macOS 14.4; models with states need macOS 15. The script takes minutes, because Core ML
compiles the model for each compute unit setting; finished steps are kept. It writes result.json: send that file back.
It has the Mac's model and chip, the versions of macOS and libraries, differences of outputs with the
worst element of each, times and compute plans, but no weights and no complete outputs.

Contents
- {', '.join(folder.packages)}: the packages to measure.
- feeds/: the inputs, one .npz per run; states/: the initial values of states.
- expected/: outputs of the same package by the reference runtime of mil-ane-passes, computed at float32 from the
  package's stored weights. They are not outputs of Core ML. Differences above this tolerance are reported, which
  `mil-ane-passes verify` uses between a model and another implementation of it:
{shares}
  Integers and strings must be equal. CPU_AND_NE and ALL are compared with CPU_ONLY with the same tolerance.
- manifest.json: lists packages and files. measure.py: the script; it needs coremltools and numpy only.

The authors of measure.py had no Mac and never ran it on one. The error of a failed step is written to result.json, and
the script continues.
{f'{chr(10)}Notes{notes}{chr(10)}' if notes else ''}"""
