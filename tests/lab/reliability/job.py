"""The job that is disturbed: a package with a large file and small ones is loaded, edited, and saved elsewhere."""

from __future__ import annotations

import hashlib
import os
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
from coremltools.converters.mil.mil import Builder as mb

from mil_ane_passes.package import CopyAhead, load, save
from mil_ane_passes.utils.errors import InputError

from ...package.helpers import conv_program, make, op_named, replace

DONE, REFUSED, BROKEN, UNCONFIRMED = 0, 2, 3, 5
"""How a child of `start_child` ends: the package is there, it was refused with an InputError, anything else happened,
or the package is there and the error says that the disk did not confirm it."""


class SaveJob:
    """A source package in `folder`, and the hashes of what comes of it."""

    def __init__(self, folder: Path, megabytes: int = 24) -> None:
        self.folder = folder
        self.source = make(folder / "in" / "source.mlpackage", conv_program())
        extra = self.source / "Data" / "extra"
        extra.mkdir()
        rng = np.random.default_rng(0)
        (extra / "large.bin").write_bytes(rng.bytes(megabytes << 20))
        for number in range(12):
            (extra / f"small{number}.bin").write_bytes(rng.bytes(1000 * number))
        self.before = hash_folder(self.source)
        self.where = folder / "out"
        self.where.mkdir()
        self.target = self.where / "made.mlpackage"
        self.old = hash_folder(self.put_old())
        self.clear()
        assert wait_for_child(start_child(self.run)) == DONE
        self.whole = hash_folder(self.target)
        self.clear()

    def run(self, overwrite: bool = False, variant: int = 0, target: Path | None = None) -> None:
        """The job itself; a variant has other weights."""
        target = target or self.target
        with CopyAhead(self.source, target) as ahead:
            package = load(self.source)
            relu = op_named(package.program, "relu")
            value = np.full((1, 16, 16, 16), 1 + variant, np.float32)
            value[0, 0, 0, 0] = 0  # not a value that is stored once for all
            replace(relu, lambda: mb.add(x=relu.x, y=mb.const(val=value, name="more"), name="sum"), name="relu")
            save(package, target, overwrite=overwrite, ahead=ahead)

    def put_old(self) -> Path:
        """A package where the new one is to be."""
        shutil.copytree(self.source, self.target, ignore=shutil.ignore_patterns("large.bin"))
        return self.target

    def clear(self) -> None:
        """Nothing is left where the package is to be."""
        shutil.rmtree(self.where)
        self.where.mkdir()

    def found(self) -> str:
        """What is at the target: "absent", "old", "whole", or "broken"."""
        if not os.path.lexists(self.target):
            return "absent"
        return {self.old: "old", self.whole: "whole"}.get(hash_folder(self.target), "broken")

    def leftovers(self) -> list[str]:
        """What is beside the target."""
        return sorted(set(os.listdir(self.where)) - {self.target.name})


def hash_folder(folder: Path) -> str:
    """All names, permissions and bytes of a folder, as one hash."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        total.update(f"{path.relative_to(folder)}\0{path.lstat().st_mode}\0".encode())
        if path.is_file():
            total.update(path.read_bytes())
    return total.hexdigest()


def start_child(work: Callable[[], None]) -> int:
    """Does `work` in a forked child and returns its process id; it ends with DONE, REFUSED or BROKEN."""
    process = os.fork()
    if process:
        return process
    code = BROKEN
    try:
        work()
        code = DONE
    except InputError as error:
        code = UNCONFIRMED if "written, but the disk did not confirm it" in str(error) else REFUSED
        code = code if "\n" not in str(error) else BROKEN
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait_for_child(process: int) -> int:
    """Waits for a child: how it ended; a signal is negative."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
