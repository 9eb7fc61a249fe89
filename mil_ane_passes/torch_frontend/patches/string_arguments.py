"""Text arguments of exported ops, such as `gelu(x, approximate="tanh")`, are text where a value is called "tanh" too.

`torch.export` names a value after the op that makes it (`tanh`, `floor`, `amax`) or after an input. coremltools reads
the names of values and text arguments as the same kind of string, and takes the value where there is one of that name:
the mode of the op is then a tensor. Here text arguments become strings that match no value's name.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ...passes.severity import Severity
from ..complex_values import map_nested
from ..contract import Patch

_TORCH_FRONTEND = "coremltools.converters.mil.frontend.torch"

PATCH = Patch(code="TORCH171", severity=Severity.WRONG,
              title="a string argument of an exported op is mistaken for the value of that name, as in `gelu` after "
                    "`tanh`",
              upstream=("none known",))


class TextArgument(str):
    """A text argument of an exported op; equal to the text, but not the name of a value."""


@PATCH.probe
def probe() -> str | None:
    """Return what coremltools reads in `gelu(tanh, approximate="tanh")`: as a tensor, the mode is overlooked."""
    import torch
    from coremltools.converters.mil.frontend.torch.internal_graph import InternalTorchIRNode

    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.gelu.default, (graph.placeholder("tanh"),), {"approximate": "tanh"})
    read = InternalTorchIRNode.from_exir_node(node)
    same = (type(read.inputs[0]), read.inputs[0]) == (type(read.kwinputs["approximate"][0]), "tanh")
    return "converts to other values, silently: `gelu(tanh, approximate='tanh')` has a tensor as mode" if same else None


@PATCH.replace_function(f"{_TORCH_FRONTEND}.internal_graph", "InternalTorchIRNode.from_exir_node")
def from_exir_node(host: Callable[..., Any], cls: Any, node: Any) -> Any:
    """Read one node of an exported program; mark its text arguments."""
    def mark_text(item: Any) -> Any:
        return TextArgument(item) if type(item) is str else item

    return host(cls, SimpleNamespace(
        target=node.target, name=node.name, meta=node.meta, args=map_nested(mark_text, node.args),
        kwargs={name: map_nested(mark_text, value) for name, value in node.kwargs.items()}))


@PATCH.replace_function(f"{_TORCH_FRONTEND}.converter", "TranscriptionContext.__contains__")
def contains(host: Callable[..., bool], context: Any, torch_name: Any) -> bool:
    """Return whether a value has this name."""
    return not isinstance(torch_name, TextArgument) and host(context, torch_name)


@PATCH.replace_function(f"{_TORCH_FRONTEND}.ops", "_get_bindings")
def get_bindings(host: Callable[..., list[Any]], context: Any, names: Any) -> list[Any]:
    """Return the values of names, and text arguments as plain strings: numpy knows no derived type as a scalar."""
    return [str(each) if isinstance(each, TextArgument) else each for each in host(context, names)]
