"""Small programs, built from a function and its feeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil import mil
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Function, types

from mil_ane_passes.runtime import Runtime

Array = np.ndarray[Any, Any]


def program(
    build: Callable[..., Any], feeds: Mapping[str, Any], *, opset: Any = ct.target.iOS18, shapes: Any = None
) -> Any:
    """`build`, given one variable per feed, as the main function of a program; `shapes` overrides by name."""
    placeholders = {}
    for name, value in feeds.items():
        array = np.asarray(value)
        shape = (shapes or {}).get(name, array.shape)
        dtype = types.numpy_type_to_builtin_type(array.dtype.type)
        placeholders[name] = mb.placeholder(shape=shape, dtype=dtype, allow_rank0_input=True)
    made = mil.Program()
    with Function(placeholders, opset_version=opset) as function:
        outputs = build(**function.inputs)
        function.set_outputs(list(outputs) if isinstance(outputs, (list, tuple)) else [outputs])
        made.add_function("main", function)
    return made


def run(
    build: Callable[..., Any],
    feeds: Mapping[str, Any],
    *,
    precision: str = "float64",
    opset: Any = ct.target.iOS18,
    quirks: Sequence[str] = (),
    shapes: Any = None,
) -> list[Array]:
    """The outputs of the program that `build` makes, on `feeds`."""
    runtime = Runtime(program(build, feeds, opset=opset, shapes=shapes), precision=precision, quirks=quirks)
    return list(runtime(feeds).values())


def draw(seed: int, *shape: int, dtype: Any = np.float32) -> Array:
    """Reproducible normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def close(found: Array, expected: Any, tolerance: float = 1e-5) -> None:
    """Equal up to float32's rounding (parameters of the truth may be float32), in shape and in value."""
    expected = np.asarray(expected)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def same_bits(found: Array, expected: Array) -> None:
    """Equal bit for bit, signs of zeros and NaNs included."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()
