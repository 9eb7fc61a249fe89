"""The process-wide lock: coremltools keeps the program it builds in globals, so one thread at a time uses the API.

Every public function that loads, builds, rewrites, runs or writes a program is `synchronized`. Several threads may
call them, and each gets the result it would get alone; a second thread waits until the first is done. For parallel
work, use processes: `batch(..., jobs=N)`, or an executor or a Dask cluster whose workers are processes.

The lock is re-entrant: code that is called meanwhile in the same thread (a progress callback, a plugin's rule, a torch
module that is compared) may call the API again. It must not wait for another thread that does. `patched()` holds the
lock while it is entered, not while the caller's code runs. A forked process starts with a free lock.

coremltools' own functions take no lock. Where other threads use this package, call `ane.convert` instead of
`ct.convert`, or hold the lock meanwhile, also to build or edit a program that other threads read:

    with ane.exclusive():
        model = ct.convert(traced, inputs=inputs, pass_pipeline=ane.pipeline())
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar, overload

__all__ = ["exclusive", "is_synchronized", "synchronized", "synchronized_property"]

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_SYNCHRONIZED_MARK = "__mil_ane_passes_synchronized__"
_MIL_PACKAGE = "coremltools.converters.mil.mil"
_lock = threading.RLock()


@contextmanager
def exclusive() -> Iterator[None]:
    """Keep other threads out of the API inside the `with`; they wait.

    Use it around coremltools' own functions (`ct.convert`, the MIL builder) where other threads use this package, and
    around edits of a program that other threads read.
    """
    lock = _lock  # a fork may replace the global inside the `with`
    with lock:
        yield


def synchronized(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate `function` so that one thread at a time runs it, or any other synchronized function."""

    @wraps(function)
    def call_locked(*arguments: P.args, **named: P.kwargs) -> R:
        with exclusive():
            return function(*arguments, **named)

    setattr(call_locked, _SYNCHRONIZED_MARK, True)
    return call_locked


class synchronized_property(Generic[R_co]):  # noqa: N801
    """A property that is computed once for an object, under the lock.

    Before Python 3.12 `functools.cached_property` has a lock of its own, shared by all objects of a class: a thread
    that computes one and waits for the API, and another in the API that reads that property, would never go on.
    """

    def __init__(self, function: Callable[[Any], R_co]) -> None:
        self._function, self._name = function, function.__name__
        self.__doc__ = function.__doc__

    @overload
    def __get__(self, owner: None, kind: type | None = None) -> synchronized_property[R_co]: ...

    @overload
    def __get__(self, owner: object, kind: type | None = None) -> R_co: ...

    def __get__(self, owner: object | None, kind: type | None = None) -> synchronized_property[R_co] | R_co:
        if owner is None:  # read from the class, as documentation tools do
            return self
        with exclusive():
            if self._name not in owner.__dict__:
                # Not by setattr: the object may be a frozen dataclass. What is found here first, Python returns itself.
                owner.__dict__[self._name] = self._function(owner)
            found: R_co = owner.__dict__[self._name]
        return found


def is_synchronized(function: Any) -> bool:
    """Return whether `function` is `synchronized`."""
    return bool(getattr(function, _SYNCHRONIZED_MARK, False))


def _restore_in_child() -> None:
    """Release the lock in a forked process, which has only the forking thread.

    If another thread was at work, its half-built programs are dropped from coremltools' globals. If the forking thread
    itself holds the lock (a callback that forks), nothing changes.
    """
    global _lock
    lock: Any = _lock  # the method is there, but not in the type
    if lock._is_owned():
        return
    if not lock.acquire(blocking=False):
        _drop_unfinished_blocks()
    _lock = threading.RLock()


def _drop_unfinished_blocks() -> None:
    block, builder, scope = (sys.modules.get(f"{_MIL_PACKAGE}.{name}") for name in ("block", "builder", "scope"))
    if block is not None:
        vars(block)["BLOCK_STACK"] = []
    if builder is not None:
        vars(builder)["_BEFORE_OP_STACK"].clear()
    if scope is not None:
        vars(scope)["SCOPE_STACK"].clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_restore_in_child)
