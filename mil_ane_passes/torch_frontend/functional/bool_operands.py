"""Python bools as operands of a trace, as in `x + True`, as ints: torch's canonical form of them has no such op."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ..errors import NotConverted

__all__ = ["replace_bool_operands"]

_KINDS = ("aten::add", "aten::sub", "aten::mul", "aten::div")
"Ops whose constant operands torch's pass changes to numbers."


class _ModuleOfGraph:
    """A TorchScript module with another graph."""

    def __init__(self, module: Any, graph: Any) -> None:
        self._module, self.forward = module, SimpleNamespace(graph=graph)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def replace_bool_operands(module: Any) -> Any:
    """Return the module, or where its trace has a bool as an operand, a stand-in of it whose graph has an int.

    The user's module is unchanged. Raises NotConverted where the other operand may be a bool, of which the sum is one.
    """
    import torch

    graph = module.inlined_graph  # a copy
    found = [node for kind in _KINDS for node in graph.findAllNodes(kind, True) if _is_bool_constant(node)]
    for node in found:
        tensor = next(node.inputs())
        dtype = tensor.type().dtype() if isinstance(tensor.type(), torch._C.TensorType) else None
        if dtype is None or dtype == torch.bool:
            raise NotConverted.at(node, "has a Python bool as an operand, which torch cannot read from a trace",
                                  "write 1 for True and 0 for False")
        with graph.insert_point_guard(node):
            node.replaceInput(1, graph.insertConstant(torch.tensor(int(list(node.inputs())[1].toIValue()))))
    return _ModuleOfGraph(module, graph) if found else module


def _is_bool_constant(node: Any) -> bool:
    operand = list(node.inputs())[1]
    return operand.node().kind() == "prim::Constant" and isinstance(operand.toIValue(), bool)
