"""Sticky overflow of partial sums, against sums taken one by one in numpy."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

from mil_ane_passes.runtime import Runtime
from mil_ane_passes.runtime.quirks import _partial_sums
from tests.runtime.helpers import Array, close, draw, program, run
from tests.runtime.quirks.cases import PRECISIONS

NAME = ["mac_overflow_32768"]


def in_order(start: float, terms: Iterable[float]) -> float:
    """The sum, or the infinity that it sticks to once it reaches 32768."""
    total = float(start)
    for term in [0.0, *terms]:
        total += float(term)
        if abs(total) >= 32768:
            return float(np.copysign(np.inf, total))
    return total


def values(seed: int, *shape: int, scale: float = 1.0) -> Array:
    return (draw(seed, *shape) * scale).astype(np.float16)


@pytest.fixture(params=["at once", "by blocks"])
def way(request: Any, monkeypatch: Any) -> None:
    """Few doubtful outputs are summed at once, many by blocks: both ways for every test."""
    if request.param == "by blocks":
        monkeypatch.setattr(_partial_sums, "_MAX_PRODUCTS_AT_ONCE", 96)


def check(found: Array, expected: Array) -> None:
    """Equal, and the data are such that some sums overflow, some only on the way, and some do not."""
    close(found, expected, 1e-9)
    assert np.isinf(expected).any() and np.isfinite(expected).any()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("bias", "inputs", "expected"), [
    (None, [32752], 32752),
    (None, [32768], np.inf),
    (None, [16384, 16376], 32760),
    (None, [16384, 16384], np.inf),
    (None, [16384, 16384, -16384, -16384, 1], np.inf),
    (None, [-16384, -16384, 16384, 16384, 1], -np.inf),
    (None, [-16384, 32752, 16384, -32752, -32752], -16384 + 16384 - 32752),
    (None, [-32752, -32, 32752, 32752, 32752], -np.inf),
    (-16384, [16384, 16384], 16384),
    (-16384, [16384, 16384, 16384], np.inf),
    (32, [32752], np.inf),
    (32, [32736], np.inf),
    (-40000, [30000, 30000], -np.inf),
    (None, [1000] * 32, 32000),
    (None, [1000] * 33, np.inf),
])
@pytest.mark.usefixtures("way")
def test_published_sums(precision: str, bias: float | None, inputs: list[float], expected: float) -> None:
    x = np.array(inputs, np.float16)[None, :, None, None]

    def build(x: Any) -> Any:
        options = {} if bias is None else {"bias": np.array([bias], np.float16)}
        flat = mb.reshape(x=x, shape=[1, len(inputs)])
        ones = np.ones((1, len(inputs)), np.float16)
        return mb.conv(x=x, weight=ones[..., None, None], **options), mb.linear(x=flat, weight=ones, **options)

    for found in run(build, {"x": x}, precision=precision, quirks=NAME):
        kept = np.float16(expected) if precision == "float16" else expected
        np.testing.assert_array_equal(found.reshape(()), kept)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_linear(rank: int) -> None:
    x, weight, bias = values(0, *(2, 3, 20)[-rank:], scale=90), values(1, 30, 20, scale=90), values(2, 30, scale=9000)
    found = run(lambda x: mb.linear(x=x, weight=weight, bias=bias), {"x": x}, quirks=NAME)[0]
    rows = x.astype(float).reshape(-1, 20)
    expected = [[in_order(bias[o], row * weight[o].astype(float)) for o in range(30)] for row in rows]
    check(found, np.array(expected).reshape(found.shape))
    assert np.abs((rows @ weight.T.astype(float) + bias)[np.isinf(np.array(expected))]).min() < 32768


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("left", "right", "turn"), [
    ((5, 16), (16, 6), (False, False)),
    ((16, 5), (6, 16), (True, True)),
    ((3, 1, 5, 16), (2, 16, 6), (False, False)),
    ((2, 5, 16), (3, 2, 6, 16), (False, True)),
    ((16,), (2, 16, 20), (False, False)),
])
def test_matmul(left: tuple[int, ...], right: tuple[int, ...], turn: tuple[bool, bool]) -> None:
    x, y = values(0, *left, scale=100), values(1, *right, scale=100)

    def build(x: Any, y: Any) -> Any:
        return mb.matmul(x=x, y=y, transpose_x=turn[0], transpose_y=turn[1])

    found = run(build, {"x": x, "y": y}, quirks=NAME)[0]
    a, b = x.astype(float), y.astype(float)
    a = a[None] if a.ndim == 1 else a.swapaxes(-1, -2) if turn[0] else a
    b = b.swapaxes(-1, -2) if turn[1] else b
    products = a[..., :, :, None] * b[..., None, :, :]
    expected = np.apply_along_axis(lambda terms: in_order(0, terms), -2, products)
    check(found, expected.reshape(found.shape))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("equation", "left", "right", "grid"), [
    ("nchw,nwhu->nchu", (2, 3, 1, 12), (1, 12, 4, 5), "nchwu"),
    ("chw,whr->chr", (6, 4, 12), (12, 4, 5), "chwr"),
])
def test_einsum(equation: str, left: tuple[int, ...], right: tuple[int, ...], grid: str) -> None:
    x, y = values(0, *left, scale=110), values(1, *right, scale=110)
    found = run(lambda x, y: mb.einsum(values=(x, y), equation=equation), {"x": x, "y": y}, quirks=NAME)[0]
    products = np.einsum(equation.split("->")[0] + "->" + grid, x.astype(float), y.astype(float))
    check(found, np.apply_along_axis(lambda terms: in_order(0, terms), grid.index("w"), products))


def convolved(x: Array, weight: Array, bias: Array, strides: Any, dilations: Any, groups: int) -> Array:
    """A 2-D convolution of a padded input, term by term: input channels outside, kernel taps inside."""
    each, per = weight.shape[1], weight.shape[0] // groups
    kernel = weight.shape[2:]
    size = [(x.shape[2 + a] - (kernel[a] - 1) * dilations[a] - 1) // strides[a] + 1 for a in range(2)]
    y = np.empty((x.shape[0], weight.shape[0], *size))
    for n, o, i, j in np.ndindex(*y.shape):
        terms = [
            float(x[n, o // per * each + c, i * strides[0] + p * dilations[0], j * strides[1] + q * dilations[1]])
            * float(weight[o, c, p, q])
            for c, p, q in itertools.product(range(each), *map(range, kernel))
        ]
        y[n, o, i, j] = in_order(bias[o], terms)
    return y


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("groups", "strides", "dilations", "pad"), [
    (1, [1, 1], [1, 1], [0, 0, 0, 0]),
    (2, [2, 1], [1, 2], [1, 0, 2, 1]),
    (4, [1, 3], [2, 1], [0, 2, 0, 0]),
])
def test_conv(groups: int, strides: list[int], dilations: list[int], pad: list[int]) -> None:
    x, weight = values(0, 2, 4, 6, 7, scale=140), values(1, 8, 4 // groups, 2, 3, scale=80 * groups**0.5)
    bias = values(2, 8, scale=8000)

    def build(x: Any) -> Any:
        return mb.conv(x=x, weight=weight, bias=bias, strides=strides, dilations=dilations, groups=groups,
                       pad_type="custom", pad=pad)

    padded = np.pad(x, [(0, 0), (0, 0), tuple(pad[:2]), tuple(pad[2:])])
    check(run(build, {"x": x}, quirks=NAME)[0], convolved(padded, weight, bias, strides, dilations, groups))


@pytest.mark.parametrize("pad_type", ["same", "same_lower", "valid"])
def test_conv_pads_itself_and_ranks_agree(pad_type: str) -> None:
    x, weight = values(0, 1, 5, 16, scale=120), values(1, 6, 5, 4, scale=120)

    def line(x: Any) -> Any:
        return mb.conv(x=x, weight=weight, pad_type=pad_type, strides=[2])

    def plane(x: Any) -> Any:
        lifted = mb.expand_dims(x=x, axes=[-1])
        return mb.squeeze(x=mb.conv(x=lifted, weight=weight[..., None], pad_type=pad_type, strides=[2, 1]), axes=[-1])

    found = run(line, {"x": x}, quirks=NAME)[0]
    before, after = {"same": (1, 1), "same_lower": (1, 1), "valid": (0, 0)}[pad_type]
    padded = np.pad(x, [(0, 0), (0, 0), (before, after)])[..., None]
    expected = convolved(padded, weight[..., None], np.zeros(6, np.float16), [2, 1], [1, 1], 1)[..., 0]
    check(found, expected)
    np.testing.assert_array_equal(run(plane, {"x": x}, quirks=NAME)[0], found)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("groups", "stride", "dilation", "options"), [
    (1, 1, 1, {}),
    (1, 3, 1, {"pad_type": "custom", "pad": [2, 2]}),
    (2, 2, 2, {"pad_type": "custom", "pad": [1, 4]}),
    (4, 3, 1, {"pad_type": "custom", "pad": [1, 0], "output_shape": [2, 8, 27]}),
    (2, 2, 1, {"pad_type": "same"}),
])
def test_conv_transpose(groups: int, stride: int, dilation: int, options: dict[str, Any]) -> None:
    x, weight = values(0, 2, 4, 8, scale=200), values(1, 4, 8 // groups, 5, scale=120)
    bias = values(2, 8, scale=9000)

    def build(x: Any) -> Any:
        return mb.conv_transpose(x=x, weight=weight, bias=bias, strides=[stride], dilations=[dilation], groups=groups,
                                 **options)

    found = run(build, {"x": x}, quirks=NAME)[0]
    full = (8 - 1) * stride + 4 * dilation + 1
    start = (full - found.shape[2]) // 2 if options.get("pad_type") == "same" else options.get("pad", [0])[0]
    expected, each, per = np.empty(found.shape), 4 // groups, 8 // groups
    for n, o, t in np.ndindex(*found.shape):
        group = o // per
        taps = [(c, i, (t + start - i * stride) / dilation)
                for c in range(group * each, (group + 1) * each) for i in range(8)]
        expected[n, o, t] = in_order(bias[o], [
            float(x[n, c, i]) * float(weight[c, o % per, int(k)]) for c, i, k in taps if k in range(5)])
    check(found, expected)


def test_nan_stays_and_infinite_operands_stick() -> None:
    x = np.array([[np.nan, 1e4, 1e4], [np.inf, -np.inf, 1], [-np.inf, 1, np.inf], [1e4, 30000, np.nan]], np.float16)
    found = run(lambda x: mb.linear(x=x, weight=np.ones((1, 3), np.float16)), {"x": x}, quirks=NAME)[0]
    np.testing.assert_array_equal(found, [[np.nan], [np.inf], [-np.inf], [np.inf]])


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_nothing_to_sum(shape: tuple[int, int]) -> None:
    weight = np.ones((2, 4), np.float16) if shape[1] else None

    def build(x: Any) -> Any:
        if weight is None:
            return mb.matmul(x=x, y=mb.transpose(x=x, perm=[1, 0]))
        return mb.linear(x=x, weight=weight)

    x = np.zeros(shape, np.float16)
    for right, found in zip(run(build, {"x": x}), run(build, {"x": x}, quirks=NAME)):
        np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize("rows", [200, 300])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_sums_over_a_large_weight_overflow_in_the_first_call(rows: int, precision: str) -> None:
    """A weight of more than 2**18 elements is converted in blocks: their bound is that of its magnitudes."""
    weight = np.repeat(np.float16([[8, -8]]), [512, 512], axis=1).repeat(rows, 0)
    x = np.full((1, 1024), 16, np.float16)
    found, = run(lambda x: mb.linear(x=x, weight=weight, name="y"), {"x": x}, precision=precision, quirks=NAME)
    np.testing.assert_array_equal(np.isinf(found), np.ones((1, rows), bool))
    bounds: list[float] = []
    made = program(lambda x: mb.linear(x=x, weight=weight, name="y"), {"x": x})
    Runtime(made, precision=precision, partial_sums=lambda op, bound: bounds.append(bound))({"x": x})
    assert bounds == [1024 * 16 * 8]


def test_a_nan_in_one_row_does_not_hide_the_sums_of_the_others() -> None:
    x = np.stack([np.zeros(8), np.tile([100, -100], 4)]).astype(np.float16)
    x[0, 0] = np.nan
    bounds: list[float] = []
    made = program(lambda x: mb.linear(x=x, weight=np.full((4, 8), 100, np.float16), name="y"), {"x": x})
    Runtime(made, partial_sums=lambda op, bound: bounds.append(bound))({"x": x})
    Runtime(made, partial_sums=lambda op, bound: bounds.append(bound))({"x": np.full_like(x, np.nan)})
    assert bounds == [8 * 100 * 100]
