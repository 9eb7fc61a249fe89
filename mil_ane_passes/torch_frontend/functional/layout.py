"""Memory layout: whether an op that copies only if needed shares memory with its argument.

Such ops are reshape, contiguous, to, ... Traced graphs contain the strides of every tensor, so torch itself decides, on
the meta device. Where strides are not known (scripts), a tensor is contiguous when it is an input or comes from ops
that preserve contiguity. The result may be None, for unknown.
"""

from __future__ import annotations

from typing import Any

from .emitter import is_tensor, read_constant, read_constant_argument

__all__ = ["MAY_COPY", "RESHAPES", "shares_memory"]

def _make_aten_kinds(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


_DROPOUTS = _make_aten_kinds("dropout feature_dropout alpha_dropout feature_alpha_dropout")
RESHAPES = _make_aten_kinds("reshape reshape_as flatten ravel")
MAY_COPY = RESHAPES | _DROPOUTS | _make_aten_kinds("contiguous to type_as cpu")
"""Ops that may return memory of their first argument."""

_KEEP_CONTIGUOUS = _make_aten_kinds(
    "add sub mul div relu sigmoid tanh exp neg abs sqrt clone cat stack linear matmul where clamp gelu silu softmax "
    "view reshape flatten unsqueeze index_put slice_scatter select_scatter copy fill contiguous")
_SLICING_OPS = _make_aten_kinds("slice narrow select detach alias")
_MAKE_CONTIGUOUS = _make_aten_kinds(
    "zeros ones full empty arange rand randn new_zeros new_ones new_full new_empty tensor linspace eye index "
    "index_select gather embedding repeat")


def shares_memory(node: Any) -> bool | None:
    """Return True when the output is the argument's memory, False when it is a copy, None when it is unknown."""
    kind = node.kind()
    source = next(node.inputs())
    if kind in _DROPOUTS:
        return _negate_if_known(read_constant(list(node.inputs())[2]))
    if kind in RESHAPES:
        return _is_reshape_in_place(source, node.output())
    if kind == "aten::contiguous":
        return _is_contiguous(source)
    return _is_noop_cast(node, source)


def _negate_if_known(training: Any) -> bool | None:
    return None if training is None else not training


def _is_reshape_in_place(source: Any, output: Any) -> bool | None:
    import torch

    sizes, strides, required = *_get_sizes_and_strides(source), _get_sizes_and_strides(output)[0]
    if sizes is None or strides is None or required is None:
        return True if _is_contiguous(source) else None
    meta = torch.empty_strided(sizes, strides, device="meta")
    in_place = meta.reshape(required)
    shared = in_place is meta or in_place._base is meta
    # The stride of an axis of size 1 is irrelevant; at another size of a flexible axis the result could differ.
    return (
        None
        if shared and ((1 in sizes and not _has_contiguous_strides(sizes, strides)) or _is_full_slice_by_chance(source))
        else shared
    )


def _is_full_slice_by_chance(value: Any) -> bool:
    """Return whether a slice with bounds covers a whole axis, but would not at another size of that axis."""
    while value.node().kind() in _SLICING_OPS:
        node = value.node()
        before, after = _get_sizes_and_strides(next(node.inputs()))[0], _get_sizes_and_strides(value)[0]
        if node.kind() != "aten::select" and before == after and not _is_full_slice(node):
            return True
        value = next(node.inputs())
    return False


def _is_full_slice(node: Any) -> bool:
    start, end = (read_constant_argument(node, name) for name in ("start", "end"))
    return (
        node.kind() == "aten::slice"
        and not start
        and (end is None or end >= 2**31 - 1)
        and not _has_computed_arguments(node)
    )


def _has_computed_arguments(node: Any) -> bool:
    return any(inputs.node().kind() != "prim::Constant" for inputs in list(node.inputs())[1:])


def _has_contiguous_strides(sizes: list[int], strides: list[int]) -> bool:
    step = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if stride != step:
            return False
        step *= size
    return True


def _get_sizes_and_strides(value: Any) -> tuple[list[int] | None, list[int] | None]:
    kind = value.type()
    if kind.kind() != "TensorType":
        return None, None
    sizes, strides = kind.sizes(), kind.strides()
    known = sizes is not None and strides is not None and len(sizes) == len(strides)
    return (sizes, strides) if known else (sizes, None)


def _is_contiguous(value: Any, depth: int = 0) -> bool | None:
    """Return whether a tensor is contiguous, None when it is unknown; inputs of the model are contiguous."""
    sizes, strides = _get_sizes_and_strides(value)
    if sizes is not None and strides is not None:
        return _has_contiguous_strides(sizes, strides) or (None if 1 in sizes else False)
    node = value.node()
    if node.kind() in ("prim::Param", "prim::GetAttr") or node.kind() in _MAKE_CONTIGUOUS:
        return True
    if node.kind() not in _KEEP_CONTIGUOUS or depth > 64:
        return None
    tensors = [inputs for inputs in node.inputs() if is_tensor(inputs)]
    return True if all(_is_contiguous(inputs, depth + 1) for inputs in tensors) else None


def _is_noop_cast(node: Any, source: Any) -> bool | None:
    """Return whether `to`, `type_as` or `cpu` returns its argument: the dtype is unchanged and no copy is requested."""
    if read_constant_argument(node, "copy"):
        return False
    before, after = (value.type().dtype() if is_tensor(value) else None for value in (source, node.output()))
    return None if before is None or after is None else bool(before == after)
