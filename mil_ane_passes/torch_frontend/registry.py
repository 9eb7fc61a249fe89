"""Registry of patches: every module of `patches/` is one. There is no list to edit."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
from dataclasses import dataclass
from pathlib import Path

from ..utils.errors import InputError, RuleError
from ..utils.locking import synchronized
from .contract import Patch

__all__ = ["PatchStatus", "collect_patch_statuses", "is_patch_key", "load_patches"]

_PATCHES_PACKAGE = "mil_ane_passes.torch_frontend.patches"
_CODE_PREFIX = "TORCH1"
"The prefix of the codes of patches."


@dataclass(frozen=True)
class PatchStatus:
    """A patch and why the installed coremltools needs it; `reason` is None where it does not."""

    patch: Patch
    reason: str | None


@functools.cache
def load_patches() -> tuple[Patch, ...]:
    """Load all patches, sorted by name.

    Raises InputError without torch, and RuleError when two patches lower the same op or a code is invalid or not
    unique.
    """
    _require_torch()
    folder = importlib.import_module(_PATCHES_PACKAGE)
    found = []
    for module in pkgutil.iter_modules(folder.__path__):
        file = importlib.import_module(f"{_PATCHES_PACKAGE}.{module.name}")
        patch = getattr(file, "PATCH", None)
        if not isinstance(patch, Patch):
            raise RuleError(f"{_PATCHES_PACKAGE}.{module.name} defines no PATCH; expected one a file")
        patch.name, patch.text = module.name, inspect.getdoc(file) or ""
        found.append(patch)
    _check_distinct(found)
    return tuple(found)


def is_patch_key(key: str) -> bool:
    """Return whether `key` is the name of a patch, in any case, or begins as their codes do. Imports no patch."""
    names = {module.name for module in pkgutil.iter_modules([str(Path(__file__).with_name("patches"))])}
    return key.lower() in names or key.upper().startswith(_CODE_PREFIX)


@synchronized
def collect_patch_statuses() -> tuple[PatchStatus, ...]:
    """Determine which patches the installed coremltools needs.

    The patches are probed once a process, with coremltools' own functions.
    """
    return _probe_patches()


@functools.cache
def _probe_patches() -> tuple[PatchStatus, ...]:
    from .probes import is_lowered_by_coremltools, isolate_coremltools

    with isolate_coremltools():
        return tuple(PatchStatus(patch, patch.needed(is_lowered_by_coremltools)) for patch in load_patches())


def _require_torch() -> None:
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise InputError("the torch frontend needs PyTorch, which is not installed: "
                         "pip install 'mil-ane-passes[verify]'") from error


def _check_distinct(patches: list[Patch]) -> None:
    owner: dict[object, str] = {}
    for patch in patches:
        if not re.fullmatch(rf"{_CODE_PREFIX}\d\d", patch.code):
            raise RuleError(f"the patch '{patch.name}' has the code {patch.code!r}; expected {_CODE_PREFIX}xx")
        for key in [patch.code, *patch.ops]:
            if key in owner:
                todo = "" if key == patch.code else " for an op kind: remove it from the other"
                raise RuleError(f"{key} is used by the patches '{owner[key]}' and '{patch.name}'; expected one{todo}")
            owner[key] = patch.name
