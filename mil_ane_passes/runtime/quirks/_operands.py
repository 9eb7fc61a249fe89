"""Operands in the form in which a faulty machine reads them. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np
import torch

from ..op_inputs import OpInputs

__all__ = ["ARRIVING_BIAS", "ReplacedInputs", "compute_sum_start", "decode_nonfinite"]

#: a name that is not an input of any op: the bias per channel and position (1, C, n), for the first n positions only
ARRIVING_BIAS = "bias that arrives"


class ReplacedInputs(OpInputs):
    """The `inputs` of an op with some of them replaced; None disconnects an input."""

    def __init__(self, inputs: OpInputs, replaced: dict[str, Any]) -> None:
        super().__init__(inputs.op, inputs.machine)
        self._inputs = inputs
        self._replaced = replaced

    def get(self, name: str) -> Any:
        """Return the replacement, or the original input if it is not replaced."""
        return self._replaced[name] if name in self._replaced else self._inputs.get(name)

    def value(self, name: str) -> Any:
        found = self._replaced.get(name)
        if name in self._replaced:
            return found.tolist() if isinstance(found, torch.Tensor) else found
        return self._inputs.value(name)

    def iterate_blocks(self, name: str) -> Iterator[tuple[int, torch.Tensor]] | None:
        """Return the blocks of an original input; None if it is replaced, as the program has other numbers for it."""
        return None if name in self._replaced else self._inputs.iterate_blocks(name)

    def constant(self, name: str) -> np.ndarray[Any, Any] | None:
        return None if name in self._replaced else self._inputs.constant(name)

    def memo(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of `make` without caching it, because it may depend on the replaced inputs."""
        return make()


def compute_sum_start(inputs: OpInputs, y: torch.Tensor) -> torch.Tensor:
    """Return the start of the sum of products of each element of `y`: its bias, or zero if it has no bias."""
    arriving, bias = inputs.get(ARRIVING_BIAS), inputs.get("bias")
    start = torch.zeros_like(y)
    if arriving is not None:
        start[..., : arriving.shape[-1]] = arriving[..., : y.shape[-1]]
    elif bias is not None:
        start += bias if inputs.op.op_type == "linear" else bias.reshape(-1, *(1,) * (y.dim() - 2))
    return start


def decode_nonfinite(x: torch.Tensor) -> torch.Tensor:
    """Replace infinities and NaN of fp16 by the numbers that an ordinary exponent field of all ones would give.

    Infinities become ±2**16. Every NaN becomes 1.5 * 2**16, the value of the usual NaN 0x7E00, since payload and sign
    of a NaN depend on the machine that runs this.
    """
    half = x.half()
    large = torch.where(half.isnan(), 1.5 * 2.0**16, torch.copysign(torch.full_like(x, 2.0**16), x))
    return torch.where(half.isfinite(), x, large)
