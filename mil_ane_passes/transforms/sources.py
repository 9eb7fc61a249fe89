"""Opening of packages as documents."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..package.manifest import Layout, read_layout
from ..package.model import Package, package_of_mlmodel, parse_model, read_model, require_ml_programs
from ..utils.errors import InputError
from .document import Document
from .pipeline import Pipeline

__all__ = ["get_source_path", "open_document"]


def get_source_path(source: Any) -> Path:
    """Return the path of a package, from a path, a `Package` or an MLModel. InputError for anything else."""
    if isinstance(source, (str, os.PathLike)):
        if not os.fspath(source):
            raise InputError("no path given; expected the path of an .mlpackage")
        return Path(source)
    found = source.path if isinstance(source, Package) else getattr(source, "package_path", None)
    if found is None:
        raise InputError(f"cannot edit a {type(source).__name__} that is no package on disk; expected the path of an "
                         ".mlpackage, a Package, or an MLModel that was loaded or converted as one")
    return Path(found)


def open_document(source: Any) -> Document:
    """Open the package at a path, of a `Package` or of an MLModel (with changes to its spec) as a document.

    Raises InputError when it is not an ML Program package, its model file contradicts itself, or the program of the
    `Package` was changed since it was loaded.
    """
    if isinstance(source, Package):
        if not source.is_unchanged():
            raise InputError(f"{source.path}: the program of this Package was changed after it was loaded; save it, "
                             "and edit what was saved")
        return _make_document(source.layout, source.raw, source.spec)
    if not isinstance(source, (str, os.PathLike)):
        package = package_of_mlmodel(source)
        return _make_document(package.layout, package.raw, package.spec)
    layout = read_layout(source)
    raw = read_model(layout)
    return _make_document(layout, raw, parse_model(raw, layout.root))


def _make_document(layout: Layout, raw: bytes, spec: Any) -> Document:
    members = require_ml_programs(raw, spec, layout)
    try:
        return Pipeline(layout, raw, spec, members) if members.programs[0].path else Document(layout, raw, spec)
    except (ValueError, UnicodeDecodeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{layout.root}: {layout.model} is damaged ({error}); take a fresh copy") from error
