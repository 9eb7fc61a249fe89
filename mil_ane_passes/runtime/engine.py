"""`Runtime`: checks a program once and then executes it on any machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..ir.query import get_contradiction, iterate_nested_ops, plain_type
from ..utils.errors import InputError, NotSupported, suggest_nearest
from ..utils.locking import synchronized
from .batched_runs import BatchedShapes
from .feeds import check_feeds, check_state, split_inputs
from .memory_limits import refuse_excessive_peak, refuse_oversized_values
from .model_description import apply_description
from .partial_sum_observer import PartialSumObserver
from .quirks import QUIRKS, Quirk
from .registry import load_kernels

if TYPE_CHECKING:
    from .interpreter import Interpreter, StateCell
    from .prepared_function import PreparedFunction

__all__ = ["PRECISIONS", "Call", "Runtime", "missing_ops"]

#: float64 tests the algebra without rounding; float32 computes in float32; float16 rounds values to their declared
#: dtype
PRECISIONS = ("float64", "float32", "float16")

#: the number of ops that an error about missing ops lists for each op type: enough to find them, and short
_MAX_NAMES_PER_OP_TYPE = 3


@synchronized
def missing_ops(program: Any, function: str | None = None) -> list[tuple[str, str]]:
    """List (op type, value name) of each op without a kernel, including ops in nested blocks.

    Only `function` is searched, or all functions if it is None.
    """
    kernels = load_kernels()
    functions = program.functions.values() if function is None else [_get_function(program, function)]
    return [
        (op.op_type, op.outputs[0].name if op.outputs else op.name)
        for each in functions
        for op in iterate_nested_ops(each)
        if op.op_type not in kernels
    ]


@dataclass(frozen=True)
class Call:
    """One run of a function: the interpreter, the cells of the states, and the values of the inputs, in order."""

    block: Any
    machine: Interpreter
    cells: Mapping[str, StateCell]
    arguments: Iterator[Any]
    batch_size: int = 1
    "The number of runs in the batch."


class Runtime:
    """Executes one function of `program`.

    - `precision` is one of `PRECISIONS`.
    - `quirks` are the names of published faults to imitate (see `QUIRKS`).
    - `observer` is called with (op, output variable, stored value) after each op that computes, also in nested blocks.
      The value is a tensor that must not be changed, or a list or string.
    - `description` is the function's `ModelDescription` or `FunctionDescription` proto. It adds declarations of inputs
      that the program lacks: enumerated and ranged shapes, images and defaults.
    - `finite_constants` reads constants with a magnitude of 65504 or more, including infinity, as numbers far beyond
      any other: 1e6, and 3e4 at float16.
    - `rounded_steps` rounds the intermediate results of recurrent steps as float16 stores them.
    - `partial_sums` is called with (op, bound) for each op that sums products, before `observer`. No partial sum of any
      element is larger than the bound.
    - `departure` changes single ops as rewrites declare.
    - `constants` are read in place of the values of constants outside of nested blocks, by name: the values that they
      had before they were rounded to their dtypes.
    - `keeps_constants` is for a runtime that is called several times: converted constants are cached when they are
      first read, and not only at the second call.
    - `like` is a runtime of the same function. This one shares its prepared data, and the constants of the same dtype.

    A program that was edited between two calls runs in its edited form. Calls at float32 without observers, quirks and
    departures compute an attention in one step (`attention_chains`).
    """

    @synchronized
    def __init__(
        self, program: Any, *, function: str | None = None, precision: str = "float32", quirks: Sequence[str] = (),
        observer: Callable[[Any, Any, Any], None] | None = None, description: Any = None,
        finite_constants: bool = False, rounded_steps: bool = False,
        partial_sums: Callable[[Any, float], None] | None = None, departure: Quirk | None = None,
        constants: Mapping[str, Any] | None = None, keeps_constants: bool = False, like: Runtime | None = None,
    ) -> None:
        if precision not in PRECISIONS:
            known = ", ".join(PRECISIONS)
            raise InputError(
                f"precision '{precision}': unknown{suggest_nearest(precision, PRECISIONS)} (known: {known})"
            )
        quirks = [quirks] if isinstance(quirks, str) else list(quirks)
        for quirk in quirks:
            if quirk not in QUIRKS:
                known = ", ".join(sorted(QUIRKS))
                raise InputError(f"quirk '{quirk}': unknown{suggest_nearest(quirk, QUIRKS)} (known: {known})")
        self.precision = precision
        self.function = _select_function_name(program, function)
        self._block = _get_function(program, self.function)
        self._kernels = load_kernels()
        if like is None or like._block is not self._block:  # `like` has passed these checks
            _refuse_contradictions(self._block)
            _refuse_missing_ops(missing_ops(program, self.function))
            refuse_oversized_values(iterate_nested_ops(self._block))
        self._quirks: list[Quirk] = [QUIRKS[name]() for name in quirks]
        if partial_sums is not None:
            self._quirks.append(PartialSumObserver(partial_sums))
        if departure is not None:
            self._quirks.append(departure)
        self._observer = observer
        self._constants = constants or {}
        self._description = description
        self._finite_constants, self._rounded_steps = finite_constants, rounded_steps
        self._keeps_constants, self._like = keeps_constants, like
        self._prepared: PreparedFunction | None = None
        self.executed_blocks: set[Any] = set()
        "The blocks that runs have entered so far, including nested blocks."

    @synchronized
    def __call__(
        self, feeds: Mapping[str, Any], state: MutableMapping[str, Any] | None = None
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Run once. State writes update `state` in place; states that `state` does not contain start as zeros.

        Raises InputError, before anything runs, for feeds or states of the wrong name, dtype or shape.
        """
        call = self.start_call(feeds, state)
        # Not with observers or quirks, which see the values between the ops.
        call.machine.joins_attention = self.precision == "float32" and not self._quirks and self._observer is None
        try:
            results = call.machine.run_block(self._block, call.arguments)
        finally:
            self.executed_blocks |= call.machine.executed_blocks
        return self.finish_call(call, results, state)

    @synchronized
    def start_call(self, feeds: Mapping[str, Any], state: MutableMapping[str, Any] | None) -> Call:
        """Check the inputs of a run and prepare it. Raises InputError as a call does."""
        arrays, states = self._check_inputs(feeds, state or {})
        machine = self._make_interpreter()
        cells = self._state_cells(machine, states, state or {})
        # An iterator, not a list, so that an input that is read early in the run is also freed early.
        arguments = (
            cells[name] if name in cells else machine.keep(var, machine.precision.tensor(arrays[name]))
            for name, var in self._block.inputs.items()
        )
        return Call(self._block, machine, cells, arguments)

    @synchronized
    def start_batched_call(self, feeds: Sequence[Mapping[str, Any]]) -> Call:
        """Prepare runs on all of `feeds` as one batch, for a function that satisfies `can_batch_runs`.

        Results contain the rows of all runs along axis 0. Raises InputError as a call does.
        """
        checked = [self._check_inputs(each, {})[0] for each in feeds]
        machine = self._make_interpreter(len(feeds))
        arguments = (
            machine.keep(var, machine.precision.tensor(np.concatenate([arrays[name] for arrays in checked])))
            for name, var in self._block.inputs.items()
        )
        return Call(self._block, machine, {}, arguments, len(feeds))

    @synchronized
    def join_call(self, call: Call) -> Interpreter:
        """Return an interpreter at this precision that shares the values of `call`, a run at another precision."""
        machine = self._make_interpreter(call.batch_size)
        machine.env, machine.live = call.machine.env, call.machine.live
        return machine

    @synchronized
    def finish_call(
        self, call: Call, results: list[Any], state: MutableMapping[str, Any] | None
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Write the states of a run to `state`, and return its outputs by name. `results` is empty afterwards.

        Raises AnePassesError if a weight file was modified during the run.
        """
        call.machine.prepared.constants.check_files()
        if state is not None:
            for name, cell in call.cells.items():
                if cell.written or name not in state:
                    state[name] = call.machine.precision.numpy(cell.content, self._block.inputs[name].dtype)
        # Each tensor is freed before the next is copied.
        return {var.name: self._to_result(call.machine, var, results.pop(0)) for var in self._block.outputs}

    @synchronized
    def read_constant(self, var: Any, ops: Sequence[Any] = ()) -> np.ndarray[Any, Any]:
        """Return the value of a constant of the function, decompressed, as ops read it at this precision.

        `ops` are those of the function that compute it from constants, in their order.
        """
        machine = self._make_interpreter()
        for op in ops:
            machine.run_op(op)
        return machine.precision.numpy(machine.operand(var), var.dtype)

    @synchronized
    def compute(
        self, var: Any, ops: Sequence[Any], feeds: Mapping[str, Any], state: Mapping[str, Any] | None = None
    ) -> np.ndarray[Any, Any]:
        """Run only `ops` and return the value of `var`, a variable of the function's outermost block that needs them.

        States that `state` does not contain are read as zeros; none is updated. Raises InputError as a call does.
        """
        call = self.start_call(feeds, dict(state or {}))
        for given, value in zip(self._block.inputs.values(), call.arguments):
            call.machine.hold(id(given), value)
        for op in ops:
            call.machine.run_op(op)
        return call.machine.precision.numpy(call.machine.operand(var), var.dtype)

    @synchronized
    def check(self, feeds: Mapping[str, Any], state: Mapping[str, Any] | None = None) -> None:
        """Check feeds and states without running. Raises InputError for a wrong name, dtype or shape."""
        self._check_inputs(feeds, state or {})

    def _check_inputs(
        self, feeds: Mapping[str, Any], state: Mapping[str, Any]
    ) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, Any]]:
        """Return the feeds as arrays, and the declared states, after checking both."""
        declared, states = split_inputs(self._block)
        if self._description is not None:
            feeds = apply_description(self._description, feeds)
        arrays = check_feeds(declared, feeds)
        check_state(states, state)
        return arrays, states

    def _make_interpreter(self, batch_size: int = 1) -> Interpreter:
        from .interpreter import Interpreter

        quirks = [*self._quirks, *[BatchedShapes(batch_size)] * (batch_size > 1)]
        machine = Interpreter(self._kernels, self._prepare_function(), quirks, self._observer)
        replaced = [op.outputs[0] for op in self._block.find_ops(op_type="const")] if self._constants else []
        for var in replaced:
            if var.name in self._constants:
                machine.hold(id(var), machine.precision.tensor(self._constants[var.name]))
        return machine

    def _prepare_function(self) -> PreparedFunction:
        """Return the prepared function; it is prepared again if the program was edited."""
        from .numeric import Precision
        from .prepared_function import PreparedFunction

        if self._prepared is None or not self._prepared.is_current():
            precision = Precision(self.precision, self._finite_constants, self._rounded_steps)
            like = None if self._like is None else self._like._prepare_function()
            self._prepared = PreparedFunction(self._block, precision, keeps_constants=self._keeps_constants, like=like)
            refuse_excessive_peak(self._prepared, self._block)
        return self._prepared

    @staticmethod
    def _state_cells(machine: Interpreter, states: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, StateCell]:
        from .interpreter import StateCell

        cells = {}
        for name, var in states.items():
            content = given[name] if name in given else np.zeros(tuple(int(extent) for extent in var.shape))
            stored = machine.precision.store(machine.precision.tensor(content), var.dtype)
            cells[name] = StateCell(name, stored)
        return cells

    @staticmethod
    def _to_result(machine: Interpreter, var: Any, value: Any) -> Any:
        import torch

        return machine.precision.numpy(value, var.dtype) if isinstance(value, torch.Tensor) else value


def _select_function_name(program: Any, name: str | None) -> str:
    """Return the name of the function to run: `name`, else the program's default, else its only function.

    Raises InputError when `name` is not in the program, or when several functions have no default.
    """
    names = list(program.functions)
    if name is None:
        default = getattr(program, "default_function_name", "main")
        if default in names:
            return str(default)
        if len(names) == 1:
            return str(names[0])
        raise InputError(f"the program has no default function; name one of: {', '.join(names)}")
    if name not in names:
        raise InputError(
            f"function '{name}': not in the program{suggest_nearest(name, names)} (functions: {', '.join(names)})"
        )
    return name


def _get_function(program: Any, name: str) -> Any:
    return program.functions[_select_function_name(program, name)]


def _refuse_contradictions(block: Any) -> None:
    """Raise NotSupported if coremltools defines an op but rejects its inputs and outputs in the package."""
    found = [op for op in iterate_nested_ops(block) if get_contradiction(op)]
    if found:
        first = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        name = first.outputs[0].name if first.outputs else first.name
        raise NotSupported(
            f"{plain_type(first)} '{name}': cannot be executed{more}: coremltools does not accept these "
            f"inputs and outputs ({get_contradiction(first)}); correct them in the program that makes the package")


def _refuse_missing_ops(missing: Sequence[tuple[str, str]]) -> None:
    if not missing:
        return
    places: dict[str, list[str]] = {}
    for op_type, name in missing:
        places.setdefault(op_type, []).append(name)
    listed = "; ".join(
        f"{op_type} ({', '.join(repr(name) for name in names[:_MAX_NAMES_PER_OP_TYPE])}"
        + (f" and {len(names) - _MAX_NAMES_PER_OP_TYPE} more)" if len(names) > _MAX_NAMES_PER_OP_TYPE else ")")
        for op_type, names in sorted(places.items())
    )
    raise NotSupported(f"the reference runtime has no kernel for: {listed}")
