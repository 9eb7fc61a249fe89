"""`torch.scatter_add` of constants: coremltools folds it as if each update replaced the previous value.

Value inference of the MIL op scatter_along_axis ignores `mode` and always replaces, so that 4 + 10 becomes 10 in a
model whose data, indices and updates are constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...passes.severity import Severity
from ..contract import Patch

PATCH = Patch(code="TORCH170", severity=Severity.WRONG,
              title="scatter_along_axis of constants is folded as an update for every mode",
              upstream=("none known",))
_OPS_MODULE = "coremltools.converters.mil.mil.ops.defs.iOS15.scatter_gather"
_UFUNCS_BY_MODE = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum,
                   "min": np.minimum}


@PATCH.probe
def probe() -> str | None:
    from coremltools.converters.mil.mil import Builder as mb

    def added(x: Any) -> Any:
        built = mb.scatter_along_axis(data=np.full(2, 4, np.float32), indices=np.zeros(1, np.int32),
                                      updates=np.full(1, 10, np.float32), axis=0, mode="add")
        found.append(built.val)
        return mb.add(x=x, y=built)

    found: list[Any] = []
    mb.program(input_specs=[mb.TensorSpec(shape=(2,))])(added)
    if found[0] is None or found[0][0] == 14:
        return None
    return f"silently miscompiled: {found[0][0]:g}, not 14"


@PATCH.replace_function(_OPS_MODULE, "scatter_along_axis.value_inference")
def value_inference(host: Callable[..., Any], op: Any) -> Any:
    """Infer the value of a constant scatter with the function that `mode` names.

    Where the mode is an update or a value is dynamic, this is coremltools' result.
    """
    replaced = host(op)
    mode = op.mode.val
    if replaced is None or mode not in _UFUNCS_BY_MODE or op.data.val.dtype.kind != "f" and mode == "div":
        return replaced if mode == "update" else None
    result = np.copy(op.data.val)
    indices, axis = np.asarray(op.indices.val), int(op.axis.val) % result.ndim
    place = [np.arange(extent).reshape([-1 if at == each else 1 for each in range(indices.ndim)])
             for at, extent in enumerate(indices.shape)]
    place[axis] = indices
    with np.errstate(all="ignore"):
        _UFUNCS_BY_MODE[mode].at(result, tuple(place), op.updates.val)
    return result
