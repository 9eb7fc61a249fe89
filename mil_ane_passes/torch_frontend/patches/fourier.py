"""`torch.fft` as products with constant matrices; coremltools fails with its default arguments and for `fft2`.

A transform along an axis is a matrix product: `rfft` computes only the half that it returns, `irfft` reads only the
half that it receives, `n` crops the matrix instead of padding the tensor, and `norm` is a factor of the matrix.
coremltools computes the matrices from fp32 angles up to 2π n, which fp32 rounds to 5e-4 for n = 2048; here the angles
are exact to fp64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..complex_values import is_complex, join_complex, split_complex
from ..contract import Patch
from ..errors import NotConverted
from ..lowering import add_result, bind_arguments, cast_to, normalize_axis, to_python
from ..probes import find_fault, is_lowered_by_coremltools

PATCH = Patch(
    code="TORCH120",
    title="`torch.fft` fails with default arguments (torch.export); `fft2` is not implemented",
    upstream=("https://github.com/apple/coremltools/issues/2130",),
)
_ONE_AXIS_KINDS = ("fft_fft", "fft_rfft", "fft_ifft", "fft_irfft")
_TWO_AXES_KINDS = ("fft_fft2", "fft_rfft2", "fft_ifft2", "fft_irfft2")
_ANY_AXES_KINDS = ("fft_fftn", "fft_rfftn", "fft_ifftn", "fft_irfftn")
ComplexPair = tuple[Var, Var | None]
"""The real and the imaginary part; None for zeros."""


@PATCH.probe
def probe() -> str | None:
    import torch

    missing = sorted(kind for kind in PATCH.ops if not is_lowered_by_coremltools(kind))
    if missing:
        return f"not implemented: {', '.join(missing)}"
    return find_fault(lambda x: torch.fft.rfft(x).real, torch.arange(4.), exporting=True)


@PATCH.op(*_ONE_AXIS_KINDS)
def lower_fft(context: Any, node: Any) -> None:
    """Lower fft_rfft(self, n=None, dim=-1, norm=None)."""
    inputs = bind_arguments(context, node, "self n=None dim=-1 norm=None")
    _transform_axes(
        context, node, inputs.self, [to_python(inputs.n, node, "n")], [to_python(inputs.dim, node, "dim")], inputs.norm
    )


@PATCH.op(*_TWO_AXES_KINDS, *_ANY_AXES_KINDS)
def lower_fftn(context: Any, node: Any) -> None:
    """Lower fft_rfftn(self, s=None, dim=None, norm=None), fft_rfft2(self, s=None, dim=[-2, -1], norm=None)."""
    inputs = bind_arguments(
        context, node, f"self s=None dim={'None' if node.kind.endswith('n') else '[-2,-1]'} norm=None"
    )
    lengths, axes = to_python(inputs.s, node, "s"), to_python(inputs.dim, node, "dim")
    if axes is None:
        axes = list(range(inputs.self.rank)) if lengths is None else list(range(-len(lengths), 0))
    _transform_axes(context, node, inputs.self, [None] * len(axes) if lengths is None else lengths, axes, inputs.norm)


def _transform_axes(context: Any, node: Any, x: Any, lengths: list[int | None], axes: list[int], norm: Any) -> None:
    """Transform along every axis.

    Real inputs are transformed along the last axis first, and real results along the last axis last.
    """
    kind = node.kind.partition(".")[0].removeprefix("fft_")
    inverse, real = kind.startswith("i"), "rfft" in kind
    steps = [(None if length in (None, -1) else int(length), normalize_axis(axis, x.rank))
             for length, axis in zip(lengths, axes, strict=True)]
    pair: ComplexPair = split_complex(x) if is_complex(x) else (cast_to(x, types.fp32), None)
    for number, (length, axis) in enumerate(steps if inverse or not real else steps[::-1]):
        halved = real and number == (len(steps) - 1 if inverse else 0)
        pair = _transform_axis(node, pair, length, axis, inverse, halved, to_python(norm, node, "norm"))
    if inverse and real:
        add_result(context, node, mb.identity(x=pair[0], name=node.name))
    else:
        first, second = pair
        context.add(join_complex(first, mb.mul(x=first, y=np.float32(0)) if second is None else second), node.name)


def _transform_axis(
    node: Any, pair: ComplexPair, length: int | None, axis: int, inverse: bool, halved: bool, norm: str | None
) -> ComplexPair:
    """Transform along one axis; `halved` selects rfft and irfft."""
    size = pair[0].shape[axis]
    if not isinstance(size, int | np.integer):
        raise NotConverted.at(node, f"transforms axis {axis}, which has a flexible size", "fix that size")
    count = int(length or (2 * (size - 1) if inverse and halved else size))
    kept = min(int(size), count // 2 + 1 if inverse and halved else count)
    cosine, sine = make_fourier_matrices(count, kept, inverse, halved, norm)
    real, imag = (None if part is None else _slice_first(part, kept, axis) for part in pair)
    first, second = _multiply_along_axis(real, cosine, axis), _multiply_along_axis(real, sine, axis)
    if imag is None:
        return first, second
    return (mb.sub(x=first, y=_multiply_along_axis(imag, sine, axis)),
            None if inverse and halved else mb.add(x=second, y=_multiply_along_axis(imag, cosine, axis)))


def make_fourier_matrices(count: int, kept: int, inverse: bool, halved: bool, norm: str | None
                          ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Make the real and the imaginary part of the matrix [input, output] of a transform of `count` elements.

    In an inverse transform of the half (`halved`), every element except the first and the middle one represents two.
    """
    outputs = count // 2 + 1 if halved and not inverse else count
    turns = np.outer(np.arange(kept), np.arange(outputs)) % count / count
    scale = {"ortho": count**-0.5, "forward": 1.0 if inverse else 1 / count}.get(norm or "backward",
                                                                               1 / count if inverse else 1.0)
    weight = np.full((kept, 1), scale)
    if inverse and halved:
        doubled = np.arange(kept)
        weight[(doubled > 0) & (2 * doubled != count)] *= 2
    angles = 2 * np.pi * turns
    # exact zeros where sin and cos of multiples of a quarter turn are zero, so that real inputs stay real
    cosine = np.where(turns * 4 % 2 == 1, 0, np.cos(angles)) * weight
    sine = np.where(turns * 2 % 1 == 0, 0, np.sin(angles)) * weight
    return cosine, sine if inverse else -sine


def _slice_first(x: Var, count: int, axis: int) -> Var:
    if x.shape[axis] == count:
        return x
    ends = [0] * x.rank
    ends[axis] = count
    return mb.slice_by_index(x=x, begin=[0] * x.rank, end=ends, end_mask=[place != axis for place in range(x.rank)])


def _multiply_along_axis(x: Var | None, matrix: np.ndarray[Any, Any], axis: int) -> Any:
    """Multiply `x` by the matrix along the axis."""
    matrix = matrix.astype(np.float32)
    if x is None:
        return None
    if x.rank == 1:
        return mb.squeeze(x=mb.matmul(x=mb.expand_dims(x=x, axes=[0]), y=matrix), axes=[0])
    if axis == x.rank - 1:
        return mb.matmul(x=x, y=matrix)
    order = list(range(x.rank))
    order[axis], order[-1] = order[-1], order[axis]
    return mb.transpose(x=mb.matmul(x=mb.transpose(x=x, perm=order), y=matrix), perm=order)
