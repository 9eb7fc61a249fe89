"""`torch.hann_window` and other windows: consts that torch itself computes.

coremltools supports only the Hann window, of TorchScript, and builds it from eight ops.
"""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.mil import Var, types

from ..contract import Patch
from ..creation import make_constant, to_mil_type
from ..decomposition import resolve_torch_call
from ..errors import NotConverted
from ..lowering import add_result, is_constant

PATCH = Patch(code="TORCH142",
              title="`hann_window` is not exported; other windows are not implemented", upstream=("none known",))


@PATCH.op("hann_window", "hann_window.periodic", "blackman_window", "blackman_window.periodic",
          "bartlett_window", "bartlett_window.periodic", "hamming_window", "hamming_window.periodic",
          "hamming_window.periodic_alpha", "hamming_window.periodic_alpha_beta",
          "kaiser_window", "kaiser_window.periodic", "kaiser_window.beta")
def lower_window(context: Any, node: Any) -> None:
    """Lower hann_window(window_length, periodic=True) to a const of torch's numbers."""
    if not is_constant([context[name] for name in node.inputs if isinstance(name, str)]):
        raise NotConverted.at(node, "the length of a window is computed by the model", "fix the size")
    function, arguments, keywords = resolve_torch_call(context, node)
    dtype = to_mil_type(keywords.pop("dtype", None), node, types.fp32)
    values = function(*(_to_plain_value(argument) for argument in arguments), **keywords).numpy()
    add_result(context, node, make_constant(values, dtype))


def _to_plain_value(value: Any) -> Any:
    return value.val.item() if isinstance(value, Var) else value
