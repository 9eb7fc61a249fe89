"""Editing of a package as a file: names, outputs, types, without building a program and without loading weights."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from ..package import CopyAhead, check_destination
from ..package.package_writer import PackageOutput, write_models
from ..package.weight_plan import WeightPlan
from ..report.edit import EditReport
from ..transforms.contract import PART_SUFFIXES, EditRecord, apply_edits, build_part_path
from ..transforms.document import Document
from ..transforms.sources import get_source_path, open_document
from ..utils.errors import InputError
from ..utils.garbage_collection import pause_garbage_collection
from ..utils.locking import synchronized
from .edit_list import FixShapes, IoTypes, Names, make_edits

__all__ = ["edit"]


@synchronized
def edit(
    src: Any, dst: str | os.PathLike[str] | None = None, *, fix_shape: FixShapes | None = None,
    expose: Names = (), drop_output: Names = (), io: IoTypes = None, rename: Mapping[str, str] | None = None,
    split_at: Names = (), dedup_weights: bool = False, function: str | None = None, overwrite: bool = False,
    link: bool = False, dry_run: bool = False, ahead: CopyAhead | None = None,
) -> EditReport:
    """Edit the ML Program package `src` and write the result to `dst`; the rest of the package is unchanged.

    `src` is a path, a `Package` as it was loaded, or an MLModel that is a package on disk. `fix_shape` gives inputs
    with flexible shapes one shape: a mapping from name to shape; a list of such mappings, or a mapping from function
    names to them, makes a function of each, which share the weights (the first is the default). `expose` names inner
    values to return as well; a type that is not allowed in the interface is cast, and the report says so.
    `drop_output` names outputs to remove, with all ops that only they needed. `io` is "fp16" or "fp32", the type that
    all float inputs and outputs get, or maps one or both to the names that get it. `rename` maps names of inputs,
    outputs, states or inner values to their new names. `split_at` makes two packages that run one after the other, cut
    behind the values it names: OUT_1.mlpackage and OUT_2.mlpackage for the `dst` OUT.mlpackage, both or neither; with
    `function` they do not contain the other functions. `dedup_weights` stores weights of equal bytes once. `function`
    edits that function alone (default: each that has the named values). All names are those of `src`, regardless of
    other edits. `dry_run` writes nothing. `link`: unchanged files become hard links where they cannot be cloned, so
    that the packages share them. `ahead`: copies of the source's large files that the caller has already started.

    The order is fixed: fix_shape, expose, drop_output, io, rename, split_at, dedup_weights.

    Raises InputError for anything that cannot be done, with the reason; nothing is written then.
    """
    started = time.perf_counter()
    edits = make_edits(function, fix_shape=fix_shape, expose=expose, drop_output=drop_output, io=io, rename=rename,
                       split_at=split_at, dedup_weights=dedup_weights)
    source = get_source_path(src)
    target = None if dry_run else _check_target(dst, source, PART_SUFFIXES if split_at else ("",), overwrite)
    copied = None if split_at or dedup_weights or link else target  # files that are packed again are not copied ahead
    with (
        _start_copying_ahead(source, copied) if ahead is None else nullcontext(ahead) as ahead,
        pause_garbage_collection(),
    ):
        documents = apply_edits(open_document(src), edits)
        report = EditReport(
            str(source), done=_collect_done_edits(documents), weight_bytes_before=_count_weight_bytes(source)
        )
        if target is not None:
            _write_result(report, documents, target, overwrite, link, ahead)
    report.seconds = time.perf_counter() - started
    return report


def _check_target(dst: str | os.PathLike[str] | None, source: Path, parts: Sequence[str], overwrite: bool) -> Path:
    """Return the path to write to. Raises InputError if a part of the result could not be written at the end."""
    if dst is None:
        raise InputError("no output; expected a path that ends in .mlpackage, or a dry run")
    for part in parts:
        check_destination(source, build_part_path(Path(dst), part), overwrite)
    return Path(dst)


def _start_copying_ahead(source: Path, target: Path | None) -> AbstractContextManager[CopyAhead | None]:
    return nullcontext() if target is None else CopyAhead(source, target)


def _write_result(
    report: EditReport, documents: list[Document], target: Path, overwrite: bool, link: bool, ahead: CopyAhead | None
) -> None:
    report.outputs = _write_documents(documents, target, overwrite, link, ahead)
    report.status = "written" if report.changed else "unchanged"
    report.weight_bytes_after = sum(_count_weight_bytes(Path(path)) for path in report.outputs)


def _write_documents(
    documents: list[Document], target: Path, overwrite: bool, link: bool, ahead: CopyAhead | None
) -> list[str]:
    """Write all documents or none; returns the paths."""
    outputs = []
    for document in documents:
        plan = document.plan or (WeightPlan(document.files) if document.repack else None)
        if plan is not None:
            plan.dead_limit = document.dead_limit
        path = Path(os.path.abspath(build_part_path(target, document.part)))
        outputs.append(PackageOutput(document.layout, document.files, document.emit(), path, plan))
    write_models(outputs, overwrite=overwrite, link=link, ahead=ahead)
    return [os.fspath(build_part_path(target, document.part)) for document in documents]


def _collect_done_edits(documents: list[Document]) -> list[EditRecord]:
    """Collect the applied edits, each once: documents made from one source start with the same edits."""
    return list(dict.fromkeys(each for document in documents for each in document.done))


def _count_weight_bytes(root: Path) -> int:
    return sum(file.stat().st_size for file in root.rglob("*.bin"))
