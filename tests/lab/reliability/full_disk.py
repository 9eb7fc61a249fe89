"""Disks that refuse: a limit on file sizes, a small disk that is full, and a refusal of each single step."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from .job import BROKEN, DONE, REFUSED, SaveJob, hash_folder, start_child, wait_for_child

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)


def try_size_limits(job: SaveJob, overwrite: bool, every: int = 1) -> dict[str, Any]:
    """A limit on the size of files, at and beside the borders of every file that is written; with `every`, some."""
    sizes = {path.stat().st_size for path in job.source.rglob("*") if path.is_file()}
    steps = {0, 1, 63, 64, 65, 1 << 20, *(size + by for size in sizes for by in (-1, 0, 1)), *(s // 2 for s in sizes)}

    counts = Counter[str]()
    for size in sorted((step for step in steps if step >= 0), reverse=True)[::every]:
        _judge_run(
            job,
            overwrite,
            partial(_run_with_size_limit, job, overwrite, size),
            counts,
            f"files of at most {size} bytes",
        )
    return _make_result(counts)


def _run_with_size_limit(job: SaveJob, overwrite: bool, size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    job.run(overwrite)


def try_disk_errors(job: SaveJob, overwrite: bool, every: int = 1) -> dict[str, Any]:
    """An error of the disk instead of each single step in the folder of the output; with `every`, of so many."""
    counts, step = Counter[str](), 0
    while not counts["to the end"]:
        step += every
        code = _DISK_ERRORS[step % len(_DISK_ERRORS)]
        work = partial(_run_with_disk_error, job, overwrite, step, code)
        _judge_run(job, overwrite, work, counts, f"step {step}")
    counts["whole"] -= 1
    del counts["to the end"]
    return _make_result(counts)


def try_small_disks(job: SaveJob, megabytes: tuple[int, ...] = (1, 2, 8, 10, 12, 13, 14, 15)) -> dict[str, Any]:
    """Memory disks too small for the package; {} where this user may not mount one."""
    counts, where = Counter[str](), job.folder / "small"
    where.mkdir(exist_ok=True)
    for size in megabytes:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}m", "tmpfs", where], capture_output=True,
                                 check=False)
        if mounted.returncode:
            return {}
        try:
            target = where / job.target.name
            code = wait_for_child(start_child(lambda target=target: job.run(target=target)))
            left = os.listdir(where)
            whole = left == [target.name] and hash_folder(target) == job.whole
            counts["whole" if whole else "refused"] += 1
            if (code, bool(left), whole) not in ((REFUSED, False, False), (DONE, True, True)):
                counts["failures"] += 1
                print(f"a disk of {size} MB: ended {code}, left {left}", file=sys.stderr)
        finally:
            subprocess.run(["umount", where], check=True)
    return _make_result(counts)


def _run_with_disk_error(job: SaveJob, overwrite: bool, step: int, code: int) -> None:
    """The job with an error in place of its step number `step`; ends this process BROKEN if it came to that step."""
    seen, where = 0, os.fspath(job.where)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        path = args[0] if args and isinstance(args[0], str | Path) else ""
        if event.startswith(("open", "os.")) and os.fspath(path).startswith(where):
            seen += 1
            if seen == step:
                raise OSError(code, os.strerror(code), os.fspath(path))

    sys.addaudithook(hook)
    job.run(overwrite)
    if seen < step:
        os._exit(_STEP_NOT_REACHED)


_STEP_NOT_REACHED = 4


def _judge_run(job: SaveJob, overwrite: bool, work: Any, counts: Counter[str], what: str) -> None:
    job.clear()
    if overwrite:
        job.put_old()
    code = wait_for_child(start_child(work))
    found, left = job.found(), job.leftovers()
    counts["refused" if code == REFUSED else "whole"] += 1
    counts["to the end"] += code == _STEP_NOT_REACHED
    stays = "old" if overwrite else "absent"
    wrong = (
        left or code == BROKEN or found != {REFUSED: stays}.get(code, "whole") or hash_folder(job.source) != job.before
    )
    if wrong:
        counts["failures"] += 1
        print(f"{what} ({overwrite=}): ended {code}, left {found} and {left}", file=sys.stderr)
    shutil.rmtree(job.where)
    job.where.mkdir()


def _make_result(counts: Counter[str]) -> dict[str, Any]:
    return {"tries": counts["refused"] + counts["whole"], "refused": counts["refused"], "whole": counts["whole"],
            "failures": counts["failures"]}
