"""Creation of tensors: their sizes, their dtype, and a const wherever sizes and value are compile-time constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from coremltools.converters.mil.frontend.torch.utils import NUM_TO_NUMPY_DTYPE
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from .errors import NotConverted
from .lowering import Size, broadcast_to, cast_to, get_dims, has_static_shape, to_python, to_size_vector

__all__ = ["make_constant", "make_filled", "make_filled_like", "read_sizes", "to_mil_type"]

_MAX_CONST_ELEMENTS = 1 << 20
"""The largest const, in elements: a larger tensor of one value stays a `fill`, which costs no bytes in the package."""


def read_sizes(value: Any, node: Any) -> list[Size]:
    """Read a `size` argument as a list with one int or rank 0 int32 Var for each dimension."""
    if isinstance(value, Var) and value.val is None:
        if value.rank == 0:
            return [value]
        if not isinstance(value.shape[0], int | np.integer):
            raise NotConverted.at(node, "the number of dimensions is computed by the model")
        return [mb.slice_by_index(x=value, begin=[place], end=[place + 1], squeeze_mask=[True])
                for place in range(value.shape[0])]
    if isinstance(value, Var):
        return [int(size) for size in np.ravel(value.val)]
    items = value if isinstance(value, list | tuple) else [value]
    return [_read_size(item) for item in items]


def _read_size(item: Any) -> Size:
    if not isinstance(item, Var):
        return int(item)
    if item.val is not None:
        return int(np.ravel(item.val)[0])
    item = cast_to(item, types.int32)
    return mb.squeeze(x=item, axes=[0]) if item.rank else item


def to_mil_type(dtype: Any, node: Any, default: Any) -> Any:
    """Return the MIL type of a torch `dtype` argument (its number), or `default` where it is None.

    Small ints are int32.
    """
    number = to_python(dtype, node, "dtype")
    if number is None:
        return default
    if isinstance(number, str):  # `x.dtype` in a script, which coremltools writes as the name of its own type
        return _MIL_TYPES_BY_NAME[number]
    if number not in NUM_TO_NUMPY_DTYPE:
        raise NotConverted.at(node, f"Core ML has no dtype for torch's number {number}", "use a real dtype")
    found = np.dtype(NUM_TO_NUMPY_DTYPE[number])
    return types.int32 if found.kind in "iu" else types.numpy_type_to_builtin_type(found.type)


_MIL_TYPES_BY_NAME = {kind.__name__: kind for kind in (types.bool, types.fp16, types.fp32)} | dict.fromkeys(
    (kind.__name__ for kind in (types.int8, types.int16, types.int32, types.uint8)), types.int32)


def make_constant(array: Any, dtype: Any) -> Var:
    """Make a const of the MIL type from `array`."""
    with np.errstate(over="ignore"):
        array = np.asarray(array).astype(types.nptype_from_builtin(dtype))
    return mb.const(val=array if array.ndim else array[()])


def make_filled(shape: Sequence[Size], value: Any, dtype: Any) -> Var:
    """Make a tensor of one value: a const where sizes and value are constant, else a `fill` or the value repeated."""
    if isinstance(value, Var) and value.val is None:
        one = mb.reshape(x=cast_to(value, dtype), shape=[1] * len(shape)) if value.rank != len(shape) else \
            cast_to(value, dtype)
        return broadcast_to(one, shape) if len(shape) else one
    number = value.val if isinstance(value, Var) else value
    if (
        all(isinstance(size, int | np.integer) for size in shape)
        and np.prod(shape, dtype=np.int64) <= _MAX_CONST_ELEMENTS
    ):
        return make_constant(np.broadcast_to(np.reshape(number, ()), tuple(shape)), dtype)
    return mb.fill(shape=to_size_vector(shape), value=make_constant(np.reshape(number, ()), dtype))


def make_filled_like(x: Var, value: Any, dtype: Any) -> Var:
    """Make a tensor of one value with the sizes of `x`.

    Flexible sizes are those of one `shape`: parts of it keep the symbols of `x` where a pass gives new ones to it.
    """
    if has_static_shape(x) or isinstance(value, Var) and value.val is None:
        return make_filled(get_dims(x), value, dtype)
    number = value.val if isinstance(value, Var) else value
    return mb.fill(shape=mb.shape(x=x), value=make_constant(np.reshape(number, ()), dtype))
