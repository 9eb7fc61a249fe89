"""The layout of a package: its folder, its manifest, and the paths in it."""

from __future__ import annotations

import json
import os
import re
import stat
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..utils.errors import InputError, suggest_nearest
from ..utils.text_format import format_command_path, join_words
from .executorch_program import SUFFIX as _PROGRAM_SUFFIX
from .executorch_program import find_address, refuse_program
from .limits import MAX_MANIFEST_BYTES, MAX_MODEL_BYTES

MANIFEST = "Manifest.json"
DATA_FOLDER = "Data"
_SUFFIX = ".mlpackage"
_NETWORK_SUFFIX = ".mlmodel"
_VERSION_FORM = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9}){0,2}")
_MAX_NAMED = 8  # items named in an error
_REMEDY = "expected an .mlpackage folder saved by coremltools"
_MISSING_REMEDIES = {_SUFFIX: _REMEDY, _NETWORK_SUFFIX: "expected an .mlmodel file",
                     _PROGRAM_SUFFIX: "expected a .pte file written by ExecuTorch"}
"Expected kind of model at a path that does not exist, by the path's suffix."
_PYTORCH_HINT = (
    "a PyTorch model; convert it first, with mil_ane_passes.convert or coremltools, and pass the .mlpackage"
)
_ARCHIVE_HINTS = {".npz": "numpy arrays, not a model; pass inputs with --feeds (feeds= in Python)",
                  ".pt": _PYTORCH_HINT, ".pth": _PYTORCH_HINT, ".pt2": _PYTORCH_HINT}
"Descriptions of archives that are not packages, by suffix."
_FILE_HINTS = {
    ".onnx": "an ONNX model; convert it first, with onnx2coreml, and pass the .mlpackage",
    ".ptd": "data of an ExecuTorch program, not a model; pass the .pte that it belongs to",
    **dict.fromkeys((".h5", ".keras", ".tflite"),
                    "a TensorFlow model; convert it first, with coremltools, and pass the .mlpackage"),
    **dict.fromkeys((".mlir", ".stablehlo"), "a StableHLO module; convert it first, with stablehlo-coreml and "
                    "coremltools, and pass the .mlpackage"),
    ".safetensors": "weights without a model; convert the model first, and pass the .mlpackage",
}
"Descriptions of files that are not packages, by suffix."


@dataclass(frozen=True)
class Layout:
    """Paths of a package: its folder, the model file, and every item the manifest lists."""

    root: Path
    model: Path
    items: tuple[Path, ...]

    @property
    def model_dir(self) -> Path:
        """The folder that `@model_path` refers to in a program."""
        return self.model.parent

    def has_item(self, path: Path) -> bool:
        """Return whether `path` is an item of the manifest, or inside one."""
        return any(item == path or item in path.parents for item in self.items)


def check_inside(root: Path, path: Path, what: str) -> Path:
    """Return `path`, which must be inside `root` also after symbolic links are followed; InputError otherwise."""
    try:
        real_root, real = os.path.realpath(root), os.path.realpath(path)
        os.path.lexists(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{root}: {what} is not a path ({error}); expected one inside the package; "
                         f"{_REMEDY}") from error
    if ".." in path.relative_to(root).parts or os.path.commonpath([real_root, real]) != real_root:
        raise InputError(f"{root}: {what} leads to {real}, outside the package; expected a path inside it; {_REMEDY}")
    return path


def read_layout(path: str | os.PathLike[str]) -> Layout:
    """Return the layout of the package at `path`.

    Raises InputError if `path` is not a package (such as a compiled or single-file model), or its manifest is broken.
    """
    root = Path(path)
    _check_kind(root)
    entries, root_id = _read_manifest(root)
    paths = {key: _resolve_item_path(root, key, entry) for key, entry in entries.items()}
    if root_id not in paths:
        raise InputError(
            f"{root}: {MANIFEST} names {root_id!r} as the root model, which is not among its items "
            f"({', '.join(map(repr, sorted(paths)[:_MAX_NAMED])) or 'none'}); {_REMEDY}"
        )
    model = paths[root_id]
    size = _get_file_size(model)
    if size is None:
        raise InputError(f"{root}: the model file {model} is missing, but {MANIFEST} lists it; {_REMEDY}")
    if size > MAX_MODEL_BYTES:
        raise InputError(
            f"{root}: the model file {model} has {size} bytes; expected at most {MAX_MODEL_BYTES}; {_REMEDY}"
        )
    return Layout(root, model, tuple(paths.values()))


def _get_file_size(path: Path) -> int | None:
    """Return the size of the regular file at `path`; None if it is missing or of another kind.

    Raises InputError if a folder on the path cannot be entered.
    """
    try:
        found = path.stat()
    except PermissionError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); check the permissions of its folders") from error
    except (OSError, ValueError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def check_exists(root: Path) -> None:
    """Raise InputError if `root` (for a delegate: its program) does not exist; the message suggests a similar name."""
    try:
        if root.exists():
            return
    except OSError as error:  # a name that is too long; other errors of the same kind mean that nothing is there
        raise InputError(f"{root}: cannot be opened ({error.strerror}); {_REMEDY}") from error
    if root.is_symlink():
        raise InputError(
            f"{root}: is a link to {os.readlink(root)}, which does not exist; expected a link to a package")
    program = next((each for each in root.parents if each.suffix == _PROGRAM_SUFFIX and not each.exists()), None)
    missing = root if program is None else program
    near = suggest_nearest(missing.stem, models := _list_models(missing.parent, missing.suffix),
                           lambda stem: str(missing.with_name(models[stem])))
    remedy = _MISSING_REMEDIES.get(missing.suffix, _REMEDY)
    raise InputError(f"{missing}: no such file or folder; {remedy}{near}")


def check_model_path(path: str | os.PathLike[str]) -> None:
    """Raise InputError if `path` cannot be a model. Loading would raise the same error, but after a slow import."""
    root = Path(path)
    if find_address(root) is None and not (root.suffix == _NETWORK_SUFFIX and root.is_file()):
        read_layout(root)


def check_package_path(path: str | os.PathLike[str]) -> None:
    """Raise InputError if `path` cannot be a package, before the slow import as in `check_model_path`."""
    read_layout(path)


def check_network_path(path: str | os.PathLike[str]) -> None:
    """Raise InputError if `path` cannot be a NeuralNetwork, before the slow import as in `check_model_path`."""
    root = Path(path)
    refuse_program(root)
    check_exists(root)
    if root.is_dir():
        read_layout(root)


def advise_upgrade(root: Path) -> str:
    """Format the advice for a NeuralNetwork where an ML Program is expected."""
    command = join_words(["mil-ane-passes", "upgrade", format_command_path(str(root)), "-o", "OUT.mlpackage"])
    return f"convert it first with `{command}`, and pass what that writes"


def _check_kind(root: Path) -> None:
    refuse_program(root)
    check_exists(root)
    if root.suffix in (".mlmodelc", ".mil"):
        raise InputError(f"{root}: a compiled model ({root.suffix}); use the .mlpackage it was compiled from")
    if root.is_file() and zipfile.is_zipfile(root):
        found = _ARCHIVE_HINTS.get(
            root.suffix, "an archive; unpack it first, and pass the .mlpackage folder in it"
        )
        raise InputError(f"{root}: {found}")
    around = next((folder for folder in root.absolute().parents if (folder / MANIFEST).is_file()), None)
    if around is not None and not (root / MANIFEST).is_file():
        raise InputError(f"{root}: a part of the package {around}; pass that folder")
    if root.is_file():
        if root.suffix == ".mlmodel":
            raise InputError(
                f"{root}: a single-file .mlmodel, the format of NeuralNetworks and older models; expected an ML "
                f"Program: if it is a NeuralNetwork, {advise_upgrade(root)}"
            )
        if root.suffix in _FILE_HINTS:
            raise InputError(f"{root}: {_FILE_HINTS[root.suffix]}")
        raise InputError(
            f"{root}: a file, not a package; convert the source model with coremltools "
            '(convert_to="mlprogram") and pass the .mlpackage'
        )
    if not (root / MANIFEST).is_file():
        compiled = (root / "coremldata.bin").exists() or (root / "model.mil").exists()
        found = "it looks like a compiled model" if compiled else f"it has no {MANIFEST}"
        raise InputError(f"{root}: not a package, {found}; {_REMEDY}")


def _list_models(folder: Path, suffix: str) -> dict[str, str]:
    """Map the stems of the models in a folder to their names; of equal stems, the name with `suffix` is listed.

    Returns {} if the folder cannot be read.
    """
    try:
        names = [name for entry in os.scandir(folder) if Path(name := entry.name).suffix in _MISSING_REMEDIES]
    except OSError:
        # The names only complete an error message, so a folder that cannot be read must not raise another error.
        return {}
    return {Path(name).stem: name for name in sorted(names, key=lambda name: (Path(name).suffix == suffix, name))}


def _read_manifest(root: Path) -> tuple[dict[str, Any], str]:
    path = check_inside(root, root / MANIFEST, MANIFEST)
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes; expected at most {MAX_MANIFEST_BYTES}")
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{root}: {MANIFEST} cannot be read as JSON ({error}); {_REMEDY}") from error
    entries = manifest.get("itemInfoEntries") if isinstance(manifest, dict) else None
    root_id = manifest.get("rootModelIdentifier") if isinstance(manifest, dict) else None
    if not isinstance(entries, dict) or not isinstance(root_id, str):
        raise InputError(
            f"{root}: {MANIFEST} lacks 'itemInfoEntries' or 'rootModelIdentifier', so no model is found; {_REMEDY}"
        )
    version = manifest.get("fileFormatVersion", "1.0.0")
    if not isinstance(version, str) or not _VERSION_FORM.fullmatch(version):
        raise InputError(f"{root}: {MANIFEST} has the fileFormatVersion {str(version)[:40]!r}, which neither Core ML "
                         f"nor coremltools supports; expected one such as '1.0.0'; {_REMEDY}")
    return entries, root_id


def _resolve_item_path(root: Path, key: str, entry: Any) -> Path:
    name = entry.get("path") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not name:
        raise InputError(f"{root}: item {key!r} of {MANIFEST} has no path; {_REMEDY}")
    if os.path.isabs(name) or ".." in Path(name).parts:
        raise InputError(
            f"{root}: item {key!r} of {MANIFEST} has the path {name!r}; expected a path inside the package; {_REMEDY}"
        )
    return check_inside(root, root / DATA_FOLDER / name, f"item {key!r} of {MANIFEST}")
