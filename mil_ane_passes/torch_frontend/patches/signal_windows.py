"""`torch.hann_window` and its kin: consts that torch itself computes.

The host knows only the Hann window, of TorchScript, and makes it of eight ops.
"""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.mil import Var, types

from ..contract import Patch
from ..creation import constant, mil_type
from ..decomposing import torch_call
from ..errors import NotConverted
from ..lowering import add, is_known
from ..probing import lowered_by_host

PATCH = Patch(code="TORCH142",
              title="`hann_window` is not exported; other windows are not implemented", upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    missing = sorted(kind for kind in PATCH.ops if not lowered_by_host(kind))
    return f"not implemented: {', '.join(missing)}" if missing else None


@PATCH.op("hann_window", "hann_window.periodic", "blackman_window", "blackman_window.periodic",
          "bartlett_window", "bartlett_window.periodic", "hamming_window", "hamming_window.periodic",
          "hamming_window.periodic_alpha", "hamming_window.periodic_alpha_beta",
          "kaiser_window", "kaiser_window.periodic", "kaiser_window.beta")
def window(context: Any, node: Any) -> None:
    """hann_window(window_length, periodic=True): the numbers that torch gives."""
    if not is_known([context[name] for name in node.inputs if isinstance(name, str)]):
        raise NotConverted.at(node, "the length of a window is computed by the model", "fix the size")
    function, arguments, keywords = torch_call(context, node)
    dtype = mil_type(keywords.pop("dtype", None), node, types.fp32)
    values = function(*(_plain(argument) for argument in arguments), **keywords).numpy()
    add(context, node, constant(values, dtype))


def _plain(value: Any) -> Any:
    return value.val.item() if isinstance(value, Var) else value
