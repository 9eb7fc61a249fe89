"""Checks of the model that `ane.convert` is given: weights and modules of Python code have no graph to convert."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Mapping
from typing import Any

from ..utils.errors import InputError
from ..utils.text_format import escape_text, format_count

__all__ = ["TORCH_FILE_SUFFIXES", "check_captured"]

TORCH_FILE_SUFFIXES = (".pt", ".pth")
"The suffixes with which coremltools reads a path as that of a TorchScript."

_TRACE = "torch.jit.trace(module.eval(), example_inputs)"
_EXPORT = "torch.export.export(module.eval(), example_inputs).run_decompositions({})"
_CAPTURES = f"{_TRACE}, or {_EXPORT}"
_EXPORT_RECORDS = ("models/model.json", "serialized_exported_program.json")
"Records of files of torch.export.save: of its archives since torch 2.8, and of those before."
_SAVED_RECORD = "data.pkl"
"The record of what torch.save was given; archives of TorchScript contain it too, beside `code/` and `constants.pkl`."


def check_captured(model: Any) -> None:
    """Raise InputError for a module of Python code, weights, and files without a TorchScript.

    coremltools would ask for a `source` in vain, or report a damaged file. Files are recognized by the names of their
    records; nothing is unpickled. Does not import torch.
    """
    if isinstance(model, str | os.PathLike):
        _check_file(model)
        return
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if isinstance(model, Mapping) and (count := _count_tensors(model, torch.Tensor)):
        raise InputError(f"convert: found a dict ({type(model).__name__}) with {format_count(count, 'tensor')}, which "
                         "has weights, but no computation; expected a module with these weights "
                         f"(module.load_state_dict(...)) in {_CAPTURES}")
    if isinstance(model, torch.nn.Module) and not isinstance(model, torch.jit.ScriptModule):
        raise InputError(f"convert: found the module {type(model).__name__}, which is not captured; expected "
                         f"{_CAPTURES}")
    if isinstance(model, torch.jit.ScriptModule) and not hasattr(model, "forward"):
        raise InputError("convert: the script has no method 'forward', as torch compiles several for a recurrent layer "
                         "alone; expected a script of a module that contains the layer")


def _count_tensors(values: Mapping[Any, Any], tensor: type) -> int:
    """Count the tensors of a dict, and of the dicts in it, as of a checkpoint with an optimizer."""
    return sum(_count_tensors(value, tensor) if isinstance(value, Mapping) else isinstance(value, tensor)
               for value in values.values())


def _check_file(path: str | os.PathLike[str]) -> None:
    """Raise InputError for an existing file of torch that is not a TorchScript, and for one that is not named by a str.

    Files of other frameworks, such as the archives of Keras, are left to coremltools.
    """
    text = os.fspath(path)
    if not isinstance(text, str) or not os.path.isfile(text):
        return
    shown, names = escape_text(text), _list_records(text)
    if any(name.endswith(_EXPORT_RECORDS) for name in names):
        raise InputError(f"convert: found {shown}, a file of torch.export.save; expected "
                         f"torch.export.load('{shown}').run_decompositions({{}})")
    script = any("/code/" in name or name.endswith("/constants.pkl") for name in names)
    what = ""
    if not script and any(name.endswith(f"/{_SAVED_RECORD}") for name in names):
        what = "a file of torch.save, which contains a dict of weights or a whole module, not a TorchScript"
    elif not names and text.endswith(TORCH_FILE_SUFFIXES):
        what = "neither a TorchScript nor another zip archive: of an old version of torch.save, or damaged"
    if what:
        raise InputError(f"convert: found {shown}, {what}; expected {_CAPTURES}, of the module that torch.load "
                         "returns, or that has these weights (module.load_state_dict(...))")
    if not isinstance(path, str) and script:
        raise InputError(f"convert: found a {type(path).__name__}; expected the path as a str: '{shown}'")


def _list_records(path: str) -> list[str]:
    """List the names in a zip archive; none for another file, and for one that cannot be read."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (zipfile.BadZipFile, OSError, NotImplementedError):
        return []
