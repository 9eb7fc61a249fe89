"""Example programs for the cumsum rewrites: where a cumsum is replaced, and where it is not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Program, Var, types

from ...passes.contract import FP32_UNSUPPORTED_REASON, Example
from ...passes.examples import build_program

__all__ = ["iterate_cumsum_examples"]

_MAX_INPUT = 150.0
"Largest input magnitude: every partial sum of the elements is then within the range of fp16."


def iterate_cumsum_examples() -> Iterator[Example]:
    yield Example("two convs", lambda: _build_cumsum((1, 8, 100), axis=-1), within=_MAX_INPUT)
    yield Example("one conv", lambda: _build_cumsum((2, 4, 8), axis=2))
    yield Example("exclusive", lambda: _build_cumsum((2, 30, 4), axis=1, exclusive=True), within=_MAX_INPUT)
    yield Example("exclusive, last axis", lambda: _build_cumsum((2, 3, 12), axis=-1, exclusive=True))
    yield Example("a mask, exclusive", lambda: _build_mask_cumsum(axis=-1, exclusive=True))
    yield Example("backwards", lambda: _build_cumsum((40, 3), axis=0, reverse=True), within=_MAX_INPUT)
    yield Example("both", lambda: _build_cumsum((2, 2, 3, 17), axis=3, reverse=True, exclusive=True), within=_MAX_INPUT)
    yield Example("three convs", lambda: _build_cumsum((2, 200), axis=1), within=_MAX_INPUT)
    yield Example("a vector", lambda: _build_cumsum((5,), axis=0))
    yield Example("rank 5", lambda: _build_cumsum((2, 3, 14, 2, 3), axis=2), within=_MAX_INPUT)
    yield Example("a mask", _build_mask_cumsum)
    yield Example(
        "any length up to", lambda: _build_cumsum((2, None), axis=1), options={"longest": 100}, within=_MAX_INPUT
    )
    yield Example("any length backwards", lambda: _build_cumsum((None, 3), axis=0, reverse=True, exclusive=True),
                  options={"longest": 40}, within=_MAX_INPUT)
    yield Example("any length", lambda: _build_cumsum((2, None), axis=1), reason=(
        "sums along an axis of symbolic length; form=windows with longest=N takes up to N elements"))
    yield Example("large triangle", lambda: _build_cumsum((2, 2000), axis=1), options={"form": "triangle"}, reason=(
        "a triangle of 2000 x 2000 is 8000000 bytes, above max_bytes=2097152; form=windows needs none"))
    yield Example("fp32", lambda: _build_cumsum((2, 5), dtype=types.fp32, axis=1), reason=FP32_UNSUPPORTED_REASON)
    yield Example("integers", lambda: _build_cumsum((2, 5), dtype=types.int32, axis=1), reason="computes on integers")


def _build_cumsum(shape: tuple[int | None, ...], dtype: Any = types.fp16, **asked: Any) -> Program:
    return build_program(lambda x: Builder.cumsum(x=x, name="y", **asked), dtype=dtype, x=shape)


def _build_mask_cumsum(axis: int = 1, **asked: bool) -> Program:
    def body(x: Var) -> Var:
        mask = Builder.cast(x=Builder.greater(x=x, y=np.float16(0)), dtype="fp16")
        result: Var = Builder.cumsum(x=mask, axis=axis, name="y", **asked)
        return result

    return build_program(body, x=(3, 5, 4))
