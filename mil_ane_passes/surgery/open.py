"""Packages as documents."""

from __future__ import annotations

import os

from ..core.errors import InputError
from ..package.manifest import read_layout
from ..package.members import kind_of
from ..package.model import members_of, parse_model, read_model
from .document import Document

__all__ = ["open_document"]


def open_document(path: str | os.PathLike[str]) -> Document:
    """The package at `path` as a document.

    Raises InputError when it is not an ML Program package, or its model file contradicts itself.
    """
    layout = read_layout(path)
    raw = read_model(layout)
    spec = parse_model(raw, layout.root)
    if members_of(raw, spec, layout).programs[0].path:
        raise InputError(f"{layout.root}: the model is a pipeline ({kind_of(spec)}), whose parts refer to each other's "
                         "inputs and outputs; edit the packages in it and build it again")
    try:
        return Document(layout, raw, spec)
    except (ValueError, UnicodeDecodeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{layout.root}: {layout.model} is damaged ({error}); take a fresh copy") from error
