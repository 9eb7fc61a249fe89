"""Selection of the ops of an fp32 program that compute in fp16, with a reason for each op that does not."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from coremltools.converters.mil.mil import Operation, Program, Var

from ...ir.clone import clone_program
from ...ir.query import get_consumers, get_flat_inputs, is_computed_in_fp16, is_const, is_opaque, iterate_nested_ops
from ...ir.value_ranges import MeasuredRanges, Range
from ...utils.errors import InputError, suggest_nearest
from ._fp16_constants import Fp16Constants
from ._fp16_conversion import can_read_fp16, convert_to_fp16, is_fp32, is_fp32_computation
from ._fp32_sensitivity import PrecisionSearch, describe_constant_loss, describe_value_loss

__all__ = ["PrecisionDecision", "PrecisionOptions", "add_compressed_weights", "choose_fp16_ops"]

_MAX_TRIAL_RUNS = 64
"Runs of the entire model after which the search for ops that must stay in fp32 ends."


@dataclass(frozen=True)
class PrecisionOptions:
    """The options that the user requested."""

    max_error: float
    keep: frozenset[str]
    wide_sums: bool
    mixed: bool


@dataclass
class PrecisionDecision:
    """The ops that go to fp16, the reasons of those that stay in fp32, and the output error, if known."""

    taken: list[Operation] = field(default_factory=list)
    kept: list[tuple[Operation, str]] = field(default_factory=list)
    error: float | None = None
    halves: Fp16Constants = field(default_factory=Fp16Constants)


def choose_fp16_ops(
    program: Program, wish: PrecisionOptions, measured: Mapping[Var, Range] | None
) -> PrecisionDecision:
    """Judge every op by itself, then all together by the output error in the runs."""
    if not 0 <= wish.max_error < 1:
        raise InputError(f"fp16_compute: max_error is {wish.max_error:g}; expected a share of the outputs, 0 or more "
                         "and below 1")
    decision = PrecisionDecision()
    ops = _list_ops(program)
    _check_names(wish.keep, ops)
    reasons = _judge_ops(program, ops, wish, measured, decision.halves)
    left = [number for number, reason in reasons.items() if not reason]
    attempt = _Fp16Trial(program, decision.halves)
    for number in attempt.refused(left) if left else ():
        reasons[number] = f"kept fp32: coremltools does not let this {ops[number].op_type} read fp16"
    left = [number for number in left if not reasons[number]]
    if isinstance(measured, MeasuredRanges) and left:
        seen = measured
        search = PrecisionSearch(left, lambda some: seen.error(attempt.program(some)), wish.max_error, _MAX_TRIAL_RUNS)
        decision.error = search.error
        for number, error in search.refused.items():
            reasons[number] = _describe_error(error, wish.max_error)
        reasons |= dict.fromkeys(search.untried_ops, f"not tried: the search ends after {_MAX_TRIAL_RUNS} runs")
        left = search.taken
    decision.taken = [ops[number] for number in left]
    decision.kept = [(ops[number], reason) for number, reason in reasons.items() if reason]
    return decision


def _describe_error(error: float, most: float) -> str:
    if math.isinf(error):
        return "with it in fp16 an output loses numbers (infinite, NaN, or all zeros), or a label changes"
    return (f"with it in fp16 the outputs are off by {error:.1e} of their largest value (of integers, that share "
            f"changes), more than {most:g}")


def add_compressed_weights(chosen: Iterable[Operation]) -> set[Operation]:
    """Return the ops `chosen` together with the compressed weights that only they read."""
    found = set(chosen)
    pending = [op for each in found for op in _collect_compressed_weights(each)]
    while pending:
        op = pending.pop()
        made = op.outputs[0]
        if op not in found and not made.consuming_blocks and all(reader in found for reader in get_consumers(made)):
            found.add(op)
            pending += _collect_compressed_weights(op)
    return found


def _collect_compressed_weights(op: Operation) -> list[Operation]:
    made = [var.op for var in op.get_flattened_inputs() if is_fp32(var) and var.op is not None]
    return [each for each in made if each.op_type.startswith("constexpr_") and not is_opaque(each)]


def _list_ops(program: Program) -> list[Operation]:
    """List all ops, in an order that a clone of the program shares."""
    return [op for function in program.functions.values() for op in iterate_nested_ops(function)]


def _check_names(names: Collection[str], ops: Iterable[Operation]) -> None:
    """Raise InputError for a name that is neither an op type nor the name of a value."""
    known = {name for op in ops for name in (op.op_type, *(var.name for var in op.outputs))} if names else set()
    for name in sorted(set(names) - known):
        raise InputError(
            f"fp16_compute: keep: no op of type '{name}' and no value of that name{suggest_nearest(name, known)}"
        )


def _judge_ops(
    program: Program,
    ops: Sequence[Operation],
    wish: PrecisionOptions,
    measured: Mapping[Var, Range] | None,
    halves: Fp16Constants,
) -> dict[int, str]:
    """Return the ops that might go to fp16, by number, each with the reason why it stays in fp32, if any."""
    numbers = {op: number for number, op in enumerate(ops)}
    found: dict[int, str] = {}
    for function in program.functions.values():
        own = list(iterate_nested_ops(function))
        mixed = not wish.mixed and any(map(is_computed_in_fp16, own))
        candidates = [op for op in own if is_fp32_computation(op) and not (mixed and _is_fp32_by_constants(op))]
        if not candidates:  # entering a function walks over all of it
            continue
        with function:  # the inputs that an op accepts depend on the opset of the current function
            for op in candidates:
                found[numbers[op]] = _find_fp32_reason(op, wish, measured, halves, mixed) or (
                    "" if can_read_fp16(op) else
                    f"kept fp32: no fp16 for {op.op_type} in {function.opset_version.name}")
    return found


def _is_fp32_by_constants(op: Operation) -> bool:
    """Return whether the only fp32 of `op` is constants beside fp16, such as an epsilon or a slope.

    coremltools' conversion to fp16 produces such ops, so that they are not left over in fp32.
    """
    return not any(map(is_fp32, op.outputs)) and all(is_const(var) for var in get_flat_inputs(op) if is_fp32(var))


def _find_fp32_reason(
    op: Operation, wish: PrecisionOptions, measured: Mapping[Var, Range] | None, halves: Fp16Constants, mixed: bool
) -> str:
    """Return why `op` stays in fp32, "" when it need not."""
    if mixed:
        return "fp32 beside ops in fp16, kept so by whoever converted the model; mixed=true converts it too"
    if op.op_type in wish.keep or wish.keep.intersection(var.name for var in op.outputs):
        return "kept fp32: asked for by name"
    lost = describe_constant_loss(op, halves) or (
        describe_value_loss(op, measured, wish.wide_sums) if measured else None
    )
    return f"kept fp32: {lost}" if lost else ""


class _Fp16Trial:
    """Trial runs of the program with some of its ops in fp16, on a clone each time."""

    def __init__(self, program: Program, halves: Fp16Constants) -> None:
        self._program, self._halves = program, halves

    def program(self, some: Iterable[int]) -> Program:
        return self._made(some)[0]

    def refused(self, some: Iterable[int]) -> list[int]:
        """Return the ops among `some` that coremltools does not let read fp16."""
        return self._made(some)[1]

    def _made(self, some: Iterable[int]) -> tuple[Program, list[int]]:
        twin = clone_program(self._program)
        ops = _list_ops(twin)
        refused = convert_to_fp16(twin, add_compressed_weights(ops[number] for number in some), self._halves)
        return twin, [number for number in some if ops[number] in refused]
