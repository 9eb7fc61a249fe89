"""One call's working memory: runs blocks, op by op, and frees what is no longer used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..core.errors import AnePassesError, InputError
from .inputs import Inputs
from .numeric import is_tensor_value
from .prepared import Prepared, is_lazy
from .quirks import in_force
from .registry import Kernel

__all__ = ["Machine", "StateCell"]


class StateCell:
    """A state's current content; shared by all who hold the state."""

    def __init__(self, name: str, content: torch.Tensor) -> None:
        self.name = name
        self.content = content
        self.written = False


class Machine:
    """Executes blocks of one function. `env` maps the id of a variable to its stored value."""

    def __init__(
        self, kernels: Mapping[str, Kernel], prepared: Prepared, quirks: Sequence[Any] = (),
        observer: Callable[[Any, Any, Any], None] | None = None,
    ) -> None:
        self.kernels = kernels
        self.prepared = prepared
        self.precision = prepared.precision
        self.quirks = quirks
        self.observer = observer
        self.env: dict[int, Any] = {}
        self.entered: set[Any] = set()
        prepared.constants.keep_read(self._constant)

    def operand(self, var: Any) -> Any:
        """The value of `var` as kernels see it."""
        if id(var) in self.env:
            return self.precision.operand(self.env[id(var)])
        return self.prepared.constants.get(var, self._constant)

    def _constant(self, var: Any) -> Any:
        if is_lazy(var.op) and var.op.op_type != "const":
            made = self._evaluate(var.op)[var.op.outputs.index(var)]
            return self.precision.operand(self.keep(var, made))
        value = var.val
        if value is None:
            raise KeyError(f"variable '{var.name}' is read before it is computed")
        return self.precision.constant(value) if is_tensor_value(value) else value

    def run_block(self, block: Any, arguments: Iterable[Any] = ()) -> list[Any]:
        """Run one block with `arguments` bound to its inputs; return the stored values of its outputs."""
        self.entered.add(block)
        steps = self.prepared.steps[block]
        self.env.update(zip(map(id, steps.inputs), arguments))
        self._forget(steps.unread)
        for op, finished in steps.ops:
            self.run_op(op)
            self._forget(finished)
        results = [self._stored(var) for var in block.outputs]
        self._forget(steps.left)
        return results

    def _forget(self, keys: Iterable[int]) -> None:
        for key in keys:
            self.env.pop(key, None)

    def _stored(self, var: Any) -> Any:
        return self.env[id(var)] if id(var) in self.env else self.keep(var, self.operand(var))

    def run_op(self, op: Any) -> None:
        """Run one op and store its outputs."""
        for var, value in zip(op.outputs, self._evaluate(op)):
            stored = self.env[id(var)] = self.keep(var, value)
            if self.observer is not None:
                self.observer(op, var, stored)

    def keep(self, var: Any, value: Any) -> Any:
        """`value` rounded, wrapped and laid out as `var` is stored."""
        dtype = self.prepared.dtypes[var] if isinstance(value, torch.Tensor) else None
        return value if dtype is None else self.precision.store(value, dtype)

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
