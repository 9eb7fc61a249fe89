"""Search for the first difference between two programs.

This is the first value, in the order in which the second program computes, that differs from the value of the same name
in the first program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Operation, Program, Var

from ..passes.contract import Exactness
from ..utils.errors import InputError
from .comparison import EVERY_OUTPUT, OutputDifference, Strictness, compare_outputs
from .difference import FirstDifference, KnownValues, build_first_difference
from .execution import Plan, copy_state
from .value_matching import FunctionValues, find_ancestors, find_counterparts, find_state_updates
from .value_store import MAX_BYTES_IN_MEMORY, ValueStore

__all__ = ["find_first_difference"]

Array = np.ndarray[Any, Any]
Observer = Callable[[Operation, Var, Any], None]
_STATE_PREFIX = "state "


class _DifferenceFound(Exception):
    """Ends the run of the second program at the first value that differs."""

    def __init__(self, op: Operation, old: Var, new: Var, run: int, found: OutputDifference) -> None:
        super().__init__()
        self.op, self.old, self.new, self.run, self.found = op, old, new, run, found


def find_first_difference(
    before: Program, after: Program, plan: Plan, precision: str, exactness: Exactness | Strictness,
    failed: Sequence[OutputDifference], *, quirks: Sequence[str] = (), mapping: Mapping[str, str] | None = None,
    limit: int = MAX_BYTES_IN_MEMORY,
) -> FirstDifference | None:
    """Find the first op of `after` whose result differs in the run `plan`, whose outputs `failed` are known to differ.

    Only values on which a failed output depends are compared. Each is judged like an output, each time it is computed.
    `mapping` maps the names of removed values of `before` to the values of `after` that replace them. Up to `limit`
    bytes of values are kept in memory, the others in temporary files. Returns None if `after` fails to run before any
    value differs.
    """
    old, new = (FunctionValues(plan.function, program.functions[plan.function]) for program in (before, after))
    pairs = find_counterparts(old, new, mapping or {})
    seen = find_ancestors(new, *_split_failed_names(new, failed))
    pairs = {var: stands_for for var, stands_for in pairs.items() if var in seen}
    with ValueStore(limit) as store:
        kept = {var for stands_for in pairs.values() for var in stands_for}
        for each in dict.fromkeys((precision, "float64")):
            _make_runtime(before, plan, each, (), _Recorder(each, kept, store))(plan.feeds, copy_state(plan))
        watch = _Comparer(pairs, store, precision, exactness)
        runtime = _make_runtime(after, plan, precision, quirks, watch)
        try:
            runtime(plan.feeds, copy_state(plan))
        except _DifferenceFound as parted:
            sides = ((old, parted.old, parted.old.op), (new, parted.new, parted.op))
            return build_first_difference(
                plan, precision, sides, parted.run, parted.found, watch.get_known_values(runtime.executed_blocks)
            )
        except InputError:
            return None
    known = watch.get_known_values(runtime.executed_blocks)
    return _describe_output_difference((old, new), plan, precision, failed, known)


def _split_failed_names(values: FunctionValues, failed: Sequence[OutputDifference]) -> tuple[set[str], list[str]]:
    """Return the names of the outputs and of the states that differ."""
    names = [found.output for found in failed]
    if names == [EVERY_OUTPUT]:
        return {var.name for var in values.function.outputs}, list(values.function.inputs)
    outputs = {name.removesuffix(" labels") for name in names if not name.startswith(_STATE_PREFIX)}
    return outputs, [name.removeprefix(_STATE_PREFIX) for name in names if name.startswith(_STATE_PREFIX)]


def _make_runtime(program: Program, plan: Plan, precision: str, quirks: Sequence[str], observer: Observer) -> Any:
    from ..runtime import Runtime

    return Runtime(program, function=plan.function, precision=precision, quirks=quirks, observer=observer)


class _Recorder:
    """Stores the values of the first program, each time they are computed."""

    def __init__(self, precision: str, kept: set[Var], store: ValueStore) -> None:
        self._precision, self._kept, self._store = precision, kept, store
        self._runs: Counter[Var] = Counter()

    def __call__(self, op: Operation, var: Var, value: Any) -> None:
        if var not in self._kept:
            return
        self._runs[var] += 1
        if hasattr(value, "numpy"):
            self._store.put((self._precision, var, self._runs[var]), value.numpy())


class _Comparer:
    """Compares the values of the second program as they are computed, up to the first that differs."""

    def __init__(
        self, pairs: Mapping[Var, Sequence[Var]], store: ValueStore, precision: str, exactness: Exactness | Strictness
    ) -> None:
        self._pairs, self._store, self._precision, self._exactness = pairs, store, precision, exactness
        self._runs: Counter[Var] = Counter()
        self._uncompared: set[Var] = set()

    def get_known_values(self, entered: set[Block]) -> KnownValues:
        """Return the result of the comparison so far.

        A value that could not be compared at its last execution does not count as equal.
        """
        return KnownValues(
            right=set(self._runs) - self._uncompared, later=set(self._pairs) - set(self._runs), executed_blocks=entered,
            matched={var for stands_for in self._pairs.values() for var in stands_for})

    def __call__(self, op: Operation, var: Var, value: Any) -> None:
        if var not in self._pairs:
            return
        self._runs[var] += 1
        run, compared = self._runs[var], False
        for old in self._pairs[var] if hasattr(value, "numpy") else ():
            found = self._judge_value(old, run, value.numpy())
            if found is not None and not found.passed:
                raise _DifferenceFound(op, old, var, run, found)
            compared |= found is not None
        (self._uncompared.discard if compared else self._uncompared.add)(var)

    def _judge_value(self, var: Var, run: int, new: Array) -> OutputDifference | None:
        """Return the difference of a value, or None if the two cannot be compared."""
        old = self._store.get((self._precision, var, run))
        exact = self._store.get(("float64", var, run))
        if old is None or exact is None or old.shape != exact.shape:
            return None  # the full-precision run took another branch
        comparable = _reshape_like(old, new)
        if comparable is None:
            return None
        truth = None if self._precision == "float64" else {var.name: exact}
        (found,) = compare_outputs({var.name: old}, {var.name: comparable}, self._exactness, truth)
        return found


def _reshape_like(old: Array, new: Array) -> Array | None:
    """Return `new` in the shape and dtype of `old`, if they differ only in axes of extent 1 and the number's width."""
    if [extent for extent in old.shape if extent != 1] != [extent for extent in new.shape if extent != 1]:
        return None
    if old.dtype.kind != new.dtype.kind:
        return None
    return new.reshape(old.shape).astype(old.dtype, copy=False)


def _describe_output_difference(
    ends: tuple[FunctionValues, FunctionValues],
    plan: Plan,
    precision: str,
    failed: Sequence[OutputDifference],
    known: KnownValues,
) -> FirstDifference | None:
    """Describe a difference at an output if no compared value differs: only the second program has the ops before it.
    """
    for found in failed:
        sides = [(values, *maker) for values in ends if (maker := _find_maker(values, found.output)) is not None]
        if len(sides) == len(ends):
            return build_first_difference(plan, precision, sides, 1, found, known)
    return None


def _find_maker(values: FunctionValues, output: str) -> tuple[Var | None, Operation] | None:
    """Return an output's value and the op that computes it; for a state, None and the last op that writes it."""
    if output.startswith(_STATE_PREFIX):
        updates = find_state_updates(values, output.removeprefix(_STATE_PREFIX))
        return (None, updates[-1]) if updates else None
    name = output.removesuffix(" labels")
    var = next((var for var in values.function.outputs if var.name == name), None)
    return None if var is None or var.op is None else (var, var.op)
