"""A mil.Program with a given number of ops and of 1-D transposed convolutions, to time the graph walk by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from coremltools.converters.mil.mil import Program, Var

CHANNELS, LENGTH = 4, 8
FILLERS = ("leaky_relu", "conv", "add", "linear", "mul", "relu")


def list_op_types(n_ops: int, n_rewrites: int) -> list[str]:
    """The op types in order, the transposed convolutions evenly spread.

    A transposed convolution doubles the length if a filler follows, which then is a strided conv that halves it again.
    Two in a row keep the length, so that any ratio of rewrites to ops can be built.
    """
    if not 0 <= n_rewrites <= n_ops:
        raise ValueError(f"n_rewrites ({n_rewrites}) must be within 0 and n_ops ({n_ops})")
    lifts = [(i + 1) * n_rewrites // max(n_ops, 1) > i * n_rewrites // max(n_ops, 1) for i in range(n_ops)]
    result, filler = [], 0
    for i, lift in enumerate(lifts):
        if lift:
            result.append("up" if i + 1 < n_ops and not lifts[i + 1] else "same")
        elif i and lifts[i - 1]:
            result.append("down")
        else:
            result.append(FILLERS[filler % len(FILLERS)])
            filler += 1
    return result


class LayerBuilder:
    """Makes one op at a time. Strides, pads and the like are shared consts: that halves the building time."""

    def __init__(self, mb: Any, seed: int, dtype: Any = np.float32) -> None:
        self.mb, self.generator, self.dtype = mb, np.random.default_rng(seed), dtype
        self.shared: dict[Any, Var] = {}

    def draw(self, *shape: int) -> np.ndarray:
        """Values of either sign that are never near zero: no bias can be taken for an absent one."""
        size = self.generator.uniform(0.1, 0.4, shape)
        return (size * self.generator.choice((-1.0, 1.0), shape)).astype(self.dtype)

    def const(self, value: Any) -> Var:
        if value not in self.shared:
            array = np.array(value, np.int32) if isinstance(value, tuple) else value
            self.shared[value] = self.mb.const(val=array)
        return self.shared[value]

    def convolve(self, op: Any, x: Var, size: int, stride: int) -> Var:
        return op(
            x=x,
            weight=self.draw(CHANNELS, CHANNELS, size),
            bias=self.draw(CHANNELS),
            strides=self.const((stride,)),
            pad_type=self.const("custom"),
            pad=self.const((1, 1)),
            dilations=self.const((1,)),
            groups=self.const(1),
        )

    def apply(self, kind: str, x: Var, skip: Var) -> Var:
        """Every kind but "up" and "down" keeps (1, CHANNELS, LENGTH)."""
        mb = self.mb
        if kind in ("up", "same"):
            return self.convolve(mb.conv_transpose, x, *((4, 2) if kind == "up" else (3, 1)))
        if kind in ("down", "conv"):
            return self.convolve(mb.conv, x, *((4, 2) if kind == "down" else (3, 1)))
        if kind == "linear":
            return mb.linear(x=x, weight=self.draw(LENGTH, LENGTH), bias=self.draw(LENGTH))
        if kind == "add":
            return mb.add(x=x, y=skip)
        if kind == "mul":
            return mb.mul(x=x, y=self.draw(1, CHANNELS, 1))
        return mb.leaky_relu(x=x, alpha=self.dtype(0.1)) if kind == "leaky_relu" else mb.relu(x=x)


def make_program(n_ops: int = 8000, n_rewrites: int = 2000, seed: int = 0, dtype: Any = np.float32) -> Program:
    """`n_ops` non-const ops in one chain with residual adds, `n_rewrites` of them 1-D conv_transposes with a bias."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    kind = types.numpy_type_to_builtin_type(dtype)

    @mb.program(input_specs=[mb.TensorSpec(shape=(1, CHANNELS, LENGTH), dtype=kind)], opset_version=ct.target.iOS17)
    def chain(x: Var) -> Var:
        layers, skip = LayerBuilder(mb, seed, dtype), x
        for kind in list_op_types(n_ops, n_rewrites):
            following = layers.apply(kind, x, skip)
            if kind in ("down", "add", "conv"):  # a residual add takes the latest of these
                skip = following
            x = following
        return x

    return chain
