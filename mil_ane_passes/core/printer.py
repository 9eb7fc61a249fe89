"""MIL as text, the same for the same program: intermediate values are numbered, small consts stand inline.

pymil's own text carries names from a counter of the process, so two builds of one program print differently.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Function, Operation, Program, Var, types

from .query import is_default, is_symbolic
from .words import escaped, lines_text

__all__ = ["block_text", "body_text", "op_text", "program_diff", "program_text", "size_text", "type_text"]

_PYMIL_SYMBOL = re.compile(r"\bis\d+\b")
_INLINE = 12
"Elements up to which a const is printed by value."


def size_text(size: Any) -> str:
    """A size of a shape; `?` for one that is not fixed, which pymil calls by another name in each process."""
    return "?" if is_symbolic(size) else str(size)


def type_text(var: Var, dim: Callable[[Any], str] = size_text) -> str:
    """`fp16[1, 384, ?]`; a scalar is its dtype alone. `dim` writes one dimension."""
    if types.is_list(var.sym_type):
        return "list"
    name = types.builtin_to_string(var.dtype)
    if types.is_state(var.sym_type):
        name = f"state {name}"
    return f"{name}[{', '.join(map(dim, var.shape))}]" if var.rank else str(name)


def program_text(program: Program, *, names: bool = False) -> str:
    """Every function; with `names` values keep their names instead of being numbered."""
    return "\n".join(_function_text(name, function, names) for name, function in program.functions.items())


def body_text(function: Function) -> str:
    """The ops of a function, one a line, without its head: the form docstrings show."""
    return lines_text(_Namer(function, False).lines(function, ""))


def block_text(block: Block) -> str:
    """The ops of a block under their own names, nested blocks included."""
    return lines_text(_Namer(None, True).lines(block, ""))


def op_text(op: Operation) -> str:
    """One op under its own names, for errors and traces."""
    return escaped(next(iter(_Namer(None, True).op_lines(op, ""))))


def program_diff(before: str, after: str) -> str:
    """A unified diff of two program texts, three lines of context."""
    lines = difflib.unified_diff(before.split("\n"), after.split("\n"), "before", "after", lineterm="")
    return "\n".join(lines)


def _function_text(name: str, function: Function, names: bool) -> str:
    namer = _Namer(function, names)
    inputs = ", ".join(f"%{key}: {namer.type(var)}" for key, var in function.inputs.items())
    body = list(namer.lines(function, "    "))
    outputs = ", ".join(namer.ref(var) for var in function.outputs)
    return lines_text([f"{name}({inputs}) {{", *body, f"}} -> ({outputs})"])


class _Namer:
    """Numbers the intermediate values of one function; inputs and outputs keep their names."""

    def __init__(self, function: Function | None, names: bool) -> None:
        self._keep = names
        self._numbers: dict[Var, str] = {}
        if function is not None:
            self._numbers.update((var, f"%{name}") for name, var in function.inputs.items())
            self._numbers.update((var, f"%{var.name}") for var in function.outputs)
        self._count = 0
        self._symbols: dict[str, str] = {}

    def type(self, var: Var) -> str:
        return type_text(var, self._dim)

    def _dim(self, extent: Any) -> str:
        """A symbol that pymil numbered is numbered anew, in the order in which this function shows them."""
        def numbered(found: re.Match[str]) -> str:
            return self._symbols.setdefault(found[0], f"s{len(self._symbols)}")

        return _PYMIL_SYMBOL.sub(numbered, str(extent))

    def ref(self, var: Var) -> str:
        if self._keep:
            return f"%{var.name}"
        if var not in self._numbers:
            self._numbers[var] = f"%{self._count}"
            self._count += 1
        return self._numbers[var]

    def lines(self, block: Block, indent: str) -> Iterator[str]:
        for op in block.operations:
            if op.op_type != "const" or any(var in block.outputs for var in op.outputs):
                yield from self.op_lines(op, indent)

    def op_lines(self, op: Operation, indent: str) -> Iterator[str]:
        arguments = ", ".join(self._arguments(op))
        results = ", ".join(f"{self.ref(var)}: {self.type(var)}" for var in op.outputs)
        yield f"{indent}{results} = {op.op_type}({arguments})"
        for block in op.blocks:
            inputs = ", ".join(f"{self.ref(var)}: {self.type(var)}" for var in block.inputs)
            yield f"{indent}  ({inputs}) {{"
            yield from self.lines(block, indent + "    ")
            yield f"{indent}  }} -> ({', '.join(self.ref(var) for var in block.outputs)})"

    def _arguments(self, op: Operation) -> Iterator[str]:
        if op.op_type == "const":
            yield f"val={_literal(op.outputs[0])}"
            return
        for name, bound in op.inputs.items():
            if isinstance(bound, (list, tuple)):
                yield f"{name}=({', '.join(self._operand(var) for var in bound)})"
            elif not is_default(op, name):
                yield f"{name}={self._operand(bound)}"

    def _operand(self, var: Var) -> str:
        return _literal(var) if var.op is not None and var.op.op_type == "const" else self.ref(var)


def _literal(var: Var) -> str:
    if types.is_list(var.sym_type):
        return f"<list of {len(var.val)}>"
    if int(np.prod(var.shape, dtype=np.int64)) > _INLINE:
        return f"<{type_text(var)}>"
    value: Any = var.val.tolist() if isinstance(var.val, (np.ndarray, np.generic)) else var.val
    return str(value)
