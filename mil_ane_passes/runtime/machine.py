"""One call's working memory: runs blocks, op by op, and frees what is no longer used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from coremltools.converters.mil.mil import types

from ..core.errors import AnePassesError, InputError
from .inputs import Inputs
from .numeric import Precision, is_tensor_value
from .quirks import in_force
from .registry import Kernel

__all__ = ["Machine", "StateCell", "last_uses"]


class StateCell:
    """A state's current content; shared by all who hold the state."""

    def __init__(self, name: str, content: torch.Tensor) -> None:
        self.name = name
        self.content = content
        self.written = False


def operands(op: Any) -> Iterable[Any]:
    """All variables an op reads, those read inside its nested blocks included."""
    for given in op.inputs.values():
        yield from given if isinstance(given, (list, tuple)) else (given,)
    for block in op.blocks:
        yield from block.outputs
        for inner in block.operations:
            yield from operands(inner)


def last_uses(block: Any) -> list[list[int]]:
    """For each op of `block`, the ids of the block's own variables that nobody reads after it."""
    ops = list(block.operations)
    kept = {id(var) for var in block.outputs}
    last: dict[int, int] = {id(var): -1 for var in _inputs(block)}
    for index, op in enumerate(ops):
        for var in operands(op):
            if id(var) in last:
                last[id(var)] = index
        for var in op.outputs:
            last[id(var)] = index
    dead: list[list[int]] = [[] for _ in ops]
    for key, index in last.items():
        if key not in kept and index >= 0:
            dead[index].append(key)
    return dead


def _inputs(block: Any) -> list[Any]:
    return list(block.inputs.values()) if isinstance(block.inputs, Mapping) else list(block.inputs)


def is_lazy(op: Any) -> bool:
    """Constants and compressed constants: made when used and not kept, since weights may be memory mapped."""
    return op is not None and (op.op_type == "const" or op.op_type.startswith("constexpr_"))


class Machine:
    """Executes blocks of one function. `env` maps the id of a variable to its stored value."""

    def __init__(
        self, kernels: Mapping[str, Kernel], precision: Precision, quirks: Sequence[Any] = (),
        observer: Callable[[Any, Any, Any], None] | None = None,
    ) -> None:
        self.kernels = kernels
        self.observer = observer
        self.precision = precision
        self.quirks = quirks
        self.env: dict[int, Any] = {}
        self.entered: set[Any] = set()
        self._dead: dict[int, list[list[int]]] = {}

    def operand(self, var: Any) -> Any:
        """The value of `var` as kernels see it."""
        if id(var) in self.env:
            return self.precision.operand(self.env[id(var)])
        if is_lazy(var.op) and var.op.op_type != "const":
            made = self._evaluate(var.op)[var.op.outputs.index(var)]
            return self.precision.operand(self.keep(var, made))
        value = var.val
        if value is None:
            raise KeyError(f"variable '{var.name}' is read before it is computed")
        return self.precision.tensor(value) if is_tensor_value(value) else value

    def run_block(self, block: Any, arguments: Sequence[Any] = ()) -> list[Any]:
        """Run one block with `arguments` bound to its inputs; return the stored values of its outputs."""
        self.entered.add(block)
        for var, value in zip(_inputs(block), arguments):
            self.env[id(var)] = value
        # Liveness is a property of the program: computed once per block even when a loop runs it many times.
        if id(block) not in self._dead:
            self._dead[id(block)] = last_uses(block)
        for op, finished in zip(list(block.operations), self._dead[id(block)]):
            self.run_op(op)
            for key in finished:
                self.env.pop(key, None)
        results = [self.keep(var, self.operand(var)) for var in block.outputs]
        for var in [*_inputs(block), *(out for op in block.operations for out in op.outputs)]:
            self.env.pop(id(var), None)
        return results

    def run_op(self, op: Any) -> None:
        """Run one op and store its outputs."""
        if is_lazy(op):
            return
        for var, value in zip(op.outputs, self._evaluate(op)):
            stored = self.env[id(var)] = self.keep(var, value)
            if self.observer is not None:
                self.observer(op, var, stored)

    def keep(self, var: Any, value: Any) -> Any:
        """`value` rounded, wrapped and laid out as `var` is stored."""
        if not isinstance(value, torch.Tensor) or types.is_list(var.sym_type):
            return value
        return self.precision.store(value, var.dtype)

    def _evaluate(self, op: Any) -> Sequence[Any]:
        inputs: Any = Inputs(op, self)
        faults = in_force(self.quirks, op)
        try:
            for fault in faults:
                inputs = fault.operands(op, inputs)
            results = self.kernels[op.op_type](op, inputs)
            outputs = tuple(results) if isinstance(results, (tuple, list)) else (results,)
            for fault in faults:
                outputs = tuple(fault.results(op, inputs, outputs))
        except AnePassesError:
            raise  # already says what is wrong, and in which op of a nested block
        except (ArithmeticError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(f"{op.op_type} '{op.name}': cannot be computed on these operands: {error}") from error
        return outputs
