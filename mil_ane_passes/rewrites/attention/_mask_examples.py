"""Small programs with masks, as frontends write them, for the examples of the rules about masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Program, Var, types

from ...passes.examples import build_program, make_weight

__all__ = [
    "MAX_SCORE",
    "REWRITTEN_EXAMPLES",
    "UNCHANGED_EXAMPLES",
    "build_attention_op",
    "build_causal_and_padding",
    "build_infinite_and_finite_mask",
    "build_product_mask",
]

MAX_SCORE = 4000.0
"Largest score in the examples: beyond it, a masked score could exceed one that is not masked."
_ROWS, _KEYS = 3, 8
_MINUS_INF = np.float16(-np.inf)


def _make_causal_mask(low: float, dtype: Any = np.float16) -> Any:
    """Make a causal mask: 0 for the keys up to the row's own, `low` beyond."""
    return np.triu(np.full((_ROWS, _KEYS), low, dtype=dtype), 1) if np.isfinite(low) else \
        np.where(np.tri(_ROWS, _KEYS, dtype=bool), 0, low).astype(dtype)


def _build_masked_softmax(mask: Callable[[Var, Var], Var], **settings: Any) -> Program:
    """Build a softmax of `mask` of scores x and of m, a number per key that is positive for visible keys."""
    return build_program(lambda x, m: Builder.softmax(x=mask(x, m), axis=-1, name="y"), **settings,
                         x=(2, _ROWS, _KEYS), m=(2, 1, _KEYS))


def _cast_visible_keys(m: Var, dtype: str = "fp16") -> Var:
    return Builder.cast(x=_find_visible_keys(m), dtype=dtype)


def _find_visible_keys(m: Var) -> Var:
    return Builder.greater(x=m, y=_make_zero(m))


def _find_hidden_keys(m: Var) -> Var:
    return Builder.less_equal(x=m, y=_make_zero(m))


def _make_zero(m: Var) -> Any:
    return np.float16(0) if m.dtype == types.fp16 else np.float32(0)


def _build_padding_mask(m: Var, low: float = -np.inf, dtype: Any = np.float16) -> Var:
    """Build (1 - m) * low."""
    shut = Builder.sub(x=dtype(1), y=_cast_visible_keys(m, "fp16" if dtype is np.float16 else "fp32"))
    return Builder.mul(x=shut, y=dtype(low))


def build_product_mask() -> Program:
    return _build_masked_softmax(lambda x, m: Builder.add(x=x, y=_build_padding_mask(m)))


def build_causal_and_padding() -> Program:
    return _build_masked_softmax(
        lambda x, m: Builder.add(x=Builder.add(x=x, y=_make_causal_mask(-np.inf)), y=_build_padding_mask(m))
    )


def build_infinite_and_finite_mask() -> Program:
    return _build_masked_softmax(
        lambda x, m: Builder.add(x=Builder.add(x=x, y=_make_causal_mask(-np.inf)), y=_build_padding_mask(m, -1e4))
    )


def _add_fp32_mask(x: Var, m: Var) -> Var:
    """Add a mask that is computed in fp32 and cast: minus infinity at run time."""
    return Builder.add(x=x, y=Builder.cast(x=_build_padding_mask(m, -1e9, np.float32), dtype="fp16"))


def _concat_masked_half(x: Var, m: Var) -> Var:
    left, right = Builder.split(x=x, num_splits=2, axis=-1)
    shut = Builder.fill_like(ref_tensor=right, value=_MINUS_INF)
    return Builder.concat(values=[Builder.add(x=left, y=right), shut], axis=-1)


def _add_gathered_mask(x: Var, m: Var) -> Var:
    rows = Builder.cast(x=Builder.greater(x=Builder.reduce_max(x=x, axes=[0, 2]), y=np.float16(0)), dtype="int32")
    return Builder.add(x=x, y=Builder.gather(x=_make_causal_mask(-np.inf), indices=rows, axis=0))


def _subtract_mask(x: Var, m: Var) -> Var:
    """Build x - (1 - m) * inf."""
    return Builder.sub(x=x, y=_build_padding_mask(m, np.inf))


def _add_band_part_mask(x: Var, m: Var) -> Var:
    """Add a causal mask as torch.triu computes it at run time: inf - inf inside the band."""
    shape = Builder.slice_by_index(x=Builder.shape(x=x), begin=[1], end=[3])
    full = Builder.fill(shape=shape, value=_MINUS_INF)
    return Builder.add(x=x, y=Builder.sub(x=full, y=Builder.band_part(x=full, lower=-1, upper=0)))


def build_attention_op() -> Program:
    """Build an attention whose scores are products of inputs, so that inputs have to be smaller."""
    def body(x: Var, m: Var) -> Var:
        return Builder.scaled_dot_product_attention(query=x, key=x, value=x, attn_mask=_build_padding_mask(m), name="y")

    return build_program(body, opset=ct.target.iOS18, x=(2, _KEYS, 4), m=(2, 1, _KEYS))


def _read_masked_twice(x: Var, m: Var) -> Var:
    masked = Builder.select(cond=_find_hidden_keys(m), a=_MINUS_INF, b=x)
    return Builder.sub(x=masked, y=Builder.reduce_max(x=masked, axes=[-1], keep_dims=True, name="highest"))


def _add_infinite_weights(x: Var, m: Var) -> Var:
    return Builder.relu(
        x=Builder.add(x=x, y=np.where(make_weight(_KEYS) > 0, _MINUS_INF, make_weight(_KEYS))), name="passed"
    )


def _scale_down_masked(x: Var, m: Var) -> Var:
    return Builder.mul(x=Builder.select(cond=_find_hidden_keys(m), a=_MINUS_INF, b=x), y=np.float16(1 / 64))


def _scale_mask_by_slope(x: Var, m: Var) -> Var:
    return Builder.add(x=x, y=Builder.mul(x=Builder.sigmoid(x=m, name="slope"), y=_make_causal_mask(-np.inf)))


def _build_nan_test() -> Program:
    def body(x: Var) -> Var:
        weights = Builder.softmax(x=Builder.add(x=x, y=np.tril(np.full((4, 4), _MINUS_INF))))
        return Builder.select(cond=Builder.not_equal(x=weights, y=weights, name="empty"), a=np.float16(0), b=weights,
                              name="y")

    return build_program(body, x=(4, 4))


def _scale_by_computed(x: Var, m: Var) -> Var:
    return Builder.mul(x=Builder.select(cond=_find_hidden_keys(m), a=_MINUS_INF, b=x), y=m, name="scaled")


REWRITTEN_EXAMPLES: dict[str, Callable[[], Program]] = {
    "masked_fill": lambda: _build_masked_softmax(
        lambda x, m: Builder.select(cond=_find_hidden_keys(m), a=_MINUS_INF, b=x)
    ),
    "where": lambda: _build_masked_softmax(
        lambda x, m: Builder.select(cond=_find_visible_keys(m), a=x, b=np.full((1, _ROWS, _KEYS), _MINUS_INF))
    ),
    "causal": lambda: _build_masked_softmax(lambda x, m: Builder.add(x=x, y=_make_causal_mask(-np.inf))),
    "lowest number of fp16": lambda: _build_masked_softmax(
        lambda x, m: Builder.add(x=x, y=_make_causal_mask(-65504.0))
    ),
    "causal and padding": build_causal_and_padding,
    "in fp32 and cast": lambda: _build_masked_softmax(_add_fp32_mask),
    "part of a concat": lambda: _build_masked_softmax(_concat_masked_half),
    "table": lambda: _build_masked_softmax(_add_gathered_mask),
    "subtracted": lambda: _build_masked_softmax(_subtract_mask),
    "triangle at run time": lambda: _build_masked_softmax(_add_band_part_mask),
}
"Examples that are rewritten."

UNCHANGED_EXAMPLES: dict[str, tuple[Callable[[], Program], str]] = {
    "a lower bound": (lambda: _build_masked_softmax(lambda x, m: Builder.maximum(x=x, y=np.float16(-np.inf))), ""),
    "an upper bound": (lambda: _build_masked_softmax(lambda x, m: Builder.minimum(x=x, y=np.float16(65504))), ""),
    "times a slope": (
        lambda: _build_masked_softmax(_scale_mask_by_slope),
        "the infinite constant is scaled by 'slope', which may be no mask of 0 and 1",
    ),
    "hard choice": (
        lambda: build_program(lambda x: Builder.softmax(x=Builder.mul(x=x, y=np.float16(65504)), name="y"), x=(4, 8)),
        "the infinite constant is scaled by 'x', which may be no mask of 0 and 1",
    ),
    "tested for NaN": (
        _build_nan_test,
        "an infinite constant, but not_equal 'empty' tells by NaN which rows are masked throughout",
    ),
    "in range": (lambda: _build_masked_softmax(lambda x, m: Builder.add(x=x, y=_build_padding_mask(m, -100.0))), ""),
    "fp32": (
        lambda: _build_masked_softmax(
            lambda x, m: Builder.add(x=x, y=_build_padding_mask(m, -1e9, np.float32)), dtype=types.fp32
        ),
        "the mask and its softmax are held in fp32, which has numbers of that size",
    ),
    "no softmax": (
        lambda: _build_masked_softmax(_add_infinite_weights),
        "an infinite constant, but reaches relu 'passed', which is no softmax",
    ),
    "another reader": (
        lambda: _build_masked_softmax(_read_masked_twice),
        "an infinite constant, but reaches reduce_max 'highest', which is no softmax",
    ),
    "output": (
        lambda: build_program(
            lambda x: (lambda v: (v, Builder.softmax(x=v, axis=-1, name="y")))(
                Builder.add(x=x, y=_make_causal_mask(-np.inf), name="masked")
            ),
            x=(_ROWS, _KEYS),
        ),
        "an infinite constant, but 'masked' is an output as well",
    ),
    "scaled down": (
        lambda: _build_masked_softmax(_scale_down_masked),
        "the mask is scaled by 0.015625 on its way: -976.562 would not silence every score, "
        "and fp16 has no room for more",
    ),
    "scaled by a computed value": (
        lambda: _build_masked_softmax(_scale_by_computed),
        "an infinite constant, but is scaled by a computed value in mul 'scaled'",
    ),
}
"Examples that are not rewritten, and why."
