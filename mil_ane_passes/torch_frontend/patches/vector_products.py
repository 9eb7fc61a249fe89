"""`matmul` with a vector on either side: a row or a column of a matrix.

MIL's matmul supports a vector on the left only with another vector; coremltools passes it on nevertheless. torch
inserts the missing axis and removes it again: (n) @ (..., n, m) = ((1, n) @ (..., n, m)) without the row. coremltools
makes a `linear` of a product with a const matrix, which does not support ints; here only a product of floats becomes
one.
"""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types

from ..contract import Patch
from ..lowering import add_result, bind_arguments, cast_to, promote_operands
from ..probes import find_fault

PATCH = Patch(code="TORCH150",
              title="a matrix times a vector is rejected", upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    return find_fault(lambda x: x @ x[0], torch.arange(4.).reshape(2, 2))


@PATCH.op("matmul", "mm", "bmm", "mv", "dot")
def matmul(context: Any, node: Any) -> None:
    """Lower matmul(self, other), mm(self, mat2), mv(self, vec), dot(self, tensor)."""
    second = {"mm": "mat2", "bmm": "mat2", "mv": "vec", "dot": "tensor"}.get(node.kind, "other")
    inputs = bind_arguments(context, node, f"self {second}")
    x, y = inputs.self, getattr(inputs, second)
    if x.rank > 1 and y.rank > 1 and types.is_float(x.dtype) and types.is_float(y.dtype):
        from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

        _TORCH_OPS_REGISTRY.name_to_func_mapping["matmul"](context, node)
        return
    x, y = (cast_to(each, types.int32) if each.dtype == types.bool else each for each in promote_operands(x, y))
    if x.rank == 1 and y.rank == 1:
        add_result(context, node, mb.reduce_sum(x=mb.mul(x=x, y=y), axes=[0], keep_dims=False, name=node.name))
        return
    if x.rank > 1 and y.rank > 1:
        add_result(context, node, mb.matmul(x=x, y=y, name=node.name))
        return
    row = x.rank == 1
    x, y = (mb.expand_dims(x=x, axes=[0]), y) if row else (x, mb.expand_dims(x=y, axes=[1]))
    product = mb.matmul(x=x, y=y)
    add_result(
        context, node, mb.squeeze(x=product, axes=[product.rank - 2 if row else product.rank - 1], name=node.name)
    )
