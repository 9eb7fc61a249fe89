"""Chips, generations, and which rules apply to them."""

from __future__ import annotations

import pytest

from mil_ane_passes.core.errors import InputError
from mil_ane_passes.core.targets import ALL, GENERATIONS, Gate, applies, parse_target

PAIRS = [("a11", "a12"), ("a14", "m1"), ("a15", "m2"), ("a16", "a17"), ("a17", "m3"), ("a18", "m4")]
CHIPS = ["a11", "a12", "a13", "a14", "m1", "a15", "m2", "a16", "a17", "m3", "a18", "m4"]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_chips_of_one_generation_are_one_target(one, other):
    assert parse_target(one) == parse_target(other)


def test_every_chip_is_in_one_generation_and_all_is_all():
    assert [chip for generation in GENERATIONS for chip in generation.chips] == CHIPS
    assert all(len(parse_target(chip)) == 1 for chip in CHIPS)
    assert parse_target("all") == GENERATIONS


@pytest.mark.parametrize("spelt", ["M1", " m1 ", "m 1"])
def test_spelling_is_forgiving(spelt):
    assert parse_target(spelt) == parse_target("m1")


@pytest.mark.parametrize(("name", "ending"), [("m5", ""), ("al", "; did you mean 'all'?"), ("", ""), ("x", "")])
def test_an_unknown_target_is_refused(name, ending):
    with pytest.raises(InputError) as error:
        parse_target(name)
    assert str(error.value).startswith(f"target '{name}' is not known; expected all, {', '.join(CHIPS)}")
    assert str(error.value).endswith(ending)


@pytest.mark.parametrize(
    ("gate", "target", "expected"),
    [
        (ALL, "all", True),
        (ALL, "a11", True),
        (ALL, "m4", True),
        (Gate(first="m3"), "m2", False),
        (Gate(first="m3"), "a16", True),
        (Gate(first="m3"), "m4", True),
        (Gate(last="a13"), "a13", True),
        (Gate(last="a13"), "a14", False),
        (Gate(last="a13"), "all", True),
        (Gate("a14", "a15"), "a13", False),
        (Gate("a14", "a15"), "m1", True),
        (Gate("a14", "a15"), "a16", False),
    ],
)
def test_a_gate_includes_both_ends(gate, target, expected):
    assert applies(gate, target) is expected


def test_a_gate_of_an_unknown_chip_says_so():
    with pytest.raises(InputError, match="target 'z9' is not known"):
        applies(Gate(first="z9"), "m1")
