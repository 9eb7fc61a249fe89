"""`nn.TransformerEncoderLayer` and `nn.MultiheadAttention` as one op, which torch runs and traces in eval mode.

The mask is a bool, True (any number except 0) where attention is masked: mask type 0 for queries × keys, 1 for the keys
of each sample, 2 for sample × head × query × key. A query without any allowed key gives NaN in torch, zeros here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var, types

from ..contract import Patch
from ..errors import NotConverted
from ..lowering import (
    add_result,
    add_results,
    bind_arguments,
    cast_to,
    get_dims,
    name_result,
    to_python,
    to_size_vector,
)
from .attention import make_additive_mask

PATCH = Patch(code="TORCH147",
              title="the fast paths of `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` are not implemented",
              upstream=("none known",))

_ENCODER_LAYER_SIGNATURE = (
    "src embed_dim num_heads qkv_weight qkv_bias proj_weight proj_bias use_gelu norm_first eps norm_weight_1 "
    "norm_bias_1 norm_weight_2 norm_bias_2 ffn_weight_1 ffn_bias_1 ffn_weight_2 ffn_bias_2 mask=None "
    "mask_type=None"
)


@PATCH.op("_transformer_encoder_layer_fwd")
def lower_encoder_layer(context: Any, node: Any) -> None:
    """Lower attention and feed-forward, each with a residual; the norms are before (norm_first) or after them."""
    inputs = bind_arguments(context, node, _ENCODER_LAYER_SIGNATURE)
    x, eps = inputs.src, np.float32(to_python(inputs.eps, node, "eps"))
    if x.rank != 3:
        raise NotConverted.at(node, f"expects samples × positions × features, but got rank {x.rank}")

    def build_norm(value: Var, which: int) -> Var:
        return mb.layer_norm(x=value, axes=[-1], gamma=getattr(inputs, f"norm_weight_{which}").val,
                             beta=getattr(inputs, f"norm_bias_{which}").val, epsilon=eps)

    def feed_forward(value: Var) -> Var:
        inner = mb.linear(x=value, weight=inputs.ffn_weight_1, bias=inputs.ffn_bias_1)
        inner = mb.gelu(x=inner, mode="EXACT") if to_python(inputs.use_gelu, node, "use_gelu") else mb.relu(x=inner)
        return mb.linear(x=inner, weight=inputs.ffn_weight_2, bias=inputs.ffn_bias_2)

    if to_python(inputs.norm_first, node, "norm_first"):
        x = mb.add(x=x, y=_attend_to_self(node, inputs, build_norm(x, 1)))
        x = mb.add(x=x, y=feed_forward(build_norm(x, 2)))
    else:
        x = build_norm(mb.add(x=x, y=_attend_to_self(node, inputs, x)), 1)
        x = build_norm(mb.add(x=x, y=feed_forward(x)), 2)
    add_result(context, node, name_result(x, node))


@PATCH.op("_native_multi_head_attention")
def lower_multi_head_attention(context: Any, node: Any) -> None:
    """Lower _native_multi_head_attention(query, key, value, ...): what is seen, and the weights."""
    inputs = bind_arguments(
        context,
        node,
        "query key value embed_dim num_heads qkv_weight qkv_bias proj_weight proj_bias "
        "mask=None need_weights=True average_attn_weights=True mask_type=None",
    )
    if any(each.rank != 3 for each in (inputs.query, inputs.key, inputs.value)):
        raise NotConverted.at(node, "expects operands of samples × positions × features (rank 3)")
    seen, weights = _compute_attention(node, inputs, inputs.query, inputs.key, inputs.value)
    if to_python(inputs.average_attn_weights, node, "average_attn_weights"):
        weights = mb.reduce_mean(x=weights, axes=[1], keep_dims=False)
    add_results(context, node, [seen, weights])


def _attend_to_self(node: Any, given: Any, x: Var) -> Var:
    return _compute_attention(node, given, x, x, x)[0]


def _project_inputs(given: Any, query: Var, key: Var, value: Var) -> list[Var]:
    if query is key and key is value:
        together = mb.linear(x=query, weight=given.qkv_weight, bias=given.qkv_bias)
        return list(mb.split(x=together, num_splits=3, axis=-1))
    thirds = zip(np.split(given.qkv_weight.val, 3), np.split(given.qkv_bias.val, 3), strict=True)
    return [mb.linear(x=x, weight=weight, bias=bias)
            for x, (weight, bias) in zip((query, key, value), thirds, strict=True)]


def _compute_attention(node: Any, given: Any, *given_to: Var) -> tuple[Var, Var]:
    """Compute the projected attention output, and the attention weights: samples × heads × queries × keys."""
    heads, width = (
        int(to_python(given.num_heads, node, "num_heads")),
        int(to_python(given.embed_dim, node, "embed_dim")),
    )
    split = []
    for part in _project_inputs(given, *given_to):
        samples, positions, _ = get_dims(part)
        part = mb.reshape(x=part, shape=to_size_vector([samples, positions, heads, width // heads]))
        split.append(mb.transpose(x=part, perm=[0, 2, 1, 3]))
    query, key, value = split
    samples, positions, _ = get_dims(given_to[0])
    scores = mb.matmul(x=mb.mul(x=query, y=np.float32((width // heads) ** -0.5)), y=key, transpose_y=True)
    weights = _compute_masked_softmax(scores, _read_mask(node, given))
    seen = mb.transpose(x=mb.matmul(x=weights, y=value), perm=[0, 2, 1, 3])
    seen = mb.reshape(x=seen, shape=to_size_vector([samples, positions, width]))
    return mb.linear(x=seen, weight=given.proj_weight, bias=given.proj_bias), weights


def _read_mask(node: Any, given: Any) -> Var | None:
    """Return the mask as bools that are true where attention is masked, of a rank that broadcasts with the scores."""
    if given.mask is None:
        return None
    mask = cast_to(given.mask, types.bool)
    kind = to_python(given.mask_type, node, "mask_type")
    if kind not in (0, 1, 2):
        raise NotConverted.at(node, f"mask_type is {kind!r}, expected 0, 1 or 2")
    return mask if kind == 2 else mb.expand_dims(x=mask, axes=[0, 1] if kind == 0 else [1, 2])


def _compute_masked_softmax(scores: Var, hidden: Var | None) -> Var:
    """Compute the masked softmax with finite numbers only: the product sets a completely masked row to zero."""
    if hidden is None:
        return mb.softmax(x=scores, axis=-1)
    allowed = mb.logical_not(x=hidden)
    flags = cast_to(allowed, scores.dtype)
    weights = mb.softmax(x=mb.add(x=scores, y=make_additive_mask(allowed, flags)), axis=-1)
    return mb.mul(x=weights, y=flags)
