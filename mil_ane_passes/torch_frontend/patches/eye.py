"""`eye` with its dtype: coremltools always returns floats, so a mask of bools is added as 0 and 1."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import types

from ...passes.severity import Severity
from ..contract import Patch
from ..creation import make_constant, to_mil_type
from ..lowering import add_result, bind_arguments, to_python
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
    rows = to_python(inputs.n, node, "n")
    columns = rows if inputs.m is None else to_python(inputs.m, node, "m")
    add_result(
        context, node, make_constant(np.eye(int(rows), int(columns)), to_mil_type(inputs.dtype, node, types.fp32))
    )


def _make_signature(node: Any) -> str:
    """Return the signature of the overload.

    TorchScript writes every argument, so their number decides; torch.export names the overload.
    """
    with_columns = node.kind.endswith(".m") or len(node.inputs) == 6
    return f"n {'m' if with_columns else ''} dtype=None layout=None device=None pin_memory=None " \
           f"{'' if with_columns else 'm=None'}"
