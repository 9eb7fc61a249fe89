"""First states whose batch is not that of the input: coremltools' converter writes such layers."""

from __future__ import annotations

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

from mil_ane_passes.ir.clone import clone_program
from mil_ane_passes.passes.engine import find_matches
from mil_ane_passes.passes.examples import build_program, make_weight
from mil_ane_passes.passes.registry import find_rewrite
from mil_ane_passes.runtime import Runtime
from mil_ane_passes.utils.errors import InputError
from tests.rewrites.recurrent_layers import draw, unrolled

pytest.importorskip("torch")
GATES = {"lstm": 4, "gru": 3, "rnn": 1}
VARIED = draw(3, 5, 4)


def layer(kind, x, state):
    states = {"initial_h": state, **({"initial_c": state} if kind == "lstm" else {})}
    wide = 4 * GATES[kind]
    return getattr(mb, kind)(
        x=x, weight_ih=make_weight(wide, 3), weight_hh=make_weight(wide, 4), output_sequence=True, name="y", **states
    )


def held(kind, state, batch):
    return build_program(lambda x: layer(kind, x, state), opset=ct.target.iOS17, x=(5, batch, 3))


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("batch", [1, 3, None])
@pytest.mark.parametrize("value", [0.0, 0.5])
def test_a_constant_state_of_equal_rows_stands_for_any_batch(kind, batch, value):
    state = np.full((5, 4), value, np.float16)
    built, x = held(kind, state, batch), draw(7, 5, batch or 2, 3)
    shapes = [tuple(var.shape) for var in built.functions["main"].outputs]
    alike = Runtime(held(kind, np.full((x.shape[1], 4), value, np.float16), x.shape[1]), precision="float64")
    found = Runtime(clone_program(built), precision="float64")({"x": x}).values()
    made = unrolled(f"unroll_{kind}", built, {"x": x})
    for value_, before, right in zip(made, found, alike({"x": x}).values(), strict=True):
        np.testing.assert_allclose(before, right, rtol=0, atol=1e-12)
        np.testing.assert_allclose(value_, right, rtol=0, atol=1e-12)
    assert [tuple(var.shape) for var in built.functions["main"].outputs] == shapes


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize(("batch", "words"), [(1, "1"), (3, "3"), (None, "known only at run time")])
def test_a_constant_state_of_other_rows_is_left_alone(kind, batch, words):
    (miss,) = find_matches(find_rewrite(f"unroll_{kind}")(), held(kind, VARIED, batch)).near_misses
    assert miss.reason == f"initial_h has 5 rows that differ, where the batch of x is {words}"


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("batch", [1, 3, None])
def test_a_state_of_another_size_that_is_an_input_is_left_alone(kind, batch):
    built = build_program(lambda x, h: layer(kind, x, h), opset=ct.target.iOS17, x=(5, batch, 3), h=(5, 4))
    (miss,) = find_matches(find_rewrite(f"unroll_{kind}")(), built).near_misses
    assert "initial_h has 5 rows that may differ" in miss.reason


@pytest.mark.parametrize("kind", GATES)
def test_one_row_is_every_row(kind):
    built = build_program(lambda x, h: layer(kind, x, h), opset=ct.target.iOS17, x=(5, 3, 3), h=(1, 4))
    feeds = {"x": draw(7, 5, 3, 3), "h": draw(8, 1, 4)}
    before = Runtime(clone_program(built), precision="float64")(feeds).values()
    for old, new in zip(before, unrolled(f"unroll_{kind}", built, feeds), strict=True):
        np.testing.assert_allclose(new, old, rtol=0, atol=1e-12)


def test_a_bidirectional_layer_cuts_the_one_row():
    state = np.tile(draw(5, 1, 8), (5, 1))

    def body(x, first=state):
        return mb.lstm(
            x=x,
            initial_h=first,
            initial_c=first,
            weight_ih=make_weight(16, 3),
            weight_hh=make_weight(16, 4),
            weight_ih_back=make_weight(16, 3),
            weight_hh_back=make_weight(16, 4),
            direction="bidirectional",
            output_sequence=True,
            name="y",
        )

    feeds = {"x": draw(7, 4, 2, 3)}
    right = Runtime(build_program(lambda x: body(x, state[:2]), x=(4, 2, 3)), precision="float64")(feeds).values()
    for found, expected in zip(unrolled("unroll_lstm", build_program(body, x=(4, 2, 3)), feeds), right, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_run_names_a_state_whose_rows_differ(kind, batch):
    with pytest.raises(InputError, match=f"{kind} 'y.*initial_h has 5 rows that differ.*batch of x is {batch}"):
        Runtime(held(kind, VARIED, batch))({"x": draw(7, 5, batch, 3)})
