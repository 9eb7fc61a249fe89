"""The host's answer to what an op makes: without what asking for it does to the op's inputs, or not asked at all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
from coremltools.converters.mil.mil import Operation, types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from .query import flat_inputs

__all__ = ["evaluation_in_bounds", "inferred_types", "not_evaluated", "sharpened"]

_EVALUATED = 1 << 20
"The most elements that an op's outputs have where they are evaluated although its operands have fewer."
_HOSTS_AUTO_VAL = Operation._auto_val


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


@contextmanager
def evaluation_in_bounds() -> Iterator[None]:
    """Ops that are built meanwhile have values only where those are not much larger than their operands.

    coremltools evaluates every op whose operands are constants: a `tile` or `fill` of one number is as large as a
    package likes to declare. A result as large as its operands is needed, such as that of a transpose of weights.
    """
    Operation._auto_val = _auto_val_in_bounds
    try:
        yield
    finally:
        Operation._auto_val = _HOSTS_AUTO_VAL


def _auto_val_in_bounds(op: Operation, output_types: Any) -> Any:
    made = max(map(_elements, output_types), default=0)
    if made > _EVALUATED and op.op_type != "const" and made > sum(_elements(var.sym_type) for var in flat_inputs(op)):
        return (None,) * len(output_types)
    return _HOSTS_AUTO_VAL(op, output_types)


def _elements(sym_type: Any) -> int:
    """How many elements a value of the type has, as far as that is known."""
    return math.prod(size for size in sym_type.get_shape() if isinstance(size, int)) if types.is_tensor(sym_type) else 1


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
