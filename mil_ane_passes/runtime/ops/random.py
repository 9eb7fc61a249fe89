"""Random numbers: reproducible, because a reference that differs from run to run cannot be compared.

Distribution, shape and dtype match those of a device; the numbers do not. A seed of -1 (no seed) counts as 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from coremltools.converters.mil.mil import types

from ..registry import register_kernel


def _make_generator(ins: Any) -> torch.Generator:
    return torch.Generator().manual_seed(max(int(ins.value("seed")), 0))


def _sample_uniform(ins: Any) -> torch.Tensor:
    # Sampled in float64 at every precision, so that the precisions agree on the samples.
    return torch.rand(ins.values("shape"), generator=_make_generator(ins), dtype=torch.float64)


@register_kernel("random_uniform")
def random_uniform(op: Any, ins: Any) -> torch.Tensor:
    """Sample from `low` to below `high`: samples that the declared dtype would round to `high` are kept below it."""
    low, high = ins["low"].double(), ins["high"].double()
    declared = types.nptype_from_builtin(ins.op.outputs[0].dtype)
    below = float(np.nextafter(declared(high.item()), declared(low.item())))
    return (low + _sample_uniform(ins) * (high - low)).clamp(max=max(below, low.item()))


@register_kernel("random_bernoulli")
def random_bernoulli(op: Any, ins: Any) -> torch.Tensor:
    return (_sample_uniform(ins) < ins["prob"].double()).to(ins.compute)


@register_kernel("random_normal")
def random_normal(op: Any, ins: Any) -> torch.Tensor:
    normal = torch.randn(ins.values("shape"), generator=_make_generator(ins), dtype=torch.float64).to(ins.compute)
    return ins["mean"] + normal * ins["stddev"]


@register_kernel("random_categorical")
def random_categorical(op: Any, ins: Any) -> torch.Tensor:
    """Sample `size` times with replacement from each row."""
    x = ins["x"].double()
    weights = torch.softmax(x, -1) if ins.value("mode") == "logits" else x
    rows = weights.reshape(-1, x.shape[-1])
    drawn = torch.multinomial(rows, ins.value("size"), replacement=True, generator=_make_generator(ins))
    return drawn.reshape(*x.shape[:-1], -1).to(ins.compute)
