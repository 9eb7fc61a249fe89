"""Printing of MIL: equal programs give equal text. Intermediate values are numbered, small consts are inline.

pymil's own text has names from a process-wide counter, so two builds of the same program print differently.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Function, Operation, Program, Var, types

from ..utils.text_format import escape_text, format_lines
from .query import is_default, is_symbolic

__all__ = [
    "diff_program_texts",
    "format_block",
    "format_dimension",
    "format_dtype",
    "format_function_body",
    "format_literal",
    "format_op",
    "format_program",
    "format_type",
    "is_literal",
]

_PYMIL_SYMBOL = re.compile(r"\bis\d+\b")
_MAX_INLINE_ELEMENTS = 12
"Largest element count of a const that is printed by value: pads, strides and shapes fit, and a line stays readable."


def format_dimension(size: Any) -> str:
    """Format a dimension; `?` for a symbolic one, because its name in pymil differs from process to process."""
    return "?" if is_symbolic(size) else str(size)


def format_dtype(dtype: Any) -> str:
    """Format a dtype such as `fp16`; a type that is not numeric is formatted as its name in MIL."""
    try:
        return str(types.builtin_to_string(dtype))
    except KeyError:
        return "tuple" if types.is_tuple(dtype) else "list" if types.is_list(dtype) else "unknown"


def format_type(var: Var, dim: Callable[[Any], str] = format_dimension) -> str:
    """Format a type such as `fp16[1, 384, ?]`; a scalar has only its dtype. `dim` formats one dimension."""
    if types.is_list(var.sym_type):
        return "list"
    name = format_dtype(var.dtype)
    if types.is_state(var.sym_type):
        name = f"state {name}"
    return f"{name}[{', '.join(map(dim, var.shape))}]" if var.rank else name


def format_program(program: Program, *, names: bool = False) -> str:
    """Format all functions of a program. With `names`, values keep their names instead of being numbered."""
    return "\n".join(_format_function(name, function, names) for name, function in program.functions.items())


def format_function_body(function: Function) -> str:
    """Format the ops of a function, one a line, without its header: the form used in docstrings."""
    return format_lines(_Namer(function, False).format_ops(function, ""))


def format_block(block: Block) -> str:
    """Format the ops of a block, including nested blocks; values keep their names."""
    return format_lines(_Namer(None, True).format_ops(block, ""))


def format_op(op: Operation) -> str:
    """Format one op for errors and traces; values keep their names."""
    return escape_text(next(iter(_Namer(None, True).op_lines(op, ""))))


def diff_program_texts(before: str, after: str) -> str:
    """Return a unified diff of two program texts, with three lines of context."""
    lines = difflib.unified_diff(before.split("\n"), after.split("\n"), "before", "after", lineterm="")
    return "\n".join(lines)


def _format_function(name: str, function: Function, names: bool) -> str:
    namer = _Namer(function, names)
    inputs = ", ".join(f"%{key}: {namer.format_var_type(var)}" for key, var in function.inputs.items())
    body = list(namer.format_ops(function, "    "))
    outputs = ", ".join(namer.format_ref(var) for var in function.outputs)
    return format_lines([f"{name}({inputs}) {{", *body, f"}} -> ({outputs})"])


class _Namer:
    """Names for the values of one function: intermediate values are numbered, inputs and outputs keep their names."""

    def __init__(self, function: Function | None, names: bool) -> None:
        self._keep = names
        self._numbers: dict[Var, str] = {}
        if function is not None:
            self._numbers.update((var, f"%{name}") for name, var in function.inputs.items())
            self._numbers.update((var, f"%{var.name}") for var in function.outputs)
        self._count = 0
        self._symbols: dict[str, str] = {}

    def format_var_type(self, var: Var) -> str:
        return format_type(var, self._format_dimension)

    def _format_dimension(self, extent: Any) -> str:
        """Format one dimension.

        Symbols numbered by pymil are renumbered in the order of their first use in this function.
        """
        def renumber_symbol(found: re.Match[str]) -> str:
            return self._symbols.setdefault(found[0], f"s{len(self._symbols)}")

        return _PYMIL_SYMBOL.sub(renumber_symbol, str(extent))

    def format_ref(self, var: Var) -> str:
        if self._keep:
            return f"%{var.name}"
        if var not in self._numbers:
            self._numbers[var] = f"%{self._count}"
            self._count += 1
        return self._numbers[var]

    def format_ops(self, block: Block, indent: str) -> Iterator[str]:
        for op in block.operations:
            if op.op_type != "const" or any(var in block.outputs for var in op.outputs):
                yield from self.op_lines(op, indent)

    def op_lines(self, op: Operation, indent: str) -> Iterator[str]:
        arguments = ", ".join(self._iterate_arguments(op))
        results = ", ".join(f"{self.format_ref(var)}: {self.format_var_type(var)}" for var in op.outputs)
        yield f"{indent}{results} = {op.op_type}({arguments})"
        for block in op.blocks:
            inputs = ", ".join(f"{self.format_ref(var)}: {self.format_var_type(var)}" for var in block.inputs)
            yield f"{indent}  ({inputs}) {{"
            yield from self.format_ops(block, indent + "    ")
            yield f"{indent}  }} -> ({', '.join(self.format_ref(var) for var in block.outputs)})"

    def _iterate_arguments(self, op: Operation) -> Iterator[str]:
        if op.op_type == "const":
            yield f"val={format_literal(op.outputs[0])}"
            return
        for name, bound in op.inputs.items():
            if isinstance(bound, (list, tuple)):
                yield f"{name}=({', '.join(self._format_operand(var) for var in bound)})"
            elif not is_default(op, name):
                yield f"{name}={self._format_operand(bound)}"

    def _format_operand(self, var: Var) -> str:
        return format_literal(var) if var.op is not None and var.op.op_type == "const" else self.format_ref(var)


def is_literal(var: Var) -> bool:
    """Return whether the value of a const is printed, and not only its type."""
    return types.is_list(var.sym_type) or int(np.prod(var.shape, dtype=np.int64)) <= _MAX_INLINE_ELEMENTS


def format_literal(var: Var) -> str:
    """Format the value of a small const, or the type of a large one in angle brackets."""
    if types.is_list(var.sym_type):
        return f"<list of {len(var.val)}>"
    if not is_literal(var):
        return f"<{format_type(var)}>"
    value: Any = var.val.tolist() if isinstance(var.val, (np.ndarray, np.generic)) else var.val
    return str(value)
