"""`concat` of a few float elements, from which one is then selected, and `stack` of constant elements.

coremltools represents each element of a small concat by a symbol, to infer shapes, at any dtype. A float selected from
it then fails ("Types should have zero-rank ndarray input"). Only ints can be sizes. Without the patch, coremltools
cannot read the package either, for example to compress its weights.

A list of constants of rank 0 is one constant in coremltools, which its `stack` cannot read ("object of type 'Var' has
no len()"): the elements of a matrix that depends on weights only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coremltools.converters.mil.frontend.torch import ops
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..contract import Patch
from ..lowering import add_result, bind_arguments
from ..probes import find_fault

PATCH = Patch(code="TORCH144",
              title="selecting one element of a small concat of floats, or stacking constant elements, fails",
              upstream=("https://github.com/apple/coremltools/issues/1811",))


@PATCH.probe
def probe() -> str | None:
    import torch

    constant = torch.tensor([1., 2.])
    return find_fault(lambda x: torch.cat([x, x])[0], constant) or find_fault(
        lambda x: x * torch.stack([constant[1], constant[0]]), constant)


@PATCH.op("stack")
def stack(context: Any, node: Any) -> None:
    """Lower stack(tensors, dim=0). That of a list of computed tensors, or of tensors with axes, is coremltools' own."""
    inputs = bind_arguments(context, node, "tensors dim=0")
    if isinstance(inputs.tensors, Var):
        add_result(context, node, mb.identity(x=inputs.tensors, name=node.name))
    else:
        ops.stack(context, node)


@PATCH.replace_function("coremltools.converters.mil.mil.ops.defs.iOS15.tensor_operation", "concat.value_inference")
def value_inference(host: Callable[..., Any], concat: Any) -> Any:
    """Return coremltools' value, but no symbols for elements that cannot be sizes."""
    if any(value.val is None and value.dtype != types.int32 for value in concat.values):
        return None
    return host(concat)
