"""Values no machine of this size can hold: refused before anything runs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any

from coremltools.converters.mil.mil import types

from ..core.errors import NotSupported
from ..core.printer import size_text

__all__ = ["refuse_giants"]

_ELEMENT_BYTES = 8
_PART = 0.5
"The part of the machine's memory that one value may take."


def refuse_giants(ops: Iterable[Any]) -> None:
    """NotSupported when an op makes a value, as far as its shape is known, that half of the memory cannot hold."""
    most = _PART * _machine_bytes()
    for op in ops:
        for var in op.outputs:
            nbytes = _ELEMENT_BYTES * _elements(var.sym_type)
            if nbytes > most:
                raise NotSupported(
                    f"value {var.name!r} of shape ({', '.join(map(size_text, var.sym_type.get_shape()))}) takes "
                    f"{nbytes / 1e9:.0f} GB; the reference runtime holds at most {most / 1e9:.0f} GB for one value "
                    "on this machine"
                )


def _elements(sym_type: Any) -> int:
    if not types.is_tensor(sym_type):
        return 1
    return math.prod(size for size in sym_type.get_shape() if isinstance(size, int))


def _machine_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return 1 << 36
