"""What numbers do: casts, integers that wrap, signs of zero, infinities, NaN, scalars, nothing at all."""

from __future__ import annotations

from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.runtime.helpers import Array, close, run, same_bits
from tests.runtime.laws import law

PRECISIONS = ("float64", "float32", "float16")
SPECIAL = [-np.inf, -4.0, -2.5, -1.0, -0.0, 0.0, 0.5, 1.0, 3.0, np.inf, np.nan]
PAIRS = np.array([(x, y) for x in SPECIAL for y in SPECIAL], np.float32).T
NARROW = {"int8": np.int8, "uint8": np.uint8, "int16": np.int16, "uint16": np.uint16}


@pytest.mark.parametrize("dtype", [*NARROW, "int32", "bool"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_casts_of_floats_drop_the_fraction(dtype: str, precision: str) -> None:
    """Toward zero; every number but zero is true, NaN too."""
    values = np.array([0, -0.0, 0.9, 1.5, 100.99, 127], np.float32)
    values = values if dtype.startswith(("u", "b")) else np.concatenate([values, -values])
    expected = np.trunc(values).astype(dtype) if dtype != "bool" else values != 0
    same_bits(run(lambda x: mb.cast(x=x, dtype=dtype), {"x": values}, precision=precision)[0], expected)
    true = run(lambda x: mb.cast(x=x, dtype="bool"), {"x": np.array([np.nan, np.inf, 1e-30], np.float32)})[0]
    assert true.all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_quotients_that_are_whole_at_float32_keep_their_integer(precision: str) -> None:
    """log(2**n) / log(16) * 8 is 2n, of constants in float32, whose product at float64 is some 1e-8 beside it."""
    def build(x: Any) -> Any:
        quotient = mb.mul(x=mb.real_div(x=mb.log(x=x), y=np.float32(np.log(16))), y=np.float32(8))
        return mb.cast(x=quotient, dtype="int32"), mb.ceil(x=quotient)

    for found in run(build, {"x": np.array([2, 4, 8, 1 / 2, 1 / 8], np.float32)}, precision=precision):
        np.testing.assert_array_equal(found, [2, 4, 6, -2, -6])


def test_numbers_beside_an_integer_keep_their_own() -> None:
    x = np.array([1.9999999, 2.0000002, -1.9999999, 16777215.0, 33554434.0], np.float32)
    for name, function in (("floor", np.floor), ("ceil", np.ceil)):
        np.testing.assert_array_equal(run(lambda x, name=name: getattr(mb, name)(x=x), {"x": x})[0], function(x))
    np.testing.assert_array_equal(run(lambda x: mb.cast(x=x, dtype="int32"), {"x": x})[0], np.trunc(x))


@pytest.mark.parametrize("dtype", [*NARROW, "int32"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_casts_of_floats_saturate(dtype: str, precision: str) -> None:
    ends = np.iinfo(dtype)
    values = np.array([-np.inf, -3e9, -40000, -300.7, -129, -1.5, 127.9, 256, 300.7, 40000, 70000, 3e9, np.inf, np.nan],
                      np.float32)
    expected = np.nan_to_num(np.clip(np.trunc(values.astype(np.float64)), ends.min, ends.max)).astype(dtype)
    same_bits(run(lambda x: mb.cast(x=x, dtype=dtype), {"x": values}, precision=precision)[0], expected)


@law
@given(
    x=hnp.arrays(np.int32, 5, elements=st.integers(-(2**31), 2**31 - 1)), dtype=st.sampled_from([*NARROW]),
    precision=st.sampled_from(PRECISIONS),
)  # fmt: skip
def test_casts_of_integers_wrap(x: Array, dtype: str, precision: str) -> None:
    def build(x: Any) -> Any:
        made = mb.cast(x=x, dtype=dtype)
        return made, mb.cast(x=made, dtype="int32"), mb.cast(x=made, dtype="bool"), mb.cast(x=made, dtype="fp32")

    made, wide, flags, floats = run(build, {"x": x}, precision=precision)
    expected = x.astype(NARROW[dtype])
    same_bits(made, expected)
    same_bits(wide, expected.astype(np.int32))
    same_bits(flags, expected != 0)
    close(floats, expected)


def test_flags_are_zeros_and_ones() -> None:
    def build(x: Any) -> Any:
        return mb.cast(x=x, dtype="int32"), mb.cast(x=x, dtype="fp16"), mb.cast(x=x, dtype="uint8")

    for found in run(build, {"x": np.array([True, False])}):
        np.testing.assert_array_equal(found, [1, 0])


def test_out_of_range_casts_end() -> None:
    """What they give is not documented, and in numpy the machine's own choice; here they give something, no error."""
    x = np.array([np.nan, np.inf, -np.inf, 3e9, -1e30], np.float32)
    for dtype in (*NARROW, "int32"):
        found = run(lambda x, dtype=dtype: mb.cast(x=x, dtype=dtype), {"x": x})[0]
        assert (found.shape, found.dtype) == ((5,), np.dtype(dtype))


@pytest.mark.parametrize("name", ["floor_div", "mod", "real_div", "maximum", "minimum"])
@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_special_values_of_two_operands(name: str, precision: str) -> None:
    """numpy's answers, the signs of zeros included; of equal zeros, which of both is the larger is not."""
    function = {"floor_div": np.floor_divide, "mod": np.mod, "real_div": np.divide}.get(name) or getattr(np, name)
    with np.errstate(all="ignore"):
        expected = function(*PAIRS.astype(precision))
    feeds = dict(zip("xy", PAIRS))
    found = run(lambda x, y: getattr(mb, name)(x=x, y=y), feeds, precision=precision)[0]
    np.testing.assert_array_equal(found, expected)
    signed = (expected != 0) | (PAIRS[0] != PAIRS[1]) if name in ("maximum", "minimum") else ~np.isnan(expected)
    signed &= ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(found[signed]), np.signbit(expected[signed]))


@pytest.mark.parametrize("alpha", [0.1, 0.0, 1.5, -0.5, np.inf])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_special_values_of_leaky_relu(alpha: float, precision: str) -> None:
    """What is not below zero stays as it is, signs of zero too; the rest is multiplied."""
    values, slope = np.array([*SPECIAL, -1e-40, 6e-8], np.float32), np.float32(alpha)
    (found,) = run(lambda x: mb.leaky_relu(x=x, alpha=slope), {"x": values}, precision=precision)
    wide = found.dtype.type
    with np.errstate(invalid="ignore"):  # zero times infinity, where it is not taken
        below = wide(slope) * values.astype(wide)
    same_bits(found, np.where(values < 0, below, values.astype(wide)))


@pytest.mark.parametrize("name", ["equal", "not_equal", "less", "less_equal", "greater", "greater_equal"])
def test_comparisons_of_special_values(name: str) -> None:
    expected = getattr(np, name)(*PAIRS)
    same_bits(run(lambda x, y: getattr(mb, name)(x=x, y=y), dict(zip("xy", PAIRS)))[0], expected)


WIDE = st.one_of(st.integers(-9, 9), st.sampled_from([-(2**31), 2**31 - 1]))


@law
@given(x=hnp.arrays(np.int32, 6, elements=WIDE), y=hnp.arrays(np.int32, 6, elements=WIDE))
def test_integers_of_two_operands(x: Array, y: Array) -> None:
    """Sums, differences and products wrap; quotients are rounded down; dividing by zero gives 0, as in numpy."""

    def build(x: Any, y: Any) -> Any:
        return mb.add(x=x, y=y), mb.sub(x=x, y=y), mb.mul(x=x, y=y), mb.floor_div(x=x, y=y), mb.mod(x=x, y=y)

    with np.errstate(all="ignore"):
        expected = [x + y, x - y, x * y, x // y, np.mod(x, y)]
    for found, truth in zip(run(build, {"x": x, "y": y}), expected):
        same_bits(found, truth)


@law
@given(x=hnp.arrays(np.int32, 4, elements=st.integers(-9, 9)), y=hnp.arrays(np.int32, 4, elements=st.integers(0, 40)))
def test_powers_of_integers_wrap(x: Array, y: Array) -> None:
    expected = [(int(a) ** int(b) + 2**31) % 2**32 - 2**31 for a, b in zip(x, y)]
    same_bits(run(lambda x, y: mb.pow(x=x, y=y), {"x": x, "y": y})[0], np.array(expected, np.int32))


@pytest.mark.parametrize(("precision", "sums"), [("float64", [80000, 2049]), ("float16", [np.inf, 2048])])
def test_half_precision_is_stored_as_declared(precision: str, sums: list[float]) -> None:
    """At float16 each value is rounded to its declared dtype; wider precisions do not overflow."""
    feeds = {"x": np.float16([40000, 2048]), "y": np.float16([40000, 1])}
    np.testing.assert_array_equal(run(lambda x, y: mb.add(x=x, y=y), feeds, precision=precision)[0], sums)


@pytest.mark.parametrize("opset", [ct.target.iOS15, ct.target.iOS17])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_scalars_and_nothing(opset: Any, shape: tuple[int, ...], precision: str) -> None:
    x = np.full(shape, 0.25, np.float32)

    def build(x: Any) -> Any:
        halves = mb.select(cond=mb.less(x=x, y=1.0), a=mb.add(x=x, y=x), b=x)
        return halves, mb.clip(x=x, alpha=0.5, beta=1.0), mb.round(x=x), mb.cast(x=mb.square(x=x), dtype="int32")

    for found, expected in zip(run(build, {"x": x}, opset=opset, precision=precision), (2 * x, 2 * x, 0 * x, 0 * x)):
        assert found.shape == shape
        np.testing.assert_array_equal(found, expected)


def test_conditions_broadcast() -> None:
    cond, x = np.array([[True], [False]]), np.array([3, 4], np.int32)
    same_bits(
        run(lambda cond, x: mb.select(cond=cond, a=x, b=0), {"cond": cond, "x": x})[0], np.int32([[3, 4], [0, 0]])
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_the_extreme_of_two_zeros_does_not_depend_on_how_they_are_broadcast(name: str, precision: str) -> None:
    """+0 is the larger one, as in IEEE 754's maximum and minimum."""
    x = np.where(np.arange(2 * 8 * 9) % 2, 0.0, -0.0).astype(np.float32).reshape(2, 8, 9)
    y = np.where(np.arange(8 * 9) % 3, 0.0, -0.0).astype(np.float32).reshape(1, 8, 9)
    negative = np.signbit(x) & np.signbit(y) if name == "maximum" else np.signbit(x) | np.signbit(y)
    expected = np.where(negative, np.float32(-0.0), np.float32(0.0))
    for other in (y, np.tile(y, (2, 1, 1))):
        same_bits(run(lambda x, y: getattr(mb, name)(x=x, y=y), {"x": x, "y": other}, precision=precision)[0],
                  expected.astype(np.float64) if precision == "float64" else expected)
    x[0, 0], y[0, 0] = 2.0, 0.0
    found, = run(lambda x, y: getattr(mb, name)(x=x, y=y), {"x": x, "y": y}, precision=precision)
    np.testing.assert_array_equal(found[0, 0], 2.0 if name == "maximum" else 0.0)


@pytest.mark.parametrize("precision", ["float64", "float16"])
@pytest.mark.parametrize("name", ["sigmoid", "silu"])
def test_a_sigmoid_does_not_depend_on_the_number_of_elements(name: str, precision: str) -> None:
    x = np.random.default_rng(0).standard_normal(301).astype(np.float32) * 4
    whole, = run(lambda x: getattr(mb, name)(x=x), {"x": x}, precision=precision)
    for count in (1, 3, 7, 50):
        part, = run(lambda x: getattr(mb, name)(x=x), {"x": x[:count]}, precision=precision)
        same_bits(part, whole[:count])
    same_bits(run(lambda x: getattr(mb, name)(x=x), {"x": np.array([-1e4, 1e4], np.float32)}, precision=precision)[0],
              np.array([-0.0 if name == "silu" else 0.0, 1e4 if name == "silu" else 1.0], whole.dtype))


def test_a_remainder_is_that_of_the_quotient_rounded_down_at_float64() -> None:
    """Numbers of float64 beside an integer, as of a wide range, have the remainder that modulo_by_floor computes."""
    def build(x: Any) -> Any:
        x = mb.sub(x=x, y=np.float32(1e-13))
        return mb.mod(x=x, y=np.float32(1)), mb.sub(x=x, y=mb.floor(x=x))

    remainder, rest = run(build, {"x": np.array([1, 2, 5], np.float32)}, precision="float64")
    np.testing.assert_allclose(remainder, rest, atol=1e-12)
    np.testing.assert_allclose(rest, [1, 1, 1], atol=1e-12)
