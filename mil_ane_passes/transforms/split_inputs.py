"""`--split-inputs`: what is computed from one input alone becomes a package of its own, which runs before.

Lookups of token ids and positions, tables of angles and masks of places are small and need integers; the rest of a
language model reads their floats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from coremltools.converters.mil.mil import Function, Operation, Var, types

from ..ir.query import get_consumers, get_static_shape, is_const
from ..utils.errors import InputError
from ..utils.option_spelling import format_option, format_option_values
from .contract import Draft, EditRecord, Transform
from .dead_ops import get_read_vars, is_pure
from .names import make_unknown_name_error
from .split_at import SplitAt

__all__ = ["SplitConstantInputs", "SplitInputs", "find_boundary", "find_lookups"]

_OPTION = "--split-inputs"
_REPEATING = frozenset({"tile", "reshape", "expand_dims", "squeeze", "transpose"})
"Ops that repeat a value, and those that change its shape around them."


@dataclass(frozen=True)
class SplitInputs(Transform):
    """Splits a function behind the lookups of inputs: values of floats that depend on one of `names` alone.

    Rows that are looked up in a table cross as they are, and a float that follows from values that cross by ops on
    floats stays in the second part. `together` splits behind what depends on several of `names` as well: the rest
    follows from looked-up rows and from other inputs.
    """

    names: Sequence[str]
    function: str | None = None
    together: bool = False

    def apply(self, draft: Draft) -> list[Draft]:
        """Return the two parts. InputError for an unknown input, and for one that only floats are computed from."""
        functions = draft.select_functions(self.function)
        if len(functions) > 1:
            raise self._make_error(f"several functions ({', '.join(sorted(functions))}); expected "
                                   f"{format_option('function')} to name one")
        (name, function), = functions.items()
        for each in self.names:
            if each not in function.inputs:
                raise make_unknown_name_error(each, format_option_values("split_inputs", each), function.inputs,
                                              "input", draft.gone)
        if self.together:
            values = find_boundary(function, self.names)
            if not values:
                raise self._make_error("nothing that is computed from these alone is read by the rest; expected "
                                       "inputs of ids, positions or masks")
            draft.done.append(EditRecord(_OPTION, name, ", ".join(self.names), "computed from integers alone: "
                                         + ", ".join(f"'{var.name}'" for var in values)))
            return SplitAt([var.name for var in values], self.function).apply(draft)
        found = find_lookups(function, self.names)
        for each in self.names:
            if not found[each]:
                raise self._make_error(f"nothing that is computed from '{each}' alone is read as floats by the rest; "
                                       "expected an input of ids or positions")
            listed = ", ".join(f"'{var.name}'" for var in found[each])
            draft.done.append(EditRecord(_OPTION, name, each, f"computed from '{each}' alone: {listed}"))
        values = [var.name for each in self.names for var in found[each]]
        return SplitAt(values, self.function).apply(draft)

    def _make_error(self, words: str) -> InputError:
        return InputError(f"{format_option_values('split_inputs', *self.names)}: {words}")


@dataclass(frozen=True)
class SplitConstantInputs(Transform):
    """Splits a function behind all that is computed from `names` alone, inputs that are the same for many calls.

    The first part runs once, such as for the keys and values of an encoder's output; the second reads what it returned
    at each call. What only repeats a value stays in the second part. The draft is left as it is if nothing is computed
    from these inputs alone.
    """

    names: Sequence[str]

    def apply(self, draft: Draft) -> list[Draft]:
        """Return the two parts, or the draft."""
        (name, function), = draft.program.functions.items()
        values = dict.fromkeys(_skip_repetition(var) for var in find_boundary(function, self.names))
        values = {var: None for var in values if var.op is not None}
        if not values:
            return [draft]
        listed = ", ".join(f"'{var.name}'" for var in values)
        draft.done.append(EditRecord("", name, ", ".join(self.names), "computed once, from what is the same for all "
                                     f"calls: {listed}"))
        return SplitAt([var.name for var in values]).apply(draft)


def _skip_repetition(var: Var) -> Var:
    """Return the smallest value that `var` is a repetition of, such as the heads of keys before they are repeated.

    That is an input where nothing is computed from it.
    """
    best = each = var
    while each.op is not None and each.op.op_type in _REPEATING:
        each = each.op.x
        if _count_elements(each) < _count_elements(best):
            best = each
    return best if each.op is not None else each


def _count_elements(var: Var) -> int:
    return math.prod(int(size) for size in get_static_shape(var) or ())


def find_lookups(function: Function, names: Sequence[str]) -> dict[str, list[Var]]:
    """Return for each input the floats that depend on it alone and that ops which read others need.

    Rows of a table of floats are the first such values, whatever is computed from them before.
    """
    sources = _find_sources(function)
    outputs = set(function.outputs)
    found: dict[str, list[Var]] = {name: [] for name in names}
    roots: set[Var] = set()
    for op in function.operations:
        for var in op.outputs:
            name, = sources[var] if len(sources[var]) == 1 else ("",)
            if name not in found or is_const(var):
                continue
            looked_up = op.op_type == "gather" and types.is_float(var.dtype) and bool(get_consumers(var))
            crosses = looked_up or var in outputs or any(sources[each] != {name} for user in get_consumers(var)
                                            for each in user.outputs)
            if crosses and not _follows_from(var, roots):
                found[name].append(var)
                roots.add(var)
    return found


def find_boundary(function: Function, names: Sequence[str]) -> list[Var]:
    """Return the values that depend on inputs `names` alone and are read by what follows from looked-up rows.

    Rows of a table of floats, and all other inputs and states, are what the rest follows from.
    """
    follows = {var for name, var in function.inputs.items() if name not in names}
    rows: list[Var] = []
    sources = _find_sources(function)
    for op in function.operations:
        if any(var in follows for var in get_read_vars(op)) or any(
                name.startswith("op ") for var in op.outputs for name in sources[var]):
            follows.update(op.outputs)
        elif op.op_type == "gather" and types.is_float(op.outputs[0].dtype) and sources[op.outputs[0]] and (
                _is_weight(op.x)):
            follows.update(op.outputs)
            rows += op.outputs
    known = follows - set(rows)
    found = [var for op in function.operations for var in op.outputs if sources[var] and not is_const(var) and (
        var not in known) and any(set(user.outputs) & known for user in get_consumers(var))]
    return found


def _find_sources(function: Function) -> dict[Var, frozenset[str]]:
    """Return the inputs and states that each value depends on; ops with side effects count as inputs."""
    found: dict[Var, frozenset[str]] = {var: frozenset((name,)) for name, var in function.inputs.items()}
    for op in function.operations:
        names: set[str] = set().union(*(found.get(var, frozenset()) for var in get_read_vars(op)))
        if not is_pure(op) and not op.op_type.startswith("constexpr_"):
            names.add(f"op {op.name}")
        found.update(dict.fromkeys(op.outputs, frozenset(names)))
    return found


def _follows_from(var: Var, roots: set[Var]) -> bool:
    """Return whether floats follow from those in `roots` and consts by ops on floats."""
    pending, seen, reached = [var], {var}, False
    while pending:
        each = pending.pop()
        if each in roots:
            reached = True
            continue
        op: Operation | None = each.op
        if op is None or not types.is_tensor(each.sym_type) or not types.is_float(each.dtype) or op.blocks:
            return False
        for read in get_read_vars(op):
            if not _is_weight(read) and read not in seen:
                seen.add(read)
                pending.append(read)
    return reached


def _is_weight(var: Var) -> bool:
    return is_const(var) or var.op is not None and var.op.op_type.startswith("constexpr_")
