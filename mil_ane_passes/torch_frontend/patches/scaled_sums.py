"""`add`, `sub`, `rsub` with `alpha`, `addmm` and `baddbmm` with integers, `outer` and comparisons of mixed dtypes.

coremltools rejects `alpha` in a trace and ignores it in an exported program, where it is a keyword argument: the sum is
wrong, silently. Here x + alpha * y is computed in torch's result type. `beta` and `alpha` of matrix products are passed
as floats (coremltools multiplies floats by an int, which is invalid in MIL); bools are compared as ints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coremltools.converters.mil.frontend.torch import ops
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ...passes.severity import Severity
from ..contract import Patch
from ..lowering import add_result as give
from ..lowering import bind_arguments, cast_to, promote_operands, to_python, to_tensor
from ..probes import find_fault

PATCH = Patch(code="TORCH140", severity=Severity.WRONG,
              title="`alpha` of `add` and `sub` is ignored in exported programs, rejected in traces",
              upstream=("none known",))


@PATCH.probe
def probe() -> str | None:
    import torch

    x = torch.ones(2, 2)
    # Exported, alpha is overlooked without a word; the first export of a process takes seconds, so it is traced here.
    return (find_fault(lambda x: torch.add(x, x, alpha=2) - torch.sub(x, x, alpha=2), x)
            # coremltools 9.1.dev1 supports alpha, but still has the other faults.
            or find_fault(lambda x: torch.addmm(x, x, x, beta=3, alpha=2), x)
            or find_fault(lambda x: ((x > 0) < (x > 1)).float(), x)
            or find_fault(lambda x: torch.outer(x[0].int(), x[0]), x))


@PATCH.op("add")
def add(context: Any, node: Any) -> None:
    """Lower add(self, other, *, alpha=1)."""
    inputs = bind_arguments(context, node, "self other alpha=1")
    x, y = to_tensor(inputs.self), to_tensor(inputs.other)
    if x.dtype == types.bool and y.dtype == types.bool:
        give(context, node, mb.logical_or(x=x, y=y, name=node.name))
    else:
        _combine_scaled(context, node, mb.add, x, y, to_python(inputs.alpha, node, "alpha"))


@PATCH.op("sub", "rsub")
def sub(context: Any, node: Any) -> None:
    """Lower sub(self, other, *, alpha=1): self - alpha * other; rsub: other - alpha * self."""
    inputs = bind_arguments(context, node, "self other alpha=1")
    x, y = to_tensor(inputs.self), to_tensor(inputs.other)
    if node.kind.startswith("rsub"):
        x, y = y, x
    _combine_scaled(context, node, mb.sub, x, y, to_python(inputs.alpha, node, "alpha"))


def _combine_scaled(context: Any, node: Any, operation: Callable[..., Var], x: Var, y: Var, alpha: Any) -> None:
    x, y = promote_operands(x, y)
    if alpha != 1:
        y = mb.mul(x=y, y=_make_number_like(alpha, y))
    give(context, node, operation(x=x, y=y, name=node.name))


def _make_number_like(value: Any, like: Var) -> Any:
    """Convert a Python number to the dtype of a Var."""
    return types.nptype_from_builtin(like.dtype)(value)


@PATCH.op("addmm", "baddbmm")
def addmm(context: Any, node: Any) -> None:
    """Lower addmm(self, mat1, mat2, *, beta=1, alpha=1), baddbmm: beta * self + alpha * (mat1 @ mat2)."""
    inputs = bind_arguments(context, node, "self mat1 mat2 beta=1 alpha=1" if node.kind.startswith("addmm")
                            else "self batch1 batch2 beta=1 alpha=1")
    first, second = (inputs.mat1, inputs.mat2) if hasattr(inputs, "mat1") else (inputs.batch1, inputs.batch2)
    beta, alpha = to_python(inputs.beta, node, "beta"), to_python(inputs.alpha, node, "alpha")
    if beta == 1 and alpha == 1:
        getattr(ops, node.kind)(context, node)
        return
    product = mb.matmul(x=first, y=second)
    if alpha != 1:
        product = mb.mul(x=product, y=_make_number_like(alpha, product))
    if beta != 0:
        bias = mb.mul(x=inputs.self, y=_make_number_like(beta, inputs.self)) if beta != 1 else inputs.self
        product = mb.add(x=bias, y=product)
    give(context, node, mb.identity(x=product, name=node.name))


@PATCH.op("outer")
def outer(context: Any, node: Any) -> None:
    """Lower outer(self, vec2)."""
    inputs = bind_arguments(context, node, "self vec2")
    x, y = promote_operands(inputs.self, inputs.vec2)
    give(context, node, mb.mul(x=mb.expand_dims(x=x, axes=[1]), y=mb.expand_dims(x=y, axes=[0]), name=node.name))


def _make_comparison_lowering(compare: Callable[..., Var]) -> Callable[[Any, Any], None]:
    def lower_comparison(context: Any, node: Any) -> None:
        inputs = bind_arguments(context, node, "self other")
        x, y = promote_operands(inputs.self, inputs.other)
        if x.dtype == types.bool:
            x, y = cast_to(x, types.int32), cast_to(y, types.int32)
        give(context, node, compare(x=x, y=y, name=node.name))
    return lower_comparison


for _kind, _compare in {"lt": mb.less, "le": mb.less_equal, "gt": mb.greater, "ge": mb.greater_equal}.items():
    PATCH.op(_kind)(_make_comparison_lowering(_compare))
