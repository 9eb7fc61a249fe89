"""Convert normalizations and softmax."""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var

from ..layer_converter import MIN_EPSILON, LayerContext, register_layer

_MAX_SUMMED_CHANNELS = 512
"Channels up to which a window of even size is summed: each takes two ops."


@register_layer("batchnorm")
def convert_batchnorm(params: Any, context: LayerContext) -> Var:
    """Convert a batch norm with stored statistics, or an instance norm."""
    channels = int(params.channels)
    read = context.weights.read
    x, restore = context.to_nchw(context.x)
    gamma, beta = read(params.gamma, (channels,), "gamma"), read(params.beta, (channels,), "beta")
    if params.computeMeanVar:
        # Statistics of the batch are those of the image: this format runs one at a time.
        return restore(mb.instance_norm(x=x, gamma=gamma, beta=beta, epsilon=float(params.epsilon)))
    mean, variance = read(params.mean, (channels,), "mean"), read(params.variance, (channels,), "variance")
    return restore(mb.batch_norm(x=x, mean=mean, variance=variance, gamma=gamma, beta=beta,
                                 epsilon=float(params.epsilon)))


@register_layer("mvn")
def convert_mvn(params: Any, context: LayerContext) -> Var:
    """Convert (x - mean) / sqrt(variance + epsilon), over each channel or over all."""
    x, restore = context.to_nchw(context.x)
    axes = [1, 2, 3] if params.acrossChannels else [2, 3]
    centered: Var = mb.sub(x=x, y=mb.reduce_mean(x=x, axes=axes, keep_dims=True))
    if params.normalizeVariance:
        variance = mb.reduce_mean(x=mb.square(x=centered), axes=axes, keep_dims=True)
        deviation = mb.sqrt(x=mb.add(x=variance, y=np.float32(params.epsilon)))
        centered = mb.real_div(x=centered, y=deviation)
    return restore(centered)


@register_layer("l2normalize")
def convert_l2_normalize(params: Any, context: LayerContext) -> Var:
    """Convert x / sqrt(sum of squares over [C, H, W] + epsilon)."""
    x, restore = context.to_nchw(context.x)
    total = mb.reduce_sum(x=mb.square(x=x), axes=[1, 2, 3], keep_dims=True)
    return restore(mb.mul(x=x, y=mb.rsqrt(x=total, epsilon=max(float(params.epsilon), MIN_EPSILON))))


@register_layer("lrn")
def convert_lrn(params: Any, context: LayerContext) -> Var:
    """Convert a local response norm across channels: x / (k + alpha / size * sum of squares) ** beta."""
    x, restore = context.to_nchw(context.x)
    size = int(params.localSize)
    if size < 1:
        raise context.refuse(f"a window of {size} channels", "expected at least 1")
    k = float(params.k) if params.k else 1.0
    if int(size) % 2:
        result: Var = mb.local_response_norm(x=x, size=size, alpha=float(params.alpha), beta=float(params.beta), k=k)
        return restore(result)
    count = int(x.shape[1])
    before, after = min((size - 1) // 2, count - 1), min(size // 2, count - 1)  # beyond all channels are zeros only
    reach = before + 1 + after
    if reach > _MAX_SUMMED_CHANNELS:
        raise context.refuse(f"an even window of {size} channels",
                             f"expected an odd one, or one of at most {_MAX_SUMMED_CHANNELS}")
    squares = mb.pad(x=mb.square(x=x), pad=[0, 0, before, after, 0, 0, 0, 0], mode="constant", constant_val=0.0)
    parts = [mb.slice_by_index(x=squares, begin=[0, each, 0, 0], end=[0, each + count, 0, 0],
                               begin_mask=[True, False, True, True], end_mask=[True, False, True, True])
             for each in range(reach)]
    total = parts[0]
    for part in parts[1:]:
        total = mb.add(x=total, y=part)
    base = mb.add(x=mb.mul(x=total, y=np.float32(params.alpha / size)), y=np.float32(k))
    return restore(mb.mul(x=x, y=mb.pow(x=base, y=np.float32(-params.beta))))


@register_layer("layerNormalization")
def convert_layer_norm(params: Any, context: LayerContext) -> Var:
    """Convert a layer norm over the last axes."""
    shape = tuple(int(each) for each in params.normalizedShape)
    axes = list(range(-len(shape), 0))
    gamma, beta = (context.weights.read(each, shape, what)
                   for each, what in ((params.gamma, "gamma"), (params.beta, "beta")))
    return mb.layer_norm(x=context.x, axes=axes, gamma=gamma, beta=beta, epsilon=max(float(params.eps), MIN_EPSILON))


@register_layer("softmax")
def convert_softmax(params: Any, context: LayerContext) -> Var:
    """Convert a softmax over the channels."""
    return mb.softmax(x=context.x, axis=-3 if context.x.rank > 2 else -1)


@register_layer("softmaxND")
def convert_softmax_nd(params: Any, context: LayerContext) -> Var:
    """Convert a softmax over an axis."""
    return mb.softmax(x=context.x, axis=int(params.axis))
