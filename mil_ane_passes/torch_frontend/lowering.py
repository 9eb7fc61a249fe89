"""Helpers for lowerings: bound arguments, sizes that may be dynamic, torch's dtypes, broadcasts."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
from coremltools.converters.mil.frontend.torch.utils import TorchFrontend
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from .errors import NotConverted

__all__ = [
    "MAX_RANK",
    "add_result",
    "add_results",
    "bind_arguments",
    "broadcast_to",
    "cast_to",
    "find_written_literal",
    "get_dims",
    "has_static_shape",
    "is_constant",
    "is_same_size",
    "lower_without_batch",
    "make_prefix",
    "make_range",
    "name_result",
    "normalize_axis",
    "promote_operands",
    "result_type",
    "to_python",
    "to_size_vector",
    "to_tensor",
]

MAX_RANK = 5
"The maximum rank of a tensor in Core ML."

Size: TypeAlias = int | Var
"""A size: an int where it is constant, else a rank 0 int32 Var."""

_PREFIX_NUMBERS: WeakKeyDictionary[Any, Iterator[int]] = WeakKeyDictionary()
"The numbers of `make_prefix`, by the context of a conversion."
_PROMOTION_ORDER = (types.bool, types.uint8, types.int8, types.int16, types.int32, types.fp16, types.fp32)


def bind_arguments(context: Any, node: Any, signature: str) -> SimpleNamespace:
    """Bind the node's arguments, positional or keyword, to the names of torch's schema.

    `signature` is "self dim=0 start=None": Python literals are defaults, a name without one is required. An argument is
    a Var, a list of Vars, or a Python value (None, a number, a string) as torch.export writes them. Raises NotConverted
    for a required argument that is missing.
    """
    bound = {}
    for place, entry in enumerate(signature.split()):
        name, has_default, default = entry.partition("=")
        inputs = (node.kwinputs or {}).get(name)
        if place < len(node.inputs):
            bound[name] = _resolve_argument(context, node.inputs[place])
        elif inputs is not None:
            bound[name] = _resolve_argument(
                context, inputs[0] if isinstance(inputs, list | tuple) and len(inputs) == 1 else inputs
            )
        elif has_default:
            bound[name] = ast.literal_eval(default)
        else:
            raise NotConverted.at(node, f"has no argument '{name}'")
    return SimpleNamespace(**bound)


def _resolve_argument(context: Any, given: Any) -> Any:
    if isinstance(given, list | tuple):
        return [_resolve_argument(context, item) for item in given]
    if not isinstance(given, str):
        return given
    # TorchScript has names of values only: an unknown one is an error, not a text
    return context[given] if given in context or context.frontend == TorchFrontend.TORCHSCRIPT else str(given)


def is_constant(value: Any) -> bool:
    """Return whether an argument is a compile-time constant."""
    if isinstance(value, list | tuple):
        return all(is_constant(item) for item in value)
    return not isinstance(value, Var) or value.val is not None


def to_python(value: Any, node: Any, name: str) -> Any:
    """Return an argument as a Python number, string or (nested) list.

    Raises NotConverted when the model computes it.
    """
    if isinstance(value, list | tuple):
        return [to_python(item, node, name) for item in value]
    if not isinstance(value, Var):
        return value
    if value.val is None:
        raise NotConverted.at(node, f"'{name}' is computed by the model", f"make '{name}' a constant")
    return value.val.tolist() if hasattr(value.val, "tolist") else value.val


def find_written_literal(number: float, node: Any) -> float:
    """Return the literal of the graph that coremltools stores as this fp32 number: 0.7, not 0.69999999."""
    single = np.float32(number)
    if float(single) != number:
        return number
    block = node.parent
    while block is not None:
        for other in getattr(block, "nodes", ()):
            literal = (other.attr or {}).get("value")
            if isinstance(literal, float) and np.float32(literal) == single:
                return literal
        block = getattr(block, "parent", None)
    return float(str(single))


def add_result(context: Any, node: Any, value: Var) -> None:
    """Add the result of the node to the context, under the node's name."""
    context.add(value, node.name)


def add_results(context: Any, node: Any, values: Sequence[Any]) -> None:
    """Add the results of a node with several to the context.

    Each has its own name in TorchScript; torch.export has one tuple.
    """
    if context.frontend == TorchFrontend.TORCHSCRIPT:
        for name, value in zip(node.outputs, values, strict=True):
            context.add(value, torch_name=name)
    else:
        context.add(tuple(values), torch_name=node.name)


def name_result(var: Var, node: Any, *given: Any) -> Var:
    """Name `var` after the node: rename it where it is new, that is, not one of the arguments `given`.

    Without `given` it may be one of them, so the result is an identity op of that name.
    """
    if not given or var.op is None or any(var is one for one in given):
        return mb.identity(x=var, name=node.name)
    var.name = var.op.name = node.name
    return var


def normalize_axis(dim: int, rank: int) -> int:
    """Count `dim` from the front."""
    return dim % max(rank, 1)


def has_static_shape(x: Var) -> bool:
    """Return whether every size of `x` is a compile-time constant."""
    return all(isinstance(size, int | np.integer) for size in x.shape)


def get_dims(x: Var) -> list[Size]:
    """Return the sizes of `x`: an int where constant, else a rank 0 int32 Var (read from `shape` by a slice)."""
    if has_static_shape(x):
        return [int(size) for size in x.shape]
    entire = mb.shape(x=x)
    return [int(size) if isinstance(size, int | np.integer)
            else mb.slice_by_index(x=entire, begin=[axis], end=[axis + 1], squeeze_mask=[True])
            for axis, size in enumerate(x.shape)]


def find_largest_magnitude(x: Var, axes: Sequence[int] | None) -> Var:
    """Return the largest magnitude of x along `axes` (None: all), which are kept, as a divisor of x.

    It is at least the smallest normal number of fp16 and at most the largest one, so that zeros and infinities stay.
    """
    as_type = types.nptype_from_builtin(x.dtype)
    most = mb.reduce_max(x=mb.abs(x=x), axes=axes, keep_dims=True)
    return mb.minimum(x=mb.maximum(x=most, y=as_type(2.0 ** -14)), y=as_type(65504))


def lower_without_batch(context: Any, node: Any, lower: Callable[[Any, Any], None]) -> None:
    """Lower an op of x, its first input, by `lower`, as that of x with a batch of one, which MIL asks for."""
    source, x = node.inputs[0], context[node.inputs[0]]
    context.add(mb.expand_dims(x=x, axes=[0]), torch_name=source, override=True)
    lower(context, node)
    context.add(x, torch_name=source, override=True)
    batched = context[node.outputs[0]]
    first = mb.squeeze(x=batched[0] if isinstance(batched, tuple) else batched, axes=[0])
    context.add((first, *batched[1:]) if isinstance(batched, tuple) else first, torch_name=node.outputs[0],
                override=True)


def to_size_vector(sizes: Sequence[Any]) -> Any:
    """Combine sizes into one int32 argument: an array when all are constant, else a Var."""
    if all(isinstance(size, int | np.integer) for size in sizes):
        return np.array(sizes, dtype=np.int32).reshape(len(sizes))
    parts = [np.array([size], dtype=np.int32) if isinstance(size, int | np.integer) else _to_vector(size)
             for size in sizes]
    return mb.concat(values=parts, axis=0) if len(parts) > 1 else parts[0]


def _to_vector(size: Var) -> Var:
    """Return a size as an int32 Var of one element.

    One that was read from a `shape` is read again: with an `expand_dims` its symbol would be lost, and a tensor made of
    the sizes of another would have new symbols.
    """
    read = size
    while read.op is not None and read.op.op_type in ("cast", "identity", "squeeze", "expand_dims"):
        read = read.op.x
    op = read.op
    if op is not None and op.op_type in ("slice_by_index", "gather") and op.x.op is not None and (
            op.x.op.op_type == "shape" and tuple(read.shape) in ((), (1,))):
        place = op.indices.val if op.op_type == "gather" else op.begin.val
        masked = op.op_type == "slice_by_index" and op.begin_mask is not None and np.any(op.begin_mask.val)
        if place is not None and np.size(place) == 1 and not masked:
            at = int(np.ravel(place)[0]) % op.x.shape[0]
            return mb.slice_by_index(x=op.x, begin=[at], end=[at + 1])
    size = cast_to(size, types.int32)
    return size if size.rank else mb.expand_dims(x=size, axes=[0])


def to_tensor(value: Any, dtype: Any = None) -> Var:
    """Convert an argument to a Var, cast to `dtype` (a MIL type) unless it is None.

    Python floats become fp32, ints int32.
    """
    if not isinstance(value, Var):
        array = np.asarray(value)
        array = array.astype({"f": np.float32, "i": np.int32, "u": np.int32}.get(array.dtype.kind, array.dtype))
        value = mb.const(val=array if array.ndim else array[()])
    return value if dtype is None else cast_to(value, dtype)


def cast_to(x: Var, dtype: Any) -> Var:
    """Cast `x` to `dtype` (a MIL type); return `x` itself when it already has this dtype."""
    return x if x.dtype == dtype else mb.cast(x=x, dtype=types.builtin_to_string(dtype))


def result_type(*operands: Var) -> Any:
    """Return the MIL type in which torch computes.

    The dtype of a tensor has priority over that of scalars (rank 0) of the same category.
    """
    def find_highest(group: Sequence[Var]) -> int:
        return max((_PROMOTION_ORDER.index(x.dtype) for x in group), default=-1)

    ranked = find_highest([x for x in operands if x.rank > 0])
    scalar = find_highest([x for x in operands if x.rank == 0])
    chosen = scalar if ranked < 0 or _get_dtype_category(scalar) > _get_dtype_category(ranked) else ranked
    return _PROMOTION_ORDER[chosen]


def _get_dtype_category(order: int) -> int:
    """Return the category of a dtype: -1 none, 0 bool, 1 integers, 2 floats."""
    return -1 if order < 0 else 0 if order == 0 else 1 if order < _PROMOTION_ORDER.index(types.fp16) else 2


def promote_operands(*operands: Any) -> list[Var]:
    """Convert the operands to Vars of the type in which torch computes."""
    variables = [to_tensor(operand) for operand in operands]
    dtype = result_type(*variables)
    return [cast_to(variable, dtype) for variable in variables]


def broadcast_to(x: Var, sizes: Sequence[Size]) -> Var:
    """Expand `x` to `sizes` as torch.Tensor.expand does, with real copies."""
    missing = len(sizes) - x.rank
    if missing > 0:
        x = mb.expand_dims(x=x, axes=list(range(missing))) if x.rank else mb.reshape(x=x, shape=[1] * len(sizes))
    own = get_dims(x)
    repeats: list[Any] = [1 if is_same_size(mine, required) or isinstance(mine, int) and mine != 1 else
                          required if isinstance(mine, int) else mb.floor_div(x=required, y=mine)
                          for mine, required in zip(own, sizes, strict=True)]
    if all(isinstance(repeat, int) and repeat == 1 for repeat in repeats):
        return x
    if x.dtype == types.bool:
        return cast_to(mb.tile(x=cast_to(x, types.int32), reps=to_size_vector(repeats)), types.bool)
    return mb.tile(x=x, reps=to_size_vector(repeats))


def is_same_size(mine: Size, required: Size) -> bool:
    """Return whether two sizes are known to be equal: equal numbers, or the same symbol."""
    if isinstance(mine, int) and isinstance(required, int | np.integer):
        return mine == int(required)
    return isinstance(required, Var) and isinstance(mine, Var) and _get_symbol(mine) is not None \
        and _get_symbol(mine) == _get_symbol(required)


def _get_symbol(size: Var) -> Any:
    """Return the symbol of a dynamic size, where the builder knows it; else None."""
    value = size.sym_val
    return value if value is not None and not isinstance(value, np.ndarray) else None


def make_prefix(context: Any, stem: str) -> str:
    """Make a prefix for names that no other part of a conversion has, and that is the same in each conversion."""
    return f"{stem}{next(_PREFIX_NUMBERS.setdefault(context, itertools.count()))}_"


def make_range(size: Size) -> Var:
    """Make 0, 1, ..., size - 1 as int32: a const where the size is constant."""
    if isinstance(size, int | np.integer):
        return mb.const(val=np.arange(size, dtype=np.int32))
    return mb.range_1d(start=0, end=size, step=1)
