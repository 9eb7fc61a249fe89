"""ANE203: remainders of every fp16 number, to the bit what NumPy's exact ones are when rounded."""

from __future__ import annotations

from functools import partial

import coremltools as ct
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb
from hypothesis import given
from hypothesis import strategies as st

from mil_ane_passes.passes.engine import apply_rewrite, find_matches
from mil_ane_passes.passes.examples import build_program
from tests.conversions import convert_model, reload_program
from tests.rewrites.helpers import configure_rewrite, kinds, only_output, unsupported_ops

EVERY = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
"Every fp16 number, infinities and NaN included."


rule = partial(configure_rewrite, "modulo_by_floor")


def by(divisor, *shape, **settings):
    return build_program(lambda x: mb.mod(x=x, y=np.float16(divisor), name="y"), x=shape or (EVERY.size,), **settings)


def exact(x, divisor):
    """PyTorch's remainder in float64, which is exact, rounded once; a zero has the sign of the divisor."""
    rest = torch.remainder(torch.from_numpy(x.astype(np.float64)), float(np.float16(divisor))).numpy()
    return np.where(rest == 0, np.copysign(0.0, divisor), rest).astype(np.float16)


def same_bits(found, wanted):
    np.testing.assert_array_equal(found, wanted)
    number = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(found[number]), np.signbit(wanted[number]))


@pytest.mark.parametrize("divisor", [1, 2, 32, 64, 2**14, 0.5, 2.0**-14, 3, 10, 24, 60, 180, 360, 1000, 2 * np.pi,
                                     np.pi, 0.1, 1 / 3, -1, -2, -0.25, -7, 16383, 6.11e-5])
def test_every_fp16_number_to_the_bit(divisor):
    built = by(divisor)
    assert apply_rewrite(rule(), built).fired and not kinds(built)["mod"] and not unsupported_ops(built)
    same_bits(only_output(built, EVERY, "float16"), exact(EVERY, divisor))


@pytest.mark.law
@given(st.floats(2.0**-14, 2.0**14, width=16), st.sampled_from([1, -1]), st.sampled_from([0, 1, 3, 17, 200]))
def test_any_divisor_and_number_of_periods(divisor, sign, periods):
    built = by(sign * divisor)
    (found,) = apply_rewrite(rule(periods=periods, max_steps=99), built).fired
    assert found.op == "mod" and sum(kinds(built).values()) - kinds(built)["const"] <= 57  # 55, and two for the sign
    x = np.where(np.abs(EVERY.astype(np.float64)) <= (periods or 1e9) * divisor, EVERY, np.float16(0))
    same_bits(only_output(built, x, "float16"), exact(x, sign * divisor))


@pytest.mark.law
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.sampled_from([3, 6.28, 1, 0.25, -5, 100]),
       st.sampled_from([ct.target.iOS15, ct.target.iOS18]))
def test_any_shape_and_opset_at_full_precision(shape, divisor, opset):
    built = by(divisor, *shape, opset=opset)
    assert apply_rewrite(rule(), built).fired and not unsupported_ops(built) and not unsupported_ops(built, "m1")
    x = (np.random.default_rng(0).standard_normal(shape) * 40).astype(np.float16)
    wanted = np.mod(x.astype(np.float64), float(np.float16(divisor)))
    np.testing.assert_allclose(only_output(built, x, "float64"), wanted, rtol=0, atol=1e-11)


def test_the_quotient_written_out_is_off_by_the_divisor_and_this_is_not():
    divisor = np.float16(2 * np.pi)
    below = [np.nextafter(np.float16(times * float(divisor)), np.float16(0)) for times in range(2, 60)]
    x = np.array([*below, -2.0**-20], np.float16)
    naive = build_program(
        lambda x: mb.sub(x=x, y=mb.mul(x=mb.floor(x=mb.real_div(x=x, y=divisor)), y=divisor), name="y"), x=x.shape
    )
    built = by(divisor, *x.shape)
    apply_rewrite(rule(), built)
    off = np.abs(only_output(naive, x, "float16").astype(np.float64) - exact(x, divisor))
    assert off.max() > 6
    same_bits(only_output(built, x, "float16"), exact(x, divisor))


def test_fewer_periods_are_fewer_ops_and_the_options_refuse():
    def ops(**options):
        built = by(2 * np.pi, 4)
        apply_rewrite(rule(**options), built)
        return sum(count for kind, count in kinds(built).items() if kind != "const")

    assert (ops(), ops(periods=30), ops(periods=3)) == (26, 13, 11)
    (miss,) = find_matches(rule(max_steps=25), by(2 * np.pi, 4)).near_misses
    assert miss.reason == "a remainder by 6.28125 needs 26 ops, max_steps=25"


def test_a_divisor_that_widens_x_is_left_alone():
    built = build_program(lambda x: mb.mod(x=x, y=np.full((3, 4), 2, np.float16), name="y"), x=(1, 4))
    (miss,) = find_matches(rule(), built).near_misses
    assert miss.reason == "the divisor is not a single number"


@pytest.mark.parametrize("opset", [ct.target.iOS15, ct.target.iOS18])
def test_it_stands_through_a_conversion_with_our_pipeline_and_the_package(opset, tmp_path):
    built = by(360, 2, 32, opset=opset)
    loaded = reload_program(built, tmp_path / "m.mlpackage", opset, passes="modulo_by_floor")
    assert not kinds(loaded)["mod"] and not unsupported_ops(loaded)
    x = np.linspace(-3000, 3000, 64).astype(np.float16).reshape(2, 32)
    same_bits(only_output(loaded, x, "float16"), exact(x, 360))


@pytest.mark.parametrize("exported", [False, True], ids=["traced", "exported"])
def test_pytorchs_remainder_is_converted_as_floor_div_and_holds_no_mod(exported):
    class Phase(torch.nn.Module):
        def forward(self, x):
            return torch.remainder(x, 6.28125)

    x = torch.randn(2, 8)
    built = convert_model(Phase(), x, way="exported" if exported else "traced", convert_to="milinternal")
    assert not kinds(built)["mod"] and not unsupported_ops(built)
