"""Feed checks: compare the feeds with the inputs that the function declares (names, dtypes, ranks and extents)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import types
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from ..ir.printer import format_dimension, format_dtype
from ..utils.errors import InputError, NotSupported, suggest_nearest
from ..utils.npz import StoredArray
from ..utils.text_format import add_article, escape_text

__all__ = [
    "check_feed_names",
    "check_feeds",
    "check_state",
    "get_numpy_dtype",
    "read_stored_feeds",
    "split_inputs",
    "to_array",
    "to_feed_dict",
]


def split_inputs(function: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a function's inputs into (inputs to feed, states), each a dict by name."""
    fed: dict[str, Any] = {}
    states: dict[str, Any] = {}
    for name, var in function.inputs.items():
        (states if types.is_state(var.sym_type) else fed)[name] = var
    return fed, states


def check_feed_names(declared: Iterable[str], feeds: Mapping[str, Any]) -> None:
    """Raise `InputError` for the first feed without an input of its name, with the nearest name of an input."""
    names = list(declared)
    for name in to_feed_dict(feeds):
        if name not in names:
            raise InputError(f"feed '{name}': no such input{suggest_nearest(name, names)} "
                             f"(inputs: {', '.join(names) or 'none'})")


def check_feeds(declared: Mapping[str, Any], feeds: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the feeds as arrays, in declared order.

    Raises `InputError` with the name of the feed, what was found and what was expected.
    """
    check_feed_names(declared, feeds)
    symbols: dict[Any, tuple[int, str]] = {}
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, var in declared.items():
        if name not in feeds:
            raise InputError(f"input '{name}': not fed; expected {_describe_type(var)}")
        arrays[name] = _check_value(f"feed '{name}'", feeds[name], var, symbols)
    return arrays


def _check_value(who: str, value: Any, var: Any, symbols: dict[Any, tuple[int, str]]) -> np.ndarray[Any, Any]:
    """Return `value` as an array. Raises InputError if it does not fit `var`.

    The dtype and shape of an array stored in a file are checked before it is read.
    """
    array = value if isinstance(value, StoredArray) else to_array(who, value)
    get_numpy_dtype(var)
    _check_dtype_kind(who, array.dtype, var)
    if isinstance(value, StoredArray):
        _check_shape(who, value.shape, var, symbols)
    array = to_array(who, array)
    _check_range(who, array, var)
    _check_shape(who, array.shape, var, symbols)
    return array


def read_stored_feeds(declared: Mapping[str, Any], feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the feeds with the arrays stored in files read.

    Raises InputError if dtype or shape do not fit, before the array is read.
    """
    return {name: _check_value(f"feed '{name}'", value, declared[name], {})
            if isinstance(value, StoredArray) and name in declared else value for name, value in feeds.items()}


def to_feed_dict(feeds: object) -> dict[str, Any]:
    """Copy the feeds to a new dictionary. Raises InputError when they are not a mapping."""
    if not isinstance(feeds, Mapping):
        raise InputError(f"feeds: found {add_article(type(feeds).__name__)}; expected a dictionary with an array for "
                         "each input")
    return dict(feeds)


def to_array(who: str, value: Any) -> np.ndarray[Any, Any]:
    """Convert `value` to an array.

    Raises InputError for a value that is not an array of numbers, such as lists of different lengths.
    """
    try:
        return np.asarray(value.detach() if getattr(value, "requires_grad", False) else value)
    except InputError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"{who}: {error}; expected an array of numbers") from error


def check_state(declared: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Check states. Raises `InputError` for a state that is not declared or does not fit its declaration."""
    if not isinstance(state, Mapping):
        raise InputError(f"state: found {type(state).__name__}; expected a mapping from names of states to arrays")
    for name, value in state.items():
        if name not in declared:
            known = ", ".join(declared) or "none"
            raise InputError(f"state '{name}': no such state{suggest_nearest(name, declared)} (states: {known})")
        _check_value(f"state '{name}'", value, declared[name], {})


def _describe_type(var: Any) -> str:
    extents = ", ".join(map(format_dimension, var.shape))
    return f"{format_dtype(var.dtype)} ({extents})"


def get_numpy_dtype(var: Any) -> np.dtype[Any]:
    """Return the numpy dtype of an input or state. Raises NotSupported if it is neither a tensor nor a scalar."""
    inner = var.sym_type.wrapped_type() if types.is_state(var.sym_type) else var.sym_type
    if types.is_tensor(inner) or types.is_scalar(inner):
        with suppress(KeyError):
            dtype: np.dtype[Any] = np.dtype(types.nptype_from_builtin(var.dtype))
            return dtype
    raise NotSupported(f"input '{escape_text(var.name)}' is of type {format_dtype(inner)}, which cannot be fed; "
                       "expected a tensor of numbers: correct it in the program that makes the package")


def _check_dtype_kind(who: str, found: np.dtype[Any], var: Any) -> None:
    """Check the kind of dtype: any float is accepted for a float, any integer for an integer, only bool for a bool."""
    kinds = "f" if types.is_float(var.dtype) else "b" if types.is_bool(var.dtype) else "iu"
    if found.kind not in kinds:
        raise InputError(f"{who}: found dtype {found}, expected {format_dtype(var.dtype)}")


def _check_range(who: str, array: np.ndarray[Any, Any], var: Any) -> None:
    """Check that integers are within the range of the declared dtype."""
    dtype = var.dtype
    if types.is_float(dtype) or types.is_bool(dtype) or not array.size:
        return
    bits, unsigned = int(dtype.get_bitwidth()), dtype.is_unsigned()
    low, high = (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    found = int(array.min()), int(array.max())
    if found[0] < low or found[1] > high:
        raise InputError(f"{who}: found values {found[0]}..{found[1]}, expected {low}..{high}")


def _check_shape(who: str, found: Sequence[int], var: Any, symbols: dict[Any, tuple[int, str]]) -> None:
    expected = tuple(var.shape)
    if any("*" in str(extent) and is_symbolic(extent) for extent in expected):
        return  # variadic rank: any shape is accepted
    if len(found) != len(expected):
        raise InputError(f"{who}: found shape {tuple(found)}, expected {_describe_type(var)}")
    for axis, (size, extent) in enumerate(zip(found, expected)):
        if not is_symbolic(extent):
            if size != int(extent):
                raise InputError(
                    f"{who}: found shape {tuple(found)}, expected {_describe_type(var)}; axis {axis} differs"
                )
            continue
        known, where = symbols.setdefault(extent, (size, f"{who} axis {axis}"))
        if known != size:
            raise InputError(
                f"{who}: found {size} on axis {axis}, expected {known}: "
                f"the model has one size for both, and it is {known} in {where}"
            )
