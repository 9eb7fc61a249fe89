"""Finds the patches: every module of `patches/`. There is no list to edit."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import threading
from dataclasses import dataclass

from ..core.errors import InputError, RuleError
from .contract import Patch

__all__ = ["Finding", "all_patches", "findings"]

_FOLDER = "mil_ane_passes.torch_frontend.patches"
_lock = threading.RLock()


@dataclass(frozen=True)
class Finding:
    """One patch and why the installed coremltools needs it; `reason` is None where it does not."""

    patch: Patch
    reason: str | None


@functools.cache
def all_patches() -> tuple[Patch, ...]:
    """Every patch, by name. Raises InputError without torch, RuleError when two patches change the same thing."""
    _require_torch()
    folder = importlib.import_module(_FOLDER)
    found = []
    for module in pkgutil.iter_modules(folder.__path__):
        patch = getattr(importlib.import_module(f"{_FOLDER}.{module.name}"), "PATCH", None)
        if not isinstance(patch, Patch):
            raise RuleError(f"{_FOLDER}.{module.name} defines no PATCH; expected one a file")
        patch.name = module.name
        found.append(patch)
    _check_disjoint(found)
    return tuple(found)


def findings() -> tuple[Finding, ...]:
    """Which patches the installed coremltools needs; probed once a process, with the host's own functions."""
    with _lock:
        return _probed()


@functools.cache
def _probed() -> tuple[Finding, ...]:
    from .probing import host_alone, lowered_by_host

    with host_alone():
        return tuple(Finding(patch, patch.needed(lowered_by_host)) for patch in all_patches())


def _require_torch() -> None:
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise InputError("the torch frontend needs torch, which is not installed; "
                         "`pip install 'mil_ane_passes[verify]'` brings it") from error


def _check_disjoint(patches: list[Patch]) -> None:
    owner: dict[object, str] = {}
    for patch in patches:
        changed = [*patch.ops, *((replacement.module, replacement.attribute) for replacement in patch.replacements)]
        for key in changed:
            if key in owner:
                raise RuleError(f"{key} is changed by the patches '{owner[key]}' and '{patch.name}'; expected one")
            owner[key] = patch.name
