"""The host's answer to what an op makes, without what asking for it does to the op's inputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Operation

__all__ = ["inferred_types"]


def inferred_types(op: Operation) -> Any:
    """What `op.type_inference()` says: a type, or a tuple of types.

    The host's rule for slices writes ends counted from the back as they are from the front, into the very arrays that
    it reads: those of the file must stay, and another slice may count from the back of something longer.
    """
    if op.op_type != "slice_by_index":
        return op.type_inference()
    given = {side: getattr(op, side) for side in ("begin", "end")}
    try:
        for side, var in given.items():
            setattr(op, side, SimpleNamespace(val=None if var.val is None else np.array(var.val)))
        return op.type_inference()
    finally:
        for side, var in given.items():
            setattr(op, side, var)
