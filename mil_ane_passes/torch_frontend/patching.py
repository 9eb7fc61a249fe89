"""Activation of the patches: for one context (`patched`) or for the process (`install`).

While a context or the process uses the patches, coremltools' functions are replaced by dispatchers, which check whether
the patches are active for the caller. At the end coremltools' own functions are restored. So a thread that did not
request the patches converts without them.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from ..utils.locking import synchronized
from .contract import Lowering, Replacement

__all__ = ["active", "install", "patched", "suspend_patches", "uninstall"]

_OP_REGISTRY_MODULE = "coremltools.converters.mil.frontend.torch.torch_op_registry"

_lock = threading.RLock()
_patched_depth: ContextVar[int] = ContextVar("mil_ane_passes_patched", default=0)
_installed = False
_holders = 0
_originals: list[tuple[Any, str, Any]] = []
_lowerings: dict[str, Lowering] = {}
_wrappers: list[Callable[[Lowering, Any, Any], None]] = []


def active() -> bool:
    """Return whether the patches are active for the caller."""
    depth = _patched_depth.get()
    return depth > 0 or (depth == 0 and _installed)


@contextmanager
def patched() -> Iterator[None]:
    """Activate the patches inside the `with`, in this thread. May be nested; other threads are not affected.

    Entering it waits for other threads that use the API. Inside, `ct.convert` is coremltools' own and acquires no lock:
    where other threads work, call `ane.convert`, or convert within `ane.exclusive()`.

    Raises InputError when torch is not installed.
    """
    _acquire_patches()
    token = _patched_depth.set(max(_patched_depth.get(), 0) + 1)
    try:
        yield
    finally:
        _patched_depth.reset(token)
        _release_patches()


@contextmanager
def suspend_patches() -> Iterator[None]:
    """Deactivate the patches inside the `with`, even where they are installed."""
    token = _patched_depth.set(-1)
    try:
        yield
    finally:
        _patched_depth.reset(token)


@synchronized
def install() -> None:
    """Patch the frontend for the entire process until `uninstall()`; a second call does nothing.

    Raises InputError when torch is not installed.
    """
    global _installed
    with _lock:
        if not _installed:
            _acquire_patches()
            _installed = True


def uninstall() -> None:
    """Undo `install()`; a call without one does nothing. Threads inside `patched()` keep the patches."""
    global _installed
    with _lock:
        if _installed:
            _installed = False
            _release_patches()


@synchronized
def _acquire_patches() -> None:
    from .registry import collect_patch_statuses

    needed = [finding.patch for finding in collect_patch_statuses() if finding.reason is not None]
    global _holders
    with _lock:
        if _holders == 0:
            for patch in needed:
                _lowerings.update(patch.ops)
                _wrappers.extend([] if patch.wrapper is None else [patch.wrapper])
                for replacement in patch.replacements:
                    _replace_function(replacement)
            _replace_function(Replacement(_OP_REGISTRY_MODULE, "TorchOpsRegistry.get_func", _get_func))
            _replace_function(Replacement(_OP_REGISTRY_MODULE, "TorchOpsRegistry.__contains__", _contains_lowering))
        _holders += 1


def _release_patches() -> None:
    global _holders
    with _lock:
        _holders -= 1
        if _holders == 0:
            while _originals:
                owner, name, original = _originals.pop()
                setattr(owner, name, original)
            _lowerings.clear()
            _wrappers.clear()


def _replace_function(replacement: Replacement) -> None:
    """Replace a function of coremltools by a dispatcher."""
    owner: Any = importlib.import_module(replacement.module)
    *path, name = replacement.attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    original = vars(owner)[name]
    _originals.append((owner, name, original))
    setattr(owner, name, _make_dispatcher(original, replacement.function))


def _make_dispatcher(original: Any, function: Callable[..., Any]) -> Any:
    """Make a function that calls `function(original, ...)` where the patches are active, `original(...)` elsewhere.

    A class method or static method remains one.
    """
    if isinstance(original, classmethod | staticmethod):
        return type(original)(_make_dispatcher(original.__func__, function))

    @functools.wraps(original)
    def dispatch_call(*arguments: Any, **named: Any) -> Any:
        return function(original, *arguments, **named) if active() else original(*arguments, **named)

    return dispatch_call


def _get_func(host: Callable[..., Any], registry: Any, kind: str) -> Any:
    """Return the lowering of an op: the user's own registration, else ours, else coremltools'."""
    other = host(registry, kind)
    ours = _find_patched_lowering(kind)
    of_user = other is not None and not (other.__module__ or "").startswith("coremltools.")
    lowering = other if ours is None or of_user else ours
    for wrapper in [] if lowering is None or of_user else _wrappers:
        lowering = functools.partial(wrapper, lowering)
    return lowering


def _contains_lowering(host: Callable[..., Any], registry: Any, kind: str) -> bool:
    return bool(host(registry, kind)) or _find_patched_lowering(kind) is not None


def _find_patched_lowering(kind: str) -> Lowering | None:
    from coremltools.converters.mil.frontend.torch.utils import sanitize_op_kind, unify_inplace_and_functional

    return _lowerings.get(unify_inplace_and_functional(sanitize_op_kind(kind)))
