"""Op inputs: the operands of one op in the form kernels expect."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from coremltools.converters.mil.mil import types

from ..ir.constants import LazyValue
from ..ir.coremltools_internals import get_typed_value
from ..utils.mapped_files import check_file_of

if TYPE_CHECKING:
    from .interpreter import Interpreter

__all__ = ["OpInputs"]

_MAX_KEPT_NUMBERS = 64
"Most numbers of a parameter that are cached as a Python list: parameters such as pads have fewer, and lists are large."


class OpInputs:
    """The resolved inputs of one op.

    Floats are in the computing dtype. Inputs that are not connected have the op's defaults. If the outputs are
    `passing`, one other op reads them and they are then dropped.
    """

    def __init__(self, op: Any, machine: Interpreter, passing: bool = False) -> None:
        self.op = op
        self.machine = machine
        self.passing = passing
        self._vars = machine.prepared.get_inputs(op)

    @property
    def compute(self) -> torch.dtype:
        """The dtype in which floats are computed."""
        return self.machine.precision.compute

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor for a result."""
        return self.machine.precision.allocate(shape, dtype, self.passing)

    def rounded(self, value: torch.Tensor) -> torch.Tensor:
        """Round an intermediate result of a recurrent step to the op's dtype.

        It is rounded only at precision float16 with `rounded_steps`, and only for ops declared fp16.
        """
        rounds = self.machine.precision.rounded_steps and self.op.outputs[0].dtype == types.fp16
        return value.half().to(value.dtype) if rounds else value

    def memo(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, which must depend only on constant parameters and on `key`, such as shapes.

        It is computed once for each op and `key`.
        """
        known = self.machine.prepared.memos
        found = known.get((self.op, key))
        if found is None:
            found = known[self.op, key] = make()
        return found

    def var(self, name: str) -> Any:
        """Return the input variable itself, or None when it is not connected."""
        return self._vars.get(name)

    def accepts(self, name: str) -> bool:
        """Return whether the op, in its opset, has an input called `name` at all."""
        return name in self.op.input_spec.input_types

    def has(self, name: str) -> bool:
        """Return whether the input is connected or has a default."""
        return self.get(name) is not None

    def get(self, name: str) -> Any:
        """Return the operand (a tensor, string, list or state; a list of these for a tuple), its default, or None."""
        var = self._vars.get(name)
        if var is None:
            return self.machine.prepared.get_default(self.op, name)
        if isinstance(var, (list, tuple)):
            return [self.machine.operand(each) for each in var]
        return self.machine.operand(var)

    def __getitem__(self, name: str) -> Any:
        found = self.get(name)
        if found is None:
            raise KeyError(f"{self.op.op_type} '{self.op.name}' has no input '{name}'")
        return found

    def iterate_blocks(self, name: str) -> Iterator[tuple[int, torch.Tensor]] | None:
        """Return the rows of a large constant matrix in blocks (see `Precision.iterate_blocks`).

        Returns None for other operands, and for one that is kept in the computing dtype.
        """
        var = self.var(name)
        if var is None or var.op is None or var.op.op_type != "const" or id(var) in self.machine.env or (
                not self.machine.prepared.constants.is_converted(var)):
            return None
        held = get_typed_value(var)
        if isinstance(held, LazyValue) or not self.machine.precision.can_convert_in_blocks(var.val):
            return None
        return self.machine.precision.iterate_blocks(var.val)

    def value(self, name: str) -> Any:
        """Return a parameter as a plain Python value, not to be changed: scalar, string, (nested) list, or None."""
        known = self.machine.prepared.parameters
        var = self._vars.get(name)
        plain = known.get(var)
        if plain is not None:
            return plain
        found = self.get(name)
        if not isinstance(found, torch.Tensor):
            return found
        plain = found.tolist()
        if found.numel() <= _MAX_KEPT_NUMBERS and getattr(getattr(var, "op", None), "op_type", "") == "const":
            known[var] = plain
        return plain

    def values(self, name: str) -> list[Any]:
        """Return a vector parameter as a list; a scalar gives a list of one, a missing parameter an empty list."""
        found = self.value(name)
        if found is None:
            return []
        return list(found) if isinstance(found, (list, tuple, range)) else [found]

    def constant(self, name: str) -> np.ndarray[Any, Any] | None:
        """Return the stored value of a constant input without a copy, for ops that use only a part of it; else None."""
        var = self.var(name)
        known = var is not None and var.op is not None and var.op.op_type == "const"
        if not known or id(var) in self.machine.env:  # the run replaces it by another value
            return None
        held = get_typed_value(var)
        value = np.asarray(held.read() if isinstance(held, LazyValue) else var.val)
        check_file_of(value)
        return value
