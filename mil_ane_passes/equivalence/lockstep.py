"""Runs of two functions side by side, in which shared ops are computed once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from coremltools.converters.mil.mil import Function, Operation, Program, Var

from ..ir.query import DATA_MOVEMENT_OPS, get_flat_inputs, is_compressed, iterate_nested_ops
from ..runtime.batched_runs import can_batch_runs
from ..runtime.engine import Call, Runtime
from ..utils.errors import InputError, MemoryLimitReached
from ..utils.locking import synchronized
from .adversarial_feeds import SPECIAL
from .execution import (
    USER_FEEDS_LABEL,
    Execution,
    OpCount,
    Plan,
    RegionLog,
    Run,
    RunProgress,
    copy_state,
    execute_run,
    is_left_out,
    join_results,
    make_runs,
    note_error,
)
from .feeds import count_computed_elements
from .overflow_bounds import can_overflow
from .value_matching import FunctionMatch, FunctionValues, OpMatch, is_constant, list_operands, match_functions

if TYPE_CHECKING:
    from ..runtime.interpreter import Interpreter

__all__ = ["Lockstep", "execute_in_lockstep"]

Array = np.ndarray[Any, Any]

_MAX_BATCH_ELEMENTS = 1 << 27
"""The largest number of elements that a batch computes: 1 GB at float64 if all were alive at once, which few are.
Larger runs gain nothing from a batch, which saves time between ops."""


class Lockstep:
    """Runs two functions on the same feeds, op by op of the second; the first runs until the counterparts are computed.

    An op of the second function reuses the result of an equal op of the first if the operands of both have the same
    bits. Any other op is run. If its result has the same bits as its counterpart, downstream ops can reuse results
    again. A value of the first function is freed when neither function needs it.

    `common` is a runtime of the first function at float32. It runs the ops whose results both functions share, if they
    read no value in which the two may differ: both functions continue with the same numbers, so the precision of these
    does not matter. An op whose result may be finite only at float64 is run at float64. If the second function computes
    a value from a shared result that the first computes from other values, the two agree only to float32 precision.
    """

    def __init__(
        self, first: Runtime, second: Runtime, match: FunctionMatch, regions: RegionLog | None = None,
        common: Runtime | None = None,
    ) -> None:
        self.first, self.second = first, second
        self._match, self._regions, self._common = match, regions, common
        self._common_ops = _CommonOps(match) if common is not None else None
        self.count = OpCount()
        "The ops of the last run."

    @property
    def lowers(self) -> bool:
        """Return whether shared ops may be computed at float32."""
        return self._common is not None

    def keep_precision(self) -> Lockstep:
        """Return a copy without `common`, which computes all ops at the runtimes' own precision."""
        return Lockstep(self.first, self.second, self._match, self._regions)

    @synchronized
    def __call__(
        self, feeds: Mapping[str, Any], states: tuple[MutableMapping[str, Any], MutableMapping[str, Any]]
    ) -> tuple[dict[str, Array], dict[str, Array] | InputError]:
        """Run both once; return the outputs of the first, and the outputs or the error of the second.

        Raises the errors of the first, and LimitReached of either. The memory limit may be exceeded by both together
        even if neither would exceed it alone.
        """
        return self._run(
            self.first.start_call(feeds, states[0]), lambda: self.second.start_call(feeds, states[1]), states)

    @synchronized
    def run_batch(
        self, feeds: Sequence[Mapping[str, Any]]
    ) -> list[tuple[dict[str, Array], dict[str, Array]]]:
        """Run both on all of `feeds` as one batch; return the outputs of both for each.

        Raises the errors of both programs, whichever run causes them.
        """
        outputs, outcome = self._run(
            self.first.start_batched_call(feeds), lambda: self.second.start_batched_call(feeds), ({}, {}))
        if isinstance(outcome, InputError):
            raise outcome
        parts = [_split_rows(each, len(feeds)) for each in (outputs, outcome)]
        return [*zip(*parts)]

    def _run(
        self, one: Call, start_second: Callable[[], Call],
        states: tuple[MutableMapping[str, Any], MutableMapping[str, Any]],
    ) -> tuple[dict[str, Array], dict[str, Array] | InputError]:
        self.count = OpCount()
        steps = _Steps(one, self._match.ops)
        if self._common is not None and self._common_ops is not None:
            steps.share(self._common.join_call(one), self._common_ops)
        entered: set[Any] = set()
        outcome: dict[str, Array] | InputError
        try:
            try:
                two = start_second()
                found = self._run_second(steps, two, entered)
                outcome = self.second.finish_call(two, found, states[1])
            except InputError as error:
                if steps.failed:
                    raise
                outcome = error
            outputs = self.first.finish_call(one, steps.finish(), states[0])
        finally:
            self.first.executed_blocks |= one.machine.executed_blocks
            self.count.at_float32, self.count.rounded = steps.at_float32, steps.rounded
        self.second.executed_blocks |= entered  # not reached if the first fails: then nothing is compared
        return outputs, outcome

    def _run_second(self, first: _Steps, call: Call, entered: set[Any]) -> list[Any]:
        machine = call.machine
        machine.live, machine.executed_blocks = first.machine.live, entered  # one memory limit for the values of both
        equal = set(map(id, self._match.inputs))
        for op, finished in machine.enter_block(call.block, call.arguments):
            match = self._match.ops.get(op)
            self.count.ops += 1
            if match is None:
                machine.run_op(op)
            else:
                self._run_matched(first, machine, op, match, equal)
            machine.release(finished)
        return machine.leave_block(call.block)

    def _run_matched(self, first: _Steps, machine: Interpreter, op: Any, match: OpMatch, equal: set[int]) -> None:
        """Reuse the results of the first function for `op`, or run it and compare its results with them."""
        first.run_until(match)
        is_shared = match.is_same and all(id(var) in equal for var in match.operands)
        if is_shared:
            machine.check_time(op)
            _count_blocks(op, match.counterpart, first.machine, machine)
            self.count.shared += 1
        else:
            machine.run_op(op)
        for own, other in match.pairs:
            value = first.machine.env[id(other)]
            is_equal = is_shared or machine.holds_bits(own, value)
            if not match.is_same and self._regions is not None:
                tensors = value, machine.env[id(own)]
                self._note_region(self._regions, (other, own), tensors, first.batch_size, is_equal)
            if is_equal:
                machine.hold(id(own), value if is_shared else first.lower(other))
                equal.add(id(own))
        first.drop_needs(match)

    def _note_region(
        self, regions: RegionLog, values: tuple[Var, Var], tensors: tuple[Any, Any], count: int, is_equal: bool
    ) -> None:
        """Record the comparison of two values in each run of a batch of `count`."""
        from ..runtime.numeric import have_equal_bits

        for parts in [tensors] if count == 1 else zip(*(each.chunk(count) for each in tensors)):
            regions.note(self.first.function, self.first.precision, values, parts,
                         is_equal or (count > 1 and have_equal_bits(*parts)))


class _CommonOps:
    """The ops of the first function whose results the second reuses if the operands of both have the same values.

    `values` are the values of the first function that are the counterpart of exactly one value of the second. For any
    other value, a downstream op could read a result that the second function does not share.
    """

    def __init__(self, match: FunctionMatch) -> None:
        count = Counter(id(other) for each in match.ops.values() for _, other in each.pairs)
        self.values = {key for key, times in count.items() if times == 1}
        partners = dict(match.inputs)
        for each in match.ops.values():
            partners.update(each.pairs)
        self.operands: dict[Operation, tuple[int, ...]] = {}
        "The ids of the values that each op reads."
        for each in match.ops.values():
            op = each.counterpart
            read = list_operands(op, op.enclosing_block)
            if (each.is_same and {id(var) for var in op.outputs} <= self.values
                    and {partners.get(var) for var in each.operands} == set(read)):
                self.operands[op] = tuple(map(id, read))
        self.magnitudes: dict[int, float] = {}
        "The largest finite magnitude of each constant."


class _Steps:
    """The run of the first function, which is continued whenever the second needs its values."""

    def __init__(self, call: Call, matches: Mapping[Any, OpMatch]) -> None:
        self.machine, self._block = call.machine, call.block
        self.failed = False
        self._needs = Counter(id(other) for match in matches.values() for _, other in match.pairs)
        self._finished: set[int] = set()
        "Values that the first function no longer reads, but the second may reuse."
        self._ops = iter(self.machine.enter_block(self._block, call.arguments))
        self._common: Interpreter | None = None
        self._common_ops: _CommonOps | None = None
        self._magnitudes: dict[int, float] = {}
        self._last: Operation | None = None
        self.at_float32 = self.rounded = 0
        self.batch_size = call.batch_size
        "The number of runs in the batch."

    def share(self, common: Interpreter, ops: _CommonOps) -> None:
        """Let `common`, an interpreter at float32 on the values of this one, run those of `ops` with equal operands."""
        self._common, self._common_ops = common, ops
        for var in self._block.inputs.values():
            if id(var) in self.machine.env:
                self.machine.round_to_float32(var, exactly=True)

    def run_until(self, match: OpMatch) -> None:
        """Continue the run until the counterparts of `match` are computed."""
        for _, other in match.pairs:
            while id(other) not in self.machine.env and self._run_next():
                pass

    def _run_next(self) -> bool:
        op, finished = next(self._ops, (None, []))
        if op is None:
            return False
        try:
            self._run(op)
        except InputError:
            self.failed = True
            raise
        needed = {key for key in finished if self._needs[key]}
        self._finished |= needed
        self.machine.release(key for key in finished if key not in needed)
        return True

    def _run(self, op: Operation) -> None:
        """Run an op, at float32 if all values that it reads are float32 and no result overflows only at float32.

        This holds if the results are finite, or if they are not finite because the op reads values that are not.
        """
        self._last = op
        reads = None if self._common_ops is None else self._common_ops.operands.get(op)
        if self._common is None or reads is None or any(map(self.machine.is_wide, reads)):
            self.machine.run_op(op)
            return
        if not op.blocks:
            self._common.run_op(op)
            if all(map(self._common.has_finite_sum, op.outputs)) or not can_overflow(
                    op, lambda name: self._find_magnitude(op.inputs.get(name))) or all(
                    map(self._common.is_finite, op.outputs)):
                self.at_float32 += not _is_exact(op)
                return
        self.machine.run_op(op)
        for var in op.outputs:
            self.lower(var)

    def _find_magnitude(self, operand: Any) -> float:
        """Return the largest finite magnitude of an operand; 0 without a finite element."""
        if operand is None or self._common is None or self._common_ops is None:
            return 0.0
        known = self._common_ops.magnitudes if is_constant(operand) else self._magnitudes
        if id(operand) not in known:
            known[id(operand)] = self._common.find_largest_magnitude(operand)
        return known[id(operand)]

    def lower(self, var: Var) -> Any:
        """Round a value that both functions share to float32, if all finite elements stay finite; return the value.

        It is not rounded if a downstream op may already have read it at float64.
        """
        if self._common_ops is not None and id(var) in self._common_ops.values and var.op is self._last:
            self.rounded += self.machine.round_to_float32(var)
        return self.machine.env[id(var)]

    def drop_needs(self, match: OpMatch) -> None:
        """Release the counterparts of an op of the second function after it has run."""
        for _, other in match.pairs:
            self._needs[id(other)] -= 1
            if not self._needs[id(other)] and id(other) in self._finished:
                self._finished.discard(id(other))
                self.machine.release([id(other)])

    def finish(self) -> list[Any]:
        """Run to the end and return the values of the outputs."""
        self._needs.clear()
        self.machine.release(self._finished)
        while self._run_next():
            pass
        return self.machine.leave_block(self._block)


def _is_exact(op: Operation) -> bool:
    """Return whether `op` has the same results at float32 and at float64, if its operands do."""
    return op.op_type in DATA_MOVEMENT_OPS and not any(map(is_compressed, get_flat_inputs(op)))


def _split_rows(outputs: Mapping[str, Array], count: int) -> list[dict[str, Array]]:
    """Split the outputs of a batch of `count` runs."""
    parts = {name: np.split(value, count) for name, value in outputs.items()}
    return [{name: each[number] for name, each in parts.items()} for number in range(count)]


def _count_blocks(op: Any, counterpart: Any, first: Interpreter, second: Interpreter) -> None:
    """Mark the blocks in `op` as executed if those of its counterpart are."""
    if not op.blocks:
        return
    pairs = [*zip(op.blocks, counterpart.blocks)]
    for own, other in zip(_iterate_inner(op), _iterate_inner(counterpart)):
        pairs += zip(own.blocks, other.blocks)
    second.executed_blocks.update(own for own, other in pairs if other in first.executed_blocks)


def _iterate_inner(op: Operation) -> Iterator[Operation]:
    return (inner for block in op.blocks for inner in iterate_nested_ops(block) if inner.blocks)


def execute_in_lockstep(
    before: Program, after: Program, made: Sequence[Plan], precisions: Sequence[str], progress: Callable[[str], None],
    mapping: Mapping[str, str], regions: RegionLog | None = None, lowers: bool = False, batches: bool = False,
) -> tuple[Execution, Execution]:
    """Execute every plan on two programs at every precision; ops that they share run once.

    Returns the results of `execute_plans` for each program; a plan that `before` cannot run has its error in both.
    `mapping` (name before -> name after) is as in `compare_programs`. With `lowers`, runs at float64 compute the ops
    that the programs share upstream of any difference at float32. With `batches`, runs of functions whose rows are
    independent are made as one batch. `regions` records the comparisons at the ends of regions that differ.
    """
    old, new = (Execution(make_runs(program, made)) for program in (before, after))
    count = RunProgress(progress, len(made) * len(precisions))
    for function in dict.fromkeys(plan.function for plan in made):
        values = [FunctionValues(function, program.functions[function]) for program in (before, after)]
        match = match_functions(values[0], values[1], mapping)
        can_batch = batches and all(can_batch_runs(program.functions[function]) for program in (before, after))
        plain: Runtime | None = None
        plain_after: Runtime | None = None
        for precision in precisions:
            common = None
            if lowers and precision == "float64":
                common = plain = Runtime(before, function=function, keeps_constants=True, like=plain)
            old_runtime, new_runtime = (
                Runtime(program, function=function, precision=precision, like=like, keeps_constants=True)
                for program, like in ((before, plain), (after, plain_after)))
            runtimes = [old_runtime, new_runtime]
            plain, plain_after = plain or old_runtime, plain_after or new_runtime
            lockstep = Lockstep(runtimes[0], runtimes[1], match, regions, common)
            pairs = [pair for pair in zip(old.runs, new.runs) if not is_left_out(pair[0], function, precision)]
            for group in _group_pairs(pairs, before.functions[function]) if can_batch else [[pair] for pair in pairs]:
                for pair in group:
                    count.report(pair[0].plan, precision)
                if len(group) == 1 or not _execute_batch(lockstep, group, precision):
                    for pair in group:
                        _execute_pair(lockstep, pair, precision)
            old.executed_blocks |= runtimes[0].executed_blocks
            new.executed_blocks |= runtimes[1].executed_blocks
    return old, new


def _group_pairs(pairs: Sequence[tuple[Run, Run]], function: Function) -> list[list[tuple[Run, Run]]]:
    """Group runs on feeds of the same shapes into batches that compute a limited number of elements.

    Runs on NaN and infinities are not part of a batch: one such element makes every op check for overflow in detail.
    Nor are runs on the user's feeds, whose errors are reported.
    """
    groups: dict[Any, list[tuple[Run, Run]]] = {}
    for number, pair in enumerate(pairs):
        plan = pair[0].plan
        is_alone = plan.adversarial == SPECIAL or plan.label.startswith(USER_FEEDS_LABEL)
        key = number if is_alone else tuple((name, each.shape, each.dtype) for name, each in plan.feeds.items())
        groups.setdefault(key, []).append(pair)
    return [part for group in groups.values() for part in _cut_group(group, function)]


def _cut_group(group: list[tuple[Run, Run]], function: Function) -> list[list[tuple[Run, Run]]]:
    """Cut a group into batches of at most `_MAX_BATCH_ELEMENTS` computed elements."""
    if len(group) == 1:
        return [group]
    shapes = {name: value.shape for name, value in group[0][0].plan.feeds.items()}
    most = max(1, int(_MAX_BATCH_ELEMENTS / max(count_computed_elements(function, shapes), 1)))
    return [group[start : start + most] for start in range(0, len(group), most)]


def _execute_batch(lockstep: Lockstep, pairs: Sequence[tuple[Run, Run]], precision: str) -> bool:
    """Execute plans on both programs as one batch; return False if a run ends with an error."""
    try:
        found = lockstep.run_batch([old.plan.feeds for old, _ in pairs])
    except (InputError, MemoryLimitReached):
        return False
    for (old, new), (outputs, outcome) in zip(pairs, found):
        old.is_batched = new.is_batched = True
        new.ops[precision] = replace(lockstep.count)
        old.results[precision], new.results[precision] = join_results(outputs, {}), join_results(outcome, {})
    return True


def _execute_pair(lockstep: Lockstep, runs: tuple[Run, Run], precision: str) -> None:
    """Execute a plan on both programs; one after the other if the values of both together exceed the memory limit."""
    old, new = runs
    states = copy_state(old.plan), copy_state(old.plan)
    try:
        outputs, outcome = lockstep(old.plan.feeds, states)
        if lockstep.lowers and isinstance(outcome, InputError):
            raise outcome
    except MemoryLimitReached:
        for runtime, run in ((lockstep.first, old), (lockstep.second, new)):
            if not run.error:
                execute_run(runtime, run, precision)
            new.error = new.error or old.error
        return
    except InputError as error:
        if lockstep.lowers:  # shapes may be computed from floats, and then be other ones at float32
            _execute_pair(lockstep.keep_precision(), runs, precision)
            return
        note_error(old, error)
        new.error = old.error
        return
    new.ops[precision] = lockstep.count
    old.results[precision] = join_results(outputs, states[0])
    if isinstance(outcome, InputError):
        note_error(new, outcome)
    elif not new.error:
        new.results[precision] = join_results(outcome, states[1])
