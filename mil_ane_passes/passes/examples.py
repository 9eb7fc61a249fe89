"""Helpers that build the small example programs of rules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Function, Program, Var, types
from coremltools.converters.mil.mil.program import get_new_symbol

from .contract import Example

__all__ = ["build_mask_program", "build_program", "make_example", "make_op_example", "make_weight"]


def make_weight(*shape: int, dtype: Any = np.float16) -> np.ndarray[Any, Any]:
    """Make a fixed, asymmetric pattern of small numbers in `shape`."""
    count = int(np.prod(shape))
    return ((np.arange(count) * 7 % 23 - 11) / 16).reshape(shape).astype(dtype)


def build_program(
    body: Callable[..., Any], *, opset: Any = ct.target.iOS17, dtype: Any = types.fp16, **inputs: tuple[int | None, ...]
) -> Program:
    """Build a one-function program: `body` gets one var per keyword, of that shape (None is a symbolic dimension)."""
    placeholders = {
        name: Builder.placeholder(shape=[get_new_symbol() if d is None else d for d in shape], dtype=dtype)
        for name, shape in inputs.items()
    }
    with Function(placeholders, opset_version=opset) as function:
        outputs = body(**function.inputs)
        function.set_outputs(list(outputs) if isinstance(outputs, (list, tuple)) else [outputs])
    built = Program()
    built.add_function("main", function)
    return built


def make_example(
    name: str,
    body: Callable[..., Any],
    *,
    reason: str | None = None,
    options: dict[str, Any] | None = None,
    within: float = float("inf"),
    scale: float = 1.0,
    measured: bool = True,
    opset: Any = ct.target.iOS17,
    dtype: Any = types.fp16,
    **inputs: tuple[int | None, ...],
) -> Example:
    """Make an `Example` of the program that `build_program` builds of `body` and `inputs`."""
    build = functools.partial(build_program, body, opset=opset, dtype=dtype, **inputs)
    return Example(name, build, reason, options or {}, within=within, scale=scale, measured=measured)


def make_op_example(
    name: str, op_type: str, shape: tuple[int | None, ...], parameters: dict[str, Any] | None = None, **settings: Any
) -> Example:
    """Make an `Example` of one op that reads x of `shape`; `settings` are those of `make_example`."""
    return make_example(
        name, lambda x: getattr(Builder, op_type)(x=x, name="y", **(parameters or {})), x=shape, **settings
    )


def build_mask_program(kind: str) -> Program:
    """Build a program that computes two masks at run time and combines them with the logical op `kind`."""
    def build_body(x: Var, z: Var) -> Var:
        both = getattr(Builder, kind)(x=Builder.greater(x=x, y=np.float16(0)), y=Builder.greater(x=z, y=np.float16(0)))
        result: Var = Builder.cast(x=both, dtype="fp16", name="y")
        return result

    return build_program(build_body, x=(2, 3), z=(2, 3))
