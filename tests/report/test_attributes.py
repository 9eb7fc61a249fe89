"""Attributes of ops and statistics of weights on the page: what is read, and what is said of the others."""

from __future__ import annotations

import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb

import mil_ane_passes as ane
from mil_ane_passes.passes.examples import build_program
from mil_ane_passes.report.html import attributes, build_page
from mil_ane_passes.report.html.attributes import compute_statistics, sample_evenly
from tests.report import programs
from tests.report.test_html import data_of


def described(program, kind):
    """Attributes, and weights by name, of the first op of `kind`."""
    data = data_of(build_page(ane.lint(program, target="m4")))
    one, texts = data["reports"][0], data["texts"]
    row = next(row for row, place in enumerate(one["ops"]["type"]) if texts[place] == kind)
    named, held = one["ops"]["attributes"][row], one["ops"]["weights"][row]
    return ({texts[name]: texts[value] for name, value in zip(named[::2], named[1::2])},
            {texts[name]: {**one["weights"][place], "type": texts[one["weights"][place]["type"]]}
             for name, place in zip(held[::2], held[1::2])})


def test_an_op_has_its_attributes_and_its_weights():
    named, held = described(programs.vocoder(), "conv_transpose")
    assert named["strides"] == "[2]" and "bias" in named
    assert held.keys() == {"weight"} and held["weight"]["type"] == "fp16[8, 4, 4]"
    assert held["weight"]["bytes"] == 8 * 4 * 4 * 2 and held["weight"]["sampled"] == 0


def test_statistics_are_those_of_the_values():
    weight = np.linspace(-1, 3, 64).astype(np.float16).reshape(8, 8)
    weight[0, :4] = 0
    found = described(build_program(lambda x: mb.matmul(x=x, y=weight), x=(1, 8)), "matmul")[1]["y"]["statistics"]
    wide = weight.astype(np.float64)
    assert found == pytest.approx({"min": wide.min(), "max": 3.0, "mean": wide.mean(), "std": wide.std(),
                                   "zeros": 0.0625, "nonfinite": 0.0}, rel=1e-5)


def test_values_that_are_not_finite_are_counted_apart():
    found = compute_statistics(np.array([1, np.inf, np.nan, 0], np.float16))
    assert (found["min"], found["max"], found["nonfinite"], found["zeros"]) == (0.0, 1.0, 0.5, 0.25)
    assert compute_statistics(np.array([np.nan], np.float32))["min"] is None


def test_a_sample_lies_evenly_in_the_whole():
    values = np.arange(100_000)
    read = sample_evenly(values, 1600)
    assert read.size == 1600 and read[0] == 0 and read[-1] == 99_999
    assert np.max(np.diff(read)) < 100_000 / 14 and sample_evenly(values[:1600], 1600) is not None
    assert np.array_equal(sample_evenly(values[:1600], 1600), values[:1600])


def wide_product(x):
    return mb.matmul(x=mb.matmul(x=x, y=np.ones((64, 2048), np.float16)), y=np.ones((2048, 64), np.float16))


def test_a_large_weight_is_sampled_and_says_so():
    _, held = described(build_program(wide_product, x=(1, 64)), "matmul")
    assert held["y"]["sampled"] == 1 << 16 and held["y"]["statistics"]["mean"] == 1.0


def test_what_is_read_of_all_weights_is_limited(monkeypatch):
    monkeypatch.setattr(attributes, "_MAX_READ", 1 << 16)
    data = data_of(build_page(ane.lint(build_program(wide_product, x=(1, 64)), target="m4")))
    first, second = (one["statistics"] for one in data["reports"][0]["weights"])
    assert first is not None and second is None


def test_a_shared_weight_is_described_once():
    data = data_of(build_page(ane.lint(programs.large(40), target="m4")))
    assert len(data["reports"][0]["weights"]) == 1


def test_a_compressed_weight_says_how_and_by_how_much():
    def body(x):
        palette = mb.constexpr_lut_to_dense(lut=np.arange(4, dtype=np.float16), shape=np.uint32([8, 8]),
                                            indices=np.zeros(16, np.uint8))
        return mb.matmul(x=x, y=palette, name="y")

    _, held = described(build_program(body, x=(1, 8)), "matmul")
    assert held["y"]["dense"] == 128 and held["y"]["bytes"] < 64 and held["y"]["statistics"] is None
