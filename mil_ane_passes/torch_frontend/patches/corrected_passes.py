"""Passes of coremltools that convert wrongly or fail: fusions of convolutions, products, paddings and normalizations.

Among them are `W @ x + b`, whose bias is added to the other axis, a grouped transposed convolution before a BatchNorm
or a product, whose channels are exchanged, and `conv(x) - buffer`, as of `BatchNorm2d(affine=False)`, which negates the
buffer of the user's own module. `nn.Linear(n, 1)(x) + 2.0` fails, and a constant of higher rank that is added to a
linear or a convolution silently loses dimensions. `x * k + b`, where `x` has one channel and the constants have
several, becomes an invalid `batch_norm`. A float that is cast to an integer and then to a bool keeps its fraction, so
that 0.4 is true. Our pipelines run corrected passes; this patch corrects them in other pipelines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types
from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

from ...passes.corrected_passes import iterate_corrections
from ...passes.examples import build_program
from ...passes.severity import Severity
from ..contract import Patch, describe_fault

PATCH = Patch(code="TORCH195", severity=Severity.WRONG,
              title="fusions miscompile `W @ x + b`, `x * k + b` of one channel and grouped transposed convolutions "
                    "before a scale, `conv(x) - buffer` changes the module, `stack` before `chunk` and paddings fail",
              upstream=("https://github.com/apple/coremltools/pull/2801",))

for _name, _method, _function in iterate_corrections():
    _host = PASS_REGISTRY.passes.get(_name)
    if _host is not None and _method in vars(_host):
        PATCH.replace_function(_host.__module__, f"{_host.__name__}.{_method}")(_function)


@PATCH.probe
def probe() -> str | None:
    from ...runtime import Runtime

    for name, shape, build in _iterate_examples():
        program = build_program(build, dtype=types.fp32, x=shape)
        feeds = {"x": np.arange(np.prod(shape), dtype=np.float32).reshape(shape)}
        expected = list(Runtime(program)(feeds).values())
        try:
            PASS_REGISTRY[f"common::{name}"](program)
            found = list(Runtime(program)(feeds).values())
        except Exception as error:
            return f"fails: {name}: {describe_fault(error)}"
        if not all(map(np.allclose, found, expected)):
            return f"silently miscompiled: {name}"
    return None


def _iterate_examples() -> Iterator[tuple[str, tuple[int, ...], Callable[[Var], Any]]]:
    """Yield the name of a pass, the shape of an input, and a function that builds what the pass should fuse or keep."""
    weight = np.arange(16, dtype=np.float32).reshape(4, 4)
    scale = np.arange(8, dtype=np.float32)

    def convolve(x: Var) -> Var:
        return mb.conv_transpose(x=x, weight=weight.reshape(4, 4, 1), groups=2)

    def subtract_parts(x: Var) -> Var:
        first, second = mb.split(x=mb.stack(values=[x, mb.relu(x=x)], axis=0), num_splits=2, axis=0)
        return mb.sub(x=first, y=second)

    yield "fuse_matmul_weight_bias", (4, 4), lambda x: mb.add(x=mb.matmul(x=weight, y=x), y=scale[:4])
    yield "fuse_conv_scale", (1, 4, 3), lambda x: mb.mul(x=convolve(x), y=scale.reshape(8, 1))
    yield "fuse_conv_batchnorm", (1, 4, 3), lambda x: mb.batch_norm(
        x=convolve(x), mean=scale, variance=scale + 1, gamma=scale, beta=scale)
    yield "fuse_elementwise_to_batchnorm", (1, 1, 2, 2), lambda x: mb.add(
        x=mb.mul(x=x, y=scale.reshape(8, 1, 1)), y=scale.reshape(8, 1, 1))
    yield "fuse_stack_split", (2, 3), subtract_parts
