"""A failure of a lowering names the op, the module path and the source line, and says what can be done.

coremltools raises what its lowering ran into (`KeyError: np.int32(2)` for a bicubic `grid_sample`), and "convert
function not implemented" for what it has no lowering for; the module is in its log only, the line nowhere. Here both
become `NotConverted`, the exception being its `__cause__`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ..contract import Patch
from ..errors import NotConverted
from ..failures import format_cause, is_reported_unchanged, record_node

PATCH = Patch(code="TORCH160",
              title="failures name no module and no line", upstream=("none known",))
_TORCH_FRONTEND = "coremltools.converters.mil.frontend.torch"
_ADVICE_UNKNOWN = ("write it with ops that Core ML has, compute it outside of the model, or register a lowering "
                   "(coremltools.converters.mil.frontend.torch.register_torch_op)")
_ADVICE_FAILS = ("use other arguments or another op for the same, or register a lowering "
                 "(coremltools.converters.mil.frontend.torch.register_torch_op)")


@PATCH.probe
def probe() -> str | None:
    """What coremltools says of an op that does not exist."""
    from coremltools.converters.mil.frontend.torch.internal_graph import InternalTorchIRNode
    from coremltools.converters.mil.frontend.torch.ops import convert_single_node

    node = InternalTorchIRNode(kind="no_such_op", inputs=[], outputs=["made"], model_hierarchy="layer(Layer)",
                               meta={"source": "model.py:1"})
    try:
        convert_single_node(SimpleNamespace(), node)
    except Exception as error:
        return None if "layer" in str(error) else f"of a module 'layer': {str(error).splitlines()[0]}"
    return None


@PATCH.replace_function(f"{_TORCH_FRONTEND}.ops", "convert_single_node")
def convert_single_node(host: Callable[..., None], context: Any, node: Any) -> None:
    """The conversion of one node."""
    record_node(node)
    try:
        host(context, node)
    except Exception as error:
        if is_reported_unchanged(error):
            raise
        raise _make_located_error(node, error) from error


@PATCH.replace_function(f"{_TORCH_FRONTEND}.internal_graph", "InternalTorchIRNode.from_exir_node")
def from_exir_node(host: Callable[..., Any], cls: Any, node: Any) -> Any:
    """The reading of one node of an exported program; it is where coremltools refuses unknown ops of those."""
    try:
        return host(cls, node)
    except Exception as error:
        if is_reported_unchanged(error):
            raise
        raise _make_located_error(SimpleNamespace(kind=str(node.target), meta=node.meta), error) from error


def _make_located_error(node: Any, error: Exception) -> NotConverted:
    from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

    lowering = None
    if not isinstance(node, SimpleNamespace):
        lowering = _TORCH_OPS_REGISTRY.get_func(node.kind)
    if lowering is None:
        return NotConverted.at(node, "is not implemented", _ADVICE_UNKNOWN)
    while isinstance(lowering, functools.partial):  # a patch is around it
        lowering = lowering.args[0]
    maker = "coremltools" if lowering.__module__.startswith("coremltools.") else lowering.__module__
    return NotConverted.at(node, f"cannot be converted; the lowering of {maker} fails: {format_cause(error)}",
                           _ADVICE_FAILS)
