"""Functionalization of in-place writes in TorchScript: every write through any chain of views reaches its base.

TorchScript graphs keep PyTorch's aliasing: `x[..., -1] += 1` is a view of `x` and an `add_` on it, and every later read
of `x` sees the sum. MIL has only values. `functionalize_graph` tracks which values share memory, propagates every write
to its base (with `select_scatter`, `slice_scatter`, ... as torch's own functionalization does) and recomputes the other
views of that base where they are read later. A write that it cannot follow is an error, never a dropped write.
"""

from __future__ import annotations

from .attributes import COMPLEX_CONSTANT, hoist_attributes, name_attributes_once, write_complex_constants
from .functionalization import functionalize_graph

__all__ = [
    "COMPLEX_CONSTANT",
    "functionalize_graph",
    "hoist_attributes",
    "name_attributes_once",
    "write_complex_constants",
]
