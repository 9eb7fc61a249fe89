"""`concat` of a few float elements, then one of them taken.

For shapes coremltools follows each element of a small concat as a symbol, whatever its dtype; a float that is picked
out of it is then refused ("Types should have zero-rank ndarray input"). Only ints can be sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coremltools.converters.mil.mil import types

from ..contract import Patch
from ..probes import find_fault

PATCH = Patch(code="TORCH144",
              title="one element of a small concat of floats cannot be taken", upstream=("https://github.com/apple/coremltools/issues/1811",))


@PATCH.probe
def probe() -> str | None:
    import torch

    return find_fault(lambda x: torch.cat([x, x])[0], torch.tensor([1., 2.]))


@PATCH.replace_function("coremltools.converters.mil.mil.ops.defs.iOS15.tensor_operation", "concat.value_inference")
def value_inference(host: Callable[..., Any], concat: Any) -> Any:
    """coremltools' value, but no symbols for what cannot be a size."""
    if any(value.val is None and value.dtype != types.int32 for value in concat.values):
        return None
    return host(concat)
