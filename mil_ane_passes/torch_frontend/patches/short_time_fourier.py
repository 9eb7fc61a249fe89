"""`stft` and `istft` as one convolution each; coremltools has no `istft`.

The windowed transform of frames is a convolution of the signal. Where the hop divides the length of the transform, the
signal is laid out as (hop, length / hop) first, and the kernel is n_fft / hop wide instead of n_fft, with a stride of
1: ANE kernels are narrow. The inverse is the same in the other direction: one convolution from the frames to `hop`
channels transforms, windows, overlaps and adds. It is divided by the sum of the squared windows, as torch does. Its
`length` can be computed (`length=x.shape[-1]`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..complex_values import is_complex, join_complex, split_complex
from ..contract import Patch
from ..creation import make_filled
from ..errors import NotConverted
from ..lowering import add_result, bind_arguments, cast_to, get_dims, is_constant, to_python, to_size_vector
from .fourier import make_fourier_matrices

PATCH = Patch(code="TORCH157",
              title="`istft` is not implemented; `stft` is a convolution with kernels as wide as a frame",
              upstream=("https://github.com/apple/coremltools/issues/2130",))

Array = np.ndarray[Any, Any]
_MIN_ENVELOPE = 1e-11
"""The envelope below which torch considers the windows to be zero."""


def _read_frame(given: Any, node: Any) -> SimpleNamespace:
    """Return the lengths of a transform, and the window of n_fft elements, padded with zeros."""
    count = int(to_python(given.n_fft, node, "n_fft"))
    hop = to_python(given.hop_length, node, "hop_length") or count // 4
    width = to_python(given.win_length, node, "win_length") or count
    window = np.ones(width) if given.window is None else np.asarray(to_python(given.window, node, "window"), np.float64)
    if window.shape != (width,) or width > count:
        raise NotConverted.at(node, f"has a window of shape {list(window.shape)}, expected [{width}], at most {count}")
    before = (count - width) // 2
    return SimpleNamespace(count=count, hop=int(hop), window=np.pad(window, (before, count - width - before)),
                           norm="ortho" if to_python(given.normalized, node, "normalized") else None)


@PATCH.op("stft")
def stft(context: Any, node: Any) -> None:
    """Lower stft.

    The signature is stft(self, n_fft, hop_length=None, win_length=None, window=None, normalized=False, onesided=None,
    return_complex=None, align_to_window=None); a script's stft.center has center=True, pad_mode='reflect' before
    `normalized`.
    """
    centered = "center" in node.kind or len(node.inputs) > 9
    inputs = bind_arguments(context, node, "self n_fft hop_length=None win_length=None window=None "
                            + ("center=True pad_mode='reflect' " if centered else "")
                            + "normalized=False onesided=None return_complex=None align_to_window=None")
    frame, x = _read_frame(inputs, node), inputs.self
    single = x.rank == 1
    parts = [mb.expand_dims(x=cast_to(part, types.fp32), axes=[0]) if single else cast_to(part, types.fp32)
             for part in (split_complex(x) if is_complex(x) else (x,))]
    if centered and to_python(inputs.center, node, "center"):
        parts = [mb.pad(x=part, pad=[frame.count // 2] * 2, mode=to_python(inputs.pad_mode, node, "pad_mode"))
                 for part in parts]
    onesided = to_python(inputs.onesided, node, "onesided")
    halved = len(parts) == 1 if onesided is None else bool(onesided)
    cosine, sine = (matrix * frame.window[:, None]
                    for matrix in make_fourier_matrices(frame.count, frame.count, False, halved, frame.norm))
    bins = cosine.shape[1]
    real, imag = _split_channels(_transform_frames(parts[0], np.concatenate([cosine, sine], axis=1), frame), bins)
    if len(parts) == 2:
        minus, more = _split_channels(_transform_frames(parts[1], np.concatenate([sine, cosine], axis=1), frame), bins)
        real, imag = mb.sub(x=real, y=minus), mb.add(x=imag, y=more)
    if single:
        real, imag = (mb.squeeze(x=part, axes=[0]) for part in (real, imag))
    if to_python(inputs.return_complex, node, "return_complex") is False:
        add_result(context, node, mb.stack(values=[real, imag], axis=-1, name=node.name))
    else:
        context.add(join_complex(real, imag), node.name)


def _transform_frames(x: Var, matrix: Array, frame: SimpleNamespace) -> Var:
    """Multiply `x` (batch, samples) by the matrix (n_fft, channels) at every hop; returns (batch, channels, frames)."""
    length = x.shape[-1]
    count, hop = frame.count, frame.hop
    if count % hop or not isinstance(length, int | np.integer):
        return mb.conv(x=mb.expand_dims(x=x, axes=[1]), weight=matrix.T[:, None].astype(np.float32), strides=[hop],
                       pad_type="valid")
    kernel = matrix.reshape(count // hop, hop, -1).transpose(2, 1, 0)
    kept = length // hop * hop
    x = x if kept == length else mb.slice_by_index(x=x, begin=[0, 0], end=[0, kept], end_mask=[True, False])
    x = mb.reshape(x=x, shape=[-1, kept // hop, hop])
    return mb.conv(x=mb.transpose(x=x, perm=[0, 2, 1]), weight=kernel.astype(np.float32), pad_type="valid")


def _split_channels(x: Var, bins: int) -> tuple[Var, Var]:
    """Split the channels into the real and the imaginary half."""
    first, second = mb.split(x=x, split_sizes=[bins, bins], axis=1)
    return first, second


@PATCH.op("istft")
def istft(context: Any, node: Any) -> None:
    """Lower istft.

    The signature is istft(self, n_fft, hop_length=None, win_length=None, window=None, center=True, normalized=False,
    onesided=None, length=None, return_complex=False).
    """
    inputs = bind_arguments(
        context,
        node,
        "self n_fft hop_length=None win_length=None window=None center=True normalized=False "
        "onesided=None length=None return_complex=False",
    )
    if not is_complex(inputs.self):
        raise NotConverted.at(node, "is called on real numbers", "use torch.view_as_complex first")
    if to_python(inputs.return_complex, node, "return_complex"):
        raise NotConverted.at(node, "has return_complex=True", "omit it if the signal is real")
    frame = _read_frame(inputs, node)
    onesided = to_python(inputs.onesided, node, "onesided")
    parts = split_complex(inputs.self)
    single = parts[0].rank == 2
    parts = tuple(mb.expand_dims(x=part, axes=[0]) for part in parts) if single else parts
    bins = frame.count // 2 + 1
    expected = frame.count if onesided is False else bins
    if parts[0].shape[1] != expected and (onesided is not None or parts[0].shape[1] != frame.count):
        raise NotConverted.at(node, f"has {parts[0].shape[1]} frequencies, expected {expected} for n_fft={frame.count}")
    # a real signal is computed from the first half of the frequencies, even where torch receives both halves
    parts = tuple(mb.slice_by_index(x=part, begin=[0, 0, 0], end=[0, bins, 0], end_mask=[True, False, True])
                  if part.shape[1] != bins else part for part in parts)
    signal = _overlap_add(mb.concat(values=parts, axis=1), _make_synthesis_matrix(frame, bins), frame)
    begin = frame.count // 2 if to_python(inputs.center, node, "center") else 0
    frames, length = parts[0].shape[2], inputs.length
    length = to_python(length, node, "length") if is_constant(length) else length
    if length is None or isinstance(length, int) and isinstance(frames, int | np.integer):
        signal = _divide_by_envelope(node, _crop_samples(signal, begin, length), frames, begin, length, frame, parts[0])
    else:
        signal, envelope = (mb.slice_by_index(x=each, begin=[0, begin], end=[0, 0], end_mask=[True, True])
                            for each in (signal, _make_flexible_envelope(frame, parts[0])))
        signal = _take_samples(mb.real_div(x=signal, y=envelope), length, frame)
    add_result(context, node, mb.squeeze(x=signal, axes=[0], name=node.name) if single else
               mb.identity(x=signal, name=node.name))


def _make_synthesis_matrix(frame: SimpleNamespace, bins: int) -> Array:
    """Make the matrix (2 bins, n_fft) from the parts of a frame to its windowed samples."""
    cosine, sine = make_fourier_matrices(frame.count, bins, True, True, frame.norm)
    return np.asarray(np.concatenate([cosine, -sine]) * frame.window)


def _overlap_add(x: Var, matrix: Array, frame: SimpleNamespace) -> Var:
    """Multiply the frames (batch, channels, frames) by the matrix (channels, n_fft) and add them up, each a hop later.

    Returns (batch, samples).
    """
    count, hop, channels = frame.count, frame.hop, len(matrix)
    if count % hop:
        found = mb.conv_transpose(x=x, weight=matrix[:, None].astype(np.float32), strides=[hop], pad_type="valid")
        return mb.squeeze(x=found, axes=[1])
    width = count // hop
    kernel = matrix.reshape(channels, width, hop)[:, ::-1].transpose(2, 0, 1)
    found = mb.conv(x=x, weight=np.ascontiguousarray(kernel, dtype=np.float32), pad_type="custom",
                    pad=[width - 1, width - 1])
    found = mb.transpose(x=found, perm=[0, 2, 1])
    if isinstance(found.shape[1], int | np.integer):
        return mb.reshape(x=found, shape=[-1, int(found.shape[1]) * hop])
    batch = found.shape[0]
    if isinstance(batch, int | np.integer):
        return mb.reshape(x=found, shape=[int(batch), -1])
    sizes = get_dims(found)
    return mb.reshape(x=found, shape=mb.stack(values=[sizes[0], mb.mul(x=sizes[1], y=np.int32(hop))], axis=0))


def _crop_samples(x: Var, begin: int, length: int | None) -> Var:
    """Crop the samples to those that torch returns.

    That is: `length` of them from `begin` on, or without `length` all except `begin` at each end.
    """
    end = begin + length if length is not None else -begin
    total = x.shape[1]
    if length is not None and isinstance(total, int | np.integer):
        end = min(end, int(total))
    if begin == 0 and end == 0:
        return x
    return mb.slice_by_index(x=x, begin=[0, begin], end=[0, end], end_mask=[True, end == 0])


def _divide_by_envelope(
    node: Any, x: Var, frames: Any, begin: int, length: int | None, frame: SimpleNamespace, like: Var
) -> Var:
    """Divide by the sum of the squared windows and pad to `length`."""
    squares = frame.window**2
    if isinstance(frames, int | np.integer):
        envelope = np.zeros(frame.count + frame.hop * (int(frames) - 1))
        for place in range(int(frames)):
            envelope[place * frame.hop:place * frame.hop + frame.count] += squares
        end = begin + length if length is not None else len(envelope) - begin
        envelope = envelope[begin:end]
        if not len(envelope) or envelope.min() < _MIN_ENVELOPE:
            raise NotConverted.at(node, "divides by windows whose squares add up to 0",
                                  "torch rejects this, too: use center=True, or a window without zeros at its ends")
        x = mb.mul(x=x, y=(1 / envelope)[None].astype(np.float32))
        missing = 0 if length is None else length - len(envelope)
        return mb.pad(x=x, pad=[0, 0, 0, missing], mode="constant", constant_val=0.0) if missing > 0 else x
    return mb.real_div(x=x, y=_crop_samples(_make_flexible_envelope(frame, like), begin, None))


def _make_flexible_envelope(frame: SimpleNamespace, like: Var) -> Var:
    """Make the sum of the squared windows of all frames of `like`, [1, samples]."""
    ones = make_filled([1, 1, get_dims(like)[2]], 1.0, types.fp32)
    return _overlap_add(ones, (frame.window**2)[None], frame)


def _take_samples(x: Var, length: Any, frame: SimpleNamespace) -> Var:
    """Take the first `length` samples, a number or computed; zeros follow the samples, as in torch.

    For a computed length there are zeros of one frame, more than a signal has beyond the frames of its transform; Core
    ML rejects a longer one at run time.
    """
    zeros = frame.count if isinstance(length, Var) else int(length)
    x = mb.pad(x=x, pad=[0, 0, 0, zeros], mode="constant", constant_val=0.0)
    size = to_size_vector([-1, length if isinstance(length, Var) else int(length)])
    return mb.slice_by_size(x=x, begin=np.zeros(2, np.int32), size=size)
