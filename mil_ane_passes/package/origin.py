"""Origins: the bytes of each loaded op in the file, and the comparison of the current op with them.

The loader sets an `Origin` on every op (`op.origin`); an op without one is new. Consts that the loader made for
defaults and inline literals have `op.synthetic` instead: the file has no op for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Operation, Var

from ..ir.constants import LazyValue
from ..ir.coremltools_internals import get_typed_value

INPUTS, OUTPUTS, BLOCKS, ATTRIBUTES = 2, 3, 4, 5
DEFAULT = 0
# Larger consts are compared by identity only. coremltools' passes merge equal scalars and short lists, not weights.
_MAX_COMPARED_ELEMENTS = 1024
# The loader makes several bindings for each op. A frozen dataclass would take three times as long to make, so this one
# is not frozen; no code changes it.


@dataclass(slots=True)
class InputBinding:
    """The file's binding of one input: map entry `key` of field `field` of the op (DEFAULT when it is not bound).

    `param` is pymil's name of the input; `args` are names as in the file, or the consts made for literals.
    """

    key: str
    param: str
    field: int
    args: tuple[str | Var, ...]


@dataclass(slots=True)
class Part:
    """One op of the file: its bytes, its inputs, and the indices of the pymil op's outputs that it produces."""

    data: bytes
    bounds: tuple[InputBinding, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class NestedOrigin:
    """A block of an op: pymil's block, its bytes, and its inputs as they were loaded."""

    block: Block
    data: bytes
    inputs: tuple[tuple[str, Any], ...]


@dataclass(slots=True)
class Origin:
    """The file's ops for a pymil op: a write and a read for a merged `coreml_update_state`, one op for every other."""

    parts: tuple[Part, ...]
    names: tuple[str, ...]
    sym_types: tuple[Any, ...]
    blocks: tuple[NestedOrigin, ...] = ()
    value: Any = None


def get_origin(op: Operation) -> Origin | None:
    """Return the origin of `op`; None for a new op and for the loader's own consts."""
    origin = getattr(op, "origin", None)
    return origin if isinstance(origin, Origin) else None


def to_var_tuple(bound: Any) -> tuple[Var, ...]:
    """Return the vars of one input, which pymil holds as a var or a tuple of them; empty when it is not bound."""
    if bound is None:
        return ()
    return tuple(bound) if isinstance(bound, (list, tuple)) else (bound,)


def get_file_inputs(op: Operation) -> dict[str, tuple[Var, ...]]:
    """Return the inputs of `op` without inputs that exist only in pymil."""
    return {param: to_var_tuple(var) for param, var in op.inputs.items() if not param.startswith("_")}


def is_kept(bound: InputBinding, now: tuple[Var, ...]) -> bool:
    """Return whether an input is still bound as in the file."""
    return len(bound.args) == len(now) and all(map(is_same_arg, bound.args, now))


def is_same_arg(arg: str | Var, var: Var) -> bool:
    """Return whether one argument, a name or the const made for a literal, is still `var`."""
    if isinstance(arg, str):
        return bool(var.name == arg)
    if arg is var or (get_typed_value(arg) is not None and get_typed_value(arg) is get_typed_value(var)):
        return True
    return _is_equal_const(arg, var)


def _is_equal_const(a: Var, b: Var) -> bool:
    """Return whether two small consts in memory have equal values: coremltools' passes merge such consts."""
    if not all(var.op is not None and var.op.op_type == "const" for var in (a, b)) or a.sym_type is not b.sym_type:
        return False
    if isinstance(get_typed_value(a), LazyValue) or isinstance(get_typed_value(b), LazyValue):
        return False
    x, y = a.val, b.val
    if (
        type(x) is not type(y)
        or getattr(x, "size", 1) > _MAX_COMPARED_ELEMENTS
        or not isinstance(x, (np.ndarray, np.generic, str, bool))
    ):
        return False
    return np.asarray(x).dtype == np.asarray(y).dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()


def get_stored_value(op: Operation) -> Any:
    """Return the object that holds the value of const `op`, without reading it."""
    held = get_typed_value(op.outputs[0])
    return held if isinstance(held, LazyValue) or held is None else held.val
