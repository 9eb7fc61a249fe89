"""`zeros`, `ones`, `full`, `new_*`, `*_like`, `fill_` and `zero_`: consts of torch's dtype.

coremltools has no `new_ones` and no `zero_`, ignores the dtype of `new_zeros`, `new_full` and `full_like` (an int
tensor becomes float, and so do the results computed from it), and does not support a computed value. Where sizes and
value are constants the result is a const, since `fill` and `fill_like` run on the CPU only. `empty*` are zeros, which
are as valid as any other values.
"""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.mil import Var, types

from ...passes.severity import Severity
from ..contract import Patch
from ..creation import make_filled, make_filled_like, read_sizes, to_mil_type
from ..lowering import add_result, bind_arguments
from ..probes import find_fault

PATCH = Patch(code="TORCH113", severity=Severity.WRONG,
              title="`new_ones`, `zero_` are not implemented; `new_zeros`, `new_full`, `full_like` lose the dtype",
              upstream=("none known",))

_FILL_VALUES = {"zeros": 0, "empty": 0, "ones": 1}


@PATCH.probe
def probe() -> str | None:
    """Test for int tensors that become floats."""
    import torch

    x = torch.tensor([1, 2])
    return find_fault(lambda x: torch.full_like(x, 2.7) + x, x) or find_fault(
        lambda x: x.new_zeros((2,)) / x.new_full((2,), 3) + torch.full_like(x, 2), x)


@PATCH.op("zeros", "ones", "empty", "empty.memory_format")
def lower_filled(context: Any, node: Any) -> None:
    """Lower zeros(size, dtype=float)."""
    inputs = bind_arguments(context, node, "size dtype=None")
    value = _FILL_VALUES[node.kind.partition(".")[0]]
    add_result(
        context, node, make_filled(read_sizes(inputs.size, node), value, to_mil_type(inputs.dtype, node, types.fp32))
    )


@PATCH.op("full")
def full(context: Any, node: Any) -> None:
    """Lower full(size, fill_value, dtype=that of the value)."""
    inputs = bind_arguments(context, node, "size fill_value dtype=None")
    dtype = to_mil_type(inputs.dtype, node, _infer_dtype(inputs.fill_value))
    add_result(context, node, make_filled(read_sizes(inputs.size, node), inputs.fill_value, dtype))


@PATCH.op("new_zeros", "new_ones", "new_empty")
def lower_new_filled(context: Any, node: Any) -> None:
    """Lower new_zeros(self, size, dtype=self's)."""
    inputs = bind_arguments(context, node, "self size dtype=None")
    dtype = to_mil_type(inputs.dtype, node, inputs.self.dtype)
    add_result(
        context, node, make_filled(read_sizes(inputs.size, node), _FILL_VALUES[node.kind.removeprefix("new_")], dtype)
    )


@PATCH.op("new_full")
def new_full(context: Any, node: Any) -> None:
    """Lower new_full(self, size, fill_value, dtype=self's)."""
    inputs = bind_arguments(context, node, "self size fill_value dtype=None")
    dtype = to_mil_type(inputs.dtype, node, inputs.self.dtype)
    add_result(context, node, make_filled(read_sizes(inputs.size, node), inputs.fill_value, dtype))


@PATCH.op("zeros_like", "ones_like", "empty_like")
def lower_filled_like(context: Any, node: Any) -> None:
    """Lower zeros_like(self, dtype=self's)."""
    inputs = bind_arguments(context, node, "self dtype=None")
    dtype = to_mil_type(inputs.dtype, node, inputs.self.dtype)
    add_result(context, node, make_filled_like(inputs.self, _FILL_VALUES[node.kind.removesuffix("_like")], dtype))


@PATCH.op("full_like")
def full_like(context: Any, node: Any) -> None:
    """Lower full_like(self, fill_value, dtype=self's)."""
    inputs = bind_arguments(context, node, "self fill_value dtype=None")
    dtype = to_mil_type(inputs.dtype, node, inputs.self.dtype)
    add_result(context, node, make_filled_like(inputs.self, inputs.fill_value, dtype))


@PATCH.op("fill")
def fill(context: Any, node: Any) -> None:
    """Lower fill(self, value): the value, a number or a rank 0 tensor, in self's dtype."""
    inputs = bind_arguments(context, node, "self value")
    add_result(context, node, make_filled_like(inputs.self, inputs.value, inputs.self.dtype))


@PATCH.op("zero")
def zero(context: Any, node: Any) -> None:
    """Lower zero(self)."""
    inputs = bind_arguments(context, node, "self")
    add_result(context, node, make_filled_like(inputs.self, 0, inputs.self.dtype))


def _infer_dtype(value: Any) -> Any:
    if isinstance(value, Var):
        return value.dtype
    return types.bool if isinstance(value, bool) else types.int32 if isinstance(value, int) else types.fp32
