"""Packages on disk: loaded as pymil programs with their weights mapped, saved with every untouched byte kept.

A package is rewritten at the speed of a copy, because weights are not loaded. Parts that no rewrite changed are saved
byte for byte: ops with attributes such as `IntendedBackend`, names, shared weights, metadata, labels, images, flexible
shapes, states, several functions, unknown fields. The ML Programs of a pipeline are rewritten in place; in reports
their functions are called `PART/FUNCTION`. Where the file system can clone files (APFS, XFS, Btrfs), the weights are
cloned; elsewhere `--link` makes hard links instead of copies. If a package has ExecuTorch's mapping from debug handles
to ops, it is written again for the ops of the new program.

The output is staged in a hidden folder beside the target, synced, and published in one step. Files of a killed run are
removed by the next run to that target. If the file system cannot swap paths, an old package is replaced by two renames;
if the process is killed between them, the next run restores it from the hidden folder. A damaged package is rejected
with a message that states what was found where. The source is never changed.

`mil-ane-passes edit` changes functions, inputs, outputs and states (see `transforms/README.md`): they are written with
the same care (`save(..., interface=True)`), and the model's description follows. `mil-ane-passes batch` processes
many packages, on the cores of one machine, any `concurrent.futures.Executor`, or a Dask cluster whose workers see the
same paths; when it is run again, it processes only packages that are not done yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..passes.lazy_import import make_lazy_getattr

if TYPE_CHECKING:
    from .copy_ahead import CopyAhead
    from .destination import check_destination
    from .model import Package, load, package_of_mlmodel
    from .package_writer import check_backup, replace_source, save

__all__ = ["CopyAhead", "Package", "check_backup", "check_destination", "load", "package_of_mlmodel", "replace_source",
           "save"]

_HOME = {"CopyAhead": ".copy_ahead", "Package": ".model", "check_destination": ".destination", "load": ".model",
         "package_of_mlmodel": ".model", "check_backup": ".package_writer", "replace_source": ".package_writer",
         "save": ".package_writer"}

# A copy can start before coremltools is imported.
if not TYPE_CHECKING:  # a type checker would accept any name with a module-level `__getattr__`
    __getattr__ = make_lazy_getattr(__name__, _HOME)
