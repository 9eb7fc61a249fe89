"""`cumsum` along an axis counted from the end, of any dtype, in torch's dtype.

MIL's `cumsum` supports -1 and axes counted from the front; coremltools passes torch's axis on, so -2 fails. Sums of
bools and integers stay integers, as in torch.
"""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

from ..contract import Patch
from ..creation import to_mil_type
from ..lowering import add_result, bind_arguments, cast_to, normalize_axis, to_python
from ..probes import find_fault

PATCH = Patch(code="TORCH138",
              title="`cumsum` along an axis below -1 fails", upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    return find_fault(lambda x: torch.cumsum(x, -2), torch.arange(6.).reshape(2, 3))


@PATCH.op("cumsum")
def cumsum(context: Any, node: Any) -> None:
    """Lower cumsum(self, dim, dtype=None)."""
    inputs = bind_arguments(context, node, "self dim dtype=None")
    own = inputs.self.dtype if types.is_float(inputs.self.dtype) else types.int32
    x = cast_to(inputs.self, to_mil_type(inputs.dtype, node, own))
    if x.rank == 0:
        add_result(context, node, mb.identity(x=x, name=node.name))
        return
    add_result(
        context, node, mb.cumsum(x=x, axis=normalize_axis(to_python(inputs.dim, node, "dim"), x.rank), name=node.name)
    )
