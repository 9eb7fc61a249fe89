"""`for i in range(1, n)` and `range(0, n, 2)` in scripts.

TorchScript counts every loop from 0 and computes the number of turns and the index from it, by two ops that the host
does not have: turns = max(0, ceil((stop - start) / step)), index = start + turn · step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb

from ..contract import Patch
from ..lowering import add, bind, is_known, python, tensor

PATCH = Patch(code="TORCH125",
              title="loops over `range(start, stop, step)` in scripts are not implemented", upstream=("none known",))


@PATCH.op("__range_length")
def range_length(context: Any, node: Any) -> None:
    """__range_length(lo, hi, step): ints."""
    given = bind(context, node, "lo hi step")
    bounds = [given.lo, given.hi, given.step]
    if is_known(bounds):
        start, stop, step = (int(python(bound, node, "range")) for bound in bounds)
        add(context, node, mb.const(val=np.int32(len(range(start, stop, step))), name=node.name))
        return
    start, stop, step = (tensor(bound) for bound in bounds)
    turns = mb.sub(x=np.int32(0), y=mb.floor_div(x=mb.sub(x=start, y=stop), y=step))
    add(context, node, mb.maximum(x=turns, y=np.int32(0), name=node.name))


@PATCH.op("__derive_index")
def derive_index(context: Any, node: Any) -> None:
    """__derive_index(index, start, step): ints."""
    given = bind(context, node, "index start step")
    step = mb.mul(x=tensor(given.index), y=tensor(given.step))
    add(context, node, mb.add(x=tensor(given.start), y=step, name=node.name))
