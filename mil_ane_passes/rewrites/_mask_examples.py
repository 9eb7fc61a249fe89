"""Small programs with masks, as frontends write them, for the rules about masks to show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder, Program, Var, types

from ..core.examples import program, weight

__all__ = ["FIRES", "MISSES", "SCORES", "attention_op", "below_a_finite_mask", "causal_and_padding", "product"]

SCORES = 4000.0
"How large scores may be in the examples: beyond, a masked one could outrank one that is not."
_ROWS, _KEYS = 3, 8
_INF = np.float16(-np.inf)


def _causal(low: float, dtype: Any = np.float16) -> Any:
    """Row r sees the keys up to r: 0, and `low` beyond."""
    return np.triu(np.full((_ROWS, _KEYS), low, dtype=dtype), 1) if np.isfinite(low) else \
        np.where(np.tri(_ROWS, _KEYS, dtype=bool), 0, low).astype(dtype)


def _attention(mask: Callable[[Var, Var], Var], **settings: Any) -> Program:
    """softmax of what `mask` makes of scores x and of m, a number per key that is positive for those to be seen."""
    return program(lambda x, m: Builder.softmax(x=mask(x, m), axis=-1, name="y"), **settings,
                   x=(2, _ROWS, _KEYS), m=(2, 1, _KEYS))


def _seen(m: Var, dtype: str = "fp16") -> Var:
    return Builder.cast(x=_is_seen(m), dtype=dtype)


def _is_seen(m: Var) -> Var:
    return Builder.greater(x=m, y=_zero(m))


def _hidden(m: Var) -> Var:
    return Builder.less_equal(x=m, y=_zero(m))


def _zero(m: Var) -> Any:
    return np.float16(0) if m.dtype == types.fp16 else np.float32(0)


def _padding(m: Var, low: float = -np.inf, dtype: Any = np.float16) -> Var:
    """(1 - m) * low"""
    shut = Builder.sub(x=dtype(1), y=_seen(m, "fp16" if dtype is np.float16 else "fp32"))
    return Builder.mul(x=shut, y=dtype(low))


def product() -> Program:
    return _attention(lambda x, m: Builder.add(x=x, y=_padding(m)))


def causal_and_padding() -> Program:
    return _attention(lambda x, m: Builder.add(x=Builder.add(x=x, y=_causal(-np.inf)), y=_padding(m)))


def below_a_finite_mask() -> Program:
    return _attention(lambda x, m: Builder.add(x=Builder.add(x=x, y=_causal(-np.inf)), y=_padding(m, -1e4)))


def _islands(x: Var, m: Var) -> Var:
    """The mask is made in fp32 and cast: minus infinity at run time."""
    return Builder.add(x=x, y=Builder.cast(x=_padding(m, -1e9, np.float32), dtype="fp16"))


def _joined(x: Var, m: Var) -> Var:
    left, right = Builder.split(x=x, num_splits=2, axis=-1)
    shut = Builder.fill_like(ref_tensor=right, value=_INF)
    return Builder.concat(values=[Builder.add(x=left, y=right), shut], axis=-1)


def _looked_up(x: Var, m: Var) -> Var:
    rows = Builder.cast(x=Builder.greater(x=Builder.reduce_max(x=x, axes=[0, 2]), y=np.float16(0)), dtype="int32")
    return Builder.add(x=x, y=Builder.gather(x=_causal(-np.inf), indices=rows, axis=0))


def _reversed(x: Var, m: Var) -> Var:
    """x - (1 - m) * inf"""
    return Builder.sub(x=x, y=_padding(m, np.inf))


def _outside_band(x: Var, m: Var) -> Var:
    """A causal mask as torch.triu makes it at run time: inf - inf inside the band."""
    shape = Builder.slice_by_index(x=Builder.shape(x=x), begin=[1], end=[3])
    full = Builder.fill(shape=shape, value=_INF)
    return Builder.add(x=x, y=Builder.sub(x=full, y=Builder.band_part(x=full, lower=-1, upper=0)))


def attention_op() -> Program:
    """Scores are products of inputs here, so that inputs have to be smaller."""
    def body(x: Var, m: Var) -> Var:
        return Builder.scaled_dot_product_attention(query=x, key=x, value=x, attn_mask=_padding(m), name="y")

    return program(body, opset=ct.target.iOS18, x=(2, _KEYS, 4), m=(2, 1, _KEYS))


def _two_readers(x: Var, m: Var) -> Var:
    masked = Builder.select(cond=_hidden(m), a=_INF, b=x)
    return Builder.sub(x=masked, y=Builder.reduce_max(x=masked, axes=[-1], keep_dims=True, name="highest"))


def _weights(x: Var, m: Var) -> Var:
    return Builder.relu(x=Builder.add(x=x, y=np.where(weight(_KEYS) > 0, _INF, weight(_KEYS))), name="passed")


def _shrunk(x: Var, m: Var) -> Var:
    return Builder.mul(x=Builder.select(cond=_hidden(m), a=_INF, b=x), y=np.float16(1 / 64))


def _graded(x: Var, m: Var) -> Var:
    return Builder.add(x=x, y=Builder.mul(x=Builder.sigmoid(x=m, name="slope"), y=_causal(-np.inf)))


def _tested() -> Program:
    def body(x: Var) -> Var:
        weights = Builder.softmax(x=Builder.add(x=x, y=np.tril(np.full((4, 4), _INF))))
        return Builder.select(cond=Builder.not_equal(x=weights, y=weights, name="empty"), a=np.float16(0), b=weights,
                              name="y")

    return program(body, x=(4, 4))


def _by_computed(x: Var, m: Var) -> Var:
    return Builder.mul(x=Builder.select(cond=_hidden(m), a=_INF, b=x), y=m, name="scaled")


FIRES: dict[str, Callable[[], Program]] = {
    "masked_fill": lambda: _attention(lambda x, m: Builder.select(cond=_hidden(m), a=_INF, b=x)),
    "where": lambda: _attention(lambda x, m: Builder.select(
        cond=_is_seen(m), a=x, b=np.full((1, _ROWS, _KEYS), _INF))),
    "causal": lambda: _attention(lambda x, m: Builder.add(x=x, y=_causal(-np.inf))),
    "lowest number of fp16": lambda: _attention(lambda x, m: Builder.add(x=x, y=_causal(-65504.0))),
    "causal and padding": causal_and_padding,
    "in fp32 and cast": lambda: _attention(_islands),
    "part of a concat": lambda: _attention(_joined),
    "table": lambda: _attention(_looked_up),
    "subtracted": lambda: _attention(_reversed),
    "triangle at run time": lambda: _attention(_outside_band),
}
"""What is rewritten."""

MISSES: dict[str, tuple[Callable[[], Program], str]] = {
    "a lower bound": (lambda: _attention(lambda x, m: Builder.maximum(x=x, y=np.float16(-np.inf))), ""),
    "an upper bound": (lambda: _attention(lambda x, m: Builder.minimum(x=x, y=np.float16(65504))), ""),
    "times a slope": (lambda: _attention(_graded),
                      "the infinite constant is scaled by 'slope', which may be no mask of 0 and 1"),
    "hard choice": (lambda: program(
        lambda x: Builder.softmax(x=Builder.mul(x=x, y=np.float16(65504)), name="y"), x=(4, 8)),
                    "the infinite constant is scaled by 'x', which may be no mask of 0 and 1"),
    "tested for NaN": (_tested,
                       "an infinite constant, but not_equal 'empty' tells by NaN which rows are masked throughout"),
    "in range": (lambda: _attention(lambda x, m: Builder.add(x=x, y=_padding(m, -100.0))), ""),
    "fp32": (lambda: _attention(lambda x, m: Builder.add(x=x, y=_padding(m, -1e9, np.float32)), dtype=types.fp32),
             "the mask and its softmax are held in fp32, which has numbers of that size"),
    "no softmax": (lambda: _attention(_weights),
                   "an infinite constant, but reaches relu 'passed', which is no softmax"),
    "another reader": (lambda: _attention(_two_readers),
                       "an infinite constant, but reaches reduce_max 'highest', which is no softmax"),
    "output": (lambda: program(lambda x: (lambda v: (v, Builder.softmax(x=v, axis=-1, name="y")))(
        Builder.add(x=x, y=_causal(-np.inf), name="masked")), x=(_ROWS, _KEYS)),
        "an infinite constant, but 'masked' is an output as well"),
    "scaled down": (
        lambda: _attention(_shrunk),
        "the mask is scaled by 0.015625 on its way: -976.562 would not silence every score, "
        "and fp16 has no room for more"),
    "scaled by a computed value": (
        lambda: _attention(_by_computed), "an infinite constant, but is scaled by a computed value in mul 'scaled'"),
}
"""What is left alone, and why."""
