"""Saving: a new package beside the old one, whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ..core.errors import InputError
from .ahead import CopyAhead
from .blobs import Blob, WeightFiles
from .destination import check_destination
from .files import copy_file, copy_mode, sync
from .manifest import Layout
from .model import Package
from .plan import WeightPlan, live_blobs, moved_blobs
from .refs import find_refs, move_refs
from .weights import write_weights

Writer = Callable[[Path], None]


def save(
    package: Package, path: str | os.PathLike[str], *, overwrite: bool = False, ahead: CopyAhead | None = None
) -> None:
    """Writes `package` to `path`: every byte as in the source, except for what changed in the program.

    The package is complete when it appears; on any failure nothing is left. The source stays as it is. `ahead` holds
    copies of the source's large files that were started earlier.
    Raises InputError when `path` exists (and not `overwrite`), is the source, inside it or around it, when the
    source changed on disk after it was loaded, when the interface changed, or when the disk refuses; RuleError
    when the program's ops are out of order.
    """
    target = Path(os.path.abspath(path))
    check_destination(package.path, target, overwrite)
    with _refusals(target):
        package.check_source()
    model, plan = package.emit()
    changed = plan if model != package.raw else None
    write_model(package.layout, package.files, model, target, plan=changed, overwrite=overwrite, ahead=ahead)


def write_model(
    layout: Layout, files: WeightFiles, model: bytes, path: str | os.PathLike[str], *, plan: WeightPlan | None = None,
    overwrite: bool = False, ahead: CopyAhead | None = None,
) -> None:
    """Writes the package at `layout` to `path` with the model file `model`; the rest as it is.

    `plan` says which blobs are new. Without a plan the weights are copied as they are. With one, blobs that `model`
    does not refer to are dropped where they are more than the plan's `dead_limit` of their file. Raises InputError as
    `save` does.
    """
    target = Path(os.path.abspath(path))
    with _refusals(target):
        check_destination(layout.root, target, overwrite)
        writers = _writers(layout, files, model, plan, ahead)
        with _staging(target) as temporary:
            staged = temporary / target.name
            _copy_folder(layout.root, staged, layout.root, writers, ahead)
            for extra in writers:
                (staged / extra).parent.mkdir(parents=True, exist_ok=True)
                writers[extra](staged / extra)
                sync(staged / extra)
            sync(temporary)
            _swap_in(staged, target, temporary)
            sync(target.parent)


@contextmanager
def _refusals(target: Path) -> Iterator[None]:
    """What the disk refuses, in words."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"{target}: the package cannot be written ({reason}); nothing was left there") from error


def _writers(
    layout: Layout, files: WeightFiles, model: bytes, plan: WeightPlan | None, ahead: CopyAhead | None
) -> dict[Path, Writer]:
    """What writes each file that is not a plain copy, by its path in the package."""
    if plan is None:
        unchanged = layout.model.read_bytes() == model
        return {} if unchanged else {layout.model.relative_to(layout.root): partial(_write_bytes, model)}
    new = {(plan.target, blob.offset) for blob in plan.added}  # may be in a file that is not there yet
    live = live_blobs(files, {ref for ref in find_refs(model) if ref not in new})
    moves = moved_blobs(files, plan.added, plan.target, live, plan.dead_limit)
    model = move_refs(model, moves)
    writers: dict[Path, Writer] = {layout.model.relative_to(layout.root): partial(_write_bytes, model)}
    for name in {*moves, *([plan.target] if plan.added and plan.target else [])}:
        writers[files.path(name).relative_to(layout.root)] = _weight_writer(
            files, plan, name, live.get(name, []), moves, ahead
        )
    return writers


def _weight_writer(
    files: WeightFiles, plan: WeightPlan, name: str, live: list[Blob], moves: dict[str, dict[int, int]],
    ahead: CopyAhead | None,
) -> Writer:
    added = plan.added if name == plan.target else []

    def write(target: Path) -> None:
        write_weights(files.files.get(name), target, live, moves.get(name), added, ahead)

    return write


def _write_bytes(data: bytes, target: Path) -> None:
    with open(target, "xb") as file:
        file.write(data)


def _copy_folder(
    source: Path, target: Path, root: Path, writers: dict[Path, Writer], ahead: CopyAhead | None
) -> None:
    """Copies a folder and all in it; files that have a writer are written by it, which is taken out of `writers`."""
    target.mkdir()
    with os.scandir(source) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            path, copy = Path(entry.path), target / entry.name
            writer = writers.pop(path.relative_to(root), None)
            if writer is not None:
                writer(copy)
            elif entry.is_symlink():
                os.symlink(os.readlink(path), copy)
                continue
            elif entry.is_dir():
                _copy_folder(path, copy, root, writers, ahead)
                continue
            elif ahead is None or not ahead.take(path, copy):
                copy_file(path, copy)
            copy_mode(path, copy)
            sync(copy)
    copy_mode(source, target)
    sync(target)


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """A folder beside `target`, gone afterwards."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        yield temporary
    finally:
        _remove(temporary)


def _remove(folder: Path) -> None:
    """Removes a folder with all in it, also where folders in it are read-only."""
    for inner, _, _ in os.walk(folder):
        os.chmod(inner, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _swap_in(staged: Path, target: Path, temporary: Path) -> None:
    """Puts `staged` in the place of `target`; what was there goes to `temporary`, and comes back on a failure."""
    if not os.path.lexists(target):
        os.rename(staged, target)
        return
    aside = temporary / "replaced"
    os.rename(target, aside)
    try:
        os.rename(staged, target)
    except BaseException:
        os.rename(aside, target)
        raise
