"""`matmul` and `linear` with a vector on either side: a row or a column of a matrix; `bilinear`.

MIL's matmul supports a vector on the left only with another vector; coremltools passes it on nevertheless. torch
inserts the missing axis and removes it again: (n) @ (..., n, m) = ((1, n) @ (..., n, m)) without the row. coremltools
makes a `linear` of a product with a const matrix, which does not support ints; here only a product of floats becomes
one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..contract import Patch
from ..errors import NotConverted
from ..lowering import (
    add_result,
    bind_arguments,
    cast_to,
    get_dims,
    is_constant,
    name_result,
    promote_operands,
    to_size_vector,
)
from ..probes import find_fault

PATCH = Patch(code="TORCH150",
              title="a matrix times a vector, a `linear` whose weight is one, and `bilinear` are rejected",
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


@PATCH.op("bilinear")
def bilinear(context: Any, node: Any) -> None:
    """Lower bilinear(input1, input2, weight, bias=None): the sums of input1[i] weight[k, i, j] input2[j].

    A linear layer makes the sums over i, one of each k and j.
    """
    inputs = bind_arguments(context, node, "input1 input2 weight bias=None")
    x, y, weight = inputs.input1, inputs.input2, inputs.weight
    if not is_constant(weight):
        raise NotConverted.at(node, "has a computed weight", "use torch.einsum")
    outputs, rows, columns = weight.shape
    matrix = np.transpose(weight.val, (0, 2, 1)).reshape(outputs * columns, rows)
    sums = mb.reshape(x=mb.linear(x=x, weight=matrix), shape=[-1, outputs, columns])
    products = mb.mul(x=sums, y=mb.reshape(x=y, shape=[-1, 1, columns]))
    rows_of_x = get_dims(x)[:-1]
    made = mb.reshape(x=mb.reduce_sum(x=products, axes=[-1]), shape=to_size_vector([*rows_of_x, outputs]))
    if inputs.bias is not None:
        made = mb.add(x=made, y=inputs.bias)
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
