"""`x.int().bool()` of floats, which is false for 0.4: the cast to an integer drops the fraction.

coremltools merges consecutive casts if the range of the numbers stays the same, and overlooks that a bool keeps whether
a number is 0. Logical ops of integers that are casts of floats have the same casts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

from ...passes.severity import Severity
from ..contract import Patch

PATCH = Patch(code="TORCH191", severity=Severity.WRONG,
              title="a float that is cast to an integer and then to a bool keeps its fraction, so that 0.4 is true",
              upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    """Ask coremltools' pass, as a conversion with all passes would take ten times as long."""
    from coremltools.converters.mil.mil.passes.defs.optimize_repeat_ops import cast_optimization

    program = mb.program(input_specs=[mb.TensorSpec((2,))])(
        lambda x: mb.cast(x=mb.cast(x=x, dtype="int32"), dtype="bool"))
    first, second = program.functions["main"].find_ops(op_type="cast")
    fuses = cast_optimization._is_cast_ops_fusable(cast_optimization(), first, second)
    return "silently miscompiled" if fuses else None


@PATCH.replace_function("coremltools.converters.mil.mil.passes.defs.optimize_repeat_ops",
                        "cast_optimization._is_cast_ops_fusable")
def can_fuse(host: Callable[..., bool], graph_pass: Any, first: Any, second: Any) -> bool:
    """Return whether two casts are one, as coremltools decides it, but not if the first drops fractions of a bool."""
    drops = types.is_float(first.x.dtype) and types.is_int(first.outputs[0].dtype)
    return not (drops and second.outputs[0].dtype == types.bool) and host(graph_pass, first, second)
