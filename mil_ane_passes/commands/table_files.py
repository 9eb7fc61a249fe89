"""Tables of embeddings as files: .npy with the data as it is stored, its compression beside it, and a description.

`table.npy` has rows of floats, or what they are compressed to. `table.json` names all files and the input that reads
the rows, and `generate.read_rows` of `report/decoder` computes these.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from ..package.destination import check_file_destination
from ..report.decoder.generate import read_rows
from ..utils.errors import InputError
from ..utils.option_spelling import choose_spelling, format_option_values

if TYPE_CHECKING:
    from ..package.package_writer import StagedFile
    from ..transforms.contract import Draft, Transform

__all__ = ["TableFile", "make_table_files"]

_KIND, _SCHEMA = "embedding", 1
"Kind and version of descriptions."


@dataclass
class TableFile:
    """The table that is looked up by the input `ids`, as the file `path`, which ends in .npy.

    `parts` are what the table consists of: those of the package, then those of the files.
    """

    ids: str
    path: Path
    parts: dict[str, Any] = field(default_factory=dict)

    @property
    def input(self) -> str:
        """The input that replaces `ids`."""
        return f"{self.ids}_rows"

    def make_transform(self, function: str | None) -> Transform:
        from ..transforms.token_input import TokenInput

        return TokenInput(self.ids, self.input, self._open_rows, function=function)

    def check(self, source: str | os.PathLike[str], overwrite: bool) -> None:
        """Raise InputError if the table and its description cannot be written; other files are known later."""
        self._check_file(source, self.path, overwrite)
        description = self.path.with_suffix(".json")
        self._check_file(source, description, overwrite)
        if description.exists() and not _is_description(description):
            raise InputError(f"{description}: exists and is not the description of a table, which would replace it; "
                             f"expected another name than '{self.path.name}', or move it away")

    def stage(
        self, stack: ExitStack, drafts: Sequence[Draft], source: str | os.PathLike[str], overwrite: bool
    ) -> list[StagedFile]:
        """Write all files into staging folders; rows are read from these from now on."""
        from ..package.package_writer import stage_file
        from ..transforms.stored_table import describe_table, list_table_arrays

        described = self._describe_input(drafts) | describe_table(self.parts, self.path.stem)
        arrays, staged = list_table_arrays(self.parts), []
        for name, file in described["files"].items():
            target = self.path.with_name(file)
            self._check_file(source, target, overwrite)
            staged.append(stage_file(stack, target, partial(_save_array, arrays[name])))
            self.parts[name] = np.load(staged[-1].path, mmap_mode="r" if arrays[name].size else None)
        text = json.dumps(described, indent=2) + "\n"
        staged.append(stage_file(stack, self.path.with_suffix(".json"), lambda file: file.write(text.encode())))
        return staged

    def _open_rows(self, parts: dict[str, Any]) -> Callable[[Any], Any]:
        self.parts = parts
        return lambda ids: read_rows(self.parts, ids)

    def _check_file(self, source: str | os.PathLike[str], path: Path, overwrite: bool) -> None:
        if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
            raise InputError(f"{path}: is not a regular file, and is not overwritten; expected another path")
        check_file_destination(source, path, overwrite, "a file of the table")

    def _describe_input(self, drafts: Sequence[Draft]) -> dict[str, Any]:
        """Describe the input of rows as the packages have it after all edits."""
        found: dict[str, Any] = {"schema": _SCHEMA, "kind": _KIND, "form": "npy", "ids": self.ids}
        for draft in drafts:
            for function, mapping in draft.interfaces.items():
                name: str | None = None
                for step in mapping.steps:
                    names = {each.old: each.new for each in step if each.kind == "input"}
                    made = any(each.new == self.input and each.action == "added" for each in step)
                    name = self.input if made else names.get(name, name)
                var = draft.program.functions[function].inputs.get(name)
                if var is not None:
                    return found | {"input": name, "dtype": _format_dtype(var)}
        return found | {"input": self.input}


def make_table_files(given: Mapping[str, str | os.PathLike[str]]) -> list[TableFile]:
    """Return the requested tables. InputError for names of files that are none of an .npy, or that two have."""
    files: list[TableFile] = []
    if not isinstance(given, Mapping):
        raise InputError(f"{format_option_values('embedding_file')}: found {given!r}; expected a mapping from names of "
                         "inputs to paths")
    for ids, path in given.items():
        if not isinstance(ids, str) or not isinstance(path, (str, os.PathLike)):
            raise InputError(f"{format_option_values('embedding_file')}: found {ids!r}: {path!r}; expected the name of "
                             "an input and a path")
        made = TableFile(ids.removeprefix("%") or ids, Path(os.path.abspath(path)))
        who = format_option_values("embedding_file", choose_spelling(f"{ids}={os.fspath(path)}", ids))
        if made.path.suffix != ".npy" or made.path.stem.startswith("."):
            raise InputError(f"{who}: '{os.fspath(path)}' is not the name of a table; expected one that ends in .npy")
        same = next((each for each in files if each.path == made.path), None)
        if same is not None:
            raise InputError(f"{who}: the table of '{same.ids}' is written to '{os.fspath(path)}' as well; expected a "
                             "file for each")
        files.append(made)
    return files


def _is_description(path: Path) -> bool:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("kind") == _KIND and "files" in found


def _save_array(array: np.ndarray[Any, Any], file: IO[bytes]) -> None:
    np.save(file, array, allow_pickle=False)


def _format_dtype(var: Any) -> str:
    from .adapt_parts import describe_var

    return str(describe_var(var)["dtype"])
