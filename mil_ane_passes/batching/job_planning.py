"""Planning: the work needed for a package, given the results of earlier runs."""

from __future__ import annotations

import os
from pathlib import Path

from ..package.destination import check_destination
from ..package.manifest import read_layout
from ..report.batch import BatchItem
from ..utils.errors import InputError
from ..utils.option_spelling import choose_spelling, is_command
from .job import Job
from .record import RECORDED_FIELDS, Record
from .request import Request
from .sources import Source

__all__ = ["plan_job"]


def plan_job(
    source: Source, asked: Request, folder: Path | None, again: bool, overwrite: bool
) -> tuple[BatchItem, Job | None]:
    """Make the item of a package, and its job if there is work to do. Errors are recorded in the item."""
    output = None if folder is None else folder / f"{source.name}{asked.suffix}"
    item = BatchItem(source.name, source.path, None if output is None else str(output))
    path = os.path.abspath(source.path)
    try:
        if source.error:
            raise InputError(source.error)
        read_layout(source.path)
        if folder is None or output is None:
            return item, Job(source.name, path, None, None, False, asked, is_command())
        record = Record(folder, output)
        if not again and _is_up_to_date(record, path, asked):
            _restore_item(item, record)
            return item, None
        _check_output_replaceable(record, path, asked, overwrite)
        return item, Job(source.name, path, str(output), str(folder), os.path.lexists(output), asked,
                         is_command())
    except InputError as error:
        item.error = str(error)
    except OSError as error:
        item.error = f"{error.strerror or error}: {error.filename or source.path}"
    item.status = "failed"
    return item, None


def _is_up_to_date(record: Record, source: str, asked: Request) -> bool:
    return (record.state == "done" and record.data.get("asked") == asked.make_comparison_key() and record.is_untouched()
            and record.report.is_file() and record.is_made_from(source))


def _restore_item(item: BatchItem, record: Record) -> None:
    item.status, item.report_file = "up to date", str(record.report)
    for name in RECORDED_FIELDS:
        setattr(item, name, record.data["item"][name])


def _check_output_replaceable(record: Record, source: str, asked: Request, overwrite: bool) -> None:
    """Raise InputError if the existing file at the result's path must not be replaced."""
    output = record.output
    if asked.command == "rewrite" and output.parent.is_dir():
        check_destination(source, output, overwrite=True)
    if overwrite or not os.path.lexists(output):
        return
    remedy = f"{choose_spelling('--overwrite', 'overwrite=True')} replaces it, or give another folder for the results"
    if record.state == "none":
        raise InputError(f"{output}: exists already, and no batch made it; {remedy}")
    if not record.is_untouched():
        raise InputError(f"{output}: was changed since a batch wrote it; {remedy}")
    made_of = record.source
    if made_of and made_of != os.path.realpath(source) and not record.is_made_from(source):
        raise InputError(f"{output}: holds the result of another package, {made_of}; {remedy}")
