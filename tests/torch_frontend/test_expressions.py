"""The expressions of expressions.tsv, through every frontend, at fp32 and fp16: torch's values, or the known faults."""

from __future__ import annotations

import pytest
import torch

import mil_ane_passes as ane

from .expressions import WAYS, Expression, Way, judge, read_expressions

PARTS = 8
SAMPLE = 60


def assert_right(expressions: list[Expression], way: Way) -> None:
    wrong, stale, count = [], [], 0
    for one, faults in judge(expressions, way):
        count += 1
        unknown = {name: text for name, text in faults.items() if not one.is_known(way, name)}
        wrong += [f"{one.inputs} | {one} | {name}: {text[:300]}" for name, text in unknown.items()]
        if not faults and one.is_expected_faulty(way):
            stale.append(f"{one.inputs} | {one} | {one.known}")
    assert not wrong, "\n".join([f"{way}:", *wrong])
    assert not stale, "\n".join([f"{way}, without a fault; remove what is known of it:", *stale])
    assert count >= 0.8 * len(expressions)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_values_are_those_of_torch(way, part):
    assert_right(read_expressions()[part::PARTS], way)


@pytest.mark.parametrize("way", [WAYS[0], WAYS[-1]], ids=str)
def test_a_sample_is_right(way):
    assert_right(read_expressions()[7::SAMPLE], way)


def test_a_wrong_value_and_a_refusal_are_found(monkeypatch):
    run = ane.run
    monkeypatch.setattr(ane, "run", lambda *given, **named: {
        name: value + (value > 2) for name, value in run(*given, **named).items()})
    faults = {one.text: faults for one, faults in judge(
        [Expression("m", "m * 2"), Expression("m", "torch.sigmoid(m)"), Expression("m", "torch.lgamma(m)")], WAYS[0])}
    assert {"ordinary", "ties", "large"} <= set(faults["m * 2"]) and "zeros" not in faults["m * 2"]
    assert faults["torch.sigmoid(m)"] == {} and "constants only" in faults["torch.lgamma(m)"]["refused"]


def test_values_are_compared_with_those_that_torch_computes_at_half_precision():
    """At fp16, a value may be off by four times what torch's own is, and by a hundredth of the largest."""
    faults = [faults for _, faults in judge([Expression("m", "(m + 1000) - 1000"), Expression("m", "m + 0.1 * m")],
                                            Way("trace", "float16"))]
    assert faults == [{}, {}] and torch.tensor(0.1).half() + 1000 - 1000 != 0.1
