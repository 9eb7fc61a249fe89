"""The host's answer to what an op makes: without what asking for it does to the op's inputs, or not asked at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
from coremltools.converters.mil.mil import Operation, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

__all__ = ["inferred_types", "not_evaluated", "sharpened"]


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


def not_evaluated() -> NoReturn:
    """For `value_inference` of an op whose value is not to be asked for: that would read weights."""
    raise NotImplementedError("large values stay unread")


def sharpened(inferred: Any, known: Any) -> Any:
    """The type `inferred`, with sizes of the type `known` where only that knows them."""
    if inferred is known or not (types.is_tensor(inferred) and types.is_tensor(known)):
        return inferred
    ours, theirs = inferred.get_shape(), known.get_shape()
    if len(ours) != len(theirs):
        return inferred
    shape = [b if is_symbolic(a) and not is_symbolic(b) else a for a, b in zip(ours, theirs, strict=True)]
    return inferred if list(ours) == shape else types.tensor(inferred.get_primitive(), shape)
