"""What each loaded op was in the file, and whether it still is.

The loader hangs an `Origin` on every op (`op.origin`); an op without one is new. Consts that the loader made for
defaults and inline literals carry `op.synthetic` instead: the file has no op for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Operation, Var

from ..core.constants import LazyValue

INPUTS, OUTPUTS, BLOCKS, ATTRIBUTES = 2, 3, 4, 5
DEFAULT = 0
_MAX_COMPARED_ELEMENTS = 1024
# The loader makes several for each op; frozen ones would take three times as long to make. Nothing changes them.


@dataclass(slots=True)
class InputBinding:
    """How the file binds one input: as map entry `key` of field `field` of the op (DEFAULT when it does not).

    `param` is pymil's name of the input; `args` are names as the file has them, or the consts made for literals.
    """

    key: str
    param: str
    field: int
    args: tuple[str | Var, ...]


@dataclass(slots=True)
class Part:
    """One op of the file: its bytes, its inputs, and which of the pymil op's outputs it makes."""

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
    """What a pymil op was in the file. A `coreml_update_state` was two ops; every other op was one."""

    parts: tuple[Part, ...]
    names: tuple[str, ...]
    sym_types: tuple[Any, ...]
    blocks: tuple[NestedOrigin, ...] = ()
    value: Any = None


def get_origin(op: Operation) -> Origin | None:
    """What `op` was in the file; None for a new op and for the loader's own consts."""
    origin = getattr(op, "origin", None)
    return origin if isinstance(origin, Origin) else None


def to_var_tuple(bound: Any) -> tuple[Var, ...]:
    """The vars of one input, which pymil holds as a var or a tuple of them; none when it is not bound."""
    if bound is None:
        return ()
    return tuple(bound) if isinstance(bound, (list, tuple)) else (bound,)


def get_file_inputs(op: Operation) -> dict[str, tuple[Var, ...]]:
    """The inputs of `op` without those that live in pymil only."""
    return {param: to_var_tuple(var) for param, var in op.inputs.items() if not param.startswith("_")}


def is_kept(bound: InputBinding, now: tuple[Var, ...]) -> bool:
    """Whether an input is still what the file binds it to."""
    return len(bound.args) == len(now) and all(map(_is_same_arg, bound.args, now))


def _is_same_arg(arg: str | Var, var: Var) -> bool:
    if isinstance(arg, str):
        return bool(var.name == arg)
    if arg is var or (arg._sym_val is not None and arg._sym_val is var._sym_val):
        return True
    return _is_equal_const(arg, var)


def _is_equal_const(a: Var, b: Var) -> bool:
    """Whether two small consts in memory hold the same: coremltools' passes merge such consts."""
    if not all(var.op is not None and var.op.op_type == "const" for var in (a, b)) or a.sym_type is not b.sym_type:
        return False
    if isinstance(a._sym_val, LazyValue) or isinstance(b._sym_val, LazyValue):
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
    """What stands for the value of const `op`: the object itself, unread."""
    held = op.outputs[0]._sym_val
    return held if isinstance(held, LazyValue) or held is None else held.val
