"""Token ids replaced by what is looked up for them: rows of the table, which the caller reads, or one-hot rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Function, Operation, Placeholder, Program, Var, types

from ..ir.block_editor import BlockEditor
from ..ir.builder import RewriteBuilder, UniqueNames
from ..ir.constants import is_stored_alike
from ..ir.coremltools_internals import add_function_input, remove_function_input
from ..ir.query import get_consumers, get_static_shape, is_compressed, is_const, iterate_nested_ops, wraps_negatives
from ..passes.interface_change import InterfaceChange
from ..utils.errors import InputError
from ..utils.option_spelling import format_advised_option, format_option, format_option_values
from .contract import Draft, EditRecord, Transform
from .dead_ops import find_dead_ops, remove_dead_ops
from .decoder import find_lookup
from .expose import choose_interface_dtype
from .names import check_identifier, make_unknown_name_error
from .stored_table import list_table_arrays, read_table

__all__ = ["TokenInput"]

Rows = Callable[[Any], Any]
_MAX_RANK = 5
"The highest rank of inputs."
_SAME_ELEMENTS = frozenset({"expand_dims", "identity", "reshape", "squeeze"})
"Ops that keep all elements of ids and their order, if the shape is fixed."


@dataclass(frozen=True)
class TokenInput(Transform):
    """Replaces the input `ids` by `name`: rows of the table (..., width), or with `one_hot` rows (..., vocabulary).

    `open_rows` gets the table as `read_table` returns it, and returns what computes its rows (n, width) for integers
    (n,). The table leaves the package, unless something else reads it.
    """

    ids: str
    name: str
    open_rows: Callable[[dict[str, Any]], Rows] | None = None
    one_hot: bool = False
    function: str | None = None

    def apply(self, draft: Draft) -> list[Draft]:
        """Replace in place. InputError for ids that are read by other ops as well, or that no table is read by."""
        functions = draft.select_functions(self.function)
        known = {name for function in functions.values() for name in function.inputs}
        if self.ids not in known:
            raise make_unknown_name_error(self.ids, self._format_option(), known, "input", draft.gone)
        if self.one_hot:
            check_identifier(self.name, self._format_option())
        changes = [_Change(self, draft, name, function) for name, function in sorted(functions.items())
                   if self.ids in function.inputs]
        if self.open_rows is None or self.one_hot:
            for each in changes:
                each.apply(None)
            return [draft]
        table = changes[0].table
        other = next((each for each in changes[1:] if not is_stored_alike(each.table, table)), None)
        if other is not None:
            raise InputError(f"{draft.where}: the functions '{changes[0].name}' and '{other.name}' look up "
                             f"'{self.ids}' in different tables; expected one table, or {format_option('function')} to "
                             "name one of them")
        parts = read_table(table)
        rows = self.open_rows(parts)
        for each in changes:
            each.apply(rows)
        note = f"{_describe_storage(parts, table)}; {_describe_readers(draft.program, table)}"
        draft.done.append(EditRecord(self.option, "", self.ids, note))
        draft.dead_limit = 0.0
        return [draft]

    @property
    def option(self) -> str:
        """The option of `edit` that requests it."""
        return "--one-hot" if self.one_hot else "--embedding-file"

    def _format_option(self) -> str:
        return format_option_values("one_hot", f"{self.ids}={self.name}") if self.one_hot else format_option_values(
            "embedding_file", self.ids)


class _Change:
    """The change of one function."""

    def __init__(self, requested: TokenInput, draft: Draft, name: str, function: Function) -> None:
        self._requested, self._draft, self.name, self._function = requested, draft, name, function
        ids = function.inputs[requested.ids]
        self._lookups = find_table_lookups(function, requested.ids, draft.where)
        self.table: Var = self._lookups[0].x
        shape = get_static_shape(ids)
        if shape is None:
            raise InputError(f"{draft.where}: the input '{requested.ids}' has a flexible shape; expected token ids of "
                             f"fixed shape: {format_option('fix_shape')} or {format_option('pad_shape')} in the same "
                             "call")
        self._shape = (*shape, int(self.table.shape[0 if requested.one_hot else 1]))
        if len(self._shape) > _MAX_RANK:
            raise InputError(f"{draft.where}: the input '{requested.ids}' has rank {len(shape)}, so that its rows have "
                             f"rank {len(self._shape)}; expected token ids of rank {_MAX_RANK - 1} or less")
        if requested.name in {*function.inputs, *(each.name for each in function.outputs)}:
            raise InputError(f"{draft.where}: '{requested.name}' is already an input or output; expected a free name: "
                             f"rename that one first, by {format_advised_option('rename')}")
        cast = choose_interface_dtype(function, self.table.dtype)
        if cast is None:
            raise InputError(f"{draft.where}: the table '{self.table.name}' is "
                             f"{types.builtin_to_string(self.table.dtype)}, and inputs of this model cannot have this "
                             "type")
        self._dtype = types.string_to_builtin(cast) if cast else self.table.dtype

    def apply(self, rows: Rows | None) -> None:
        """Change the function; `rows` computes rows of the table."""
        function, requested = self._function, self._requested
        dead = set(find_dead_ops(function))
        placeholder = Placeholder(self._shape, self._dtype, name=requested.name)
        made = placeholder.outputs[0]
        made.name = requested.name
        names = UniqueNames(function)
        with BlockEditor() as editor:
            add_function_input(function, requested.name, placeholder)
            for lookup in self._lookups:
                block = lookup.enclosing_block  # may be nested
                with block:
                    found = self._build_rows(RewriteBuilder(block, names), lookup, made)
                editor.replace(lookup.outputs[0], found)
            editor.remove_if_unused(self._lookups)
        remove_dead_ops(function, dead)
        ids = function.inputs[requested.ids]
        users = get_consumers(ids)
        if users or ids in function.outputs:
            raise _make_use_error(self._draft.where, requested.ids, users[0] if users else None)
        remove_function_input(function, requested.ids)
        self._declare(rows)

    def _build_rows(self, mb: RewriteBuilder, lookup: Operation, made: Var) -> Var:
        """Build what takes the place of a lookup."""
        old = lookup.outputs[0]
        found = made
        with mb.at(lookup):
            if found.dtype != old.dtype:
                found = mb.cast(x=found, dtype=types.builtin_to_string(old.dtype))
            if self._requested.one_hot:
                found = mb.matmul(x=found, y=lookup.x)
            if tuple(found.shape) != tuple(old.shape):
                found = mb.reshape(x=found, shape=[int(size) for size in old.shape])
            if found is made and old.consuming_blocks:  # an output has a name of its own
                found = mb.identity(x=made)
            mb.adopt_scopes(lookup.scopes)
        return found

    def _declare(self, rows: Rows | None) -> None:
        requested, draft = self._requested, self._draft
        draft.gone[requested.ids] = "one_hot" if requested.one_hot else "embedding_file"
        draft.change_interface(
            self.name, InterfaceChange("input", requested.ids, None, "removed"),
            InterfaceChange("input", None, requested.name, "added", make=self._make_feed(rows)))
        what = "one-hot rows, which are multiplied with the table" if requested.one_hot else "rows of the table"
        held = ", ".join(map(str, self._shape))
        draft.done.append(EditRecord(requested.option, self.name, requested.name, f"input '{requested.name}' ({held}) "
                                     f"replaces '{requested.ids}': {what}"))

    def _make_feed(self, rows: Rows | None) -> Callable[[Any], Any]:
        count, ids, kind = int(self.table.shape[0]), self._requested.ids, types.nptype_from_builtin(self._dtype)

        def make(feeds: Any) -> Any:
            held = np.asarray(feeds[ids]).astype(np.int64)
            flat = np.where(held < 0, held + count, held).reshape(-1)
            found = np.eye(count, dtype=kind)[flat] if rows is None else np.asarray(rows(flat))  # float64 stays so
            return found.reshape(*held.shape, -1)

        return make


def find_table_lookups(function: Function, ids: str, where: str) -> list[Operation]:
    """Return the lookups of the input `ids` in one table of floats, which the caller can make instead.

    Raises InputError, with the reason, for an input that anything else is computed from.
    """
    start = function.inputs[ids]
    pending, lookups, others = [start], [], []
    while pending:
        var = pending.pop()
        for op in get_consumers(var):
            if op.op_type == "gather" and op.indices is var:
                lookups.append(op)
            elif op.op_type in _SAME_ELEMENTS or op.op_type == "cast" and types.is_int(op.outputs[0].dtype) or (
                    wraps_negatives(op) and op.a is var):
                pending += [each for each in op.outputs if each not in pending]
            elif not _is_part_of_wrap(op, var):
                others.append(op)
    reached = find_lookup(start)
    if not lookups and reached is not None:
        raise InputError(f"{where}: the op '{others[0].outputs[0].name}' ({others[0].op_type}) computes other integers "
                         f"from the input '{ids}', and these are looked up in the table '{reached.x.name}'; expected a "
                         "lookup of the ids themselves, not of positions or of ids with an offset")
    if not lookups:
        raise InputError(f"{where}: the input '{ids}' is not looked up in a table by a gather op; expected token ids")
    if others:
        raise _make_use_error(where, ids, others[0])
    for lookup in lookups:
        _check_table(lookup, ids, where)
    other = next((each for each in lookups if not is_stored_alike(each.x, lookups[0].x)), None)
    if other is not None:
        raise InputError(f"{where}: the input '{ids}' is looked up in several tables, '{lookups[0].x.name}' and "
                         f"'{other.x.name}'; expected one")
    return lookups


def _check_table(lookup: Operation, ids: str, where: str) -> None:
    """Raise InputError for a lookup that does not read entire rows of a stored table of floats."""
    table, batch = lookup.x, lookup.inputs.get("batch_dims")
    who = f"{where}: the input '{ids}' is looked up in '{table.name}', which"
    if not is_const(table) and not is_compressed(table):
        made = "is an input" if table.op is None else f"the op {table.op.op_type} computes"
        raise InputError(f"{who} {made}; expected a stored table, which can be written as a file")
    if table.rank != 2 or int(lookup.axis.val) % table.rank or batch is not None and int(batch.val):
        raise InputError(f"{who} has the shape {tuple(table.shape)}, along axis {int(lookup.axis.val)}; expected "
                         "entire rows of a table (rows, width)")
    if not types.is_float(table.dtype):
        raise InputError(f"{who} holds {types.builtin_to_string(table.dtype)}; expected a table of floats")


def _is_part_of_wrap(op: Operation, var: Var) -> bool:
    """Return whether an op computes what a select needs to count ids below 0 from the end, and nothing else."""
    users = [user for out in op.outputs for user in get_consumers(out)]
    returned = any(out.consuming_blocks for out in op.outputs)
    return op.op_type in ("greater_equal", "add") and bool(users) and not returned and all(
        wraps_negatives(user) and user.a is var for user in users)


def _make_use_error(where: str, ids: str, op: Operation | None) -> InputError:
    who = "an output returns" if op is None else f"the op '{op.outputs[0].name}' ({op.op_type}) reads"
    return InputError(f"{where}: {who} the token ids '{ids}' in addition to the lookup in a table; expected only this "
                      "lookup")


def _describe_storage(parts: Mapping[str, Any], table: Var) -> str:
    """Describe how a table is stored, in the file as in the package."""
    arrays = list_table_arrays(parts)
    nbytes = sum(each.nbytes for each in arrays.values())
    kind = types.builtin_to_string(table.dtype)
    count, width = (int(size) for size in table.shape)
    with_ = [name for name in arrays if name != "data"]
    if not with_:
        return f"the table ({count}, {width}) is written as it is stored, {kind}, {nbytes:,} bytes"
    codes = f"{parts['bits']}-bit integers" if "bits" in parts else str(arrays["data"].dtype)
    dense = count * width * np.dtype(types.nptype_from_builtin(table.dtype)).itemsize
    return (f"the table ({count}, {width}) is written as it is compressed, {codes} with {', '.join(with_)}: {nbytes:,} "
            f"bytes, {dense:,} as {kind}")


def _describe_readers(program: Program, table: Var) -> str:
    """Describe who reads the table in the package, so that it stays there."""
    for op in _iterate_readers(program, table):
        return f"it stays in the package, too: the op '{op.outputs[0].name}' ({op.op_type}) reads it"
    return "it leaves the package"


def _iterate_readers(program: Program, table: Var) -> Iterator[Operation]:
    for function in program.functions.values():
        for op in iterate_nested_ops(function):
            for var in op.outputs if op.op_type == "const" or op.op_type.startswith("constexpr_") else ():
                if tuple(var.shape) == tuple(table.shape) and is_stored_alike(var, table):
                    yield from get_consumers(var)
