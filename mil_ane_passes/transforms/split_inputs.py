"""`--split-inputs`: ops that depend on only one input are moved to a package of their own, which runs first.

Lookups of token ids and positions, tables of angles and masks of positions are small and need integers. The rest of a
language model reads the resulting floats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coremltools.converters.mil.mil import Function, Operation, Var, types

from ..ir.block_editor import rebind_inputs
from ..ir.builder import RewriteBuilder, UniqueNames
from ..ir.query import get_consumers, get_flat_inputs, get_static_shape, is_const
from ..utils.errors import InputError
from ..utils.option_spelling import format_option, format_option_values
from .contract import Draft, EditRecord, Transform
from .dead_ops import get_read_vars, is_pure
from .expose import can_have_fp16_interface
from .names import make_unknown_name_error
from .split_at import split_each

__all__ = ["SplitConstantInputs", "SplitInputs", "find_boundary", "find_lookups"]

_OPTION = "--split-inputs"
_REPEATING = frozenset({"tile", "reshape", "expand_dims", "squeeze", "transpose"})
"Ops that repeat a value, and ops that change its shape before or after a repetition."


@dataclass(frozen=True)
class SplitInputs(Transform):
    """Splits each function after the lookups of inputs: float values that depend on only one of `names`.

    Rows looked up in a table are crossing values. A float that is computed from crossing values by ops on floats stays
    in the second part. With `together`, values that depend on several of `names` are in the first part, too; the second
    part then depends on looked-up rows and on other inputs. Booleans that it reads, such as masks, become floats there,
    which the second part compares with 0.5.
    """

    names: Sequence[str]
    function: str | None = None
    together: bool = False

    def apply(self, draft: Draft) -> list[Draft]:
        """Return the two parts. Raises InputError for an unknown input, and for an input without a lookup."""
        functions = draft.select_functions(self.function)
        _check_inputs(draft, "split_inputs", self.names, functions)
        find = self._find_boundary if self.together else self._find_lookups
        return split_each(draft, {name: find(draft, name, function) for name, function in functions.items()},
                          self.function, format_option_values("split_inputs", *self.names))

    def _find_boundary(self, draft: Draft, name: str, function: Function) -> list[str]:
        boundary = find_boundary(function, self.names)
        if not boundary:
            raise self._make_error("the other ops read no value that depends only on these; expected inputs of ids, "
                                   "positions or masks")
        values = _replace_booleans(function, boundary)
        draft.done.append(EditRecord(_OPTION, name, ", ".join(self.names), "computed from integers alone: "
                                     + ", ".join(f"'{var.name}'" for var in values)))
        return [var.name for var in values]

    def _find_lookups(self, draft: Draft, name: str, function: Function) -> list[str]:
        found = find_lookups(function, self.names)
        for each in self.names:
            if not found[each]:
                raise self._make_error(f"the other ops read no floats that depend only on '{each}'; expected an input "
                                       "of ids or positions")
            listed = ", ".join(f"'{var.name}'" for var in found[each])
            draft.done.append(EditRecord(_OPTION, name, each, f"computed from '{each}' alone: {listed}"))
        return [var.name for each in self.names for var in found[each]]

    def _make_error(self, words: str) -> InputError:
        return InputError(f"{format_option_values('split_inputs', *self.names)}: {words}")


@dataclass(frozen=True)
class SplitConstantInputs(Transform):
    """Splits each function after all values that depend only on `names`, inputs that are the same for many calls.

    The first part runs once, for example to compute the keys and values of an encoder's output; the second part reads
    its results at each call. Ops that only repeat a value stay in the second part. If no values depend only on these
    inputs, InputError is raised, or the draft is not changed if `optional` is true.
    """

    names: Sequence[str]
    function: str | None = None
    optional: bool = False

    def apply(self, draft: Draft) -> list[Draft]:
        """Return the two parts, or the draft. InputError for an unknown input."""
        functions = draft.select_functions(self.function)
        _check_inputs(draft, "split_constant_inputs", self.names, functions)
        values = {name: self._find_values(draft, name, function) for name, function in functions.items()}
        asked = format_option_values("split_constant_inputs", *self.names)
        return split_each(draft, values, self.function, asked) if all(values.values()) else [draft]

    def _find_values(self, draft: Draft, name: str, function: Function) -> list[str]:
        who = format_option_values("split_constant_inputs", *self.names)
        state = next((each for each in self.names if types.is_state(function.inputs[each].sym_type)), None)
        if state is not None:
            raise InputError(f"{who}: '{state}' is a state, which each call may change; expected inputs")
        values = dict.fromkeys(_skip_repetition(var) for var in find_boundary(function, self.names))
        values = {var: None for var in values if var.op is not None}
        if not values and not self.optional:
            raise InputError(f"{who}: no value depends only on these; expected inputs that are the same for many "
                             "calls, such as the output of an encoder")
        if values:
            listed = ", ".join(f"'{var.name}'" for var in values)
            draft.done.append(EditRecord("--split-constant-inputs", name, ", ".join(self.names), "computed once for "
                                         f"many calls: {listed}"))
        return [var.name for var in values]


def _check_inputs(draft: Draft, option: str, names: Sequence[str], functions: Mapping[str, Function]) -> None:
    """Raise InputError for a name that is not an input of each function."""
    for function, each in sorted(functions.items()):
        for name in names:
            if name not in each.inputs:
                several = len(functions) > 1 and any(name in other.inputs for other in functions.values())
                who = f"{format_option_values(option, name)}{f': function {function!r}' if several else ''}"
                error = make_unknown_name_error(name, who, each.inputs, "input", draft.gone)
                raise InputError(f"{error}; {format_option('function')} splits one, and leaves the others out"
                                 ) if several else error


def _skip_repetition(var: Var) -> Var:
    """Return the smallest value of which `var` is a repetition, such as the heads of keys before they are repeated.

    It may be an input.
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
    """Return for each input the values that depend only on it, and are outputs or read by ops that depend on others.

    Rows looked up in a table of floats are always such values, even if the ops on them depend only on the input. Floats
    computed from such values are omitted.
    """
    sources = _find_sources(function)
    outputs = set(function.outputs)
    readers = _find_readers(function)
    found: dict[str, list[Var]] = {name: [] for name in names}
    roots: set[Var] = set()
    for op in function.operations:
        for var in op.outputs:
            name, = sources[var] if len(sources[var]) == 1 else ("",)
            if name not in found or is_const(var):
                continue
            looked_up = op.op_type == "gather" and types.is_float(var.dtype) and bool(get_consumers(var))
            crosses = looked_up or var in outputs or any(sources[each] != {name} for user in readers.get(var, ())
                                            for each in user.outputs)
            if crosses and not _follows_from(var, roots):
                found[name].append(var)
                roots.add(var)
    return found


def find_boundary(function: Function, names: Sequence[str]) -> dict[Var, list[Operation]]:
    """Return the values that depend only on inputs `names` and are read by ops that depend on looked-up rows.

    Each is listed with these ops. The remaining ops depend on rows of a table of floats, other inputs, and states.
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
    known, readers = follows - set(rows), _find_readers(function)
    found = {var: [user for user in readers.get(var, ()) if set(user.outputs) & known]
             for op in function.operations for var in op.outputs
             if sources[var] and not is_const(var) and var not in known}
    return {var: readers for var, readers in found.items() if readers}


def _replace_booleans(function: Function, boundary: Mapping[Var, list[Operation]]) -> list[Var]:
    """Return the values of a boundary, with a float (1 for true) in place of each boolean; its readers compare it.

    Booleans that are read inside of blocks stay as they are.

    The ANE does not read booleans and integers from memory; it computes comparisons of floats.
    """
    found = []
    dtype = "fp16" if can_have_fp16_interface(function) else "fp32"
    with function:
        mb = RewriteBuilder(function, UniqueNames(function))
        for var, readers in boundary.items():
            in_blocks = any(var not in get_flat_inputs(reader) for reader in readers)
            if not types.is_tensor(var.sym_type) or var.dtype != types.bool or in_blocks:
                found.append(var)
                continue
            first = next(op for op in function.operations if op in readers)
            with mb.at(first):
                flags = mb.cast(x=var, dtype=dtype, name=f"{var.name}_flags")
                mb.adopt_scopes(var.op.scopes)
                compared = mb.greater(x=flags, y=types.nptype_from_builtin(flags.dtype)(0.5))
                mb.adopt_scopes(first.scopes)
            for reader in readers:
                reader.set_inputs(**rebind_inputs(reader, var, compared))
            found.append(flags)
    return found


def _find_readers(function: Function) -> dict[Var, list[Operation]]:
    """Return for each value the ops of the function itself that read it, also in their blocks."""
    found: dict[Var, list[Operation]] = {}
    for op in function.operations:
        for var in get_read_vars(op):
            found.setdefault(var, []).append(op)
    return found


def _find_sources(function: Function) -> dict[Var, frozenset[str]]:
    """Return the inputs and states on which each value depends; ops with side effects count as inputs."""
    found: dict[Var, frozenset[str]] = {var: frozenset((name,)) for name, var in function.inputs.items()}
    for op in function.operations:
        names: set[str] = set().union(*(found.get(var, frozenset()) for var in get_read_vars(op)))
        if not is_pure(op) and not op.op_type.startswith("constexpr_"):
            names.add(f"op {op.name}")
        found.update(dict.fromkeys(op.outputs, frozenset(names)))
    return found


def _follows_from(var: Var, roots: set[Var]) -> bool:
    """Return whether `var` is computed from `roots` and consts by ops on floats only."""
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
