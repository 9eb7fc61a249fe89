"""Packages as documents."""

from __future__ import annotations

import os
from typing import Any

from ..core.errors import InputError
from ..package.manifest import Layout, read_layout
from ..package.model import _parse
from .document import Document

__all__ = ["open_document"]


def open_document(path: str | os.PathLike[str]) -> Document:
    """The package at `path` as a document.

    Raises InputError when it is not an ML Program package, or its model file contradicts itself.
    """
    layout = read_layout(path)
    try:
        raw = layout.model.read_bytes()
    except OSError as error:
        raise InputError(f"{layout.root}: {layout.model} cannot be read ({error.strerror})") from error
    try:
        return Document(layout, raw, _parsed(layout, raw))
    except (ValueError, UnicodeDecodeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{layout.root}: {layout.model} is damaged ({error}); take a fresh copy") from error


def _parsed(layout: Layout, raw: bytes) -> Any:
    spec = _parse(raw, layout.root)
    kind = spec.WhichOneof("Type") or "nothing"
    if kind != "mlProgram":
        raise InputError(f"{layout.root}: the model is a pipeline ({kind}), whose parts refer to each other's inputs "
                         "and outputs; edit the packages in it and build it again")
    return spec
