"""The interpreter: runs the blocks of one call op by op, stores their values, and frees those no longer used."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..ir.constants import LazyValue
from ..ir.coremltools_internals import get_typed_value
from ..ir.query import describe_constant_sizes
from ..utils.budget import get_current_budget
from ..utils.errors import AnePassesError, InputError
from .attention_chains import ChainStep, compute_chain
from .memory_limits import (
    LiveValues,
    estimate_result_bytes,
    is_out_of_memory,
    refuse_allocation,
)
from .numeric import have_equal_bits, is_tensor_value
from .op_inputs import OpInputs
from .prepared_function import PreparedFunction, is_lazy
from .quirks import select_quirks
from .registry import Kernel

__all__ = ["Interpreter", "StateCell"]


_STEPS_PER_PROGRESS_CHECK = 256
"Loop steps between two checks of the clock for progress reports: a check at each step would slow short steps down."


class StateCell:
    """The current content of a state, shared by all readers and writers of the state."""

    def __init__(self, name: str, content: torch.Tensor) -> None:
        self.name = name
        self.content = content
        self.written = False


class Interpreter:
    """Executes the blocks of one function. `env` maps the id of a variable to its stored value."""

    def __init__(
        self, kernels: Mapping[str, Kernel], prepared: PreparedFunction, quirks: Sequence[Any] = (),
        observer: Callable[[Any, Any, Any], None] | None = None,
    ) -> None:
        self.kernels = kernels
        self.prepared = prepared
        self.precision = prepared.precision
        self.quirks = quirks
        self.observer = observer
        self.env: dict[int, Any] = {}
        self.joins_attention = False
        "True if the ops of an attention run in one step (`attention_chains`)."
        self.executed_blocks: set[Any] = set()
        self.budget = get_current_budget()
        self.live = LiveValues()
        self._steps = 0
        self._started = time.monotonic()
        self._loops: list[list[Any]] = []
        "The running loops, outermost first, each with the number of its current step."
        self._is_timed = self.budget.max_seconds is not None
        prepared.constants.check_files()
        prepared.constants.cache_read_constants(self._make_constant)

    def operand(self, var: Any) -> Any:
        """Return the value of `var` in the form kernels expect."""
        value = self.env.get(id(var))
        if value is not None:
            return self.precision.operand(value)
        return self.prepared.constants.get_operand(var, self._make_constant)

    def _make_constant(self, var: Any, passing: bool = False) -> Any:
        """Compute the operand for a constant. `passing` is true if one op reads it and it is then dropped."""
        if is_lazy(var.op) and var.op.op_type != "const":
            made = self._evaluate_op(var.op, passing)[var.op.outputs.index(var)]
            return self.precision.operand(self.keep(var, made))
        held = get_typed_value(var)
        value = held.read() if isinstance(held, LazyValue) else var.val  # `read` does not cache the unpacked elements
        if value is None:
            raise KeyError(f"variable '{var.name}' is read before it is computed")
        return self.precision.constant(value, passing) if is_tensor_value(value) else value

    def run_block(self, block: Any, arguments: Iterable[Any] = ()) -> list[Any]:
        """Run one block with `arguments` bound to its inputs; return the stored values of its outputs."""
        steps = self.enter_block(block, arguments)
        if self.joins_attention:
            steps = self.prepared.get_chained_ops(block)
        for op, finished in steps:
            if isinstance(op, ChainStep):
                self._run_chain(op)
            else:
                self.run_op(op)
            self.release(finished)
        return self.leave_block(block)

    def _run_chain(self, steps: ChainStep) -> None:
        """Run the ops of an attention in one step, or one by one if `compute_chain` does not support the operands."""
        product = steps.chain.product
        self.check_time(product)
        try:
            self.live.require_room(product, self.prepared.count_result_bytes(product) or 0)
            made = compute_chain(steps.chain, self.operand)
        except (MemoryError, RuntimeError) as error:
            if is_out_of_memory(error):
                refuse_allocation(product, error, self.live)
            made = None  # the op that fails reports it
        if made is not None:
            self.hold(id(product.outputs[0]), self.keep(product.outputs[0], made))
        for op, finished in steps.ops:
            if made is None:
                self.run_op(op)
            self.release(finished)

    def enter_block(self, block: Any, arguments: Iterable[Any]) -> list[tuple[Any, list[int]]]:
        """Bind `arguments` to the inputs of a block; return its ops, each with the values to release after it."""
        self.executed_blocks.add(block)
        self.prepared.constants.read_ahead(block)
        steps = self.prepared.steps[block]
        for var, value in zip(steps.inputs, arguments):
            self.hold(id(var), value)
        self.release(steps.unread_inputs)
        return steps.ops

    def leave_block(self, block: Any) -> list[Any]:
        """Return the stored values of a block's outputs, and release them."""
        results = [self._get_stored(var) for var in block.outputs]
        self.release(self.prepared.steps[block].left)
        return results

    def hold(self, key: int, value: Any) -> None:
        """Store the value of the variable with the id `key`."""
        self.env[key] = value
        self.live.add_value(key, value)

    def holds_bits(self, var: Any, value: Any) -> bool:
        """Return whether the stored value of `var` and `value` are tensors of one dtype and shape with equal bits."""
        held = self.env[id(var)]
        return isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor) and have_equal_bits(held, value)

    def is_wide(self, key: int) -> bool:
        """Return whether the value of the variable with the id `key` has float64 elements, or is not a tensor."""
        value = self.env.get(key)
        return not isinstance(value, torch.Tensor) or value.dtype == torch.float64

    def is_finite(self, var: Any) -> bool:
        """Return whether the stored value of `var` is a tensor that has only finite elements."""
        value = self.env[id(var)]
        if not isinstance(value, torch.Tensor):
            return False
        return not value.is_floating_point() or bool(value.isfinite().all())

    def has_finite_sum(self, var: Any) -> bool:
        """Return whether the sum of the elements of `var` is finite. Then all elements are; faster than `is_finite`."""
        value = self.env[id(var)]
        return isinstance(value, torch.Tensor) and (not value.is_floating_point() or math.isfinite(float(value.sum())))

    def find_largest_magnitude(self, var: Any) -> float:
        """Return the largest magnitude of the finite elements of `var`; 0 without finite elements or for a non-tensor.
        """
        value = self.operand(var)
        if not isinstance(value, torch.Tensor) or not value.numel():
            return 0.0
        finite = value.nan_to_num(0.0, 0.0, 0.0) if value.is_floating_point() else value.double()
        return float(finite.abs_().max())

    def round_to_float32(self, var: Any, exactly: bool = False) -> bool:
        """Store a float64 tensor as float32 if no finite element becomes infinite (with `exactly`: if none changes).

        Returns whether it was stored as float32. Ops at any precision can read it.
        """
        value = self.env[id(var)]
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float64:
            return False
        rounded = value.float()
        if not (have_equal_bits(rounded.double(), value) if exactly else torch.equal(rounded.isfinite(),
                                                                                     value.isfinite())):
            return False
        self.hold(id(var), rounded)
        return True

    def release(self, keys: Iterable[int]) -> None:
        """Drop the values of variables that no later op reads."""
        for key in keys:
            self.env.pop(key, None)
            self.live.drop_value(key)

    @contextmanager
    def track_loop(self, op: Any) -> Iterator[Callable[[], None]]:
        """Register the running loop `op`; yield a function to call before each of its steps.

        The function raises LimitReached when the run exceeds the step limit.
        """
        loop = [op, 0]
        self._loops.append(loop)
        most = self.budget.max_steps

        def count_step() -> None:
            if most is not None and self._steps >= most:
                self.budget.raise_steps_exceeded(self._format_position(), self._steps, time.monotonic() - self._started)
            self._steps += 1
            loop[1] += 1
            if not self._steps % _STEPS_PER_PROGRESS_CHECK:
                self.budget.report(self._format_position)

        try:
            yield count_step
        finally:
            self._loops.pop()

    def _format_position(self) -> str:
        """Format the running loops and the current step of each."""
        return ", in it ".join(f"while_loop '{op.outputs[0].name}' (step {step:,})" for op, step in self._loops)

    def check_time(self, op: Any) -> None:
        """Raise LimitReached, with the position of `op`, if the time limit is exceeded."""
        if self._is_timed and self.budget.is_time_over:
            name = op.outputs[0].name if op.outputs else op.name
            position = filter(None, [self._format_position(), f"{op.op_type} '{name}'"])
            self.budget.raise_time_exceeded(", in it ".join(position))

    def _get_stored(self, var: Any) -> Any:
        return self.env[id(var)] if id(var) in self.env else self.keep(var, self.operand(var))

    def run_op(self, op: Any) -> None:
        """Run one op and store its outputs."""
        if self._is_timed:
            self.check_time(op)
        try:
            for var, value in zip(op.outputs, self._evaluate_op(op)):
                stored = self.keep(var, value)
                self.hold(id(var), stored)
                if self.observer is not None:
                    self.observer(op, var, stored)
            if self.live.bytes > self.live.most:  # results of unpredicted sizes
                self.live.require_room(op, 0)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            refuse_allocation(op, error, self.live)

    def keep(self, var: Any, value: Any) -> Any:
        """Return `value` rounded, wrapped and laid out in the form in which `var` is stored."""
        dtype = self.prepared.dtypes[var] if isinstance(value, torch.Tensor) else None
        return value if dtype is None else self.precision.store(value, dtype)

    def _evaluate_op(self, op: Any, passing: bool = False) -> Sequence[Any]:
        inputs: Any = OpInputs(op, self, passing)
        faults = select_quirks(self.quirks, op) if self.quirks else ()
        try:
            self.live.require_room(op, estimate_result_bytes(self.prepared, op, inputs))
            for fault in faults:
                inputs = fault.operands(op, inputs)
            results = self.kernels[op.op_type](op, inputs)
            outputs = tuple(results) if isinstance(results, (tuple, list)) else (results,)
            for fault in faults:
                outputs = tuple(fault.results(op, inputs, outputs))
        except AnePassesError:
            raise  # the message already has the fault and the op, also for an op in a nested block
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise _make_evaluation_error(op, error) from error
        except (ArithmeticError, IndexError, KeyError, TypeError, ValueError) as error:
            raise _make_evaluation_error(op, error) from error
        return outputs


def _make_evaluation_error(op: Any, error: Exception) -> InputError:
    return InputError(f"{op.op_type} '{op.name}': cannot be computed on these operands: {error}"
                      f"{describe_constant_sizes(op)}")
