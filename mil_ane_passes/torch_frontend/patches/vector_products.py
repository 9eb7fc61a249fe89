"""`matmul` and `linear` with a vector on either side: a row or a column of a matrix.

MIL's matmul supports a vector on the left only with another vector; coremltools passes it on nevertheless. torch
inserts the missing axis and removes it again: (n) @ (..., n, m) = ((1, n) @ (..., n, m)) without the row. coremltools
makes a `linear` of a product with a const matrix, which does not support ints; here only a product of floats becomes
one.
"""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..contract import Patch
from ..lowering import add_result, bind_arguments, cast_to, name_result, promote_operands
from ..probes import find_fault

PATCH = Patch(code="TORCH150",
              title="a matrix times a vector, and a `linear` whose weight is one, are rejected",
              upstream=("none known",))


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
    add_result(context, node, name_result(_multiply(x, y), node))


@PATCH.op("linear")
def linear(context: Any, node: Any) -> None:
    """Lower linear(input, weight, bias=None) whose weight is a vector, as in D-FINE; coremltools lowers all others."""
    inputs = bind_arguments(context, node, "input weight bias=None")
    if inputs.weight.rank > 1:
        from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

        _TORCH_OPS_REGISTRY.name_to_func_mapping["linear"](context, node)
        return
    product = _multiply(inputs.input, inputs.weight)
    made = product if inputs.bias is None else mb.add(**dict(zip("xy", promote_operands(product, inputs.bias))))
    add_result(context, node, name_result(made, node))


def _multiply(x: Var, y: Var) -> Var:
    """Build the product `x @ y` as torch defines it for vectors and matrices."""
    x, y = (cast_to(each, types.int32) if each.dtype == types.bool else each for each in promote_operands(x, y))
    if x.rank == 1 and y.rank == 1:
        return mb.reduce_sum(x=mb.mul(x=x, y=y), axes=[0], keep_dims=False)
    if x.rank > 1 and y.rank > 1:
        return mb.matmul(x=x, y=y)
    row = x.rank == 1
    x, y = (mb.expand_dims(x=x, axes=[0]), y) if row else (x, mb.expand_dims(x=y, axes=[1]))
    product = mb.matmul(x=x, y=y)
    return mb.squeeze(x=product, axes=[product.rank - 2 if row else product.rank - 1])
