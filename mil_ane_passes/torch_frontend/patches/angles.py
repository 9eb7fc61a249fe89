"""`atan2` of 0 and a negative number is pi, and of two zeros 0, in fp16 as well.

coremltools corrects atan(y / x) where y is above or below 0, so that atan2(0, -1), the phase of negative real numbers,
is silently 0 instead of pi. It moves an x near 0 by 2e-8, which fp16 rounds to 0. Here the angle is computed as that of
complex numbers is. The sign of a zero is not read: atan2(-0.0, -1) is pi, where torch has -pi.
"""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.mil import types

from ...passes.severity import Severity
from ..contract import Patch
from ..lowering import add_result, bind_arguments, cast_to, name_result, promote_operands
from ..probes import find_fault
from .complex_tensors import compute_angle

PATCH = Patch(code="TORCH176", severity=Severity.WRONG,
              title="`atan2` of 0 and a negative number is 0 in place of pi, silently", upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    return find_fault(lambda x: torch.atan2(x * 0, x), torch.tensor([-1.0, 2.0, -3.0]))


@PATCH.op("atan2")
def atan2(context: Any, node: Any) -> None:
    """Lower atan2(self, other): the angle of the point (other, self)."""
    inputs = bind_arguments(context, node, "self other")
    y, x = promote_operands(inputs.self, inputs.other)
    angle = compute_angle(cast_to(x, types.fp32), cast_to(y, types.fp32))
    add_result(context, node, name_result(cast_to(angle, x.dtype) if types.is_float(x.dtype) else angle, node))
