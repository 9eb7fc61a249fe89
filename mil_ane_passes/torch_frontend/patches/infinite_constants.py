"""Infinite numbers of traced and scripted models stay infinite.

coremltools replaces them by 3.4e38, so that the largest of masked numbers, of which all are -inf, passes for a finite
number: `isinf` and `isfinite` are wrong, and `nan_to_num` and a comparison by `> -1e38` return other numbers. Models of
torch.export keep their infinities.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb

from ...passes.severity import Severity
from ..contract import Patch

PATCH = Patch(code="TORCH155", severity=Severity.WRONG,
              title="infinities of traced and scripted models become 3.4e38, which `isinf` and `nan_to_num` take for a "
                    "finite number",
              upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    from ..probes import convert_to_mil, trace_function

    x = torch.ones(2)
    program = convert_to_mil(trace_function(lambda x: x.masked_fill(x > 0, -math.inf), x), x)
    values = [op.outputs[0].val for op in program.functions["main"].operations if op.op_type == "const"]
    return None if -math.inf in [value for value in values if isinstance(value, np.floating)] else (
        "silently miscompiled")


@PATCH.replace_function("coremltools.converters.mil.frontend.torch.ops", "_construct_constant")
def construct_constant(host: Callable[[Any, str], Any], value: Any, name: str) -> Any:
    """Make a const of a constant of torch's graph; None stands for torch's default."""
    if isinstance(value, float) and math.isinf(value):
        return mb.const(val=value, name=name)
    return host(value, name)
