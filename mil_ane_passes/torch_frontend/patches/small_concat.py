"""`concat` of a few float elements, from which one is then selected.

coremltools represents each element of a small concat by a symbol, to infer shapes, at any dtype. A float selected from
it then fails ("Types should have zero-rank ndarray input"). Only ints can be sizes. Without the patch, coremltools
cannot read the package either, for example to compress its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coremltools.converters.mil.mil import types

from ..contract import Patch
from ..probes import find_fault

PATCH = Patch(code="TORCH144",
              title="selecting one element of a small concat of floats "
                    "fails", upstream=("https://github.com/apple/coremltools/issues/1811",))


@PATCH.probe
def probe() -> str | None:
    import torch

    return find_fault(lambda x: torch.cat([x, x])[0], torch.tensor([1., 2.]))


@PATCH.replace_function("coremltools.converters.mil.mil.ops.defs.iOS15.tensor_operation", "concat.value_inference")
def value_inference(host: Callable[..., Any], concat: Any) -> Any:
    """Return coremltools' value, but no symbols for elements that cannot be sizes."""
    if any(value.val is None and value.dtype != types.int32 for value in concat.values):
        return None
    return host(concat)
