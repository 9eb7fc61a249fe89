"""ExecuTorch's mapping from debug handles to ops, a file that coremltools saves next to the manifest of a package.

ExecuTorch's profiler uses the file to find the ops of an exported program by their output names. While the program is
rewritten, each op carries its handle as a coremltools scope, so ops that replace another op get its handle. Saving
writes the file again for the new ops.
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
_FUNCTION_AT, _OP_AT = 1, -1  # indices in a path, which lists program, function, block and operation


def attach_debug_handles(root: Path, program: Program) -> None:
    """Read the mapping of the package at `root` and set each handle as a scope of its op; do nothing without a valid
    file."""
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
    """Return the mapping for the ops of `program` as {path in the package: contents of the file}.

    Returns {} if the package at `root` has no valid mapping or no op has a handle. The existing file is then copied.
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
    """Yield function name and op for each op that a path can name: it has an output and is not in a nested block."""
    for name, function in program.functions.items():
        for op in function.operations:
            if op.outputs:
                yield name, op


def _read_document(root: Path) -> dict[str, Any] | None:
    """Return the parsed mapping of the package at `root`; None if it is missing or has an unexpected form."""
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
