"""Example programs of one conv or conv_transpose."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder, Var, types

from ...passes.contract import Example
from ...passes.examples import make_example, make_weight

__all__ = ["make_conv_example", "make_conv_transpose_example"]


def make_conv_example(
    name: str,
    x: tuple[int | None, ...],
    weight: tuple[int, ...],
    *,
    op_type: str = "conv",
    dtype: type = np.float16,
    reason: str | None = None,
    options: dict[str, Any] | None = None,
    within: float = float("inf"),
    **parameters: Any,
) -> Example:
    """Make an example of a conv of input shape `x` and weight shape `weight`; `parameters` are further inputs."""

    def build_body(x: Var) -> Var:
        built: Var = getattr(Builder, op_type)(x=x, weight=make_weight(*weight, dtype=dtype), name="y", **parameters)
        return built

    io_dtype = types.fp16 if dtype is np.float16 else types.fp32
    return make_example(name, build_body, reason=reason, options=options, within=within, dtype=io_dtype, x=x)


def make_conv_transpose_example(
    name: str,
    *,
    x: tuple[int | None, ...] = (1, 4, 8),
    weight: tuple[int, ...] | None = None,
    groups: int = 1,
    dtype: type = np.float16,
    bias: tuple[float, ...] | None = (0.5, -1.0),
    **rest: Any,
) -> Example:
    """Make an example of a conv_transpose, by default a 1-D one of 4 input and 2 output channels with a bias."""
    if bias is not None:
        rest["bias"] = np.array(bias, dtype)
    shape = weight or (4, 2 // groups, 5)
    return make_conv_example(name, x, shape, op_type="conv_transpose", groups=groups, dtype=dtype, **rest)
