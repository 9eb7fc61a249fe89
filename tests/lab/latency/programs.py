"""MIL programs of the shapes that measurements name, with placeholder weights of any size (one element, broadcast)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Program, types

FORMATS = {
    "fp16": "fp16", "fp16 dense": "fp16", "fp16 weights": "fp16", "int8 (W8A16)": "int8", "W8A16": "int8",
    "int8 weights": "int8", "int8 weights, fp16 act": "int8", "int8 weights (W8A16)": "int8",
    "int8 weights only": "int8",
    "W8A8": "w8a8", "A8W4": "a8w4", "W4A16": "4-bit palette", "int4 LUT": "4-bit palette",
    "sparse 2:4": "sparse 50%", "sparse 1:4 kept": "sparse 75%",
}
_PALETTE = re.compile(r"(\d)-bit palette( group16)?")
_SPARSE = re.compile(r"sparse (\d+)%( \+ 4-bit palette)?")


def parse_format(text: str) -> str | None:
    """Return the weight format that `text` of a table names, None for one that cannot be built."""
    found = FORMATS.get(text, text)
    known = found in ("fp16", "int8", "w8a8", "a8w4") or _PALETTE.fullmatch(found) or _SPARSE.fullmatch(found)
    return found if known else None


def fill_weight(shape: tuple[int, ...]) -> np.ndarray:
    """Return a placeholder: one element, broadcast to `shape`."""
    return np.broadcast_to(np.float16(0.5), shape)


def _make_palette(shape: tuple[int, ...], bits: int) -> Any:
    kind = types.nptype_from_builtin(types.string_to_builtin(f"uint{bits}"))
    indices = np.broadcast_to(np.array(0, dtype=kind), shape)
    return mb.constexpr_lut_to_dense(indices=indices, lut=np.zeros((*[1] * len(shape), 2 ** bits, 1), np.float16))


def _make_sparse(shape: tuple[int, ...], zeros: float, palette: bool) -> Any:
    count = int(np.prod(shape))
    mask = np.zeros(count, dtype=types.nptype_from_builtin(types.uint1))
    mask[:round(count * (1 - zeros))] = 1
    mask = mask.reshape(shape)
    if not palette:
        return mb.constexpr_sparse_to_dense(nonzero_data=np.zeros(round(count * (1 - zeros)), np.float16), mask=mask)
    kind = types.nptype_from_builtin(types.uint4)
    indices = np.zeros(round(count * (1 - zeros)), dtype=kind)
    mask, data = mb.constexpr_lut_to_sparse(indices_mask=mask, indices_nonzero_data=indices,
                                            lut=np.zeros((*[1] * len(shape), 16, 1), np.float16))
    return mb.constexpr_sparse_to_dense(nonzero_data=data, mask=mask)


def make_weight(shape: tuple[int, ...], form: str) -> Any:
    """Make a weight of `shape` in the current block, stored in the format `form`."""
    if form in ("int8", "w8a8"):
        scale = np.full((shape[0], *[1] * (len(shape) - 1)), 0.1, np.float16)
        return mb.constexpr_blockwise_shift_scale(data=np.broadcast_to(np.int8(1), shape), scale=scale)
    if form == "a8w4" or (found := _PALETTE.fullmatch(form)) is not None:
        return _make_palette(shape, 4 if form == "a8w4" else int(found[1]))
    if (sparse := _SPARSE.fullmatch(form)) is not None:
        return _make_sparse(shape, int(sparse[1]) / 100, bool(sparse[2]))
    return mb.const(val=fill_weight(shape))


def quantize_activations(x: Any, form: str) -> Any:
    """Quantize `x` to int8 and back if `form` computes with int8 activations."""
    if form not in ("w8a8", "a8w4"):
        return x
    scale = np.float16(0.1)
    return mb.dequantize(input=mb.quantize(input=x, scale=scale, output_dtype="int8"), scale=scale)


def build(shape: tuple[int, ...] | list[tuple[int, ...]], body: Callable[..., Any]) -> Program:
    """Build a program of fp16 inputs of these shapes, whose body gets the inputs and returns the outputs."""
    shapes = shape if isinstance(shape, list) else [shape]
    specs = [mb.TensorSpec(each, dtype=types.fp16) for each in shapes]
    made = {1: lambda a: body(a), 2: lambda a, b: body(a, b), 3: lambda a, b, c: body(a, b, c),
            4: lambda a, b, c, d: body(a, b, c, d)}.get(len(shapes))
    if made is None:
        names = ", ".join(f"x{place}" for place in range(len(shapes)))
        made = eval(f"lambda {names}: body({names})", {"body": body})
    return mb.program(input_specs=specs, opset_version=ct.target.iOS18)(made)


def conv_chain(shape, weight, *, layers=1, form="fp16", dilation=1, shared=False) -> Program:
    """Build a chain of same-padded convs; `weight` is (out, in, kernel height, kernel width)."""
    def body(x):
        held = None
        for _ in range(layers):
            if held is None or not shared:
                held = make_weight(weight, form)
            x = mb.conv(x=quantize_activations(x, form), weight=held, pad_type="same", dilations=[dilation] * 2)
        return x
    return build(shape, body)


def linear_chain(rows, inner, outer, *, layers=1, form="fp16", inner_tile=0, outer_tile=0) -> Program:
    """Build a chain of linears; `inner_tile` and `outer_tile` split each into parts along K, added, and N."""
    def body(x):
        for _ in range(layers):
            x = _add_linear(x, inner, outer, form, inner_tile or inner, outer_tile or outer)
        return x
    return build((rows, inner), body)


def _add_linear(x, inner, outer, form, inner_tile, outer_tile):
    x = quantize_activations(x, form)
    columns = []
    for start in range(0, outer, outer_tile):
        width, total = min(outer_tile, outer - start), None
        for at in range(0, inner, inner_tile):
            depth = min(inner_tile, inner - at)
            part = x if depth == inner else mb.slice_by_index(x=x, begin=[0, at], end=[x.shape[0], at + depth])
            made = mb.linear(x=part, weight=make_weight((width, depth), form))
            total = made if total is None else mb.add(x=total, y=made)
        columns.append(total)
    return columns[0] if len(columns) == 1 else mb.concat(values=columns, axis=-1)


def elementwise_chain(shape, layers, op, *, operand=True) -> Program:
    """Build a chain of elementwise ops: with the input as second operand, or with a scalar."""
    def body(x):
        first, value = x, x
        for place in range(layers):
            kind = op if isinstance(op, str) else op[place % len(op)]
            value = getattr(mb, kind)(x=value, y=first if operand else np.float16(1.5))
        return value
    return build(shape, body)


def sum_of_inputs(count, shape, convs=0) -> Program:
    """Build the sum of `count` inputs, followed by 1x1 convs."""
    def body(*values):
        total = values[0]
        for value in values[1:]:
            total = mb.add(x=total, y=value)
        held = make_weight((shape[1], shape[1], 1, 1), "fp16") if convs else None
        for _ in range(convs):
            total = mb.conv(x=total, weight=held)
        return total if convs or count > 1 else mb.mul(x=total, y=np.float16(1.5))
    return build([shape] * count, body)


def softmax_program(shape, layers=1) -> Program:
    """Build a chain of softmaxes on the last axis."""
    def body(x):
        for _ in range(layers):
            x = mb.softmax(x=x, axis=-1)
        return x
    return build(shape, body)


def attention_program(heads, width, rows, *, block=0, softmax=True, values=True) -> Program:
    """Build attention of `heads` heads of `width`; with `block`, causal by key blocks that lie before the queries."""
    def body(q, k, v):
        size = block or rows
        made = []
        for start in range(0, rows, size):
            end = min(rows, start + size)
            span = end if block else rows
            take = mb.slice_by_index(x=q, begin=[0, start, 0], end=[heads, end, width]) if block else q
            keys = mb.slice_by_index(x=k, begin=[0, 0, 0], end=[heads, span, width]) if span < rows else k
            vals = mb.slice_by_index(x=v, begin=[0, 0, 0], end=[heads, span, width]) if span < rows else v
            scores = mb.matmul(x=take, y=keys, transpose_y=True)
            scores = mb.softmax(x=scores, axis=-1) if softmax else scores
            made.append(mb.matmul(x=scores, y=vals) if values else scores)
        return made[0] if len(made) == 1 else mb.concat(values=made, axis=1)
    return build([(heads, rows, width)] * 3, body)


def transformer(rows, hidden, inner, heads, groups, width, layers, *, context=0, form="fp16", inner_tile=0,
                parts=1, vocabulary=0, last=0, gated=True) -> Program:
    """Build the linears of a decoder (and its attention over `context` cached positions) for `rows` tokens.

    `groups` are the heads of keys and values, `width` is that of a head. Norms and position codes are left out, and
    each cache is an input. `inner_tile` splits linears along K into parts of that size, `parts` those of the MLP into
    as many. The last `last` rows (all if 0) go through the output projection to `vocabulary`.
    """
    def attend(x, cache):
        tile = inner_tile or hidden
        made = [_add_linear(x, hidden, count * width, form, min(tile, hidden), count * width)
                for count in (heads, groups, groups)]
        value = made[0]
        if cache is not None:
            query = mb.reshape(x=value, shape=[groups, heads // groups * rows, width])
            scores = mb.softmax(x=mb.matmul(x=query, y=cache, transpose_y=True), axis=-1)
            value = mb.reshape(x=mb.matmul(x=scores, y=cache), shape=[rows, heads * width])
        else:
            value = mb.add(x=value, y=value)
        return mb.add(x=x, y=_add_linear(value, heads * width, hidden, form, min(tile, heads * width), hidden))

    def feed_forward(x):
        tile, low = (min(inner_tile or -(-depth // parts), depth) for depth in (hidden, inner))
        up = mb.gelu(x=_add_linear(x, hidden, inner, form, tile, inner))
        if gated:
            up = mb.mul(x=up, y=_add_linear(x, hidden, inner, form, tile, inner))
        return mb.add(x=x, y=_add_linear(up, inner, hidden, form, low, hidden))

    def body(x, *caches):
        for layer in range(layers):
            x = feed_forward(attend(x, caches[layer] if caches else None))
        if vocabulary:
            x = x if not last else mb.slice_by_index(x=x, begin=[rows - last, 0], end=[rows, hidden])
            x = _add_linear(x, hidden, vocabulary, form, hidden, vocabulary)
        return x
    return build([(rows, hidden)] + [(groups, context, width)] * (layers if context else 0), body)


def resnet50(form="fp16") -> Program:
    """Build ResNet-50 for one image of 224 x 224."""
    def conv(x, outer, side, stride=1):
        weight = make_weight((outer, x.shape[1], side, side), form)
        made = mb.conv(x=quantize_activations(x, form), weight=weight, pad_type="same", strides=[stride] * 2)
        return made

    def body(x):
        x = mb.relu(x=conv(x, 64, 7, 2))
        x = mb.max_pool(x=x, kernel_sizes=[3, 3], strides=[2, 2], pad_type="same")
        for width, count, first in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for place in range(count):
                stride = first if place == 0 else 1
                inner = mb.relu(x=conv(x, width, 1))
                inner = conv(mb.relu(x=conv(inner, width, 3, stride)), width * 4, 1)
                side = conv(x, width * 4, 1, stride) if place == 0 else x
                x = mb.relu(x=mb.add(x=inner, y=side))
        x = mb.reduce_mean(x=x, axes=[2, 3])
        return _add_linear(x, 2048, 1000, "fp16", 2048, 1000)
    return build((1, 3, 224, 224), body)
