"""Saving: a new package is written to a staging folder beside the target and appears complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
from coremltools.converters.mil.mil import Block, Operation, Program, Var, types

from ..ir.constants import LazyValue, get_blob_ref
from ..ir.coremltools_internals import get_typed_value
from ..ir.query import is_const, iterate_nested_ops, plain_type
from ..utils.errors import AnePassesError, InputError
from ..utils.locking import synchronized
from ..utils.mapped_files import is_mapped
from ..utils.text_format import add_article, escape_text
from .blob_refs import find_refs, move_refs
from .blobs import Blob, WeightFiles
from .contents import list_contents
from .copy_ahead import CopyAhead
from .debug_handles import format_debug_handles
from .destination import check_destination, check_file_destination
from .file_clone import clone_file
from .files import copy_file, copy_mode, link_file, sync_path
from .manifest import Layout
from .model import Package, load
from .origin import get_file_inputs
from .staging import REPLACED, Staging
from .swap import exchange_paths, move_to_free_path
from .weight_plan import NewBlob, WeightPlan, find_live_blobs, is_equal_to_blob, plan_blob_moves
from .weights import write_weights
from .write_errors import convert_write_errors

# Attempts to publish a package while other runs replace the one at the target. Each failed attempt means that another
# run has just published, so 100 failures in a row point to an error and not to concurrency.
_MAX_TRIES = 100
_NEW_NAME, _TAKEN_BACK_NAME = "new", "taken back"

Writer = Callable[[Path], None]


@synchronized
def save(
    package: Package, path: str | os.PathLike[str], *, overwrite: bool = False, link: bool = False,
    interface: bool = False, ahead: CopyAhead | None = None, read_back: bool = False,
) -> None:
    """Write `package` to `path`: every byte as in the source, except for what changed in the program.

    The package is complete when it appears; on any failure nothing is left. The source is not modified. With
    `overwrite`, an existing package is exchanged for the new one in one step. With `link`, unchanged files that cannot
    be cloned become hard links: the two packages then share them, so never edit either in place. With `interface`,
    functions, inputs, outputs and states that were added, removed or changed are written to the model and described.
    `ahead` holds copies of the source's large files that were started earlier. With `read_back`, the package is read
    again before it appears, and compared with the program.

    Raises InputError if `path` exists (without `overwrite`), if it is the source, in it or contains it, if the source
    changed on disk after it was loaded, if the interface changed (without `interface`), or if writing fails; RuleError
    if the program's ops are out of order.
    """
    if not isinstance(package, Package):
        raise InputError(f"cannot save {add_article(type(package).__name__)}; expected a Package, as load returns it "
                         "(an MLModel has its own method save)")
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"path: found {add_article(type(path).__name__)}; expected a path that ends in .mlpackage")
    target = Path(os.path.abspath(path))
    check_destination(package.path, target, overwrite)
    with convert_write_errors(target):
        package.check_source()
    model, plan = package.emit(interface=interface)
    changed = plan if model != package.raw else None
    extra = {} if changed is None else format_debug_handles(package.path, package.program)
    output = PackageOutput(package.layout, package.files, model, target, changed, extra,
                           package.program if read_back and changed is not None else None)
    write_models([output], overwrite=overwrite, link=link, ahead=ahead)


@synchronized
def replace_source(package: Package, backup: str | os.PathLike[str]) -> None:
    """Write `package` in place of the folder that it was loaded from, which is kept as `backup`.

    The new package is complete before anything is changed, and exchanged for the old one in one step. The backup is
    made before that; its path must be free, and its files are links to the old ones or copies. After a failure the
    source is unchanged and there is no backup, with one exception: if another run puts something at the source's path
    in the moment between two renames (see `swap`), that stays, and so does the backup. Raises InputError for the
    reasons of `save` and `check_backup`.
    """
    target, kept = Path(os.path.abspath(package.path)), Path(os.path.abspath(backup))
    check_backup(target, kept)
    with convert_write_errors(target), Staging(target) as staging:
        new = staging.folder / f"{_NEW_NAME}.mlpackage"
        save(package, new)
        _fill_staged_folder(target, staging.folder / kept.name, {}, None, link=True)
        package.check_source()
        try:
            move_to_free_path(staging.folder / kept.name, kept)
        except FileExistsError:
            check_backup(target, kept)
            raise
        try:
            exchange_paths(new, target, staging.folder / REPLACED)
        except FileExistsError as error:  # the source cannot be put back, so only the backup is left of it
            raise InputError(f"{target}: another run has written to this path in the meantime; its result is kept, and "
                             f"the source is kept as {kept}") from error
        except BaseException:
            os.rename(kept, staging.folder / _TAKEN_BACK_NAME)
            raise
    _sync_parent_folder(target)


def check_backup(target: Path, backup: Path, *, may_exist: bool = False) -> None:
    """Raise InputError if the package at `target` cannot be replaced in place and kept as `backup`.

    A backup that `may_exist` is accepted, for a caller that does not know yet whether it replaces the package.
    """
    if os.path.islink(target):
        raise InputError(f"{target}: is a link to {os.readlink(target)}, and a link is not replaced; expected the path "
                         "of the package itself")
    if not target.exists():
        left = f"a run that was killed has left it as {backup}: rename that" if (backup / "Manifest.json").is_file() \
            else "expected the path of an .mlpackage"
        raise InputError(f"{target}: no such file or folder; {left}")
    if not target.is_dir():
        raise InputError(f"{target}: is not a package; only an .mlpackage is replaced in place")
    if os.path.lexists(backup) and not may_exist:
        raise InputError(f"{backup}: exists already, and a backup is never overwritten; move it away, or write the "
                         "result to another path (-o)")


@dataclass(frozen=True)
class PackageOutput:
    """One package to write: the one at `layout` with the model file `model`, to the absolute path `target`.

    `plan` lists the new blobs; without a plan the weights are copied as they are. With a plan, blobs that `model` does
    not refer to are dropped from each weight file of which they are more than the fraction `plan.dead_limit`. `extra`
    maps the paths (in the package) of other changed files to their contents. If `program` is given, the staged package
    is read again and must contain it: a check of the program in memory then holds for the package.
    """

    layout: Layout
    files: WeightFiles
    model: bytes
    target: Path
    plan: WeightPlan | None = None
    extra: Mapping[Path, bytes] = field(default_factory=dict)
    program: Program | None = None


@dataclass(frozen=True)
class StagedFile:
    """A file that belongs to packages, complete in a staging folder as `path`; it appears at the folder's target."""

    staging: Staging

    @property
    def path(self) -> Path:
        return self.staging.folder / _NEW_NAME


def stage_file(stack: ExitStack, target: Path, fill: Callable[[IO[bytes]], object]) -> StagedFile:
    """Let `fill` write a file into a staging folder beside `target`, which is removed when `stack` is closed.

    `write_models` moves it to the target. Raises InputError where it cannot be written.
    """
    with convert_write_errors(target, "the file"):
        staged = StagedFile(stack.enter_context(Staging(target)))
        with open(staged.path, "xb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
    return staged


@synchronized
def write_models(
    outputs: Sequence[PackageOutput], *, overwrite: bool = False, link: bool = False, ahead: CopyAhead | None = None,
    files: Sequence[StagedFile] = (),
) -> None:
    """Write several packages, and put `files` in their places, all or none.

    Files that a `PackageOutput` does not change are those of its source. The files appear first, then the packages, one
    after another, when the last is complete. If the process is killed between two of them, those that have appeared
    stay, and each is complete. Raises the errors of `save`.
    """
    with ExitStack() as stack:
        stagings = []
        for each in outputs:
            with convert_write_errors(each.target):
                check_destination(each.layout.root, each.target, overwrite)
                each.files.check_unchanged()  # its other files are read below
                writers = _plan_writers(each.layout, each.files, each.model, each.plan, ahead)
                writers |= {path: partial(_write_bytes, data) for path, data in each.extra.items()}
                stagings.append(stack.enter_context(Staging(each.target)))
                _fill_staged_folder(each.layout.root, stagings[-1].folder / _NEW_NAME, writers, ahead, link)
                if each.program is not None:
                    _check_contents(each.program, stagings[-1].folder / _NEW_NAME, each.target)
        for each in outputs:
            with convert_write_errors(each.target):
                each.files.check_unchanged()  # else the copied files could be of two different states of the source
        with ExitStack() as undo:
            for staging in (*(file.staging for file in files), *stagings):
                what = "package" if staging in stagings else "file"
                with convert_write_errors(staging.target, f"the {what}"):
                    publish_output(staging.folder / _NEW_NAME, staging.target, staging.folder / REPLACED, overwrite,
                                     what)
                undo.callback(_undo_publish, staging)
            undo.pop_all()
    for target in (*(file.staging.target for file in files), *(each.target for each in outputs)):
        _sync_parent_folder(target)


def _check_contents(program: Program, staged: Path, target: Path) -> None:
    """Raise AnePassesError if the package at `staged` does not contain the program: its ops, operands and constants.

    Names may differ, as new ones are written without special characters. Constants that are still at their place in the
    weight file of the source are not read.
    """
    written = load(staged)
    for name, function in program.functions.items():
        other = written.program.functions.get(name)
        faults = [name] if other is None else _ContentCheck(function, other, written.files).list_differing_ops()
        if faults:
            raise AnePassesError(
                f"{target}: not written, as its program would differ from the one in memory, in function "
                f"{escape_text(name)!r}, at {escape_text(faults[0])!r}; this is an error of mil-ane-passes: please "
                "report it")


class _ContentCheck:
    """The comparison of a function with the written one, whose weights are in `files`."""

    def __init__(self, function: Block, written: Block, files: WeightFiles) -> None:
        self._function, self._written, self._files = function, written, files
        self._alike: dict[Var, Var] = dict(zip(function.inputs.values(), written.inputs.values()))
        self._equal: set[tuple[Var, Var]] = set()

    def list_differing_ops(self) -> list[str]:
        """List the names of ops whose type, operands or constants differ from those of the op at the same place."""
        ops, others = ([op for op in iterate_nested_ops(each) if op.op_type != "const"]
                       for each in (self._function, self._written))
        if len(ops) != len(others):
            return [f"{len(others)} ops in place of {len(ops)}"]
        pairs = [*zip(ops, others)]
        for op, other in pairs:
            if len(op.outputs) == len(other.outputs) and len(op.blocks) == len(other.blocks):
                self._alike.update(zip(op.outputs, other.outputs))
                for inner, same in zip(op.blocks, other.blocks):
                    self._alike.update(zip(inner.inputs, same.inputs))
        faults = [op.name for op, other in pairs if not self._is_same_op(op, other)]
        blocks = [(self._function, self._written), *(both for op, other in pairs for both in zip(
            op.blocks, other.blocks))]
        return faults + [var.name for block, same in blocks for var, read in zip(block.outputs, same.outputs)
                         if not self._is_same_operand(var, read)]

    def _is_same_op(self, op: Operation, other: Operation) -> bool:
        inputs, others = (get_file_inputs(each) for each in (op, other))
        return plain_type(op) == plain_type(other) and len(op.outputs) == len(other.outputs) and all(
            len(others.get(param, ())) == len(read) and all(map(self._is_same_operand, read, others[param]))
            for param, read in inputs.items())

    def _is_same_operand(self, var: Var, other: Var) -> bool:
        if not is_const(var) or not is_const(other):
            return self._alike.get(var) is other
        if (var, other) not in self._equal and self._has_same_value(var, other):
            self._equal.add((var, other))
        return (var, other) in self._equal

    def _has_same_value(self, var: Var, other: Var) -> bool:
        """Return whether two constants have the same bytes; those of large ones are compared piece by piece."""
        if types.is_list(var.sym_type) != types.is_list(other.sym_type) or (
                not types.is_list(var.sym_type) and var.dtype != other.dtype):
            return False
        held, place, at = get_typed_value(var), get_blob_ref(var), get_blob_ref(other)
        lazy = isinstance(held, LazyValue)
        value = np.frombuffer(held.read_packed(), np.uint8) if lazy else np.asarray(var.val)
        if at is None or (types.is_sub_byte(var.dtype) and not lazy):
            return bool(np.array_equal(np.asarray(var.val), np.asarray(other.val), equal_nan=value.dtype.kind == "f"))
        if place is not None and (place.name, place.offset) == (at.name, at.offset) and (lazy or is_mapped(value)):
            return True
        file = self._files.open_file(at.name)
        blob = file.blob(at.offset)
        return tuple(var.shape) == tuple(other.shape) and value.nbytes == blob.nbytes and is_equal_to_blob(
            file, blob, value if value.flags.c_contiguous or is_mapped(value) else np.ascontiguousarray(value))


def _undo_publish(staging: Staging) -> None:
    """Undo `publish_output`: restore what was replaced."""
    staged, aside = staging.folder / _NEW_NAME, staging.folder / REPLACED
    if staged.exists():  # the two paths were exchanged
        exchange_paths(staged, staging.target, staging.folder / _TAKEN_BACK_NAME)
        return
    os.rename(staging.target, staging.folder / _TAKEN_BACK_NAME)
    if aside.exists():
        move_to_free_path(aside, staging.target)


def _plan_writers(
    layout: Layout, files: WeightFiles, model: bytes, plan: WeightPlan | None, ahead: CopyAhead | None
) -> dict[Path, Writer]:
    """Return, by path in the package, the functions that write the files that are not plain copies."""
    if plan is None:
        unchanged = layout.model.read_bytes() == model
        return {} if unchanged else {layout.model.relative_to(layout.root): partial(_write_bytes, model)}
    refs = find_refs(model)
    new = {(plan.target, blob.offset) for blob in plan.added}  # may be in a file that does not exist yet
    live = find_live_blobs(files, {ref for ref in refs if ref not in new})
    added = [blob for blob in plan.added if (plan.target, blob.offset) in refs]
    moves = plan_blob_moves(files, added, plan.target, live, plan.dead_limit, gaps=len(added) < len(plan.added))
    model = move_refs(model, moves)
    writers: dict[Path, Writer] = {layout.model.relative_to(layout.root): partial(_write_bytes, model)}
    for name in {*moves, *([plan.target] if added and plan.target else [])}:
        writers[files.path(name).relative_to(layout.root)] = _make_weight_writer(
            files, added if name == plan.target else [], name, live.get(name, []), moves, ahead
        )
    return writers


def _make_weight_writer(
    files: WeightFiles, added: list[NewBlob], name: str, live: list[Blob], moves: dict[str, dict[int, int]],
    ahead: CopyAhead | None,
) -> Writer:
    def write_file(target: Path) -> None:
        write_weights(files.files.get(name), target, live, moves.get(name), added, ahead)

    return write_file


def _write_bytes(data: bytes, target: Path) -> None:
    with open(target, "xb") as file:
        file.write(data)


def _fill_staged_folder(
    source: Path, staged: Path, writers: dict[Path, Writer], ahead: CopyAhead | None, link: bool
) -> None:
    """Fill the new folder `staged` with the contents of `source` and sync it.

    Files in `writers` are written by their writer instead of copied.
    """
    staged.mkdir()
    folders = {Path()}
    for item in list_contents(source):
        path, copy = source / item.path, staged / item.path
        if item.path in writers:
            writers.pop(item.path)(copy)
        elif item.kind == "folder":
            copy.mkdir()
            folders.add(item.path)
            continue
        elif item.kind == "link":
            os.symlink(os.readlink(path), copy)
            continue
        elif not _copy_or_link(path, copy, ahead, link):
            continue  # a hard link shares its permissions with the source
        copy_mode(path, copy)
        sync_path(copy)
    for extra, write in writers.items():
        (staged / extra).parent.mkdir(parents=True, exist_ok=True)
        write(staged / extra)
        sync_path(staged / extra)
        folders |= set(extra.parents)
    for folder in sorted(folders, key=lambda path: len(path.parts), reverse=True):
        if (source / folder).is_dir():
            copy_mode(source / folder, staged / folder)
        sync_path(staged / folder)


def _copy_or_link(path: Path, copy: Path, ahead: CopyAhead | None, link: bool) -> bool:
    """Make `copy` have the bytes of `path`.

    Returns False if it is a hard link to the same file, True if it is a file of its own.
    """
    if ahead is not None and ahead.take_copy(path, copy):
        return True
    if link and clone_file(path, copy):
        return True
    if link and link_file(path, copy):
        return False
    copy_file(path, copy)
    return True


def publish_output(
    staged: Path, target: Path, aside: Path, overwrite: bool, what: str = "package",
    check: Callable[[], None] | None = None,
) -> None:
    """Move `staged` to `target`, in one step if the file system supports it; other runs may do the same meanwhile.

    `what` is "package", "file" for one that belongs to packages, or "folder" for one of packages. `check` raises
    InputError if what is at `target` may not be replaced; by default that is decided for a package or a file.
    """
    for _ in range(_MAX_TRIES):
        try:
            if not (overwrite and os.path.lexists(target)):
                return move_to_free_path(staged, target)
            if check is not None:
                check()
            elif what == "package":
                check_destination(staged, target, overwrite)  # still something that may be replaced
            else:
                check_file_destination(None, target, overwrite, "a file")
            return exchange_paths(staged, target, aside)
        except FileNotFoundError:
            if not staged.exists():
                raise
        except FileExistsError as error:
            if not overwrite:
                raise InputError(f"{target}: another run has written a {what} to this path in the meantime, which is "
                                 "kept; this run wrote nothing; expected a free path, or overwrite to replace the "
                                 f"{what}") from error
    raise InputError(f"{target}: other runs keep replacing it; write to this path with one run at a time")


def _sync_parent_folder(target: Path) -> None:
    """Wait until the target's name is on disk, unless the parent folder may not be opened."""
    try:
        sync_path(target.parent)
    except PermissionError:
        # A parent folder without read permission cannot be opened, but the package in it is complete.
        return
    except OSError as error:
        raise InputError(f"{target}: written, but the disk did not confirm it ({error.strerror}); check the disk, then "
                         "this package") from error
