"""Names of new vars and ops: unique, and valid Core ML identifiers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from coremltools.converters.mil.mil import Function, Operation, Var

from ..ir.query import iterate_nested_ops
from .origin import get_origin


@contextmanager
def assign_unique_names(function: Function, written: set[Operation]) -> Iterator[None]:
    """Give new vars and ops in `function` unique names while the `with` block runs.

    Names from the file stay, with one exception. If a new op makes a function output and the loaded op of that name
    still exists, the new op gets the name, because it belongs to the interface. `written` are the ops that will be in
    the file.
    """
    old, new = _partition_vars(function, written)
    renamed = [(var, var.name) for var in new]
    ops = [(op, op.name) for op in _find_new_ops(function, written)]
    try:
        _rename_vars(function, old, new)
        taken = {op.name for op in written if get_origin(op) is not None}
        for op, name in ops:
            op.name = _make_free_identifier(name, taken)
        yield
    finally:
        for var, name in renamed:
            var.name = name
        for op, name in ops:
            op.name = name


def _partition_vars(function: Function, written: set[Operation]) -> tuple[list[Var], list[Var]]:
    """Separate the vars whose names are from the file from the new or renamed ones."""
    old: dict[Var, None] = {}
    new: dict[Var, None] = {}
    for op in iterate_nested_ops(function):
        if op not in written:
            continue
        origin = get_origin(op)
        names = origin.names if origin is not None else ()
        for index, var in enumerate(op.outputs):
            kept = (index < len(names) and names[index] == var.name) or _is_requested(op, var)
            (old if kept else new)[var] = None
        nested = origin.blocks if origin is not None else ()
        for index, block in enumerate(op.blocks):
            known = {name for name, _ in nested[index].inputs} if index < len(nested) else set()
            for var in block.inputs:
                (old if var.name in known or _is_requested(op, var) else new)[var] = None
    claimed = {var.name for var in function.outputs if var in new}
    for var in [var for var in old if var.name in claimed and var not in function.outputs]:
        del old[var]
        new[var] = None
    return list(old), list(new)


def rename_var(op: Operation, var: Var, name: str) -> None:
    """Rename an output of `op` or an input of its blocks. The name is written unchanged, even if blocks share it."""
    var.name = name
    op.requested_names = getattr(op, "requested_names", frozenset()) | {name}


def _is_requested(op: Operation, var: Var) -> bool:
    return var.name in getattr(op, "requested_names", ())


def _find_new_ops(function: Function, written: set[Operation]) -> list[Operation]:
    return [op for op in iterate_nested_ops(function) if op in written and get_origin(op) is None]


def _rename_vars(function: Function, old: list[Var], new: list[Var]) -> None:
    outputs = set(function.outputs)
    taken = {*function.inputs, *(var.name for var in old), *(var.name for var in outputs)}
    for var in new:
        if var not in outputs:
            var.name = _make_free_identifier(var.name, taken)


def _make_free_identifier(name: str, taken: set[str]) -> str:
    """Return `name` as an identifier, with a number appended if it is in `taken`, and add it to `taken`."""
    base = re.sub(r"\W", "_", name, flags=re.ASCII)
    base = f"_{base}" if not base or base[0].isdigit() else base
    return make_free_name(base, taken)


def make_free_name(name: str, taken: set[str]) -> str:
    """Return `name`, with a number appended if it is in `taken`, and add it to `taken`."""
    free, number = name, 0
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    taken.add(free)
    return free
