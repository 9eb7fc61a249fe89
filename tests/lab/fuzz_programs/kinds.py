"""The kinds of op chains that random programs are made of, each with random shapes and parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Var
from coremltools.converters.mil.mil.types.symbolic import is_symbolic

from .draft import Draft, Kind, UnsuitableKind

__all__ = ["KINDS"]

KINDS: dict[str, tuple[float, Kind]] = {}
"How often each kind is drawn beside the others, and the function that adds it."


def _register_kind(share: float = 1.0) -> Callable[[Kind], Kind]:
    def register(function: Kind) -> Kind:
        KINDS[function.__name__.strip("_")] = (share, function)
        return function

    return register


def _has_static_shape(var: Var) -> bool:
    return not any(map(is_symbolic, var.shape))


def _pick_axis(g: Draft, var: Var, first: int = 0) -> int:
    """An axis of known length, counted from either end."""
    axes = [axis for axis in range(first, var.rank) if not is_symbolic(var.shape[axis])]
    if not axes:
        raise UnsuitableKind
    axis = g.pick(axes)
    return axis - var.rank if g.chance(0.3) else axis


# Elementwise ------------------------------------------------------------------------------------------------------

_UNARY = ("relu", "tanh", "sigmoid", "abs", "exp", "square", "sign", "floor", "ceil", "round", "erf", "sin", "cos",
          "softplus", "silu", "softsign", "relu6", "atan", "exp2")


@_register_kind(2.0)
def _elementwise(g: Draft) -> Var:
    x = g.value()
    for _ in range(g.int(1, 4)):
        if g.chance(0.5):
            x = getattr(mb, g.pick(_UNARY))(x=mb.clip(x=x, alpha=g.number(-8), beta=g.number(8)))
        else:
            kind = g.pick(("add", "sub", "mul", "maximum", "minimum"))
            other = g.number(g.int(-8, 8) / 4) if g.chance(0.5) else x
            x = getattr(mb, kind)(x=x, y=other)
    return x


@_register_kind()
def _binary(g: Draft) -> Var:
    x = g.value()
    shape = [1 if g.chance(0.4) else (None if is_symbolic(n) else int(n)) for n in x.shape]
    y = g.input(shape[g.int(0, len(shape)):])
    return getattr(mb, g.pick(("add", "sub", "mul", "maximum", "minimum")))(x=x, y=y)


@_register_kind(2.0)
def _elementary(g: Draft) -> Var:
    """Functions that the ANE lacks."""
    name = g.pick(("sinh", "cosh", "asin", "acos", "atanh", "tan", "tan", "atanh"))
    x = g.value()
    if name in ("asin", "acos", "atanh"):
        x = mb.mul(x=mb.tanh(x=x), y=g.number(0.9))
    if name in ("sinh", "cosh"):
        x = mb.clip(x=x, alpha=g.number(-9), beta=g.number(9))
    return getattr(mb, name)(x=x)


@_register_kind(2.0)
def _softplus(g: Draft) -> Var:
    x = g.value()
    if g.chance(0.4):
        x = mb.mul(x=x, y=g.number(g.pick((4, 16, 30))))
    plain = g.pick((
        lambda: mb.softplus(x=x), lambda: mb.log(x=mb.add(x=mb.exp(x=x), y=g.number(1))),
        lambda: mb.log(x=mb.exp(x=x), epsilon=g.number(1)),
        lambda: mb.select(cond=mb.greater(x=x, y=g.number(20)), a=x,
                          b=mb.log(x=mb.exp(x=x), epsilon=g.number(1)))))()
    if g.chance(0.6):  # mish
        factor = mb.tanh(x=plain)
        return mb.mul(x=x, y=factor) if g.chance(0.5) else mb.mul(x=factor, y=x)
    return plain


# Convolutions and pools -------------------------------------------------------------------------------------------

def _make_image(g: Draft, spatial: int, channels: int, low: int = 5, high: int = 12) -> Var:
    shape = [g.batch(), channels, *g.ints(low, high, spatial)]
    return g.value(2 + spatial, lambda var: _has_static_shape(var) and int(var.shape[1]) == channels
                   and all(int(n) >= low for n in var.shape[2:]), shape) if not g.symbolic else g.input(shape)


def _pick_padding(g: Draft, spatial: int, most: int) -> dict[str, Any]:
    kind = g.pick(("valid", "same", "custom", "custom"))
    return {"pad_type": kind, **({"pad": g.ints(0, most, 2 * spatial)} if kind == "custom" else {})}


@_register_kind(2.0)
def _conv(g: Draft) -> Var:
    spatial, groups = g.pick((1, 2, 2, 3)), g.pick((1, 1, 2, 4))
    inward, outward = groups * g.int(1, 2), groups * g.int(1, 3)
    x = _make_image(g, spatial, inward, 6, 18 if spatial < 3 else 8)
    sizes = g.ints(1, 5, spatial)
    if spatial < 3 and g.chance(0.25):  # wide, or long
        sizes[g.int(0, spatial - 1)] = g.pick((16, 17, 36))
        x = mb.pad(x=x, pad=[0, 0, 0, 0] + [18, 18] * spatial)
    dilations = [g.pick((1, 1, 2)) if n < 4 else 1 for n in sizes]
    bias = {"bias": g.array(outward)} if g.chance(0.6) else {}
    if bias and g.chance(0.3):
        bias["bias"][0] = 0
    return mb.conv(x=mb.pad(x=x, pad=[0, 0, 0, 0] + [2, 2] * spatial) if spatial < 3 and g.chance(0.2) else x,
                   weight=g.weight(outward, inward // groups, *sizes), groups=groups, dilations=dilations,
                   strides=[g.pick((1, 1, 2, 3, 5, 7)) for _ in range(spatial)], **_pick_padding(g, spatial, 3), **bias)


@_register_kind(1.5)
def _linear_run(g: Draft) -> Var:
    """Convs or linears with nothing but scales, shifts and norms between them."""
    spatial = g.pick((0, 1, 2))
    x = g.input([g.batch(), g.int(1, 6), *g.ints(5, 9, spatial)])
    for _ in range(g.int(2, 4)):
        channels = int(x.shape[1])
        each = [channels, *[1] * spatial]
        kind = g.pick(("product", "product", "mul", "add", "sub", "real_div", "norm"))
        if kind == "product" and not spatial:
            outward = g.int(1, 6)
            x = mb.linear(x=x, weight=g.weight(outward, channels), bias=g.array(outward))
        elif kind == "product":
            sizes = g.pick(([1] * spatial, [1] * spatial, g.ints(1, 2, spatial)))
            outward = g.int(1, 6)
            bias = {"bias": g.array(outward)} if g.chance(0.5) else {}
            x = mb.conv(x=x, weight=g.weight(outward, channels, *sizes), **_pick_padding(g, spatial, 1), **bias)
        elif kind == "norm" and spatial:
            x = mb.batch_norm(x=x, mean=g.array(channels), variance=np.abs(g.array(channels)) + g.number(0.5),
                              gamma=g.array(channels), beta=g.array(channels))
        elif kind != "norm":
            other = np.abs(g.array(*each)) + g.number(0.25) if g.chance(0.7) else g.number(g.int(1, 6) / 4)
            x = getattr(mb, kind)(x=x, y=other)
    return x


@_register_kind(0.7)
def _upright(g: Draft) -> Var:
    """1-D convs in two dimensions, on either axis, between dummy axes."""
    at = g.pick((2, 3))
    x = mb.expand_dims(x=g.input([g.int(1, 2), g.int(1, 4), g.int(18, 30)]), axes=[at])
    for _ in range(g.int(1, 3)):
        kind = g.pick(("conv", "conv", "relu", "max_pool", "pad", "mul"))
        size = [g.pick((1, 3, 9, 16)), 1] if at == 3 else [1, g.pick((1, 3, 9, 16))]
        if kind == "conv":
            x = mb.conv(x=x, weight=g.weight(g.int(1, 4), int(x.shape[1]), *size), pad_type="same")
        elif kind == "max_pool":
            x = mb.max_pool(x=x, kernel_sizes=[3, 1] if at == 3 else [1, 3], strides=[1, 1], pad_type="same")
        elif kind == "pad":
            x = mb.pad(x=x, pad=[0, 0, 0, 0, 2, 1, 0, 0] if at == 3 else [0, 0, 0, 0, 0, 0, 2, 1])
        else:
            x = mb.relu(x=x) if kind == "relu" else mb.mul(x=x, y=g.number(0.5))
    return mb.squeeze(x=x, axes=[at])


@_register_kind(2.0)
def _conv_transpose(g: Draft) -> Var:
    spatial, groups = g.pick((1, 2, 2, 3)), g.pick((1, 1, 2))
    inward, outward = groups * g.int(1, 2), g.int(1, 3)
    x = _make_image(g, spatial, inward, 3, 8 if spatial < 3 else 5)
    bias = {"bias": g.array(groups * outward)} if g.chance(0.6) else {}
    return mb.conv_transpose(x=x, weight=g.weight(inward, outward, *g.ints(2, 5, spatial)), groups=groups,
                             strides=g.ints(1, 3, spatial), **_pick_padding(g, spatial, 1), **bias)


@_register_kind(2.0)
def _pool(g: Draft) -> Var:
    spatial = g.pick((1, 2, 2, 3))
    x = _make_image(g, spatial, g.int(1, 3), 9, 40 if spatial < 3 else 12)
    sizes = [int(n) if g.chance(0.25) else g.int(1, min(int(n), 36)) for n in x.shape[2:]]
    kind = g.pick(("max_pool", "max_pool", "avg_pool", "l2_pool" if spatial < 3 else "avg_pool"))
    how = _pick_padding(g, spatial, 0)
    if how["pad_type"] == "custom":
        how["pad"] = [g.int(0, max(0, (size - 1) // 2)) for size in sizes for _ in "ab"]
    if kind == "avg_pool":
        how["exclude_padding_from_average"] = g.chance(0.5)
    return getattr(mb, kind)(x=x, kernel_sizes=sizes, strides=g.ints(1, 5, spatial), **how)


@_register_kind()
def _upsample(g: Draft) -> Var:
    if g.chance(0.7):
        g.targets.add("a12")
    x = _make_image(g, 2, g.int(1, 3), 2, 5)
    if g.chance(0.6):
        return mb.upsample_nearest_neighbor(x=x, scale_factor_height=float(g.int(1, 6)),
                                            scale_factor_width=float(g.int(2, 6)))
    return mb.resize_nearest_neighbor(x=x, target_size_height=int(x.shape[2]) * g.int(1, 4),
                                      target_size_width=int(x.shape[3]) * g.int(3, 5))


@_register_kind()
def _resize(g: Draft) -> Var:
    x = _make_image(g, 2, g.int(1, 2), 3, 7)
    size = g.ints(2, 12, 2)
    return mb.resize_bilinear(x=x, target_size_height=size[0], target_size_width=size[1], sampling_mode=g.pick(
        ("DEFAULT", "STRICT_ALIGN_CORNERS", "ALIGN_CORNERS", "OFFSET_CORNERS", "UNALIGN_CORNERS")))


@_register_kind(2.0)
def _crop_resize(g: Draft) -> Var:
    g.needs(17)
    images = g.int(1, 3)
    x = g.input([images, g.int(1, 3), g.int(4, 9), g.int(4, 9)])
    height, width = (int(n) for n in x.shape[2:])
    boxes = []
    for _ in range(g.int(1, 4)):
        top, bottom = sorted(g.random.uniform(0, height - 1, 2))
        left, right = sorted(g.random.uniform(0, width - 1, 2))
        boxes.append([top, left, bottom, right])
    held = np.array(boxes, np.float32)
    if g.chance(0.5):
        held = np.round(held * g.pick((1, 2, 4))) / g.pick((1, 2, 4))
        held[:, [0, 2]] = held[:, [0, 2]].clip(0, height - 1)
        held[:, [1, 3]] = held[:, [1, 3]].clip(0, width - 1)
    return mb.crop_resize(
        x=x, boxes=held.astype(g.np_dtype), box_indices=np.array(g.ints(0, images - 1, len(boxes)), np.int32),
        target_height=g.int(1, 6), target_width=g.int(1, 6), sampling_mode=g.pick(
            ("DEFAULT", "STRICT_ALIGN_CORNERS", "ALIGN_CORNERS", "OFFSET_CORNERS", "UNALIGN_CORNERS")))


# Sums, norms, softmax ---------------------------------------------------------------------------------------------

@_register_kind(2.0)
def _cumsum(g: Draft) -> Var:
    x = g.input([*g.shape(g.int(0, 3), 1, 4), g.pick((3, 13, 14, 40, 170, 300))]) if g.chance(0.5) else g.value()
    if x.rank == 0:
        raise UnsuitableKind
    axis = _pick_axis(g, x) if g.opset.value >= ct.target.iOS17.value else _pick_axis(g, x) % x.rank
    return mb.cumsum(x=x, axis=axis, exclusive=g.chance(0.4), reverse=g.chance(0.4))


@_register_kind()
def _product(g: Draft) -> Var:
    x = g.fixed(g.int(2, 4))
    y = mb.add(x=mb.tanh(x=x), y=g.number(g.pick((0, 1.5))))
    return mb.reduce_prod(x=y, axes=[_pick_axis(g, y, 1)], keep_dims=g.chance(0.5))


@_register_kind(2.0)
def _norm(g: Draft) -> Var:
    x = g.value(4, shape=g.shape(4, 2, 6)) if g.chance(0.7) else g.value(g.int(3, 5) if g.chance(0.5) else None)
    tiny = g.chance(0.4) and g.opset.value >= ct.target.iOS17.value
    epsilon = np.float32(g.pick((1e-12, 1e-10, 1e-9))) if tiny else g.number(1e-3)
    kind = g.pick(("layer_norm", "instance_norm", "l2_norm"))
    if kind == "layer_norm":
        axes = sorted({x.rank - 1, g.int(max(1, x.rank - 2), x.rank - 1)}) if x.rank > 1 else [0]
        sizes = [int(x.shape[axis]) for axis in axes] if all(not is_symbolic(x.shape[a]) for a in axes) else None
        affine = {"gamma": g.array(*sizes), "beta": g.array(*sizes)} if sizes and g.chance(0.5) else {}
        return mb.layer_norm(x=x, axes=axes, epsilon=epsilon, **affine)
    if x.rank not in (3, 4):
        raise UnsuitableKind
    if kind == "instance_norm":
        if is_symbolic(x.shape[1]):
            raise UnsuitableKind
        return mb.instance_norm(x=x, gamma=g.array(int(x.shape[1])), beta=g.array(int(x.shape[1])), epsilon=epsilon)
    return mb.l2_norm(x=x, epsilon=epsilon)


@_register_kind(1.5)
def _spelled_norm(g: Draft) -> Var:
    x = g.value()
    if x.rank == 0:
        raise UnsuitableKind
    axis = _pick_axis(g, x)
    centred = mb.sub(x=x, y=mb.reduce_mean(x=x, axes=[axis], keep_dims=True)) if g.chance(0.4) else x
    square = g.pick((lambda: mb.square(x=centred), lambda: mb.mul(x=centred, y=centred),
                     lambda: mb.pow(x=centred, y=g.number(2))))()
    mean = (mb.reduce_mean if g.chance(0.7) else mb.reduce_sum)(x=square, axes=[axis], keep_dims=True)
    epsilon = g.number(g.pick((1e-3, 1e-5, 6e-8)))
    if g.chance(0.6):
        return mb.mul(x=centred, y=mb.rsqrt(x=mb.add(x=mean, y=epsilon), epsilon=g.number(1e-7)))
    return mb.real_div(x=centred, y=mb.sqrt(x=mb.add(x=mean, y=epsilon)))


@_register_kind()
def _unprotected_norm(g: Draft) -> Var:
    """A root of a sum of squares with an epsilon that fp16 does not hold."""
    g.needs(17, "fp16")
    x = g.fixed(g.int(2, 4))
    mean = mb.reduce_mean(x=mb.square(x=x), axes=[-1], keep_dims=True)
    return mb.mul(x=x, y=mb.rsqrt(x=mean, epsilon=np.float32(g.pick((1e-12, 1e-10)))))


@_register_kind()
def _group_norm(g: Draft) -> Var:
    groups, each, height, width = g.int(1, 3), g.int(1, 3), g.int(2, 4), g.int(2, 4)
    x = g.input([1, groups * each, height, width])
    y = mb.reshape(x=x, shape=[1, groups, each, height, width])
    mean = mb.reduce_mean(x=y, axes=[2, 3, 4], keep_dims=True)
    centred = mb.sub(x=y, y=mean)
    variance = mb.reduce_mean(x=mb.square(x=centred), axes=[2, 3, 4], keep_dims=True)
    normed = mb.mul(x=centred, y=mb.rsqrt(x=mb.add(x=variance, y=g.number(1e-3)), epsilon=g.number(1e-7)))
    scaled = mb.mul(x=mb.reshape(x=normed, shape=[1, groups * each, height, width]),
                    y=g.array(1, groups * each, 1, 1))
    return mb.add(x=scaled, y=g.array(1, groups * each, 1, 1))


@_register_kind(2.0)
def _softmax(g: Draft) -> Var:
    x = g.value()
    if x.rank == 0:
        raise UnsuitableKind
    axis = _pick_axis(g, x)
    if g.chance(0.3):
        x = mb.mul(x=x, y=g.number(20))
    form = g.int(0, 5)
    if form == 0:
        return mb.softmax(x=x, axis=axis)
    if form == 1:
        bounded = {"epsilon": g.number(g.pick((1e-7, 1e-4)))} if g.chance(0.3) else {}
        return mb.log(x=mb.softmax(x=x, axis=axis), **bounded)
    if form == 5:
        return mb.sub(x=x, y=mb.reduce_log_sum_exp(x=x, axes=[axis], keep_dims=True))
    if form == 2:
        return mb.reduce_log_sum_exp(x=x, axes=[axis], keep_dims=g.chance(0.5))
    total = mb.reduce_sum(x=mb.exp(x=x), axes=[axis], keep_dims=True)
    logarithm = mb.log(x=total, epsilon=g.number(1e-7))
    return logarithm if form == 3 else mb.sub(x=x, y=logarithm)


@_register_kind(2.0)
def _mask(g: Draft) -> Var:
    """An additive mask before a softmax, computed or constant."""
    x = g.fixed(g.int(2, 4))
    last = int(x.shape[-1])
    low = g.number(g.pick((-math.inf, -1e9, -65504, -1e4)))
    with np.errstate(over="ignore"):
        if g.chance(0.4):
            held = np.where(g.random.random(last) < 0.5, low, 0).astype(g.np_dtype)
            held[g.int(0, last - 1)] = 0
            return mb.softmax(x=mb.add(x=x, y=held), axis=-1)
        mask = mb.greater(x=g.input([last]), y=g.number(0))
        if g.chance(0.5):
            return mb.softmax(x=mb.select(cond=mask, a=x, b=low), axis=-1) if g.chance(0.5) else mb.softmax(
                x=mb.add(x=x, y=mb.select(cond=mask, a=g.number(0), b=low)), axis=-1)
        hidden = mb.sub(x=g.number(1), y=mb.cast(x=mask, dtype=g.dtype))
        return mb.softmax(x=mb.add(x=x, y=mb.mul(x=hidden, y=low)), axis=-1)


# Products ---------------------------------------------------------------------------------------------------------

@_register_kind()
def _matmul(g: Draft) -> Var:
    x = g.fixed(g.int(2, 4), 1)
    last = int(x.shape[-1])
    if g.chance(0.5):
        return mb.matmul(x=x, y=g.weight(last, g.int(1, 5)))
    other = g.input([g.int(1, 5), last] if g.chance(0.5) else [*g.shape(x.rank, 1, 1)[:-2], g.int(1, 4), last])
    return mb.matmul(x=x, y=other, transpose_y=True)


@_register_kind()
def _linear(g: Draft) -> Var:
    x = g.fixed(g.int(1, 4), 1)
    if is_symbolic(x.shape[-1]):
        raise UnsuitableKind
    outward = g.int(1, 8)
    bias = {"bias": g.array(outward)} if g.chance(0.5) else {}
    return mb.linear(x=x, weight=g.weight(outward, int(x.shape[-1])), **bias)


@_register_kind(0.35)
def _wide_linear(g: Draft) -> Var:
    inward, outward = g.int(1, 3), g.pick((16390, 65540))
    if outward < 65536:
        g.targets.add("m1")
    x = mb.add(x=g.input([g.int(1, 2), inward]), y=g.number(0.5))
    if g.chance(0.3):
        return mb.matmul(x=x, y=g.weight(inward, outward))
    bias = {"bias": g.array(outward)} if g.chance(0.5) else {}
    return mb.linear(x=x, weight=g.weight(outward, inward), **bias)


@_register_kind(0.5)
def _inner_product(g: Draft) -> Var:
    inner = g.pick((33000, 40000))
    rows = mb.add(x=mb.reduce_mean(x=g.input([2, 3]), axes=[1], keep_dims=True), y=g.array(inner, scale=0.01))
    if g.chance(0.5):
        return mb.linear(x=rows, weight=g.weight(2, inner))
    return mb.matmul(x=g.input([1, inner, 2]), y=g.input([1, inner, 3]), transpose_x=True)


@_register_kind()
def _attention(g: Draft) -> Var:
    g.needs(18)
    heads, length, width = g.int(1, 2), g.int(2, 5), g.pick((2, 4, 8))
    query = g.input([1, heads, length, width])
    key, value = g.input([1, heads, g.int(2, 5), width]), None
    value = g.input([1, heads, int(key.shape[2]), width])
    mask = {}
    if g.chance(0.4):
        mask["attn_mask"] = g.array(1, 1, length, int(key.shape[2]))
    return mb.scaled_dot_product_attention(query=query, key=key, value=value, **mask)


@_register_kind(1.5)
def _row_slice(g: Draft) -> list[Var]:
    """Ops that compute row by row, or not quite, before a slice of a few rows; some rows are read elsewhere, too."""
    rank = g.int(2, 4)
    x = g.fixed(rank, 3)
    axis = g.int(0 if not is_symbolic(x.shape[0]) and int(x.shape[0]) > 2 else 1, rank - 1)
    seen = [x]
    for _ in range(g.int(1, 5)):
        x = _apply_by_rows(g, x, axis)
        seen.append(x)
    taken = [_take_rows(g, x, axis)]
    if g.chance(0.25):
        taken.append(mb.reduce_max(x=g.pick(seen), axes=[-1], keep_dims=True))
    if g.chance(0.25):
        taken.append(_take_rows(g, x, axis))
    return taken


def _apply_by_rows(g: Draft, x: Var, axis: int) -> Var:
    """An op whose result has the axes of x, of which most compute each row of `axis` by itself."""
    width, other = int(x.shape[-1]), (axis + 1) % x.rank
    kinds: dict[str, Callable[[], Var]] = {
        "unary": lambda: getattr(mb, g.pick(("relu", "tanh", "square", "abs", "sigmoid", "round")))(x=x),
        "scale": lambda: mb.mul(x=x, y=g.number(0.5)),
        "weight": lambda: mb.add(x=x, y=g.array(*(int(n) for n in x.shape[1:]))),
        "residual": lambda: mb.add(x=x, y=mb.tanh(x=x)),
        "softmax": lambda: mb.softmax(x=x, axis=g.pick((axis, other))),
        "mean": lambda: mb.sub(x=x, y=mb.reduce_mean(x=x, axes=[g.pick((axis, other))], keep_dims=True)),
        "linear": lambda: mb.linear(x=x, weight=g.weight(width, width), bias=g.array(width)),
        "matmul": lambda: mb.matmul(x=x, y=g.weight(width, width), transpose_y=g.chance(0.5)),
        "square": lambda: mb.mul(x=mb.reduce_sum(x=mb.mul(x=x, y=x), axes=[other], keep_dims=True), y=x),
        "twice": lambda: mb.transpose(x=mb.relu(x=mb.transpose(x=x, perm=list(range(x.rank))[::-1])),
                                      perm=list(range(x.rank))[::-1]),
        "apart": lambda: mb.concat(values=[mb.relu(x=x), x], axis=other) if g.chance(0.3) else mb.sub(
            x=mb.exp(x=mb.clip(x=x, alpha=g.number(-4), beta=g.number(4))), y=x),
        "row": lambda: mb.add(x=x, y=mb.slice_by_index(
            x=mb.square(x=x), begin=[0] * x.rank, end=[1] * x.rank, end_mask=[at != axis for at in range(x.rank)])),
        "split": lambda: mb.squeeze(x=mb.add(x=mb.expand_dims(x=x, axes=[0]), y=g.number(1)), axes=[0]),
    }
    return kinds[g.pick(tuple(kinds))]()


def _take_rows(g: Draft, x: Var, axis: int) -> Var:
    extent = x.shape[axis]
    if is_symbolic(extent):
        raise UnsuitableKind
    rows, form = int(extent), g.int(0, 3)
    if form == 0:
        return mb.gather(x=x, indices=np.int32(g.int(-rows, rows - 1)), axis=axis)
    if form == 1:
        return mb.gather(x=x, indices=np.array(g.ints(0, rows - 1, 2), np.int32), axis=axis)
    first = g.int(0, rows - 1)
    last = min(rows, first + g.int(1, 2))
    begin, end, mask = [0] * x.rank, [0] * x.rank, [at != axis for at in range(x.rank)]
    begin[axis], end[axis] = first - (rows if g.chance(0.3) else 0), last
    drops = {"squeeze_mask": [at == axis for at in range(x.rank)]} if form == 2 and x.rank > 1 else {}
    return mb.slice_by_index(x=x, begin=begin, end=end, begin_mask=mask, end_mask=mask, **drops)


@_register_kind()
def _grouped_heads(g: Draft) -> Var:
    """Attention with keys and values that are repeated for the heads of a group, in row or in turn."""
    groups, times, width, keys = g.int(1, 3), g.int(2, 3), g.pick((2, 4)), g.int(2, 5)
    rows = g.pick((1, 1, 2, 6))
    query = g.input([1, groups * times, rows, width])
    key, value = (g.input([1, groups, keys, width]) for _ in range(2))
    form = g.int(0, 4)
    repeated = [_repeat_heads(x, times, form) for x in (key, value)]
    scores = mb.matmul(x=query, y=repeated[0], transpose_y=True)
    if g.chance(0.5):
        scores = mb.mul(x=scores, y=g.number(0.5))
    if g.chance(0.5):
        scores = mb.add(x=scores, y=g.array(1, 1, g.pick((1, rows)), keys))
    return mb.matmul(x=mb.softmax(x=scores, axis=-1), y=repeated[g.pick((1, 1, 1, 0))])


def _repeat_heads(x: Var, times: int, form: int) -> Var:
    batch, heads, rows, width = map(int, x.shape)
    if form == 0:
        tiled = mb.tile(x=mb.expand_dims(x=x, axes=[2]), reps=[1, 1, times, 1, 1])
        return mb.reshape(x=tiled, shape=[batch, heads * times, rows, width])
    if form == 1:
        return mb.gather(x=x, indices=np.repeat(np.arange(heads), times).astype(np.int32), axis=1)
    if form == 2:
        return mb.concat(values=[x] * times, axis=1, interleave=True)
    if form == 3:
        return mb.tile(x=x, reps=[1, times, 1, 1])
    parts = mb.split(x=x, num_splits=heads, axis=1) if heads > 1 else [x]
    return mb.concat(values=[part for part in parts for _ in range(times)], axis=1)


@_register_kind()
def _repeated_work(g: Draft) -> Var:
    """Layers that prepare the same value, some of them another."""
    x, other = g.value(2), g.number(g.int(1, 3) / 2)
    total = x
    for _ in range(g.int(2, 3)):
        factor = g.number(2) if g.chance(0.7) else g.number(3)
        pair = (x, mb.tanh(x=mb.mul(x=x, y=factor)))
        product = mb.mul(x=pair[0], y=pair[1]) if g.chance(0.5) else mb.mul(x=pair[1], y=pair[0])
        total = mb.add(x=total, y=mb.sub(x=product, y=other))
    return total


@_register_kind(1.2)
def _large_sum(g: Draft) -> Var:
    """Partial sums that pass 32768 with the feeds that the run is given."""
    g.needs(15, "fp16")
    if g.symbolic:
        raise UnsuitableKind
    g.scale = 64.0
    weight = (g.random.integers(-4, 5, (4, 8)) * 64).astype(g.np_dtype)
    return mb.mul(x=mb.linear(x=mb.clip(x=g.input([2, 8]), alpha=g.number(-60), beta=g.number(60)), weight=weight),
                  y=g.number(2**-8))


# Recurrences and loops --------------------------------------------------------------------------------------------

def _make_recurrent(g: Draft, kind: str, gates: int, states: tuple[str, ...]) -> list[Var]:
    steps, batch, inward, width = g.int(1, 6), g.int(1, 3), g.int(1, 5), g.int(1, 6)
    both = kind == "lstm" and g.chance(0.3)
    direction = "bidirectional" if both else g.pick(("forward", "reverse"))
    how: dict[str, Any] = {"direction": direction, "output_sequence": g.chance(0.7)}
    for back in ("", "_back")[:1 + both]:
        how[f"weight_ih{back}"] = g.weight(gates * width, inward)
        how[f"weight_hh{back}"] = g.weight(gates * width, width)
        if g.chance(0.6):
            how[f"bias{back}"] = g.array(gates * width)
        if kind == "lstm" and g.chance(0.3):
            how[f"peephole{back}"] = g.array(3 * width)
    if both and ("peephole" in how) != ("peephole_back" in how):
        how.pop("peephole", None), how.pop("peephole_back", None)
    if kind == "lstm" and g.chance(0.2):
        how["clip"] = g.number(0.5)
    if kind == "gru" and g.opset.value >= ct.target.iOS18.value and g.chance(0.5):
        how |= {"reset_after": True, "input_bias": g.array(gates * width)}
    if g.chance(0.25):
        how["activation"] = g.pick(("relu", "sigmoid", "linear"))
    for state in states:
        shape = (batch, width * (1 + both))
        how[state] = g.pick((lambda: np.zeros(shape, g.np_dtype), lambda: g.array(*shape), lambda: g.input(shape)))()
    return list(getattr(mb, kind)(x=g.input([steps, batch, inward]), **how))


@_register_kind(2.0)
def _lstm(g: Draft) -> list[Var]:
    return _make_recurrent(g, "lstm", 4, ("initial_h", "initial_c"))


@_register_kind(2.0)
def _gru(g: Draft) -> list[Var]:
    return _make_recurrent(g, "gru", 3, ("initial_h",))


@_register_kind(1.5)
def _rnn(g: Draft) -> list[Var]:
    return _make_recurrent(g, "rnn", 1, ("initial_h",))


@_register_kind()
def _loop(g: Draft) -> list[Var]:
    """A counted loop, sometimes with another in it, or with a branch by the step."""
    x = g.value()
    steps, form = g.int(0, 5), g.int(0, 3)
    factor = g.weight(int(x.shape[-1])) if x.rank and not is_symbolic(x.shape[-1]) else g.number(0.5)

    def step(i: Var, y: Var) -> Var:
        if form == 1:
            inner = mb.while_loop(_cond=lambda j, z: mb.less_equal(x=j, y=i),
                                  _body=lambda j, z: (mb.add(x=j, y=np.int32(1)), mb.mul(x=z, y=g.number(0.5))),
                                  loop_vars=(np.int32(0), y))
            return inner[1]
        if form == 2:
            odd = mb.equal(x=mb.mod(x=i, y=np.int32(2)), y=np.int32(1))
            return mb.cond(pred=odd, _true_fn=lambda: mb.relu(x=y), _false_fn=lambda: mb.tanh(x=y))
        return mb.mul(x=mb.add(x=y, y=mb.cast(x=i, dtype=g.dtype)), y=factor)

    loop = mb.while_loop(_cond=lambda i, y: mb.less(x=i, y=np.int32(steps)),
                         _body=lambda i, y: (mb.add(x=i, y=np.int32(1)), step(i, y)), loop_vars=(np.int32(0), x))
    return [loop[1]]


@_register_kind()
def _branch(g: Draft) -> Var:
    x = g.value()
    if x.rank == 0:
        raise UnsuitableKind
    known = g.chance(0.4)
    flag: Any = np.bool_(g.chance(0.5)) if known else mb.greater(x=mb.reduce_sum(
        x=x, axes=list(range(x.rank)), keep_dims=False), y=g.number(0))
    return mb.cond(pred=flag, _true_fn=lambda: mb.relu(x=x), _false_fn=lambda: mb.mul(x=x, y=g.number(0.5)))


@_register_kind()
def _rows(g: Draft) -> list[Var]:
    """Rows written to a list, or scattered one after the other, and read again."""
    count, width = g.int(2, 4), g.int(1, 5)
    x = g.input([count, width])
    rows = [mb.gather(x=x, indices=np.int32(at), axis=0) for at in range(count)]
    order = [int(at) for at in g.random.permutation(count)]
    if g.chance(0.5):
        g.needs(15)
        held = mb.make_list(init_length=count, elem_shape=(width,), dynamic_length=False, dtype=g.dtype)
        for at in order:
            held = mb.list_write(ls=held, index=np.int32(at), value=mb.tanh(x=rows[at]))
        return [mb.list_gather(ls=held, indices=np.array(order[:g.int(1, count)], np.int32))]
    data: Any = np.zeros((count, width), g.np_dtype)
    for at in order:
        data = mb.scatter(data=data, indices=np.array([at], np.int32), axis=0, mode=g.pick(("update", "add")),
                          updates=mb.expand_dims(x=mb.tanh(x=rows[at]), axes=[0]))
    return [data, mb.gather(x=data, indices=np.int32(g.int(0, count - 1)), axis=0)]


@_register_kind()
def _state(g: Draft) -> list[Var]:
    g.needs(18, "fp16")
    shape = [g.int(1, 3), g.int(1, 6)]
    state = g.input(shape, "state")
    old = mb.read_state(input=state)
    new = mb.coreml_update_state(state=state, value=mb.add(x=mb.mul(x=old, y=g.number(0.5)), y=g.input(shape)))
    return [mb.cumsum(x=new, axis=-1) if g.chance(0.5) else mb.tanh(x=new), mb.sinh(x=old)]


# Integers and selections ------------------------------------------------------------------------------------------

def _make_indices(g: Draft, bound: int, shape: list[int], negative: bool = True) -> Any:
    """Indices into `bound` elements: constants, or computed by the caller, of both signs."""
    if g.chance(0.4):
        made = g.input(shape, "int32")
        return mb.sub(x=made, y=np.int32(g.int(1, bound))) if negative and g.chance(0.3) else made
    low = -bound if negative and g.chance(0.5) else 0
    return np.array(g.ints(low, bound - 1, int(np.prod(shape, dtype=int))), np.int32).reshape(shape)


@_register_kind(2.0)
def _gather(g: Draft) -> Var:
    x = g.fixed(g.int(2, 4))
    axis = _pick_axis(g, x, 1)
    ids = _make_indices(g, int(x.shape[axis]), g.ints(1, 4, g.int(0, 2)))
    form = g.int(0, 2)
    if form == 0 and g.chance(0.3):  # a run, a stride, or a partial reversal
        bound = int(x.shape[axis])
        ids = np.arange(bound, dtype=np.int32)[g.pick((slice(None), slice(None, None, 2), slice(None, None, -1),
                                                       slice(None, 0, -1)))]
    if form < 2:
        return mb.gather(x=x, indices=ids, axis=axis)
    if is_symbolic(x.shape[0]):
        raise UnsuitableKind
    shape = [int(n) for n in x.shape]
    shape[axis] = g.int(1, 4)
    return mb.gather_along_axis(x=x, indices=_make_indices(g, int(x.shape[axis]), shape), axis=axis)


@_register_kind()
def _table(g: Draft) -> Var:
    rows = g.pick((5, 40, 3000))
    ids = g.input([g.int(1, 4)], "int32")
    if g.chance(0.6):  # brought into range as frontends write it
        ids = mb.select(cond=mb.greater_equal(x=ids, y=np.int32(0)), a=ids, b=mb.add(x=ids, y=np.int32(rows)))
    return mb.gather(x=g.weight(rows, g.int(1, 6)), indices=ids, axis=0)


@_register_kind()
def _gather_nd(g: Draft) -> Var:
    x = g.fixed(g.int(2, 4))
    if is_symbolic(x.shape[0]):
        raise UnsuitableKind
    depth = g.int(1, min(x.rank, 2))
    columns = [g.ints(0, int(x.shape[axis]) - 1, 3) for axis in range(depth)]
    return mb.gather_nd(x=x, indices=np.array(columns, np.int32).T)


@_register_kind(2.0)
def _scatter(g: Draft) -> Var:
    x = g.fixed(g.int(1, 3))
    if not _has_static_shape(x):
        raise UnsuitableKind
    axis = _pick_axis(g, x)
    bound, form = int(x.shape[axis]), g.int(0, 2)
    mode = g.pick(("add", "update", "mul", "max", "min", "sub"))
    if form == 2:
        depth = g.int(1, x.rank)
        places = {tuple(g.int(0, int(n) - 1) for n in x.shape[:depth]) for _ in range(3)}
        shape = [len(places), *x.shape[depth:]]
        updates = g.input(shape) if g.chance(0.6) else g.array(*shape)
        return mb.scatter_nd(data=x, indices=np.array(sorted(places), np.int32), updates=updates, mode=mode)
    count = g.int(1, bound)
    ids = g.random.permutation(bound)[:count].astype(np.int32) - (bound if g.chance(0.3) else 0)
    shape = [int(n) for n in x.shape]
    shape[axis] = count
    updates = g.input(shape) if g.chance(0.6) else g.array(*shape)
    if form == 0:
        ids = _make_indices(g, bound, [count]) if g.chance(0.2) and mode == "add" else ids
        return mb.scatter(data=x, indices=ids, updates=updates, axis=axis, mode=mode)
    lined = np.moveaxis(np.broadcast_to(ids, (*np.delete(shape, axis), count)), -1, axis)
    return mb.scatter_along_axis(data=x, indices=np.ascontiguousarray(lined), updates=updates, axis=axis, mode=mode)


@_register_kind(1.5)
def _one_hot(g: Draft) -> Var:
    size = g.int(2, 6)
    ids = g.input(g.ints(1, 4, g.int(1, 2)), "int32")
    if g.chance(0.3):
        ids = mb.sub(x=ids, y=np.int32(g.int(1, 4)))
    hot = mb.one_hot(indices=ids, one_hot_vector_size=size, axis=g.pick((-1, 0)),
                     on_value=g.number(g.pick((1, 2))), off_value=g.number(g.pick((0, -1))))
    return hot


@_register_kind(1.5)
def _order(g: Draft) -> list[Var]:
    x = g.value()
    if x.rank == 0:
        raise UnsuitableKind
    axis = _pick_axis(g, x)
    if g.chance(0.3):
        x = mb.round(x=x)
    form = g.int(0, 2)
    if form == 0:
        values, places = mb.topk(x=x, k=g.int(1, int(x.shape[axis])), axis=axis, ascending=g.chance(0.3))[:2]
        return [values, places]
    if form == 1:
        place = getattr(mb, g.pick(("reduce_argmax", "reduce_argmin")))(x=x, axis=axis, keep_dims=g.chance(0.5))
        return [mb.cast(x=place, dtype=g.dtype) if g.chance(0.6) else place]
    return [mb.argsort(x=x, axis=axis, ascending=g.chance(0.5))]


@_register_kind(1.5)
def _mod(g: Draft) -> Var:
    x = g.value()
    if x.rank == 0:
        raise UnsuitableKind
    if g.chance(0.5):
        x = mb.mul(x=x, y=g.number(g.pick((8, 100))))
    return mb.mod(x=x, y=g.number(g.pick((1, 2, 4, 32, 0.5, 0.25, 2 * math.pi, math.pi, 360, 3, 10, 0.1, -3, -2, 7))))


@_register_kind(1.5)
def _logic(g: Draft) -> Var:
    x = g.value()
    y = mb.sub(x=x, y=g.number(0.3))
    first, second = mb.greater(x=x, y=g.number(0)), mb.less(x=mb.abs(x=y), y=g.number(0.7))
    both = getattr(mb, g.pick(("logical_and", "logical_or", "logical_xor")))(x=first, y=second)
    if g.chance(0.3):
        both = mb.logical_not(x=both)
    return mb.select(cond=both, a=x, b=y) if g.chance(0.5) else mb.cast(x=both, dtype=g.dtype)


@_register_kind(1.5)
def _integers(g: Draft) -> Var:
    x = g.input(g.ints(1, 4, g.int(1, 3)), "int32")
    for _ in range(g.int(1, 4)):
        kind = g.pick(("add", "sub", "mul", "floor_div", "mod", "maximum", "minimum"))
        x = getattr(mb, kind)(x=x, y=np.int32(g.int(1, 5)))
    if g.chance(0.5):
        same = mb.equal(x=x, y=np.int32(g.int(0, 4)))
        return mb.cast(x=same, dtype=g.dtype)
    return mb.mul(x=mb.cast(x=x, dtype=g.dtype), y=g.number(0.5))


@_register_kind()
def _casts(g: Draft) -> Var:
    x = g.value()
    if x.rank == 0:
        raise UnsuitableKind
    if g.chance(0.5):  # a count of truths
        whole = mb.cast(x=mb.greater(x=x, y=g.number(0)), dtype="int32")
        count = mb.reduce_sum(x=whole, axes=[_pick_axis(g, x)], keep_dims=True)
        more = mb.greater_equal(x=count, y=np.int32(g.int(1, 2))) if g.chance(0.5) else mb.sub(x=np.int32(9), y=count)
        return mb.cast(x=more, dtype=g.dtype)
    whole = mb.cast(x=mb.mul(x=x, y=g.number(4)), dtype="int32")
    return mb.cast(x=mb.add(x=whole, y=np.int32(g.int(-3, 3))), dtype=g.dtype)


# Layout -----------------------------------------------------------------------------------------------------------

@_register_kind(1.5)
def _pad(g: Draft) -> Var:
    x = g.fixed(g.int(2, 4), 3)
    mode = g.pick(("constant", "constant", "reflect", "replicate"))
    most = 2 if mode != "constant" else 3
    if mode == "constant":
        return mb.pad(x=x, pad=g.ints(0, most, 2 * g.int(1, x.rank - 1)), mode=mode,
                      constant_val=g.number(g.pick((0, 1, -2.5))))
    return mb.pad(x=x, pad=g.ints(0, most, 2 * min(2, x.rank - 1)), mode=mode)


@_register_kind(1.5)
def _windows(g: Draft) -> Var:
    x = g.input([g.batch(), g.int(4, 20), g.int(1, 4)][:g.int(2, 3)])
    size = g.int(1, int(x.shape[1]))
    return mb.sliding_windows(x=x, axis=1, size=size, stride=g.int(1, 4))


@_register_kind()
def _high_rank(g: Draft) -> Var:
    height, width, block = g.int(1, 3), g.int(1, 3), g.pick((2, 3))
    channels = g.int(1, 3)
    x = g.input([1, channels, height * block, width * block])
    y = mb.reshape(x=x, shape=[1, channels, height, block, width, block])
    y = mb.transpose(x=y, perm=g.pick(([0, 1, 3, 5, 2, 4], [0, 2, 4, 3, 5, 1], [0, 1, 2, 4, 3, 5])))
    if g.chance(0.3):
        y = mb.relu(x=y)
    return mb.reshape(x=y, shape=[1, -1, width])


@_register_kind(1.5)
def _slice(g: Draft) -> Var:
    x = g.fixed(g.int(2, 4), 3)
    axis = _pick_axis(g, x, 1) % x.rank
    begin, end = [0] * x.rank, [0] * x.rank
    begin[axis], end[axis] = g.int(0, 1), int(x.shape[axis]) - g.int(0, 1)
    stride = [g.pick((1, 1, 2)) if at == axis else 1 for at in range(x.rank)]
    mask = [at != axis for at in range(x.rank)]
    return mb.slice_by_index(x=x, begin=begin, end=end, stride=stride, begin_mask=mask, end_mask=mask)


@_register_kind()
def _slice_by_shape(g: Draft) -> Var:
    """A slice whose end is worked out of the value's own shape."""
    if not g.symbolic:
        raise UnsuitableKind
    x = g.input([None, g.int(2, 5)])
    size = mb.gather(x=mb.shape(x=x), indices=np.int32(0), axis=0)
    end = mb.concat(values=[mb.sub(x=size, y=np.int32(g.int(0, 1))), np.int32(int(x.shape[1]))], axis=0)
    return mb.slice_by_index(x=x, begin=[0, 0], end=end, end_mask=[False, True])


@_register_kind()
def _fill(g: Draft) -> list[Var]:
    x = g.value()
    if x.rank == 0:
        raise UnsuitableKind
    form = g.int(0, 3)
    if form == 0:
        return [mb.add(x=x, y=mb.fill_like(ref_tensor=x, value=g.number(0.5)))]
    if form == 1:
        return [mb.mul(x=mb.transpose(x=mb.fill(shape=g.ints(1, 4, 2), value=g.number(2)), perm=[1, 0]),
                       y=g.number(1.5))]
    if form == 2:
        counted = mb.range_1d(start=np.int32(g.int(-3, 0)), end=np.int32(g.int(1, 9)), step=np.int32(g.int(1, 3)))
        return [mb.expand_dims(x=mb.cast(x=counted, dtype=g.dtype), axes=[0])]
    rows = mb.gather(x=mb.shape(x=x), indices=np.array([0], np.int32), axis=0)
    return [mb.fill(shape=mb.concat(values=[rows, np.array([3], np.int32)], axis=0), value=g.number(-1))]


@_register_kind()
def _arrange(g: Draft) -> Var:
    x = g.fixed(g.int(2, 5), 1)
    form = g.int(0, 5)
    axis = _pick_axis(g, x)
    if form == 0:
        return mb.concat(values=[x, mb.relu(x=x)], axis=axis)
    if form == 1:
        return mb.reverse(x=x, axes=[axis])
    if form == 2:
        return mb.tile(x=x, reps=g.ints(1, 2, x.rank))
    if form == 3:
        return mb.transpose(x=x, perm=[int(at) for at in g.random.permutation(x.rank)])
    if form == 4 and x.rank < 5:
        return mb.stack(values=[x, mb.tanh(x=x)], axis=axis % x.rank)
    return mb.band_part(x=x, lower=g.int(-1, 2), upper=g.int(-1, 2))


@_register_kind()
def _broadcast(g: Draft) -> Var:
    x = g.input([g.batch(), 1, g.int(2, 5)])
    y = g.input([1, g.int(2, 4), int(x.shape[2])])
    return mb.add(x=mb.tile(x=x, reps=[1, int(y.shape[1]), 1]), y=y)


@_register_kind(0.35)
def _lopsided(g: Draft) -> Var:
    length = g.pick((70000, 65600, 66000))
    x = g.input([1, length])
    y = mb.mul(x=mb.relu(x=x) if g.chance(0.5) else mb.mul(x=x, y=mb.reduce_max(x=x, axes=[1], keep_dims=True)),
               y=g.number(0.5))
    return mb.add(x=mb.sqrt(x=mb.abs(x=y)), y=x)


@_register_kind()
def _scalar(g: Draft) -> Var:
    """Values of rank 0 and 1."""
    x = g.input(g.ints(1, 5, g.int(0, 1)))
    y = mb.exp(x=mb.clip(x=x, alpha=g.number(-4), beta=g.number(4)))
    return mb.maximum(x=mb.sub(x=y, y=x), y=g.number(0.25))


@_register_kind()
def _static_mask(g: Draft) -> Var:
    """Places of a constant mask."""
    x = g.input([g.int(3, 6), g.int(1, 3)])
    held = g.random.random(int(x.shape[0])) < 0.6
    held[0] = True
    places = mb.non_zero(x=held.astype(np.float32))
    if g.chance(0.5):
        return mb.add(x=x, y=mb.reduce_sum(x=mb.cast(x=places, dtype=g.dtype)))
    return mb.gather_nd(x=x, indices=places)


@_register_kind()
def _blocks(g: Draft) -> Var:
    x = g.input([1, 4 * g.int(1, 2), 2 * g.int(1, 3), 2 * g.int(1, 3)])
    kind = g.pick(("space_to_depth", "depth_to_space", "pixel_shuffle", "space_to_batch"))
    if kind == "pixel_shuffle":
        return mb.pixel_shuffle(x=x, upscale_factor=2)
    if kind == "space_to_batch":
        return mb.space_to_batch(x=x, block_shape=[2, 2], paddings=np.zeros((2, 2), np.int32))
    return getattr(mb, kind)(x=x, block_size=2)


