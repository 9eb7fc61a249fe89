"""`zeros`, `ones`, `full`, `new_*`, `*_like`, `fill_` and `zero_`: consts of torch's dtype.

The host has no `new_ones` and no `zero_`, forgets the dtype of `new_zeros`, `new_full` and `full_like` (an int tensor
becomes float, so does all that is computed with it), and takes no computed value. Where sizes and value are known the
result is a const: `fill` and `fill_like` run on the CPU only. `empty*` are zeros, as good as any other values.
"""

from __future__ import annotations

from typing import Any

from coremltools.converters.mil.mil import Var, types

from ..contract import Patch
from ..creation import filled, filled_like, mil_type, sizes
from ..lowering import add, bind
from ..probing import lowered_by_host, wrong

PATCH = Patch(code="TORCH113",
              title="`new_ones`, `zero_` are not implemented; `new_zeros`, `new_full`, `full_like` lose the dtype",
              upstream=("none known",))

_VALUE = {"zeros": 0, "empty": 0, "ones": 1}


@PATCH.probe
def lacks() -> str | None:
    """A missing op, or an int tensor that becomes float."""
    import torch

    missing = [kind for kind in PATCH.ops if not lowered_by_host(kind)]
    if missing:
        return f"not implemented: {', '.join(missing)}"
    return wrong(lambda x: x.new_zeros((2,)) / x.new_full((2,), 3) + torch.full_like(x, 2), torch.tensor([1, 2]))


@PATCH.op("zeros", "ones", "empty", "empty.memory_format")
def of_size(context: Any, node: Any) -> None:
    """zeros(size, dtype=float)."""
    given = bind(context, node, "size dtype=None")
    value = _VALUE[node.kind.partition(".")[0]]
    add(context, node, filled(sizes(given.size, node), value, mil_type(given.dtype, node, types.fp32)))


@PATCH.op("full")
def full(context: Any, node: Any) -> None:
    """full(size, fill_value, dtype=that of the value)."""
    given = bind(context, node, "size fill_value dtype=None")
    dtype = mil_type(given.dtype, node, _type_of(given.fill_value))
    add(context, node, filled(sizes(given.size, node), given.fill_value, dtype))


@PATCH.op("new_zeros", "new_ones", "new_empty")
def new(context: Any, node: Any) -> None:
    """new_zeros(self, size, dtype=self's)."""
    given = bind(context, node, "self size dtype=None")
    dtype = mil_type(given.dtype, node, given.self.dtype)
    add(context, node, filled(sizes(given.size, node), _VALUE[node.kind.removeprefix("new_")], dtype))


@PATCH.op("new_full")
def new_full(context: Any, node: Any) -> None:
    """new_full(self, size, fill_value, dtype=self's)."""
    given = bind(context, node, "self size fill_value dtype=None")
    dtype = mil_type(given.dtype, node, given.self.dtype)
    add(context, node, filled(sizes(given.size, node), given.fill_value, dtype))


@PATCH.op("zeros_like", "ones_like", "empty_like")
def like(context: Any, node: Any) -> None:
    """zeros_like(self, dtype=self's)."""
    given = bind(context, node, "self dtype=None")
    dtype = mil_type(given.dtype, node, given.self.dtype)
    add(context, node, filled_like(given.self, _VALUE[node.kind.removesuffix("_like")], dtype))


@PATCH.op("full_like")
def full_like(context: Any, node: Any) -> None:
    """full_like(self, fill_value, dtype=self's)."""
    given = bind(context, node, "self fill_value dtype=None")
    dtype = mil_type(given.dtype, node, given.self.dtype)
    add(context, node, filled_like(given.self, given.fill_value, dtype))


@PATCH.op("fill")
def fill(context: Any, node: Any) -> None:
    """fill(self, value): the value, a number or a rank 0 tensor, in self's dtype."""
    given = bind(context, node, "self value")
    add(context, node, filled_like(given.self, given.value, given.self.dtype))


@PATCH.op("zero")
def zero(context: Any, node: Any) -> None:
    """zero(self)."""
    given = bind(context, node, "self")
    add(context, node, filled_like(given.self, 0, given.self.dtype))


def _type_of(value: Any) -> Any:
    if isinstance(value, Var):
        return value.dtype
    return types.bool if isinstance(value, bool) else types.int32 if isinstance(value, int) else types.fp32
