"""Checks of the path that a package is written to, made before anything is loaded."""

from __future__ import annotations

import os
from pathlib import Path

from ..utils.errors import InputError
from ..utils.option_spelling import choose_spelling


def find_enclosing_package(path: str | os.PathLike[str]) -> Path | None:
    """Return the innermost package folder that contains `path`; None if no package does."""
    real = Path(os.path.realpath(path))
    return next((folder for folder in real.parents if (folder.suffix == ".mlpackage" and folder.is_dir())
                 or ((folder / "Manifest.json").is_file() and (folder / "Data").is_dir())), None)


def check_destination(source: str | os.PathLike[str], path: str | os.PathLike[str], overwrite: bool) -> None:
    """Raise InputError if `save` could not write a package loaded from `source` to `path`."""
    target = Path(os.path.abspath(path))
    if has_overlap(os.path.realpath(source), os.path.realpath(target)):
        raise InputError(
            f"{target}: is the source package {os.fspath(source)}, inside it or contains it; expected another path: "
            f"the source is never modified"
        )
    if (around := find_enclosing_package(target)) is not None:
        raise InputError(f"{target}: is inside the package {around}; expected a path outside of packages")
    if target.suffix != ".mlpackage":
        raise InputError(f"{target}: is not the name of a package; expected one that ends in .mlpackage")
    if not target.parent.is_dir():
        raise InputError(f"{target}: the folder {target.parent} does not exist; create it first")
    if os.path.lexists(target) and not overwrite:
        raise InputError(f"{target}: exists already; expected a path that does not exist, or "
                         f"{choose_spelling('--overwrite', 'overwrite=True')} to replace it")
    if os.path.islink(target):
        raise InputError(f"{target}: is a link to {os.readlink(target)}, and links are not overwritten; expected the "
                         f"path of the package itself, or one that does not exist")
    if os.path.lexists(target) and not _is_replaceable(target):
        raise InputError(f"{target}: exists and is not a package (it has no Manifest.json); only packages are "
                         f"overwritten: move it away")


def check_file_destination(source: object, path: Path, overwrite: bool, what: str) -> None:
    """Raise InputError if `what`, a model that is a single file, cannot be written to `path`; `source` is the file
    that is read."""
    if isinstance(source, (str, os.PathLike)) and os.path.exists(source) and path.exists() \
            and os.path.samefile(source, path):
        raise InputError(f"{path}: is the source, which is never modified; expected another path")
    if path.is_dir():
        raise InputError(f"{path}: is a folder; expected the name of {what}")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{path}: the folder {path.parent} does not exist; create it first")
    if (around := find_enclosing_package(path)) is not None:
        raise InputError(f"{path}: is inside the package {around}; expected a path outside of packages")
    if os.path.lexists(path) and not overwrite:
        raise InputError(f"{path}: exists already; expected a path that does not exist, or "
                         f"{choose_spelling('--overwrite', 'overwrite=True')} to replace it")


def _is_replaceable(target: Path) -> bool:
    """Return whether `target` is a package or an empty folder: replacing it cannot delete other files."""
    if not target.is_dir():
        return False
    return (target / "Manifest.json").is_file() or not any(target.iterdir())


def has_overlap(source: str, target: str) -> bool:
    """Return whether one of two real paths is the other or inside it.

    File identity is compared, too, as names may differ in case.
    """
    if os.path.commonpath([source, target]) in (source, target):
        return True
    if not os.path.exists(source):
        return False
    around_target = [path for path in (target, *map(str, Path(target).parents)) if os.path.exists(path)]
    if any(os.path.samefile(path, source) for path in around_target):
        return True
    around_source = map(str, Path(source).parents)
    return os.path.exists(target) and any(os.path.samefile(path, target) for path in around_source)
