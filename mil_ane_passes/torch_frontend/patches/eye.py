"""`eye` with its dtype, and of a flexible size: coremltools always returns floats, so a mask of bools is added as 0
and 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

from ...passes.severity import Severity
from ..contract import Patch
from ..creation import make_constant, read_sizes, to_mil_type
from ..lowering import add_result, bind_arguments, cast_to, make_range, name_result
from ..probes import find_fault

PATCH = Patch(code="TORCH112", severity=Severity.WRONG,
              title="`eye` loses its dtype", upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    def add_twice(x: Any) -> Any:
        return x + (torch.eye(2, dtype=torch.bool) + torch.eye(2, dtype=torch.bool)).float()

    x = torch.tensor([3.0, -5.0])
    return find_fault(add_twice, x) or find_fault(lambda x: (x > 0) & torch.eye(2, dtype=torch.bool), x)


@PATCH.op("eye", "eye.m")
def eye(context: Any, node: Any) -> None:
    """Lower eye(n, dtype=float), eye.m(n, m, dtype=float)."""
    inputs = bind_arguments(context, node, _make_signature(node))
    (rows,) = read_sizes(inputs.n, node)
    (columns,) = (rows,) if inputs.m is None else read_sizes(inputs.m, node)
    dtype = to_mil_type(inputs.dtype, node, types.fp32)
    if isinstance(rows, int) and isinstance(columns, int):
        add_result(context, node, make_constant(np.eye(rows, columns), dtype))
        return
    column, row = mb.expand_dims(x=make_range(rows), axes=[1]), mb.expand_dims(x=make_range(columns), axes=[0])
    diagonal = mb.equal(x=column, y=row)
    add_result(context, node, name_result(cast_to(diagonal, dtype), node))


def _make_signature(node: Any) -> str:
    """Return the signature of the overload.

    TorchScript writes every argument, so their number decides; torch.export names the overload.
    """
    with_columns = node.kind.endswith(".m") or len(node.inputs) == 6
    return f"n {'m' if with_columns else ''} dtype=None layout=None device=None pin_memory=None " \
           f"{'' if with_columns else 'm=None'}"
