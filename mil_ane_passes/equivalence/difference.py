"""The first difference between two programs, as data, as JSON and as text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Block, Operation, Var, types

from ..ir.printer import format_op, format_type
from ..ir.query import get_flat_inputs
from ..utils.text_format import format_lines
from .comparison import OutputDifference
from .execution import Plan
from .value_matching import FunctionValues, is_constant

__all__ = ["FirstDifference", "KnownValues", "Side", "build_first_difference"]

_CONTEXT_OPS = 3
"Ops of MIL that are printed before and after the op that differs: enough to find it in a listing."
_MAX_NAMES_LISTED = 8
"Most ops without a counterpart that the text lists, so that they fit in a line or two; the JSON has all."

_Sides = Sequence[tuple[FunctionValues, Var | None, Operation]]


@dataclass(frozen=True)
class Side:
    """The value in one program: its name, the op that computes it, its type (`fp16[1, 2]`), and the MIL around the op.
    """

    value: str
    op_type: str
    type: str
    mil: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value, "op_type": self.op_type, "type": self.type, "mil": list(self.mil)}


@dataclass(frozen=True)
class FirstDifference:
    """The first value of the second program that differs from the first program's.

    `function`, `feeds` and `precision` identify the run. `place` is the path of the op (function > nested block > ...),
    `execution` the number of its execution (in a loop: the iteration). `worst` is the element with the largest
    difference; its index is in the shape of `before`. The op's operands `agree` were compared and are equal; the
    operands `unknown` have no counterpart. `parameters` are constants of the op that differ. If operands are unknown,
    the fault is between the values `since` and this one, in the ops `only_before` and `only_after`, whose names exist
    only in one program.
    """

    function: str
    feeds: str
    precision: str
    place: str
    execution: int
    before: Side
    after: Side
    worst: OutputDifference
    agree: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    since: tuple[str, ...] = ()
    only_before: tuple[str, ...] = ()
    only_after: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        worst = self.worst.to_dict()
        numbers = {key: worst[key] for key in ("index", "absolute", "relative", "ulps", "allowed", "reason")}
        return {
            "function": self.function, "feeds": self.feeds, "precision": self.precision, "place": self.place,
            "execution": self.execution, "before": {**self.before.to_dict(), "number": worst["before"]},
            "after": {**self.after.to_dict(), "number": worst["after"]}, **numbers,
            "operands": {"agree": list(self.agree), "unknown": list(self.unknown)},
            "parameters": list(self.parameters),
            "between": {"since": list(self.since), "before": list(self.only_before), "after": list(self.only_after)},
        }

    def __str__(self) -> str:
        one, other = self.before, self.after
        name = f"%{one.value}" if one.value == other.value else f"%{one.value}, now %{other.value}"
        op = one.op_type if one.op_type == other.op_type else f"{one.op_type}, now {other.op_type}"
        kind = one.type if one.type == other.type else f"{one.type}, now {other.type}"
        again = f", execution {self.execution}" if self.execution > 1 else ""
        return format_lines([
            f"first difference: {name} ({op}) in {self.place}{again}; {self.feeds}, {self.precision}",
            f"  {kind}: {str(self.worst).removeprefix(f'{self.worst.output}: ')}{self._format_share()}",
            *(f"  {line}" for line in self._iterate_cause_lines()),
            *(f"  {line}" for line in self._list_mil_lines()),
        ])

    def _list_mil_lines(self) -> list[str]:
        if self.before.mil == self.after.mil:
            return ["in both", *self.after.mil]
        return ["before", *self.before.mil, "after", *self.after.mil]

    def _format_share(self) -> str:
        return f", relative {self.worst.relative:.3g}" if np.isfinite(self.worst.relative) else ""

    def _iterate_cause_lines(self) -> Iterator[str]:
        if self.parameters:
            yield f"constants that differ: {', '.join(self.parameters)}"
        if self.agree:
            yield f"operands that agree: {_format_names(self.agree)}"
        if self.unknown:
            yield f"operands without a counterpart: {_format_names(self.unknown)}"
            since = _format_names(self.since) if self.since else "the inputs"
            yield f"so the difference arises between {since} and %{self.after.value}:"
            for which, ops in (("first", self.only_before), ("second", self.only_after)):
                if ops:
                    yield f"  only the {which} program computes {_format_names(ops, '')}"


def _format_names(names: Sequence[str], sign: str = "%") -> str:
    more = f" and {len(names) - _MAX_NAMES_LISTED} more" if len(names) > _MAX_NAMES_LISTED else ""
    return ", ".join(f"{sign}{name}" for name in names[:_MAX_NAMES_LISTED]) + more


def build_first_difference(
    plan: Plan, precision: str, sides: _Sides, execution: int, worst: OutputDifference,
    known: KnownValues,
) -> FirstDifference:
    """Describe the difference found at the ops of `sides` (before, after), and the known values on which they depend.
    """
    (old, _, old_op), (new, _, new_op) = sides
    trail = _BackwardSearch(new, known)
    operands = trail.list_operands(new_op)
    unknown = [var for var in operands if not trail.is_known_right(var)]
    since, own_after = trail.search_backward(unknown)
    matched = _BackwardSearch(old, KnownValues(known.matched))
    _, own_before = matched.search_backward(matched.list_operands(old_op)) if unknown else ([], [])
    # An op that both programs compute, but one of them more often, is not listed as computed by only one of them.
    shared = {var.name for op in old.order for var in op.outputs} & {var.name for op in new.order for var in op.outputs}
    own_before, own_after = (
        [op for op in own if not any(var.name in shared for var in op.outputs)] for own in (own_before, own_after))
    return FirstDifference(
        plan.function,
        plan.label,
        precision,
        " > ".join(new.place(new_op)),
        execution,
        _build_side(old_op, sides[0][1]),
        _build_side(new_op, sides[1][1]),
        worst,
        agree=tuple(var.name for var in operands if trail.is_known_right(var)),
        unknown=tuple(var.name for var in unknown),
        parameters=tuple(_find_changed_parameters(old_op, new_op)),
        since=tuple(var.name for var in since),
        only_before=tuple(map(_format_op_name, own_before)),
        only_after=tuple(map(_format_op_name, own_after)),
    )


@dataclass(frozen=True)
class KnownValues:
    """The result of comparing values up to the difference.

    `right` are values that agree. `later` are values that will be compared when they are computed. `matched` are the
    values of the first program that have a counterpart. `executed_blocks` are the blocks that the second program has
    entered (None: all blocks).
    """

    right: Collection[Var]
    later: Collection[Var] = ()
    matched: Collection[Var] = ()
    executed_blocks: Collection[Block] | None = None


class _BackwardSearch:
    """Searches backward from a value to values that are known to agree."""

    def __init__(self, values: FunctionValues, known: KnownValues) -> None:
        self._values, self._known = values, known
        self._right = {*known.right, *values.function.inputs.values()}

    def list_operands(self, op: Operation) -> list[Var]:
        """List the computed values that `op` depends on: its operands, and the outputs of the blocks that it ran."""
        returned = [
            var
            for block in op.blocks
            if self._known.executed_blocks is None or block in self._known.executed_blocks
            for var in block.outputs
        ]
        return list(dict.fromkeys(var for var in [*get_flat_inputs(op), *returned] if _is_worth_naming(var)))

    def is_known_right(self, var: Var) -> bool:
        """Return whether `var` agrees: it was compared or fed, or is a loop variable all of whose sources agree."""
        return all(each in self._right or is_constant(each) or (each is not var and each in self._known.later)
                   for each in self._values.sources(var))

    def search_backward(self, unknown: Sequence[Var]) -> tuple[list[Var], list[Operation]]:
        """Return the known values nearest to `unknown`, and the ops between, both in program order."""
        since: set[Var] = set()
        ops: set[Operation] = set()
        pending, seen = list(unknown), set(unknown)
        while pending:
            var = pending.pop()
            if self.is_known_right(var):
                since |= {var} - set(self._values.carried)  # loop variables have no position in the program order
                continue
            if var.op is not None:
                ops.add(var.op)
            leading = self._values.carried.get(var, []) if var.op is None else self.list_operands(var.op)
            fresh = [each for each in leading if each not in seen]
            seen.update(fresh)
            pending += fresh
        order = self._values.order
        return sorted(since, key=lambda var: (order.get(var.op, -1), var.name)), sorted(ops, key=lambda op: order[op])


def _is_worth_naming(var: Var) -> bool:
    """Return whether `var` is listed in reports: not for constants, functions that build a block, and states."""
    return not is_constant(var) and (var.op is not None or not types.is_state(var.sym_type)) and not callable(var.val)


def _format_op_name(op: Operation) -> str:
    return f"{op.op_type} %{op.outputs[0].name if op.outputs else op.name}"


def _build_side(op: Operation, var: Var | None) -> Side:
    made = var if var is not None else (op.outputs[0] if op.outputs else op.inputs["value"])
    block = [each for each in op.enclosing_block.operations if not _is_constant_op(each)]
    at = block.index(op)
    lines = [
        ("> " if each is op else "  ") + format_op(each)
        for each in block[max(0, at - _CONTEXT_OPS) : at + _CONTEXT_OPS + 1]
    ]
    return Side(made.name, op.op_type, format_type(made), tuple(lines))


def _is_constant_op(op: Operation) -> bool:
    """Return whether `op` only holds constants: such ops are left out of the printed MIL."""
    return bool(op.outputs) and all(is_constant(var) for var in op.outputs)


def _find_changed_parameters(old: Operation, new: Operation) -> Iterator[str]:
    """Yield the parameters whose constants differ, if both ops have the same type."""
    if old.op_type != new.op_type:
        return
    for name in dict.fromkeys([*old.inputs, *new.inputs]):
        one, other = old.inputs.get(name), new.inputs.get(name)
        if (one is None) != (other is None) or _has_other_value(one, other):
            yield name


def _has_other_value(one: Any, other: Any) -> bool:
    """Return whether two inputs are constants of different values; if both are the same array, it is not read."""
    values = [var.val if isinstance(var, Var) else None for var in (one, other)]
    known = all(value is not None and not callable(value) for value in values)
    return known and values[0] is not values[1] and not _is_equal_array(*values)


def _is_equal_array(one: Any, other: Any) -> bool:
    first, second = np.asarray(one), np.asarray(other)
    return bool(np.array_equal(first, second, equal_nan=first.dtype.kind == second.dtype.kind == "f"))
