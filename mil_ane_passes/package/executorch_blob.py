"""The blob of a Core ML delegate in an ExecuTorch program: a folder with the model's package and other files.

The blob starts with the data of all files, one after another. A JSON text follows, with its bytes in reverse order. It
has a list `nodes`. A node is a file (kind 0) with its `dataRegion`, or a folder (kind 1) with `children`, a map from
name to index in the list. Children come before their folder, so the last node is the outermost folder.
Source: `backends/apple/coreml/runtime/inmemoryfs` of https://github.com/pytorch/executorch.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["Data", "Folder", "count_bytes", "flatten_folder", "read_folder", "replace_model", "unpack_folder"]

Data: TypeAlias = memoryview | bytes | Path
"The contents of a file, or the file on disk that has them."
Folder: TypeAlias = "dict[str, Data | Folder]"

MODEL, COMPILED_MODEL = "model.mlpackage", "model.mlmodelc"
_METADATA, _DEBUG_INFO = "metadata.json", "debug_info.json"
_FILE, _FOLDER = 0, 1
_MAX_INDEX_BYTES = 1 << 24
"Largest JSON list of nodes, in bytes, that is parsed. A package has about ten files, so 16 MB means a damaged blob."
_MAX_DEPTH = 32
"Deepest nesting of folders that is read. A package has four levels, so 32 means a damaged blob."


def read_folder(blob: memoryview) -> tuple[str, Folder]:
    """Return the name of the folder in `blob`, and its contents. Raises ValueError if the blob is inconsistent."""
    text = bytes(blob[-_MAX_INDEX_BYTES:])[::-1].decode("utf-8", "surrogateescape")
    try:
        index, end = json.JSONDecoder().raw_decode(text)
    except RecursionError:
        raise ValueError("its list of files is nested too deep") from None
    nodes = index.get("nodes") if isinstance(index, dict) else None
    if not isinstance(nodes, list) or not nodes:
        raise ValueError("it has no list of files")
    limit = len(blob) - len(text[:end].encode("utf-8", "surrogateescape"))
    read: list[tuple[Data | Folder, int] | None] = []
    for node in nodes:
        read.append(_read_node(node, blob[:limit], read))
    root = read[-1]
    if root is None or not isinstance(root[0], dict) or any(each is not None for each in read[:-1]):
        raise ValueError("its last entry is not the folder of all others")
    return str(nodes[-1].get("name")), root[0]


def _read_node(node: Any, data: memoryview, read: list[tuple[Data | Folder, int] | None]) -> tuple[Data | Folder, int]:
    """Return the contents of a node and the nesting depth of its folders; its children are removed from `read`."""
    if not isinstance(node, dict) or node.get("kind") not in (_FILE, _FOLDER):
        raise ValueError("an entry is neither a file nor a folder")
    if node["kind"] == _FILE:
        region = node.get("dataRegion")
        start, size = (region.get("offset"), region.get("size")) if isinstance(region, dict) else (None, None)
        if not (isinstance(start, int) and isinstance(size, int) and 0 <= start <= start + size <= len(data)):
            raise ValueError(f"the data of '{node.get('name')}' are outside of the blob")
        return data[start:start + size], 0
    children = node.get("children")
    if not isinstance(children, dict) or not all(isinstance(each, int) and 0 <= each < len(read)
                                                 for each in children.values()):
        raise ValueError(f"the folder '{node.get('name')}' has no list of its contents")
    found: Folder = {}
    depth = 0
    for name, place in sorted(children.items(), key=lambda item: item[1]):  # the order in which they were written
        child = read[place]
        if child is None or name in ("", ".", "..") or "/" in name or "\0" in name or not name.isprintable():
            raise ValueError(f"the name '{name}' cannot be used, or its entry is in two folders")
        read[place], found[name], depth = None, child[0], max(depth, child[1] + 1)
    if depth > _MAX_DEPTH:
        raise ValueError("its folders are nested too deep")
    return found, depth


def flatten_folder(name: str, folder: Folder) -> list[bytes | memoryview | Path]:
    """Return the blob of a folder, as ExecuTorch writes it, in parts; a part that is a path stands for that file."""
    parts: list[bytes | memoryview | Path] = []
    nodes: list[dict[str, Any]] = []
    written = 0

    def add_node(name: str, content: Data | Folder) -> int:
        nonlocal written
        children: dict[str, int] = {}
        start = size = 0
        if isinstance(content, dict):
            children = {key: add_node(key, each) for key, each in content.items()}
        else:
            start, size = written, count_bytes(content)
            parts.append(content)
            written += size
        nodes.append({"children": children, "dataRegion": {"offset": start, "size": size},
                      "kind": _FOLDER if isinstance(content, dict) else _FILE, "name": name})
        return len(nodes) - 1

    add_node(name, folder)
    return [*parts, json.dumps({"nodes": nodes}, separators=(",", ":"), sort_keys=True).encode()[::-1]]


def count_bytes(content: Data) -> int:
    """Return the size of the contents of a file in bytes."""
    return content.stat().st_size if isinstance(content, Path) else len(content)


def unpack_folder(folder: Folder, path: Path) -> None:
    """Write a folder to `path`, which must not exist. Raises OSError."""
    path.mkdir()
    for name, content in folder.items():
        if isinstance(content, dict):
            unpack_folder(content, path / name)
        else:
            (path / name).write_bytes(content.read_bytes() if isinstance(content, Path) else content)


def replace_model(folder: Folder, package: Path) -> Folder:
    """Return the folder with its package replaced by `package`, a path on disk.

    The model gets a new identifier, derived from its contents: devices cache compiled models by identifier, and would
    keep using the old model. The profiler's table of debug handles is updated from the package's. Other files are kept.
    """
    from .debug_handles import FILE as HANDLES_FILE  # imports coremltools, which would delay `--help`

    digest = hashlib.sha256()
    for path in sorted(each for each in package.rglob("*") if each.is_file()):
        digest.update(f"{path.relative_to(package)}\0{path.stat().st_size}\0".encode())
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    made = {**folder, MODEL: _list_folder(package)}
    metadata = _parse_object(folder.get(_METADATA))
    if metadata is not None:
        identifier = f"executorch_{uuid.UUID(bytes=digest.digest()[:16], version=4)}"
        made[_METADATA] = json.dumps({**metadata, "identifier": identifier}).encode()
    handles = package / HANDLES_FILE
    if _DEBUG_INFO in folder and handles.is_file():
        info = _make_debug_info(_parse_object(handles))
        made[_DEBUG_INFO] = folder[_DEBUG_INFO] if info is None else json.dumps(info).encode()
    return made


def _list_folder(path: Path) -> Folder:
    """Return the contents of a folder on disk, by name."""
    return {each.name: _list_folder(Path(each)) if each.is_dir() else Path(each)
            for each in sorted(os.scandir(path), key=lambda entry: entry.name)}


def _parse_object(content: Data | Folder | None) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if it contains anything else (the file is then kept as it is)."""
    if content is None or isinstance(content, dict):
        return None
    try:
        found = json.loads(content.read_bytes() if isinstance(content, Path) else bytes(content))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _make_debug_info(handles: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the debug handles by symbol (`OUTPUT:OPERATOR`), as ExecuTorch's backend derives them from a package.

    Returns None if the handles have an unexpected form.
    """
    mapping = handles.get("mapping") if handles is not None else None
    if handles is None or not isinstance(mapping, dict):
        return None
    paths: dict[str, Any] = {}
    numbers: dict[str, list[int]] = {}
    try:
        for handle, symbol, path in _iterate_symbols(mapping):
            numbers.setdefault(symbol, []).append(handle)
            paths[symbol] = path
    except ValueError:
        # Handles of an unknown form do not stop the run: the blob then keeps its old debug info.
        return None
    return {"versionInfo": handles.get("version", {}), "debugSymbolToOperationPath": paths,
            "debugSymbolToHandles": numbers}


def _iterate_symbols(mapping: dict[str, Any]) -> Iterator[tuple[int, str, Any]]:
    """Yield handle, symbol and path. Raises ValueError if one of them has an unexpected form."""
    for handle, paths in mapping.items():
        for path in paths if isinstance(paths, list) else [None]:
            if not isinstance(path, list) or not path or not isinstance(path[-1], dict):
                raise ValueError(f"the paths of debug handle {handle!r} are not lists of entries")
            output, operator = path[-1].get("Output"), path[-1].get("Operator")
            if output is not None and operator is not None:
                yield int(handle), f"{output}:{operator}", path
