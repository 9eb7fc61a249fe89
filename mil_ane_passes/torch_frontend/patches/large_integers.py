"""Integers beyond int32 beside floats, as in `x * 2**32`, keep their value; int32 arithmetic with them is an error.

Core ML has int32 in place of torch's int64. coremltools makes 2**31 - 1 of a larger constant, also where it becomes a
float next, or wraps it around (torch.export), and takes 2**63 - 1 for an argument that is left out.

Beside a float operand, and as dividend or divisor, such a constant becomes a float. A comparison, bound or choice of
integers takes the closest int32: `ids < 2**33` is true for every int32. Sums, products and remainders of integers are
an error, because int32 cannot hold them either. Another op that reads a tensor of them, such as `gather`, gets the
closest int32, and a warning says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types
from numpy.typing import NDArray

from ...passes.severity import Severity
from ..contract import Patch
from ..creation import to_mil_type
from ..errors import NotConverted, describe_node_location
from ..lowering import bind_arguments, make_prefix, to_python
from ..probes import find_fault

PATCH = Patch(code="TORCH168", severity=Severity.WRONG,
              title="integers beyond int32 become other numbers, also beside floats: `x * 2**32`",
              upstream=("none known",))

_NUMBERS: WeakKeyDictionary[Any, dict[str, NDArray[np.int64]]] = WeakKeyDictionary()
"The constants beyond int32 of a conversion, by its context and by name."
_LIMITS = np.iinfo(np.int32)
_log = logging.getLogger("mil_ane_passes")
_SAME = frozenset(("alias", "clone", "contiguous", "detach", "detach_", "lift_fresh", "lift_fresh_copy"))
_CASTS = frozenset(("_to_copy", "float", "to", "type", "type_as"))
_SATURATING = frozenset((
    "clamp", "clamp_max", "clamp_min", "clip", "eq", "fill", "ge", "greater", "greater_equal", "gt", "le", "less",
    "less_equal", "lt", "masked_fill", "maximum", "minimum", "ne", "not_equal", "where"))
_ARITHMETIC = frozenset((
    "add", "bitwise_and", "bitwise_or", "bitwise_xor", "div", "divide", "floor_divide", "fmod", "mul", "multiply",
    "remainder", "rsub", "sub", "subtract", "true_divide"))
_FILLED = {"full": "size fill_value dtype=None", "new_full": "self size fill_value dtype=None",
           "full_like": "self fill_value dtype=None"}


@PATCH.probe
def probe() -> str | None:
    import torch

    return find_fault(lambda x: x * 2**32, torch.tensor([1.0, -2.0]))


@PATCH.replace_function("coremltools.converters.mil.frontend.torch.converter", "TorchConverter.convert_const")
def convert_constants(host: Callable[..., None], self: Any) -> None:
    """Convert the parameters and buffers; record those with integers beyond int32."""
    for name, value in self.graph.params.items():
        _record(self.context, name, value)
    host(self)


@PATCH.wrap_lowerings
def lower_with_large_integers(lowering: Callable[[Any, Any], None], context: Any, node: Any) -> None:
    """Call the lowering with constants beyond int32 as its op can have them."""
    kind = node.kind.split(".")[0].rstrip("_")
    if kind == "constant":
        _record(context, node.name, (node.attr or {}).get("value"))
    large = dict(_iterate_large(context, node))
    if not large:
        lowering(context, node)
    elif kind in _SATURATING or kind in _ARITHMETIC or kind in _FILLED:
        _lower_with_large(lowering, context, node, kind, large)
    else:
        lowering(context, node)
        if kind in _SAME or kind in _CASTS:
            _keep_value(context, node, next(iter(large.values())))
        elif tensors := [value for value in large.values() if value.ndim]:  # others may be ends of slices
            _log.warning("%s reads integers beyond int32, such as %d, which become the closest int32",
                         describe_node_location(node), _find_largest(tensors))


def _record(context: Any, name: str, value: Any) -> None:
    if type(value) is not int and (
            str(getattr(value, "dtype", None)) not in ("torch.int64", "int64") or getattr(value, "is_meta", False)):
        return
    array = np.asarray(value)
    if array.dtype == np.int64 and _is_large(array):
        _NUMBERS.setdefault(context, {})[name] = array


def _is_large(value: NDArray[np.int64]) -> bool:
    return bool(np.any((value > _LIMITS.max) | (value < _LIMITS.min)))


def _iterate_large(context: Any, node: Any) -> Iterator[tuple[int | str, NDArray[np.int64]]]:
    """Yield the place or keyword, and the value, of each argument that is an integer constant beyond int32."""
    named = {name: given[0] if isinstance(given, list | tuple) and len(given) == 1 else given
             for name, given in (node.kwinputs or {}).items()}
    known = _NUMBERS.get(context, {})
    for place, given in (*enumerate(node.inputs), *named.items()):
        if isinstance(given, str) and given in known:
            yield place, known[given]
        elif type(given) is int and -(2**63) <= given < 2**63 and _is_large(np.array(given)):
            yield place, np.array(given)


def _lower_with_large(
    lowering: Callable[[Any, Any], None], context: Any, node: Any, kind: str,
    large: dict[int | str, NDArray[np.int64]],
) -> None:
    """Lower the node with other constants in place of the large ones."""
    operands = [context[name] for place, name in enumerate(node.inputs)
                if place not in large and isinstance(name, str) and name in context]
    tensors = [var for var in operands if isinstance(var, Var) and var.dtype != types.bool]
    divides = kind in ("div", "divide", "true_divide") and not _has_rounding(context, node)
    if kind in _FILLED:
        default = types.int32 if kind == "full" else tensors[0].dtype
        is_float = types.is_float(to_mil_type(bind_arguments(context, node, _FILLED[kind]).dtype, node, default))
    else:
        is_float = divides or any(types.is_float(var.dtype) for var in tensors)
    if not is_float and kind in _ARITHMETIC:
        if any(var.rank for var in tensors):
            largest = _find_largest(large.values())
            raise NotConverted.at(node, f"computes integers with {largest}, and Core ML has int32 only",
                                  "use smaller numbers, or compute these integers outside of the model")
        lowering(context, node)
        return
    changed = copy(node)
    changed.inputs = [*node.inputs]
    changed.kwinputs = {**node.kwinputs} if node.kwinputs else node.kwinputs
    for place, value in large.items():
        name = f"{make_prefix(context, node.name)}large_{place}"
        context.add(mb.const(val=value.astype(np.float32)[()] if is_float else
                             np.clip(value, _LIMITS.min, _LIMITS.max).astype(np.int32)[()]), torch_name=name)
        if isinstance(place, int):
            changed.inputs[place] = name
        else:
            changed.kwinputs[place] = [name]
    lowering(context, changed)
    if kind in _FILLED and not is_float:
        result = context[node.name]
        _keep_value(context, node, np.broadcast_to(next(iter(large.values())), result.shape if result.val is not None
                                                   else ()))


def _find_largest(values: Iterable[NDArray[np.int64]]) -> int:
    return max((int(each) for value in values for each in value.reshape(-1)), key=abs)


def _has_rounding(context: Any, node: Any) -> bool:
    """Return whether a division rounds its result."""
    return to_python(bind_arguments(context, node, "self other rounding_mode=None").rounding_mode, node,
                     "rounding_mode") not in (None, [])


def _keep_value(context: Any, node: Any, value: NDArray[np.int64]) -> None:
    """Record that the result of a node is a constant beyond int32, or make it one if it is a float."""
    result = context[node.name]
    if not isinstance(result, Var) or result.val is None or np.shape(result.val) != value.shape:
        return
    if types.is_float(result.dtype):
        context.add(mb.const(val=value.astype(types.nptype_from_builtin(result.dtype))[()]), torch_name=node.name,
                    override=True)
    else:
        _NUMBERS.setdefault(context, {})[node.name] = value
