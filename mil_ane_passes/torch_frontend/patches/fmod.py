"""`torch.fmod`: the remainder with the dividend's sign.

fmod(x, y) = sign(x) · (|x| mod |y|): with both sides positive MIL's floored `mod` and torch's truncated one agree.
"""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.mil import Builder as mb

from ..contract import Patch
from ..lowering import add_result, bind_arguments, promote_operands

PATCH = Patch(code="TORCH117",
              title="`fmod` is not implemented", upstream=("none known",))


@PATCH.op("fmod")
def fmod(context: Any, node: Any) -> None:
    """Lower fmod(self, other): any shapes that broadcast."""
    inputs = bind_arguments(context, node, "self other")
    x, y = promote_operands(inputs.self, inputs.other)
    size = mb.mod(x=mb.abs(x=x), y=mb.abs(x=y))
    add_result(context, node, mb.mul(x=size, y=mb.sign(x=x), name=node.name))
