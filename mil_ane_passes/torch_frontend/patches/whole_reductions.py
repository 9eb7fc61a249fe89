"""`x.transpose(0, 1).sum()`: a reduction over all axes after a transpose.

coremltools' pass that moves transposes reads `axes` of each reduction, which a reduction over all axes does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..contract import Patch

PATCH = Patch(code="TORCH154",
              title="a sum over all axes after a transpose breaks a pass", upstream=("none known",))
_PASS_MODULE = "coremltools.converters.mil.mil.passes.defs.optimize_repeat_ops"


@PATCH.probe
def probe() -> str | None:
    from coremltools.converters.mil.mil import Builder as mb
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

    def total(x: Any) -> Any:
        return mb.reduce_sum(x=mb.relu(x=mb.transpose(x=x, perm=[1, 0])), keep_dims=False)

    try:
        PASS_REGISTRY["common::reduce_transposes"](mb.program(input_specs=[mb.TensorSpec(shape=(2, 3))])(total))
    except KeyError as error:
        return f"fails: KeyError {error}"
    return None


@PATCH.replace_function(_PASS_MODULE, "_TransformReduceMean.__init__")
def initialize_reduction(host: Callable[..., Any], reduction: Any, **given: Any) -> None:
    """Initialize as coremltools does, but accept a reduction without axes."""
    if given["op"].inputs.get("axes") is not None:
        host(reduction, **given)
        return
    from coremltools.converters.mil.mil.passes.defs.optimize_repeat_ops import TransformAxisUpdateOps

    TransformAxisUpdateOps.__init__(reduction, **given)
    reduction.axes_var = None


@PATCH.replace_function(_PASS_MODULE, "_TransformReduceMean.can_transpose_pass")
def can_transpose_pass(host: Callable[..., bool], reduction: Any) -> bool:
    """Return whether a transpose can move past this reduction.

    It never moves past a reduction of all axes, which has nothing to transpose.
    """
    return reduction.axes_var is not None and host(reduction)
