"""`len` of a tensor, a shape or a list in a script: the first size, flexible or not, or the number of items."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from ..contract import Patch
from ..errors import NotConverted
from ..lowering import bind_arguments, get_dims

PATCH = Patch(code="TORCH124",
              title="`len` of a tensor is not implemented", upstream=("none known",))


@PATCH.op("len")
def lower_len(context: Any, node: Any) -> None:
    """Lower len(t)."""
    inputs = bind_arguments(context, node, "t").t
    if isinstance(inputs, Var) and inputs.rank == 0:
        raise NotConverted.at(node, "a tensor of rank 0 has no length")
    size = get_dims(inputs)[0] if isinstance(inputs, Var) else len(inputs)
    context.add(size if isinstance(size, Var) else mb.const(val=np.int32(size)), torch_name=node.name)
