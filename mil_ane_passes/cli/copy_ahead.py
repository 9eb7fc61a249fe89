"""Copying of a package's large files during the import of coremltools."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from ..package.copy_ahead import CopyAhead
from ..package.destination import check_destination
from ..transforms.contract import build_part_path
from ..utils.errors import InputError

__all__ = ["add_link_option", "start_copying"]


def add_link_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--link", action="store_true",
                        help="files that stay as they are become hard links where they cannot be cloned: the packages "
                             "then share them, so never edit one in place")


def start_copying(
    source: str, output: str | None, overwrite: bool, dry_run: bool, packed: bool = False, link: bool = False,
    parts: Sequence[str] = ("",),
) -> AbstractContextManager[CopyAhead | None]:
    """Start copying files that will be copied anyway: none if weights are `packed` again, or files are to be linked.

    `parts` are the suffixes of the packages to write for `output`. Raises InputError if `output` is missing or could
    not be written.
    """
    if output is None and not dry_run:
        raise InputError("no output; expected -o OUT.mlpackage, or --dry-run")
    if not source.strip():
        raise InputError("no path given; expected the path of an .mlpackage")
    if output is None or dry_run:
        return nullcontext()
    for part in parts:
        check_destination(source, build_part_path(Path(output), part), overwrite)
    return nullcontext() if packed or link else CopyAhead(Path(source), Path(output))
