"""Search for packages by paths, folders and patterns, and the names of their results, for `batch` and `lint`."""

from __future__ import annotations

import glob
import os
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..package.executorch_program import SUFFIX as _PROGRAM_SUFFIX
from ..package.executorch_program import ExecutorchProgram, is_program_path
from ..utils.errors import InputError

__all__ = ["BACKUP_SUFFIX", "Paths", "Source", "find_programs", "find_sources"]

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_SUFFIX = ".mlpackage"
BACKUP_SUFFIX = ".bak"
"Added to the name of a package that was replaced; folders are not searched for such ones."
_FILE_SUFFIX = ".mlmodel"
"Suffix of models that are a file: NeuralNetworks."


@dataclass(frozen=True)
class Source:
    """One package: its path, the `name` of its result (with folders, without suffix), or an `error` with the reason."""

    path: str
    name: str
    error: str = ""


def find_sources(given: Paths, folder: Path | None, *, named: bool = True) -> list[Source]:
    """Find the packages that `given` refers to, in that order, each once.

    A package is found under its own path, not that of a link in the same folders, unless the link itself was given.
    The result is named after its package. A package that is found in a folder keeps its path below that folder.
    `folder`, the folder of the results, is not searched. A missing package becomes a source with an `error`. Raises
    InputError when nothing is given, or when the results of two packages would have the same name; not `named`: there
    are no such results, and each Core ML delegate of an ExecuTorch program is a source.
    """
    listed = [given] if isinstance(given, (str, os.PathLike)) or not isinstance(given, Iterable) else list(given)
    for each in listed:
        if not isinstance(each, (str, os.PathLike)):
            raise InputError(f"found {type(each).__name__} among the packages; expected paths of .mlpackage folders, "
                             f"of .mlmodel files, or of folders that contain them")
    if not listed or not all(os.fspath(each).strip() for each in listed):
        raise InputError("no packages given; expected paths of .mlpackage folders, of .mlmodel files, or of folders "
                         "that contain them")
    found: dict[str, Source] = {}
    links: set[str] = set()
    for each in listed:
        suffixes = (_FILE_SUFFIX,) if named else (_FILE_SUFFIX, _PROGRAM_SUFFIX)
        for source in _iterate_sources(os.fspath(each), folder, suffixes):
            for one in [_reject_program(source)] if named else _list_delegates(source):
                target = os.path.realpath(one.path)
                if target not in found or target in links and not os.path.islink(one.path):
                    found[target] = one
                    if os.path.islink(one.path) and one.path != os.fspath(each):
                        links.add(target)
    if named:
        _check_names(found.values())
    return list(found.values())


def find_programs(given: Paths, folder: Path | None) -> list[str]:
    """Find the ExecuTorch programs in the folders among `given`, which `find_sources` leaves out where results are
    `named`."""
    listed = [given] if isinstance(given, (str, os.PathLike)) else list(given)
    given_directly, all_found = (
        {source.path for each in listed for source in _iterate_sources(os.fspath(each), folder, suffixes)
         if not source.error and is_program_path(source.path)} for suffixes in ((), (_PROGRAM_SUFFIX,)))
    return sorted(all_found - given_directly)


def _reject_program(source: Source) -> Source:
    if source.error or not is_program_path(source.path):
        return source
    error = (f"{source.path}: an ExecuTorch program; expected an .mlpackage or .mlmodel: lint and rewrite read "
             "programs, one at a time, and `mil-ane-passes rewrite IN.pte/METHOD/N -o OUT.mlpackage` writes a delegate")
    return Source(source.path, source.name, error)


def _list_delegates(source: Source) -> list[Source]:
    """Return a source for each delegate of a program that has several with different models; else the source."""
    if source.error or not is_program_path(source.path) or not os.path.isfile(source.path):
        return [source]
    try:
        found = ExecutorchProgram(source.path).select_blobs(None)
    except InputError:
        return [source]  # the error is that of the command, which meets it again
    if len(found) == 1:
        return [source]
    return [Source(f"{source.path}/{blob.name}", f"{source.name}/{blob.name}") for blob in found]


def _iterate_sources(path: str, folder: Path | None, suffixes: tuple[str, ...]) -> Iterator[Source]:
    if not os.path.lexists(path) and glob.has_magic(path):
        matches = sorted(set(_iterate_pattern_matches(path, folder, suffixes)))
        if not matches:
            yield Source(
                path, _get_result_name(path), f"{path}: no path matches this pattern; expected at least one .mlpackage"
            )
        for match in matches:
            yield from _iterate_sources(match, folder, suffixes)
    elif not os.path.isdir(path) or _is_package(path):
        yield Source(path, _get_result_name(path))
    else:
        below = list(_search_folder(path, folder, suffixes))
        yield from below
        if not below:
            yield Source(
                path,
                _get_result_name(path),
                f"{path}: no {_SUFFIX} or {_FILE_SUFFIX} found in this folder; expected a package, or a folder that "
                f"contains packages",
            )


def _iterate_pattern_matches(pattern: str, folder: Path | None, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Yield the paths that match a pattern; `**` matches every folder that is searched."""
    parts = pattern.split(os.sep)
    if "**" not in parts:
        yield from glob.glob(pattern)
        return
    at = parts.index("**")
    for top in glob.glob(os.sep.join([*parts[:at], ""]) or os.curdir):
        if not parts[at + 1 :]:
            yield top
            continue
        for place, _ in _walk_folders(top, folder, [], suffixes):
            yield from _iterate_pattern_matches(
                os.path.join(glob.escape(os.path.normpath(place)), *parts[at + 1 :]), folder, suffixes
            )


def _walk_folders(
    top: str, folder: Path | None, refused: list[OSError], suffixes: tuple[str, ...]
) -> Iterator[tuple[str, list[str]]]:
    """Yield all folders below, with the names of the packages in each, and of the files with one of the suffixes.

    Files and broken links that are named as packages are listed, too: opening them says what they are. Packages, hidden
    folders, the folder of the results and links are not searched, and backups are left out.
    """
    results = None if folder is None else os.path.realpath(folder)
    for place, folders, files in os.walk(top, onerror=refused.append):
        folders[:] = sorted(name for name in folders
                            if not name.startswith(".") and not name.endswith(_SUFFIX + BACKUP_SUFFIX)
                            and os.path.realpath(os.path.join(place, name)) != results)
        inside = [name for name in folders if _is_package(os.path.join(place, name))]
        folders[:] = [name for name in folders if name not in inside]
        yield place, sorted([*inside, *(name for name in files if name.endswith((_SUFFIX, *suffixes)))])


def _search_folder(top: str, folder: Path | None, suffixes: tuple[str, ...]) -> Iterator[Source]:
    """Yield the packages in a folder, by name."""
    refused: list[OSError] = []
    for place, inside in _walk_folders(top, folder, refused, suffixes):
        for name in inside:
            path = os.path.join(place, name)
            yield Source(path, Path(os.path.relpath(path, top)).with_name(_get_result_name(path)).as_posix())
    for error in refused:
        where = error.filename or top
        yield Source(where, _get_result_name(where), f"{where}: cannot be searched ({error.strerror})")


def _is_package(path: str) -> bool:
    return path.rstrip("/").endswith(_SUFFIX) or os.path.isfile(os.path.join(path, "Manifest.json"))


def _get_result_name(path: str) -> str:
    return Path(os.path.abspath(path)).name.removesuffix(_SUFFIX).removesuffix(_FILE_SUFFIX).removesuffix(
        _PROGRAM_SUFFIX)


def _check_names(sources: Iterable[Source]) -> None:
    """Raise InputError for names that a file system may treat as equal: the second result would replace the first."""
    taken: dict[str, Source] = {}
    for source in sources:
        if source.error:
            continue
        key = unicodedata.normalize("NFC", source.name).casefold()
        if key in taken:
            beside = len({os.path.dirname(os.path.abspath(each.path)) for each in (source, taken[key])}) == 1
            advice = "pass one of them" if beside else (
                "pass the folder that contains both (packages found in a folder keep their relative path)")
            raise InputError(f"{taken[key].path} and {source.path} would both become '{source.name}'; expected "
                             f"different names: {advice}, or run batch twice")
        taken[key] = source
