"""`eye` with its dtype: the host makes floats whatever is asked, so a mask of bools is added as 0 and 1."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import types

from ..contract import Patch
from ..creation import constant, mil_type
from ..lowering import add, bind, python
from ..probing import wrong

PATCH = Patch(code="TORCH112",
              title="`eye` loses its dtype", upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    return wrong(lambda x: (x > 0) & torch.eye(2, dtype=torch.bool), torch.tensor([3., -5.]))


@PATCH.op("eye", "eye.m")
def eye(context: Any, node: Any) -> None:
    """eye(n, dtype=float), eye.m(n, m, dtype=float)."""
    given = bind(context, node, _signature(node))
    rows = python(given.n, node, "n")
    columns = rows if given.m is None else python(given.m, node, "m")
    add(context, node, constant(np.eye(int(rows), int(columns)), mil_type(given.dtype, node, types.fp32)))


def _signature(node: Any) -> str:
    """TorchScript writes every argument, so their number tells; torch.export names the overload."""
    with_columns = node.kind.endswith(".m") or len(node.inputs) == 6
    return f"n {'m' if with_columns else ''} dtype=None layout=None device=None pin_memory=None " \
           f"{'' if with_columns else 'm=None'}"
