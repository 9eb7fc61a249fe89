"""Opening of packages as drafts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..ir.clone import clone_program
from ..package import Package, load, package_of_mlmodel
from ..utils.errors import InputError
from ..utils.text_format import add_article
from .contract import Draft

__all__ = ["get_source_path", "open_draft"]


def get_source_path(source: Any) -> Path:
    """Return the path of a package from a path, a `Package` or an MLModel. Raises InputError for anything else."""
    if isinstance(source, (str, os.PathLike)):
        if not os.fspath(source):
            raise InputError("no path given; expected the path of an .mlpackage")
        return Path(source)
    found = source.path if isinstance(source, Package) else getattr(source, "package_path", None)
    if found is None:
        raise InputError(f"cannot edit {add_article(type(source).__name__)} that is not a package on disk; expected "
                         "the path of an .mlpackage, a Package, or an MLModel that was loaded or converted as one")
    return Path(found)


def open_draft(source: Any) -> Draft:
    """Open the package at a path, of a `Package` or of an MLModel (with changes to its spec) as a draft.

    Raises InputError if it is not an ML Program package, its model file is inconsistent, or the program of the
    `Package` was changed since it was loaded.
    """
    if isinstance(source, Package):
        if not source.is_unchanged():
            raise InputError(f"{source.path}: the program of this Package was changed after it was loaded; save it, "
                             "and edit what was saved")
        package, program = source, clone_program(source.program)
    else:
        package = load(source) if isinstance(source, (str, os.PathLike)) else package_of_mlmodel(source)
        program = package.program
    _check_opsets(package)
    return Draft(program, str(package.path), package)


def _check_opsets(package: Package) -> None:
    """Raise InputError if a function has blocks for other opsets than its own: these would not be edited."""
    for member in package.members.programs:
        for name, function in member.spec.mlProgram.functions.items():
            if list(function.block_specializations) != [function.opset]:
                found = ", ".join(sorted(function.block_specializations)) or "none"
                raise InputError(
                    f"{package.path}: function {name!r} is for opset {function.opset!r} and has blocks for {found}; "
                    "expected one block, for its opset: others would not be edited with it"
                )
