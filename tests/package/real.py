"""Packages of real architectures, to hold the package layer to: tests.lab.models.more, as coremltools saves them.

    python -m tests.package.real FOLDER [NAME ...]

Writes one package for each architecture that this machine can make and FOLDER does not have yet. The slow tests take
them from the folder that REAL_PACKAGES names, and make them where it names none.
This file imports torch when it is run: see `make`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "REAL_PACKAGES"


def path_of(folder: Path, name: str) -> Path:
    """Where the package of architecture `name` is in `folder`."""
    return folder / f"{re.sub('[^A-Za-z0-9]+', '_', name).strip('_')}.mlpackage"


def given() -> Path | None:
    """The folder of packages made earlier, if one is named."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


def make(folder: Path, names: Sequence[str] = ()) -> dict[str, Path]:
    """The packages of the architectures `names` (all, when none) in `folder`, those made that are not there."""
    from tests.lab.models import fired
    from tests.lab.models.more import ALL_ARCHITECTURES

    found = {}
    for each in ALL_ARCHITECTURES:
        path = path_of(folder, each.name)
        if each.missing() or (names and each.name not in names):
            continue
        if not path.exists():
            with fired.silence_warnings(), tempfile.TemporaryDirectory(dir=folder) as temporary:
                staged = Path(temporary, path.name)
                fired.convert_architecture(each, each.model(), each.draw(0), staged)
                shutil.move(staged, path)
        found[each.name] = path
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.package.real", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, path in make(options.folder, options.names).items():
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        print(f"{path.name}: {name}, {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
