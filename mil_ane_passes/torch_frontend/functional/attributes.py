"""The tensors of the module itself: one graph value each, with known dtype and strides; and complex constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import NotConverted

__all__ = [
    "COMPLEX_CONSTANT",
    "get_attribute_path",
    "hoist_attributes",
    "name_attributes_once",
    "write_complex_constants",
]

COMPLEX_CONSTANT = "mil_ane::complex_constant"
"""The node kind of a complex number, such as 1j: float attributes `real` and `imag`."""


def get_attribute_path(value: Any) -> tuple[str, ...]:
    """Return the names that lead from the module to a submodule or tensor of it."""
    node = value.node()
    if node.kind() != "prim::GetAttr":
        return ()
    return (*get_attribute_path(next(node.inputs())), node.s("name"))


def hoist_attributes(graph: Any) -> None:
    """Move every GetAttr to the front, so that a tensor first read in a branch or loop is also known after it.

    coremltools gives all reads of a tensor the value of the first read, wherever that is.
    """
    anchor = next((node for node in graph.nodes() if node.kind() != "prim::GetAttr"), None)
    if anchor is not None:
        for node in graph.findAllNodes("prim::GetAttr", True):
            node.moveBefore(anchor)


def name_attributes_once(graph: Any, tensors: Mapping[str, Any]) -> None:
    """Give the values of `tensors` (by name) their full type.

    Values that are the same tensor are merged into the first.
    """
    import torch

    first: dict[Any, Any] = {}
    for node in graph.findAllNodes("prim::GetAttr", True):
        value = node.output()
        tensor = tensors.get(value.debugName())
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            continue
        value.setType(torch._C.TensorType.create_from_tensor(tensor.detach()))
        memory = tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
        if tensor.numel() and first.setdefault(memory, value).unique() != value.unique():
            value.replaceAllUsesWith(first[memory])


def write_complex_constants(graph: Any) -> None:
    """Replace complex constants, whose attribute coremltools cannot read, by nodes that it can read.

    Raises NotConverted for a traced model with complex inputs, which would be read as real ones.
    """
    for value in graph.inputs():
        dtype = value.type().dtype() if value.type().kind() == "TensorType" else None
        if dtype is not None and dtype.is_complex:
            raise NotConverted(f"the input '{value.debugName()}' of the model is complex, which Core ML does not "
                               f"support; use torch.view_as_real(...) of it as the input and torch.view_as_complex in "
                               f"the model")
    for node in graph.findAllNodes("prim::Constant", True):
        number = node.output().toIValue() if node.hasAttribute("value") else None
        if isinstance(number, complex):
            written = graph.create(COMPLEX_CONSTANT, [], 1)
            written.f_("real", number.real)
            written.f_("imag", number.imag)
            written.insertBefore(node)
            written.copyMetadata(node)
            written.output().setType(node.output().type())
            node.output().replaceAllUsesWith(written.output())
            node.destroy()
