"""The table of kernels: op type -> function. Importing every module in `ops/` fills it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from ..utils.errors import InputError

__all__ = ["Kernel", "load_kernels", "register_kernel"]

#: (pymil op, resolved inputs) -> value of the only output, or a tuple with one value per output
Kernel = Callable[[Any, Any], Any]

_KERNELS: dict[str, Kernel] = {}
_loaded = False


def register_kernel(*op_types: str) -> Callable[[Kernel], Kernel]:
    """Register the decorated function as the implementation of each of `op_types`."""

    def register(function: Kernel) -> Kernel:
        for op_type in op_types:
            known = _KERNELS.get(op_type)
            # A reloaded module may register its kernels again; two modules may not register the same op type.
            if known is not None and known.__module__ != function.__module__:
                raise ValueError(f"op type '{op_type}' has two kernels: {known.__module__}, {function.__module__}")
            _KERNELS[op_type] = function
        return function

    return register


def load_kernels() -> Mapping[str, Kernel]:
    """Import every module of `ops/` (they need torch) and return the table."""
    global _loaded
    if not _loaded:
        try:
            import torch  # noqa: F401
        except ImportError as error:
            raise InputError(
                "the reference runtime needs PyTorch, which is not installed: pip install 'mil-ane-passes[verify]'"
            ) from error
        package = importlib.import_module("mil_ane_passes.runtime.ops")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")
        _loaded = True
    return _KERNELS
