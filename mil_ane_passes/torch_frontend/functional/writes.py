"""What an in-place op writes, as a functional op."""

from __future__ import annotations

from typing import Any

from ..errors import NotConverted
from .emit import Emitter, schema_of

__all__ = ["METADATA", "functional_value", "written_arguments"]

METADATA = {f"aten::{name}_": f"aten::{name}" for name in (
    "squeeze", "unsqueeze", "transpose", "t", "swapaxes", "swapdims")}
"""In-place ops that change how a tensor is seen, not what it holds."""

_OF_OPERATORS = {"__iand__": "__and__", "__ior__": "__or__", "__ixor__": "__xor__", "__ilshift__": "__lshift__",
                 "__irshift__": "__rshift__"}
_RANDOM = frozenset((
    "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_"))
_REMAKES = frozenset(("set_", "resize_", "resize_as_", "swap_"))
_KEEPS_DTYPE = frozenset((
    "copy", "fill", "index_put", "masked_fill", "scatter", "clamp", "relu", "index_fill", "index_copy",
    "masked_scatter", "neg", "abs", "triu", "tril"))
"""Ops whose result always has the dtype of their first argument."""


def written_arguments(node: Any) -> list[int]:
    """Which inputs the op writes, by its schema."""
    schema = schema_of(node)
    if schema is None:
        return []
    return [place for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write]


def functional_value(emit: Emitter, node: Any, place: int, inputs: list[Any]) -> Any:
    """What input `place` holds after the op: shaped and typed as before it.

    `inputs` are the op's inputs as they are now. Raises NotConverted where torch has no functional form.
    """
    target = inputs[place]
    name = node.kind().removeprefix("aten::")
    if place > 0:  # out=
        result = emit.op(node.kind(), *inputs[:place], *inputs[place + 1:])
        return emit.op("aten::copy", target, result, False, like=target)
    if name in _RANDOM:
        raise NotConverted.at(node, "draws random numbers in place", "draw them with torch.randn, or outside")
    if name in _REMAKES:
        raise NotConverted.at(node, "gives a tensor other memory or another size in place", "make a new tensor")
    if name == "zero_":
        return emit.op("aten::fill", target, 0, like=target)
    functional = _OF_OPERATORS.get(name) or name.removesuffix("_")
    if functional == name or not _known(functional):
        raise NotConverted.at(node, "writes in place, and torch has no functional form of it")
    new = emit.op(f"aten::{functional}", *inputs, like=target)
    if functional in _KEEPS_DTYPE or _same_dtype(inputs):
        return new
    return emit.op("aten::type_as", new, target, like=target)


def _known(name: str) -> bool:
    import torch

    return bool(torch._C._jit_get_schemas_for_operator(f"aten::{name}"))


def _same_dtype(inputs: list[Any]) -> bool:
    """Whether all tensors among the inputs are known to have one dtype and nothing else could promote it."""
    kinds = [given.type() for given in inputs if given.type().kind() == "TensorType"]
    dtypes = {kind.dtype() for kind in kinds}
    floats = any(given.type().kind() == "FloatType" for given in inputs)
    dtype = next(iter(dtypes)) if len(dtypes) == 1 else None
    return dtype is not None and (dtype.is_floating_point or not floats)
