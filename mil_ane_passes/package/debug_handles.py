"""ExecuTorch's mapping from debug handles to ops, a file that coremltools saves beside the manifest of a package.

Its profiler finds the ops of an exported program by their output names. Ops carry their handle as a scope of
coremltools while the program changes, so ops that replace another have its handle; saving writes the file again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coremltools.converters.mil.mil import Operation, Program
from coremltools.converters.mil.mil.scope import ScopeSource

from .limits import MAX_DEBUG_HANDLES_BYTES

__all__ = ["attach_debug_handles", "format_debug_handles"]

FILE = Path("executorch_debug_handle_mapping.json")
_FUNCTION_AT, _OP_AT = 1, -1  # places in a path: program, function, block, operation


def attach_debug_handles(root: Path, program: Program) -> None:
    """Set the handles in the file of the package at `root`, if it has a valid one, as scopes of the ops they name."""
    document = _read_document(root)
    if document is None:
        return
    handles = {(path[_FUNCTION_AT].get("Name"), path[_OP_AT]["Output"]): int(handle)
               for handle, paths in document["mapping"].items() for path in paths}
    for name, op in _iterate_ops(program):
        handle = handles.get((name, op.outputs[0].name))
        if handle is not None:
            op.scopes[ScopeSource.EXIR_DEBUG_HANDLE] = [handle]


def format_debug_handles(root: Path, program: Program) -> dict[Path, bytes]:
    """Format the file of the package at `root` for the ops of `program`, by its path in the package.

    {} without a valid file, or if no op has a handle: a file that is about other ops is copied.
    """
    document = _read_document(root)
    if document is None:
        return {}
    mapping: dict[int, list[Any]] = {}
    for name, op in _iterate_ops(program):
        for handle in op.scopes.get(ScopeSource.EXIR_DEBUG_HANDLE, ()):
            if handle is not None:
                mapping.setdefault(handle, []).append(
                    [{"Type": "Program"}, {"Type": "Function", "Name": name}, {"Type": "Block"},
                     {"Type": "Operation", "Operator": op.op_type, "Output": op.outputs[0].name}])
    return {FILE: json.dumps({**document, "mapping": mapping}).encode()} if mapping else {}


def _iterate_ops(program: Program) -> Iterator[tuple[str, Operation]]:
    """Yield function name and op for the ops that a path can name: those of no nested block, with an output."""
    for name, function in program.functions.items():
        for op in function.operations:
            if op.outputs:
                yield name, op


def _read_document(root: Path) -> dict[str, Any] | None:
    """Return the file of the package at `root`; None without one, or if it has another form: it is copied then."""
    path = root / FILE
    if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_DEBUG_HANDLES_BYTES:
        return None
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return document if _is_valid(document) else None


def _is_valid(document: Any) -> bool:
    mapping = document.get("mapping") if isinstance(document, dict) else None
    return isinstance(mapping, dict) and bool(mapping) and all(
        handle.isdecimal() and isinstance(paths, list) and all(map(_is_path, paths))
        for handle, paths in mapping.items())


def _is_path(path: Any) -> bool:
    """Return whether `path` names an op of a function, as coremltools writes it."""
    return (isinstance(path, list) and len(path) == 4 and all(isinstance(step, dict) for step in path)
            and isinstance(path[_FUNCTION_AT].get("Name"), str) and isinstance(path[_OP_AT].get("Output"), str))
