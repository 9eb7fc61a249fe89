"""`cumsum` along an axis counted from the end, of any dtype, in torch's dtype.

MIL's `cumsum` takes -1 and axes counted from the front; the host passes torch's on, so -2 fails. Sums of bools and
integers stay integers, as in torch.
"""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

from ..contract import Patch
from ..creation import mil_type
from ..lowering import add, axis_of, bind, cast, python
from ..probing import wrong

PATCH = Patch(code="TORCH138",
              title="`cumsum` along an axis below -1 fails", upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    return wrong(lambda x: torch.cumsum(x, -2), torch.arange(6.).reshape(2, 3))


@PATCH.op("cumsum")
def cumsum(context: Any, node: Any) -> None:
    """cumsum(self, dim, dtype=None)."""
    given = bind(context, node, "self dim dtype=None")
    own = given.self.dtype if types.is_float(given.self.dtype) else types.int32
    x = cast(given.self, mil_type(given.dtype, node, own))
    if x.rank == 0:
        add(context, node, mb.identity(x=x, name=node.name))
        return
    add(context, node, mb.cumsum(x=x, axis=axis_of(python(given.dim, node, "dim"), x.rank), name=node.name))
